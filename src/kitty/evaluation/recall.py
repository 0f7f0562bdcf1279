"""Recall from a long context: keys, spans and sequences in the quantized part of the cache.

A text holds many questions with their answers. One pass scores all of them: an answer is right
where every one of its tokens is the most likely one behind what stands before it. Every query sees
what decoding would show it, so this is what greedy decoding with these answers would give.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitty.errors import KittyError
from kitty.evaluation.downstream import with_interval
from kitty.evaluation.journal import Journal, digest
from kitty.evaluation.reference import check_head, check_text, head_logits
from kitty.methods import Method
from kitty.models import enough_memory
from kitty.tasks import TaskSetting

Encode = Callable[[str], list[int]]

# Common words, one token each with a leading space in most vocabularies.
_LINES = (
    "time year people way day man thing woman life child world school state family",
    "student group country problem hand part place case week company system program",
    "question work government number night point home water room mother area money story",
    "fact month lot right study book eye job word business issue side kind head house",
    "service friend father power hour game line end member law car city community name",
    "president team minute idea body information back parent face others level office",
    "door health person art war history party result change morning reason research girl",
    "guy moment air teacher force education foot boy age policy music market sense nation",
    "plan college interest death course someone experience behind road table bird tree",
    "fish river stone bread horse apple ship king gold winter summer paper glass window",
    "garden mountain island bridge engine camera doctor letter picture village",
)
WORDS = tuple(word for line in _LINES for word in line.split())
FILLER = (
    "The river runs past the old mill and on to the sea. In the morning the boats go out, and in "
    "the evening they come back. Nothing here is worth remembering. The hills are green in spring "
    "and brown in autumn, and the road between the villages is long and quiet. "
)
SPAN_WORDS = 12


@dataclass(frozen=True)
class Text:
    """A long text with its answers.

    Attributes:
        ids: token ids.
        answers: first and one past the last position of each answer.
    """

    ids: list[int]
    answers: list[tuple[int, int]]


class _Writer:
    """Puts a text together piece by piece, so that the places of the answers are exact."""

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        self.ids: list[int] = []
        self.answers: list[tuple[int, int]] = []

    def write(self, text: str) -> None:
        self.ids += self.encode(text)

    def answer(self, text: str) -> None:
        start = len(self.ids)
        self.write(text)
        self.answers.append((start, len(self.ids)))

    def fill(self, length: int) -> None:
        """Filler up to a length."""
        filler = self.encode(FILLER)
        while len(self.ids) < length:
            self.ids += filler[: length - len(self.ids)]


def key_retrieval(encode: Encode, rng: random.Random, tokens: int) -> Text:
    """Numbered keys with four-digit values, filler, then a question for each key in another order.

    Half of the text holds the keys, at most a quarter the questions.
    """
    writer = _Writer(encode)
    writer.write("Here is a list of names and their codes.\n")
    pairs: list[tuple[str, str]] = []
    names = [f"{a} {b}" for a in WORDS for b in rng.sample(WORDS, 2)]
    rng.shuffle(names)
    size = len(encode(f"The code of {names[0]} is 1234.\n")) + 1
    for name in names[: max(2, tokens // (4 * size))]:
        pairs.append((name, str(rng.randrange(1000, 10000))))
        writer.write(f"The code of {name} is")
        writer.write(f" {pairs[-1][1]}")
        writer.write(".\n")
    writer.fill(tokens - len(pairs) * size - len(encode("\nNow the codes again.\n")))
    writer.write("\nNow the codes again.\n")
    for name, code in rng.sample(pairs, len(pairs)):
        writer.write(f"The code of {name} is")
        writer.answer(f" {code}")
        writer.write(".\n")
    return Text(writer.ids, writer.answers)


def span_copy(encode: Encode, rng: random.Random, tokens: int) -> Text:
    """Numbered spans of random words, filler, then each span again by its number, in order."""
    writer = _Writer(encode)
    writer.write("Here are lists of words.\n")
    size = len(encode("List 10:" + " word" * SPAN_WORDS + ".\n")) + 2
    spans = [
        " " + " ".join(rng.sample(WORDS, SPAN_WORDS))
        for _ in range(max(2, tokens * 2 // (5 * size)))
    ]
    for number, span in enumerate(spans, 1):
        writer.write(f"List {number}:")
        writer.write(span)
        writer.write(".\n")
    writer.fill(tokens - len(spans) * size - len(encode("\nNow the same lists again.\n")))
    writer.write("\nNow the same lists again.\n")
    for number, span in enumerate(spans, 1):
        writer.write(f"List {number}:")
        first = span[1:].split()[0]
        writer.write(f" {first}")
        writer.answer(span.removeprefix(f" {first}"))
        writer.write(".\n")
    return Text(writer.ids, writer.answers)


def induction(encode: Encode, rng: random.Random, tokens: int) -> Text:
    """Words that all differ, filler, and the same words again: each follows the one it followed.

    Two fifths of the text, at most every word there is, are the first list.
    """
    writer = _Writer(encode)
    size = len(encode(" word,"))
    words = rng.sample(WORDS, min(len(WORDS), tokens * 2 // (5 * size)))
    for word in words:
        writer.write(f" {word}")
        writer.write(",")
    head = "\nThe same words again:"
    writer.fill(tokens - len(writer.ids) - len(encode(head)))
    writer.write(head)
    for place, word in enumerate(words):
        (writer.answer if place else writer.write)(f" {word}")
        writer.write(",")
    return Text(writer.ids, writer.answers)


KINDS: dict[str, Callable[[Encode, random.Random, int], Text]] = {
    "key_retrieval": key_retrieval,
    "span_copy": span_copy,
    "induction": induction,
}


def make_text(kind: str, encode: Encode, tokens: int, seed: int, index: int) -> Text:
    """One text, the same for equal arguments; it may be a few tokens longer or shorter."""
    return KINDS[kind](encode, random.Random(f"{kind} {tokens} {seed} {index}"), tokens)


@torch.inference_mode()
def score_text(model: Any, text: Text, method: Method, cache: Any) -> list[dict[str, float]]:
    """Scores of each answer: ``answer`` (all tokens right), ``token`` (share), ``nll`` (per token).

    Args:
        model: a transformers causal language model with the "kitty" attention.
        text: the text.
        method: named in errors.
        cache: an empty Kitty cache with ``dense_prefill=False``; None for the 16-bit model.
    """
    ids = torch.tensor(text.ids)
    check_text(model, ids)
    hidden = model.base_model(
        input_ids=ids[None, :-1].to(model.device),
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state[0]
    scores = []
    for start, stop in text.answers:
        log_p = head_logits(model, hidden[start - 1 : stop - 1]).log_softmax(-1)
        wanted = ids[start:stop].to(log_p.device)
        right: Tensor = log_p.argmax(-1) == wanted
        nll = -log_p.gather(-1, wanted[:, None]).mean()
        scores.append(
            {
                "answer": float(right.all()),
                "token": float(right.double().mean()),
                "nll": float(nll),
            }
        )
    return scores


def evaluate_recall(
    model: Any,
    tokenizer: Any,
    setting: TaskSetting,
    method: Method,
    new_cache: Callable[[], Any],
    *,
    seed: int,
    journal: Journal,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a recall task: metrics ``answer``, ``token`` and ``nll``, and a sample for each text.

    Args:
        new_cache: gives an empty cache of the method with ``dense_prefill=False``, or None.
        seed: of the texts.
        journal: keeps every text's scores as soon as they are there.

    Raises:
        KittyError: the texts do not fit the model, or the memory does not suffice.
    """
    recall = setting.recall
    assert recall is not None
    count = min(recall["texts"], setting.limit or recall["texts"])

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    samples = []
    for index in range(count):
        text = make_text(recall["kind"], encode, recall["tokens"], seed, index)
        key = digest(["recall", recall["kind"], text.ids])
        if key not in journal.answers:
            if index == 0:
                check_head(model, torch.tensor(text.ids))
            cache = new_cache()
            with enough_memory(str(model.device), setting.name):
                scores = score_text(model, text, method, cache)
            read = 0 if cache is None else int(cache.quantized_pages_read)
            journal.add({key: scores}, read)
        samples.append(
            {
                "doc_id": index,
                "tokens": len(text.ids),
                "answers": text.answers,
                "scores": journal.answers[key],
            }
        )
        progress(index + 1, count)
    return _metrics(samples, setting), samples


def _metrics(samples: list[dict[str, Any]], setting: TaskSetting) -> dict[str, Any]:
    metrics = {}
    for name in ("answer", "token", "nll"):
        values = [score[name] for sample in samples for score in sample["scores"]]
        if not values:
            raise KittyError(f"Task {setting.name!r} has no answer: give it longer texts.")
        mean = sum(values) / len(values)
        spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
        metrics[name] = with_interval(mean, (spread / len(values)) ** 0.5, values)
    return metrics
