"""Generates the stand-in data sets of configs/standins: the real columns with easy content.

They show that the rules run, offline and with a small model. Their scores say nothing about the
tasks whose place they take. Write them anew with ``python -m kitty.evaluation.standins``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kitty.paths import configs_dir
from kitty.records import write_atomically

PROBLEMS = 40
Row = dict[str, Any]

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps", "shells", "cards")


def word_problem(rng: random.Random) -> tuple[str, str, int]:
    """A sum of one or two steps: question, worked solution, answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b, c = rng.randint(5, 20), rng.randint(2, 9), rng.randint(2, 4)
    form = rng.randrange(4)
    if form == 0:
        question = f"{name} has {a} {thing}. A friend gives {name} {b} more {thing}."
        steps, answer = f"{a} + {b} = {a + b}.", a + b
    elif form == 1:
        question = f"{name} has {a + b} {thing} and gives away {b} of them."
        steps, answer = f"{a + b} - {b} = {a}.", a
    elif form == 2:
        question = f"{name} has {c} boxes with {b} {thing} in each box."
        steps, answer = f"{c} * {b} = {c * b}.", c * b
    else:
        question = f"{name} has {a} {thing}, gets {b} more, and then loses {c}."
        steps, answer = f"{a} + {b} = {a + b}. {a + b} - {c} = {a + b - c}.", a + b - c
    return f"{question} How many {thing} does {name} have now?", steps, answer


def story_problem(rng: random.Random) -> tuple[str, str, int]:
    """What two of ten people have, in a longer text: question, worked solution, answer."""
    thing = rng.choice(THINGS)
    counts = dict(zip(rng.sample(NAMES, len(NAMES)), rng.choices(range(2, 40), k=10), strict=True))
    told = " ".join(
        f"{name} looks into the bag and finds {count} {thing} in it."
        for name, count in counts.items()
    )
    first, second = rng.sample(NAMES, 2)
    total = counts[first] + counts[second]
    question = f"{told} How many {thing} do {first} and {second} have together?"
    return question, f"{counts[first]} + {counts[second]} = {total}.", total


def gsm8k(rng: random.Random) -> Row:
    """Columns of openai/gsm8k."""
    question, steps, answer = word_problem(rng)
    return {"question": question, "answer": f"{steps}\n#### {answer}"}


def math_algebra(rng: random.Random) -> Row:
    """Columns of EleutherAI/hendrycks_math: a linear equation."""
    a, x, b = rng.randint(2, 5), rng.randint(1, 9), rng.randint(1, 9)
    solution = f"We have ${a}x = {a * x + b} - {b} = {a * x}$, so $x = \\boxed{{{x}}}$."
    return {
        "problem": f"Solve for $x$: ${a}x + {b} = {a * x + b}$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": solution,
    }


def multiple_choice(rng: random.Random) -> tuple[str, list[int], int]:
    """A sum with four answers: question, choices, index of the right one."""
    a, b = rng.randint(2, 30), rng.randint(2, 9)
    right = a + b
    wrong = rng.sample([right + d for d in (-3, -2, -1, 1, 2, 3, 10)], 3)
    choices = [right, *wrong]
    rng.shuffle(choices)
    return f"What is {a} plus {b}?", choices, choices.index(right)


def gpqa(rng: random.Random) -> Row:
    """The columns of Idavidrein/gpqa that the task reads."""
    question, choices, right = multiple_choice(rng)
    wrong = [str(choice) for i, choice in enumerate(choices) if i != right]
    return {
        "Question": question,
        "Correct Answer": str(choices[right]),
        **{f"Incorrect Answer {i + 1}": text for i, text in enumerate(wrong)},
    }


def mmlu(rng: random.Random) -> Row:
    """Columns of cais/mmlu."""
    question, choices, right = multiple_choice(rng)
    return {
        "question": question,
        "subject": "elementary_mathematics",
        "choices": [str(choice) for choice in choices],
        "answer": right,
    }


FUNCTIONS = (
    ("add", "a, b", "Return the sum of a and b.", "return a + b", ("1, 2", "-4, 9", "0, 0")),
    ("double", "x", "Return twice the value of x.", "return 2 * x", ("3", "-2", "0")),
    ("square", "x", "Return x multiplied by itself.", "return x * x", ("3", "-2", "0")),
    ("largest", "a, b", "Return the larger of a and b.", "return max(a, b)", ("1, 2", "5, -1")),
    ("is_even", "n", "Return True if n is even, else False.", "return n % 2 == 0", ("4", "7")),
    ("first", "items", "Return the first element of the list items.", "return items[0]",
     ("[4, 5]", "['a']")),
    ("count", "items", "Return the number of elements in the list items.", "return len(items)",
     ("[4, 5]", "[]")),
    ("total", "items", "Return the sum of all numbers in the list items.", "return sum(items)",
     ("[4, 5]", "[]")),
    ("backwards", "text", "Return the string text in reverse order.", "return text[::-1]",
     ("'abc'", "''")),
    ("shout", "text", "Return the string text in upper case.", "return text.upper()",
     ("'abc'", "''")),
)  # fmt: skip


NOTES = (
    "The function takes its arguments as they are, changes none of them, prints nothing,\n"
    "    and gives its result back with return. These are some calls and what they give:"
)


def humaneval(rng: random.Random, index: int) -> Row:
    """Columns of openai/openai_humaneval; the tests are made by running the canonical solution."""
    name, arguments, says, body, calls = FUNCTIONS[index % len(FUNCTIONS)]
    entry = name if index < len(FUNCTIONS) else f"{name}_{index}"
    scope: dict[str, Any] = {}
    exec(f"def {entry}({arguments}):\n    {body}\n", scope)
    cases = [(call, eval(f"{entry}({call})", scope)) for call in calls]
    shown = "".join(f"    >>> {entry}({call})\n    {value!r}\n" for call, value in cases)
    asker = rng.choice(NAMES)
    doc = f'    """{says}\n\n    {asker} needs it. {NOTES}\n\n{shown}    """\n'
    checks = "".join(f"    assert candidate({call}) == {value!r}\n" for call, value in cases)
    return {
        "task_id": f"standin/{index}",
        "prompt": f"def {entry}({arguments}):\n{doc}",
        "canonical_solution": f"    {body}\n",
        "test": f"def check(candidate):\n{checks}",
        "entry_point": entry,
    }


def aime24(rng: random.Random, index: int) -> Row:
    """Columns of Maxwell-Jia/AIME_2024."""
    question, steps, answer = story_problem(rng)
    return {"ID": f"S-{index}", "Problem": question, "Solution": steps, "Answer": answer}


def aime25(rng: random.Random, index: int) -> Row:
    """Columns of math-ai/aime25."""
    question, _, answer = story_problem(rng)
    return {"problem": question, "answer": str(answer), "id": str(index)}


def _alone(make: Callable[[random.Random], Row]) -> Callable[[random.Random, int], Row]:
    return lambda rng, index: make(rng)


SETS: dict[str, Callable[[random.Random, int], Row]] = {
    "gsm8k": _alone(gsm8k),
    "math_algebra": _alone(math_algebra),
    "gpqa": _alone(gpqa),
    "mmlu": _alone(mmlu),
    "humaneval": humaneval,
    "aime24": aime24,
    "aime25": aime25,
}


def rows(name: str, problems: int = PROBLEMS) -> list[Row]:
    """The problems of one set, all different; the same at every call."""
    rng = random.Random(f"kitty stand-in {name}")
    found: dict[str, Row] = {}
    index = 0
    while len(found) < problems:
        row = SETS[name](rng, index)
        index += 1
        found.setdefault(next(v for k, v in row.items() if k not in ("ID", "task_id")), row)
    return list(found.values())


def text(name: str) -> str:
    """The file of one set: a JSON line a problem."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(name))


def write(folder: Path) -> list[Path]:
    """Write every set into a folder."""
    paths = [folder / f"{name}.jsonl" for name in SETS]
    for path in paths:
        write_atomically(path, text(path.stem).encode())
    return paths


if __name__ == "__main__":
    for path in write(configs_dir() / "standins"):
        print(path)
