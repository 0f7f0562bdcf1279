"""Recall tasks: texts whose answers can be found, scored as decoding would meet them."""

import pytest
import tiny_lm
import torch

from kitty.evaluation.journal import Journal
from kitty.evaluation.recall import KINDS, evaluate_recall, make_text, score_text
from kitty.integrations.transformers import SimulatedCache
from kitty.methods import get_method
from kitty.tasks import load_task

SMALL = get_method("kitty", sink=4, window=8, page_size=8)


def encode(text):
    return tiny_lm.tokenizer()(text, add_special_tokens=False)["input_ids"]


def decode(ids):
    return tiny_lm.tokenizer().decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1500, 4000])
def test_each_answer_stands_in_the_quantized_part_of_the_cache_when_it_is_asked_for(kind, tokens):
    text = make_text(kind, encode, tokens, 0, 0)
    assert len(text.ids) == tokens
    assert len(text.answers) >= 2
    method = get_method("kitty")
    for start, stop in text.answers:
        quantized = method.sink + method.page_size * method.value_pages(start)  # keys reach further
        assert decode(text.ids[start:stop]) in decode(text.ids[:quantized])


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_depends_on_seed_and_number_alone(kind):
    one = make_text(kind, encode, 1500, 0, 0)
    assert make_text(kind, encode, 1500, 0, 0) == one
    assert make_text(kind, encode, 1500, 1, 0).ids != one.ids
    assert make_text(kind, encode, 1500, 0, 1).ids != one.ids


def test_a_key_is_asked_for_once_and_has_one_code():
    text = decode(make_text("key_retrieval", encode, 3000, 0, 0).ids)
    told, asked = text.split("Now the codes again.")
    lines = {line.split(" is ")[0]: line for line in told.splitlines() if " is 1" in line}
    again = [line for line in asked.splitlines() if line.split(" is ")[0] in lines]
    assert len(again) == len(set(again)) == len(lines) > 0
    assert all(lines[line.split(" is ")[0]] == line for line in again)


def test_answers_are_scored_as_decoding_token_by_token_meets_them():
    model = tiny_lm.model(torch.float64)
    text = make_text("induction", encode, 400, 0, 0)
    scores = score_text(model, text, SMALL, SimulatedCache(SMALL, dense_prefill=False))
    cache, rows = SimulatedCache(SMALL), []
    for token in text.ids[:-1]:
        with torch.inference_mode():
            rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    log_p = torch.stack(rows).log_softmax(-1)
    for (start, stop), score in zip(text.answers, scores, strict=True):
        wanted = torch.tensor(text.ids[start:stop])
        at = log_p[start - 1 : stop - 1]
        right = at.argmax(-1) == wanted
        assert score["answer"] == float(right.all())
        assert score["token"] == pytest.approx(float(right.double().mean()))
        assert score["nll"] == pytest.approx(float(-at.gather(-1, wanted[:, None]).mean()))


def test_a_task_counts_its_answers_and_goes_on_where_it_was_stopped(tmp_path):
    setting = load_task("induction", {"recall": {"tokens": 400, "texts": 3}, "limit": 2})
    model, tokenizer = tiny_lm.model(), tiny_lm.tokenizer()
    made = []

    def new_cache():
        made.append(SimulatedCache(SMALL, dense_prefill=False))
        return made[-1]

    def run(name):
        journal = Journal(tmp_path / name, "one")
        return *evaluate_recall(
            model, tokenizer, setting, SMALL, new_cache, seed=0, journal=journal
        ), journal.pages_read

    metrics, samples, read = run("a")
    assert len(made) == len(samples) == 2
    answers = [score for sample in samples for score in sample["scores"]]
    assert metrics["token"]["n"] == len(answers)
    assert metrics["token"]["value"] == pytest.approx(
        sum(score["token"] for score in answers) / len(answers)
    )
    low, high = metrics["nll"]["ci"]
    assert low < metrics["nll"]["value"] < high
    assert run("a") == (metrics, samples, read)
    assert len(made) == 2  # nothing was computed again
