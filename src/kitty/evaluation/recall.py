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
    """Puts a part of a text together piece by piece, so that the places of answers are exact."""

    def __init__(self, encode: Encode, opening: str) -> None:
        self.encode = encode
        self.ids = encode(opening)
        self.answers: list[tuple[int, int]] = []

    def write(self, text: str) -> None:
        self.ids += self.encode(text)

    def answer(self, text: str) -> None:
        start = len(self.ids)
        self.write(text)
        self.answers.append((start, len(self.ids)))


def _join(told: _Writer, asked: _Writer, tokens: int) -> Text:
    """What is told, filler, and what is asked at the end: ``tokens`` in all."""
    room = tokens - len(told.ids) - len(asked.ids)
    filler = told.encode(FILLER)
    between = (filler * (room // len(filler) + 1))[: max(0, room)]
    shift = len(told.ids) + len(between)
    answers = [(start + shift, stop + shift) for start, stop in asked.answers]
    return Text(told.ids + between + asked.ids, answers)


def key_retrieval(encode: Encode, rng: random.Random, tokens: int) -> Text:
    """Names with four-digit codes, filler, then the codes again in another order.

    The names fill a quarter of the text, and so do the questions.
    """
    told = _Writer(encode, "Here is a list of names and their codes.\n")
    names = [f"{a} {b}" for a in WORDS for b in rng.sample(WORDS, 2)]
    rng.shuffle(names)
    pairs: list[tuple[str, str]] = []
    for name in names:
        if len(pairs) >= 2 and len(told.ids) >= tokens // 4:
            break
        pairs.append((name, str(rng.randrange(1000, 10000))))
        for piece in (f"The code of {name} is", f" {pairs[-1][1]}", ".\n"):
            told.write(piece)
    asked = _Writer(encode, "\nNow the codes again.\n")
    for name, code in rng.sample(pairs, len(pairs)):
        asked.write(f"The code of {name} is")
        asked.answer(f" {code}")
        asked.write(".\n")
    return _join(told, asked, tokens)


def span_copy(encode: Encode, rng: random.Random, tokens: int) -> Text:
    """Numbered lists of random words, filler, then each list again behind its first word.

    The lists fill a third of the text.
    """
    told = _Writer(encode, "Here are lists of words.\n")
    asked = _Writer(encode, "\nNow the same lists again.\n")
    number = 0
    while number < 2 or len(told.ids) < tokens // 3:
        number += 1
        words = rng.sample(WORDS, SPAN_WORDS)
        head, rest = f" {words[0]}", "".join(f" {word}" for word in words[1:])
        for part, put in ((told, told.write), (asked, asked.answer)):
            part.write(f"List {number}:")
            part.write(head)
            put(rest)
            part.write(".\n")
    return _join(told, asked, tokens)


def induction(encode: Encode, rng: random.Random, tokens: int) -> Text:
    """Words that all differ, filler, and the same words again: each follows the one it followed.

    The first list is two fifths of the text, or every word there is.
    """
    told = _Writer(encode, "")
    asked = _Writer(encode, "\nThe same words again:")
    for place, word in enumerate(rng.sample(WORDS, len(WORDS))):
        if place >= 3 and len(told.ids) >= tokens * 2 // 5:
            break
        for part, put in ((told, told.write), (asked, asked.answer if place else asked.write)):
            put(f" {word}")
            part.write(",")
    return _join(told, asked, tokens)


KINDS: dict[str, Callable[[Encode, random.Random, int], Text]] = {
    "key_retrieval": key_retrieval,
    "span_copy": span_copy,
    "induction": induction,
}


def make_text(kind: str, encode: Encode, tokens: int, seed: int, index: int) -> Text:
    """One text of ``tokens`` tokens, the same for equal arguments.

    Texts too short for two answers come out longer.
    """
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
