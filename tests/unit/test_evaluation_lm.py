"""lm-eval over a quantized cache: what reaches the model, what is scored, what a stop leaves."""

import json
import random

import pytest
import tiny_lm
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kitty.errors import KittyError
from kitty.evaluation.agreement import Comparison, compare_task
from kitty.evaluation.downstream import evaluate_task, load_lm_task
from kitty.evaluation.journal import Journal
from kitty.evaluation.lm import KittyLM
from kitty.integrations.transformers import SimulatedCache
from kitty.jobs import TaskJob, measure_task, samples_path
from kitty.methods import get_method
from kitty.models import find_model
from kitty.records import read_record
from kitty.tasks import load_task, seeds

SMALL = get_method("kitty", sink=4, window=8, page_size=8)
GREEDY = {"max_gen_toks": 20, "do_sample": False, "until": ["\n\n"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("tiny-model"))


def lm(method=SMALL, cache="simulate", model=None, **options):
    return KittyLM(model or tiny_lm.model(), tiny_lm.tokenizer(), method, cache, **options)


def requests(*prompts, **changes):
    return [
        Instance("generate_until", {}, (prompt, {**GREEDY, **changes}), i)
        for i, prompt in enumerate(prompts)
    ]


def words(count, seed=0):
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefgh ,.") for _ in range(count))


# --- generation ---


def test_the_16_bit_model_answers_as_stock_lm_eval_does():
    prompts = [words(60), words(35, 1), words(48, 2)]
    stock = HFLM(pretrained=tiny_lm.model(), tokenizer=tiny_lm.tokenizer(), batch_size=2)
    ours = lm(get_method("fp16"), batch_size=2)
    assert ours.generate_until(requests(*prompts)) == stock.generate_until(
        requests(*prompts), disable_tqdm=True
    )
    assert ours.journal.pages_read == 0


def test_the_pages_read_are_those_of_the_states_that_decoding_passes_through():
    prompt, new = words(50), 20
    ours = lm()
    (answer,) = ours.generate_until(requests(prompt, until=["~~~"]))
    steps = len(answer)  # a character is a token; the last one is never fed back
    assert steps == new
    states = range(len(prompt), len(prompt) + new - 1)
    pages = sum(SMALL.key_pages(n) + SMALL.value_pages(n) for n in states)
    assert ours.journal.pages_read == 2 * pages  # two layers


def test_a_batch_is_answered_like_its_problems_alone():
    prompts = [words(60), words(31, 1), words(44, 2)]
    together = lm(model=tiny_lm.model(torch.float64), batch_size=3)
    alone = lm(model=tiny_lm.model(torch.float64), batch_size=1)
    answers = together.generate_until(requests(*prompts))
    assert answers == alone.generate_until(requests(*prompts))
    assert len(set(answers)) == 3


def test_sampling_depends_on_the_seed_alone():
    changes = {"do_sample": True, "temperature": 1.5, "top_k": 20}
    prompts = [words(40, i) for i in range(4)]

    def answers(seed):
        torch.manual_seed(random.randrange(10**6))
        return lm(seed=seed, batch_size=2).generate_until(requests(*prompts, **changes))

    assert answers(1234) == answers(1234) != answers(1235)


def test_an_answer_that_is_kept_is_not_asked_for_again(tmp_path):
    prompts = [words(40, i) for i in range(4)]
    path = tmp_path / "kept.jsonl"
    first = lm(batch_size=2, journal=Journal(path, "one"))
    expected = first.generate_until(requests(*prompts))
    lines = path.read_text().splitlines()
    assert len(lines) == 2  # a line a batch
    kept = json.loads(lines[0])
    kept["answers"] = dict.fromkeys(kept["answers"], "from the file")
    path.write_text(json.dumps(kept) + "\n")
    again = lm(batch_size=2, journal=Journal(path, "one")).generate_until(requests(*prompts))
    assert again.count("from the file") == 2
    assert {a for a in again if a != "from the file"} < set(expected)


def test_running_out_of_memory_keeps_the_finished_batches_and_says_so(tmp_path, monkeypatch):
    ours = lm(batch_size=1, journal=Journal(tmp_path / "kept.jsonl", "one"))
    generate, calls = ours.model.generate, []

    def fail_at_the_third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(*args, **kwargs)

    monkeypatch.setattr(ours.model, "generate", fail_at_the_third)
    with pytest.raises(KittyError, match=r"too little memory.*smaller --batch-size.*is kept"):
        ours.generate_until(requests(*[words(40, i) for i in range(4)]))
    assert Journal(tmp_path / "kept.jsonl", "one").resumed == 2


def test_more_new_tokens_than_the_model_has_positions_are_refused():
    with pytest.raises(KittyError, match="max_gen_toks is 4096, but the model has 4096 positions"):
        lm().generate_until(requests(words(9), max_gen_toks=4096))


def test_a_method_that_the_packed_cache_cannot_hold_is_refused_at_once():
    with pytest.raises(KittyError, match="page_size 8"):
        lm(cache="packed")


# --- likelihoods ---


def by_single_steps(model, method, context, continuation):
    """Log-likelihood of a continuation, one token fed at a time."""
    cache = SimulatedCache(method)
    total, greedy, logits = 0.0, True, torch.empty(0)
    for place, token in enumerate(context + continuation):
        if place >= len(context):
            log_p = logits.log_softmax(-1)
            total += float(log_p[token])
            greedy &= int(log_p.argmax()) == token
        with torch.inference_mode():
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return total, greedy


@pytest.mark.parametrize("method", ["fp16", "small"])
def test_a_likelihood_is_what_decoding_one_token_at_a_time_gives(method):
    method = SMALL if method == "small" else get_method(method)
    model = tiny_lm.model(torch.float64)
    ours = lm(method, model=model, batch_size=3)
    pairs = [(words(50), "abc"), (words(41, 1), "h"), (words(30, 2), words(25, 3))]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = ours.loglikelihood(asked, disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        expected = by_single_steps(
            model, method, ours.tok_encode(context), ours.tok_encode(continuation)
        )
        assert value == pytest.approx(expected[0], rel=1e-9)
        assert greedy == expected[1]
    assert (ours.journal.pages_read > 0) == method.quantized


def test_the_16_bit_likelihoods_are_those_of_stock_lm_eval():
    pairs = [(words(50), "abc"), (words(41, 1), "h")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    stock = HFLM(pretrained=tiny_lm.model(), tokenizer=tiny_lm.tokenizer(), batch_size=2)
    expected = stock.loglikelihood(asked, disable_tqdm=True)
    found = lm(get_method("fp16"), batch_size=2).loglikelihood(asked, disable_tqdm=True)
    for (value, greedy), (stock_value, stock_greedy) in zip(found, expected, strict=True):
        assert value == pytest.approx(stock_value, rel=1e-5)
        assert greedy == stock_greedy


# --- tasks of lm-eval with their stand-ins ---

PROMPTS = {  # what a prompt holds once for the problem and once for each shot
    "gsm8k_cot_llama": ("Given the following problem", 8),
    "minerva_math_algebra": ("Problem:", 4),
    "gpqa_diamond_cot_n_shot": ("Question:", 5),
    "mmlu_flan_cot_fewshot": ("Q:", 4),
    "aime24": ("Question:", 0),
    "aime25": ("Question:", 0),
    "humaneval_instruct": ("Write a solution", 0),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompts_of_a_task_have_the_papers_shots(name):
    setting = load_task(name, {"provider": "standin"})
    (task,) = load_lm_task(setting, seeds(0))["tasks"].values()
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests(limit=2, rank=0, world_size=1)
    text, shots = PROMPTS[name]
    for instance in task.instances:
        prompt, arguments = instance.args
        assert prompt.count(text) == shots + 1
        assert {k: arguments[k] for k in setting.generation} == setting.generation


def test_a_task_gives_scores_that_can_be_counted_from_its_samples():
    setting = load_task(
        "gsm8k_cot_llama",
        {"provider": "standin", "limit": 3, "num_fewshot": 0, "generation": GREEDY},
    )
    ours = lm(model=tiny_lm.model(), batch_size=3)
    right = iter(["The final answer is 7", "The final answer is 11", "The final answer is 0"])
    ours._model_generate = None  # must not be reached: the answers are given below
    ours._in_batches = lambda kind, requests, *rest: [next(right) for _ in requests]
    scores = evaluate_task(ours, setting, seeds(0), run_code=False)
    entry = scores.metrics["exact_match,strict-match"]
    assert (entry["value"], entry["n"]) == (pytest.approx(2 / 3), 3)  # 13 - 6, 5 + 6, not 0
    assert scores.problems["exact_match,strict-match"] == [1.0, 1.0, 0.0]
    assert [s["responses"] for s in scores.samples][2] == [["The final answer is 0"]]


def test_code_is_run_only_with_leave_and_scored_by_its_tests():
    setting = load_task(
        "humaneval_instruct", {"provider": "standin", "limit": 2, "generation": GREEDY}
    )
    with pytest.raises(KittyError, match="pass --run-code"):
        evaluate_task(lm(), setting, seeds(0), run_code=False)
    ours = lm()
    ours._in_batches = lambda *rest: ["    return a + b\n```\nprose", "    return 0"]
    scores = evaluate_task(ours, setting, seeds(0), run_code=True)
    assert scores.problems == {"pass@1,create_test": [1.0, 0.0]}  # add is right, double is not


def test_an_unknown_task_is_told_with_its_nearest_names():
    setting = load_task("gsm8k_cot_lama")
    object.__setattr__(setting, "folder", "gsm8k")  # reading all of lm-eval's takes long
    with pytest.raises(KittyError, match=r"'gsm8k_cot_lama' is known neither.*gsm8k_cot_llama"):
        load_lm_task(setting, seeds(0))


@pytest.mark.parametrize(
    "reason, advice",
    [
        ("Couldn't reach the Hub (OfflineModeIsEnabled)", "HF_HOME"),
        ("Dataset is a gated dataset on the Hub", "log in with `hf auth login`"),
    ],
)
def test_data_that_cannot_be_had_are_told_with_what_helps(monkeypatch, reason, advice):
    def refuse(*args, **kwargs):
        raise ConnectionError(reason)

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(KittyError, match=f"gpqa_diamond.*cannot be loaded.*{advice}.*standin"):
        load_lm_task(load_task("gpqa_diamond_cot_n_shot"), seeds(0))


def test_data_of_the_users_own_take_the_place_of_the_data_set(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"ID": "x", "Problem": "One?", "Solution": "", "Answer": 1}) + "\n")
    setting = load_task("aime24", {"data": str(own)})
    (task,) = load_lm_task(setting, seeds(0))["tasks"].values()
    assert [doc["Problem"] for doc in task.eval_docs] == ["One?"]


# --- whole jobs ---


def job(folder, **changes):
    setting = load_task(
        "gsm8k_cot_llama",
        {"provider": "standin", "limit": 4, "num_fewshot": 1, "generation": GREEDY},
    )
    given = {"spec": find_model(str(folder)), "task": setting, "method": SMALL, "batch_size": 2}
    return TaskJob(**{**given, **changes})


def test_a_job_keeps_its_record_and_predictions_and_nothing_else(folder, tmp_path):
    out = tmp_path / "r0.json"
    record = measure_task(job(folder), out)
    assert read_record(out) == record
    assert record["task"]["num_fewshot"] == 1
    assert record["task"]["generation"]["max_gen_toks"] == 20
    assert record["quantized_pages_read"] > 0
    assert len(samples_path(out).read_text().splitlines()) == record["samples"]["n"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r0.json", "r0.samples.jsonl"]


def test_a_stopped_job_goes_on_and_ends_with_the_same_predictions(folder, tmp_path, monkeypatch):
    whole = measure_task(job(folder), tmp_path / "whole.json")
    add, lines = Journal.add, []

    def stop_after_the_first(self, *args):
        add(self, *args)
        lines.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", stop_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        measure_task(job(folder), tmp_path / "r0.json")
    assert not (tmp_path / "r0.json").exists()
    monkeypatch.setattr(Journal, "add", lambda self, *args: (lines.append(1), add(self, *args))[1])
    record = measure_task(job(folder), tmp_path / "r0.json")
    assert len(lines) == 2  # two batches in all: the first was not answered again
    assert record["samples"]["sha256"] == whole["samples"]["sha256"]
    assert record["quantized_pages_read"] == whole["quantized_pages_read"]


def test_a_gated_model_without_a_login_is_told_in_one_sentence(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("You are trying to access a gated repo.\nMake sure to have access to it.")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(KittyError, match=r"for a gated model, the login \(You are .* gated repo"):
        measure_task(job("llama-3.1-8b-instruct"), tmp_path / "r0.json")
    assert not list(tmp_path.iterdir())


def test_texts_too_short_for_the_buffers_are_an_error_and_no_16_bit_result(folder, tmp_path):
    long_sink = get_method("kitty", sink=3000)
    with pytest.raises(KittyError, match=r"read no quantized page.*more shots"):
        measure_task(job(folder, method=long_sink), tmp_path / "r0.json")
    assert not (tmp_path / "r0.json").exists()


def test_simulated_and_packed_cache_give_the_same_answers():
    setting = load_task("gsm8k_cot_llama", {"provider": "standin", "num_fewshot": 1})
    ours = lm(get_method("kitty-pro"), model=tiny_lm.model(torch.float32))
    found = compare_task(ours, load_lm_task(setting, seeds(0)), 3, 40)
    assert len(found) == 3
    assert all(comparison.pages_read > 0 and comparison.explained for comparison in found)
    assert all(comparison.error < 1e-2 for comparison in found)


@pytest.mark.slow
def test_simulated_and_packed_cache_agree_on_twenty_problems_of_a_real_model():
    from kitty.models import load_model

    setting = load_task("gsm8k_cot_llama", {"provider": "standin"})
    ours = KittyLM(*load_model("smollm2-135m-instruct"), get_method("kitty-pro"))
    found = compare_task(ours, load_lm_task(setting, seeds(0)), 20, 48)
    assert len(found) == 20
    assert all(comparison.explained for comparison in found)


def test_a_group_has_the_score_of_all_its_tasks_together():
    from kitty.paths import configs_dir

    setting = load_task("mmlu_flan_cot_fewshot_stem")
    object.__setattr__(setting, "folder", "mmlu")
    setting = setting.changed(
        {"data": str(configs_dir() / "standins" / "mmlu.jsonl"), "limit": 2, "num_fewshot": 0}
    )
    ours = lm()
    ours._in_batches = lambda kind, requests, *rest: [
        "The answer is (C)." if i % 2 == 0 else "no idea" for i in range(len(requests))
    ]
    scores = evaluate_task(ours, setting, seeds(0), run_code=False)
    entry = scores.metrics["exact_match,get-answer"]  # of the first two problems the first is (C)
    assert entry["value"] == pytest.approx(0.5)
    assert entry["n"] == len(scores.samples) == 2 * len({s["task"] for s in scores.samples})


def test_the_packed_cache_gives_the_likelihoods_of_the_simulated_one():
    pairs = [(words(330), "abc"), (words(300, 1), "hd")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = {}
    for cache in ("simulate", "packed"):
        ours = lm(get_method("kitty-pro"), cache, batch_size=2)
        found[cache] = [value for value, _ in ours.loglikelihood(asked, disable_tqdm=True)]
        assert ours.journal.pages_read > 0
    dense = lm(get_method("fp16"), batch_size=2).loglikelihood(asked, disable_tqdm=True)
    assert found["packed"] == pytest.approx(found["simulate"], rel=1e-4)
    assert found["packed"] != pytest.approx([value for value, _ in dense], rel=1e-4)


def test_answers_may_part_only_where_the_gap_is_below_the_error_of_the_logits() -> None:
    def parted(gap: float | None) -> bool:
        step = None if gap is None else 3
        return Comparison((100, 8), step, gap, error=0.5, pages_read=4).explained

    assert parted(None)
    assert parted(0.49)
    assert not parted(0.5)
    assert not parted(0.9)
