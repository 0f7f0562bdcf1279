"""End-to-end measurements: what may be asked for, the arithmetic, shapes, experiment files."""

from __future__ import annotations

import pytest
import torch
import yaml

from kitty.benchmark.latency import (
    LatencyJob,
    Workload,
    mean_step,
    parse_bytes,
    parse_counts,
    sample_starts,
    step_times,
)
from kitty.benchmark.measure import Steps, summarize
from kitty.benchmark.shapes import config_of, find_shape, random_model, weight_bytes
from kitty.errors import KittyError
from kitty.experiments import load_experiment
from kitty.methods import get_method


def job(implementation: str = "kitty-pro", **changes: object) -> LatencyJob:
    workload = changes.pop("workload", Workload(100, 8092, 8))
    return LatencyJob("qwen3-tiny", "qwen3-tiny", implementation, workload, **changes)


# --- arithmetic ----------------------------------------------------------------------------------


def test_the_steps_of_a_run_are_joined_from_sampled_times_by_straight_lines() -> None:
    # 5 new tokens: the prefill gives the first, steps at 10, 11, 12, 13 tokens the others
    assert step_times(Workload(10, 5, 1), [(13, 4.0), (10, 1.0)]) == [1.0, 2.0, 3.0, 4.0]
    assert step_times(Workload(10, 5, 1), [(11, 2.0), (12, 4.0)]) == [2.0, 2.0, 4.0, 4.0]


def test_throughput_counts_every_new_token_over_prefill_and_steps() -> None:
    samples = [Steps(10, [1.0], []), Steps(13, [4.0], [])]
    found = summarize(Workload(10, 5, 2), 0.99, [1.0, 2.0, 3.0, 4.0], samples)
    assert found["decode_s"] == 0.01
    assert found["tokens_per_s"] == 10.0  # 2 x 5 tokens in a second
    assert found["step_ms_p50"] == 2.5
    assert found["step_ms_p20"] == pytest.approx(1.6)
    assert found["step_ms_p80"] == pytest.approx(3.4)
    assert found["step_ms_last"] == 4.0


def test_one_sampled_length_alone_gives_no_throughput() -> None:
    found = summarize(Workload(10, 5, 2), 0.5, [], [Steps(13, [2.0, 4.0], [])])
    assert found["tokens_per_s"] is None
    assert found["decode_s"] is None
    assert found["step_ms_p50"] == 3.0


def test_a_step_that_writes_pages_counts_once_in_128() -> None:
    assert mean_step([1.0, 1.0, 1.0], [129.0]) == 2.0
    assert mean_step([1.0, 3.0], []) == 2.0
    assert mean_step([], [5.0]) == 5.0


def test_every_sampled_window_has_a_page_step_in_its_middle() -> None:
    method = get_method("kitty-pro")

    def writes(length: int) -> bool:
        return method.key_pages(length) != method.key_pages(length - 1)

    workload = Workload(100, 8092, 64)
    starts = sample_starts(workload, 5, 16, writes)
    assert len(starts) == 5
    # pages fill at 32 + 128 k tokens: the first after the prompt at 160, the last before 8191 - 16
    assert starts[0] == 160 - 8
    assert starts[-1] == 32 + 63 * 128 - 8
    assert all((start + 8 - 32) % 128 == 0 for start in starts)
    assert starts[2] == pytest.approx((starts[0] + starts[-1]) / 2, abs=128)


def test_a_run_with_one_page_step_is_sampled_at_every_point_all_the_same() -> None:
    # 8192 + 100 tokens: pages are written at 32 + 64 * 128 = 8224 alone
    workload = Workload(8192, 100, 2)
    assert sample_starts(workload, 2, 8, lambda length: length == 8224) == [8220, 8283]
    assert sample_starts(workload, 3, 8, lambda length: length == 8224) == [8220, 8239, 8283]
    # where that step lies in the last window, the first one takes it and the last stands first
    assert sample_starts(workload, 2, 8, lambda length: length == 8287) == [8195, 8283]


def test_windows_stay_within_the_run_where_nothing_is_quantized() -> None:
    workload = Workload(100, 8092, 64)
    # three untimed steps after the prompt, and the last timed one ends at 8191 cached tokens
    assert sample_starts(workload, 3, 16, lambda length: False) == [103, 4139, 8175]
    assert sample_starts(workload, 1, 16, lambda length: False) == [8175]


# --- requests ------------------------------------------------------------------------------------


def test_sizes_are_decimal_unless_they_say_otherwise() -> None:
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("1.5 kb") == 1500
    assert parse_bytes("2GiB") == 2 * 2**30
    assert parse_bytes("512") == 512
    for wrong in ("", "GB", "80 gigs", "-1GB", "0", "80GB!"):
        with pytest.raises(KittyError, match="such as 80GB"):
            parse_bytes(wrong)


def test_batches_are_positive_whole_numbers() -> None:
    assert parse_counts("16,8, 8") == [8, 16]
    for wrong in ("0", "8,-1", "8,,9", "many", "1.5"):
        with pytest.raises(KittyError, match="no positive whole number"):
            parse_counts(wrong)


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"implementation": "vllm"}, "'vllm' is not known: use one of hf-dynamic"),
        ({"implementation": "hf-hqq-int4+compile"}, "cannot be compiled"),
        ({"mode": "fast"}, "'fast' is not known"),
        ({"mode": "sampled", "workload": Workload(100, 19, 1)}, "20 new tokens, not 19"),
        ({"mode": "sampled", "points": 0}, "at least one length"),
        ({"steps": 65}, "use 1 to 64"),
        ({"sub_batch": 0}, "sub_batch is 0"),
        ({"device": "auto"}, "Device 'auto' is none"),
    ],
)
def test_what_cannot_be_measured_is_told_at_once(wrong: dict, told: str) -> None:
    with pytest.raises(KittyError, match=told):
        job(**wrong)


def test_a_workload_has_a_prompt_two_new_tokens_and_a_sequence() -> None:
    for wrong in ((0, 8, 1), (1, 1, 1), (1, 8, 0)):
        with pytest.raises(KittyError, match="must be at least"):
            Workload(*wrong)


def test_a_record_of_another_setting_is_told_apart() -> None:
    asked = job(mode="sampled", memory_budget_bytes=10**9, sub_batch=2)
    same = {
        "implementation": "kitty-pro",
        "workload": {"prompt_tokens": 100, "new_tokens": 8092, "batch": 8},
        "mode": "sampled",
        "memory_budget_bytes": 10**9,
        "method": get_method("kitty-pro").to_dict(),
        "settings": asked.settings(),
    }
    assert asked.difference(same) is None
    assert asked.difference(same | {"memory_budget_bytes": None}) == "memory budget"
    assert asked.difference(same | {"mode": "full"}) == "mode"
    assert asked.difference(same | {"settings": asked.settings() | {"sub_batch": 4}}) == "sub_batch"
    changed = get_method("kitty-pro", sink=0).to_dict()
    assert asked.difference(same | {"method": changed}) == "method"
    assert job("hf-dynamic", sub_batch=2).settings()["sub_batch"] is None  # has no such thing


# --- shapes --------------------------------------------------------------------------------------


def test_qwen3_8b_has_its_number_of_weights() -> None:
    # counted from the model's card: 8 190 735 360 parameters
    assert weight_bytes(config_of(find_shape("qwen3-8b")), torch.float16) == 2 * 8190735360


def test_random_weights_give_finite_logits_that_tell_tokens_apart() -> None:
    model = random_model(find_shape("qwen3-tiny"), torch.float32, "cpu", "sdpa")
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4]])).logits
    assert logits.isfinite().all()
    assert logits.std() > 1e-3
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied, as the shape says
    again = random_model(find_shape("qwen3-tiny"), torch.float32, "cpu", "sdpa")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_shape_is_a_name_or_a_config_file(tmp_path) -> None:
    config = tmp_path / "mine.json"
    config.write_text('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}')
    assert find_shape(config).name == "mine"
    config.write_text("{}")
    with pytest.raises(KittyError, match="no model_type"):
        find_shape(config)
    with pytest.raises(KittyError, match="'gpt-9' is not known: use one of qwen3-4b"):
        find_shape("gpt-9")


# --- experiments ---------------------------------------------------------------------------------

LATENCY = {
    "implementations": ["hf-dynamic", "kitty-pro"],
    "workloads": [
        {"prompt_tokens": 32, "new_tokens": 8, "batches": [1, 2]},
        {"prompt_tokens": 64, "new_tokens": 8, "batches": [4], "implementations": ["kitty"]},
    ],
}


def experiment(tmp_path, **changes):
    path = tmp_path / "mine.yaml"
    content = {"title": "Mine", "models": ["smollm2-135m-instruct"], "latency": LATENCY | changes}
    path.write_text(yaml.safe_dump(content))
    return load_experiment(path)


def test_an_experiment_expands_into_a_job_per_implementation_and_batch(tmp_path) -> None:
    found = experiment(tmp_path)
    assert [(j.implementation, j.workload.name) for j in found.latency] == [
        ("hf-dynamic", "p32-n8-b1"),
        ("hf-dynamic", "p32-n8-b2"),
        ("kitty-pro", "p32-n8-b1"),
        ("kitty-pro", "p32-n8-b2"),
        ("kitty", "p64-n8-b4"),
    ]
    record = "records/latency/smollm2-135m-instruct/kitty/p64-n8-b4.json"
    assert found.latency[-1].record == record
    assert found.latency_job("smollm2-135m-instruct", "kitty", "p64-n8-b4") is found.latency[-1]
    with pytest.raises(KittyError, match="no latency job"):
        found.latency_job("smollm2-135m-instruct", "kitty", "p64-n8-b5")


def test_an_experiment_with_a_wrong_latency_part_is_refused(tmp_path) -> None:
    with pytest.raises(KittyError, match="'vllm' is not known"):
        experiment(tmp_path, implementations=["vllm"])
    with pytest.raises(KittyError, match="Model config 'smollm2-135m-instruct' is not known"):
        experiment(tmp_path, dummy_weights=True)
    with pytest.raises(KittyError, match="such as 80GB"):
        experiment(tmp_path, memory_budget="lots")


def test_the_figure_5_experiment_is_the_papers_workload_within_80_gb() -> None:
    found = load_experiment("figure5")
    for each in found.latency:
        assert each.memory_budget_bytes == 80 * 10**9
        assert each.dummy_weights
        assert each.workload.total in (8192, 8292)
    tried = {j.implementation for j in found.latency}
    assert {"hf-dynamic", "hf-static", "hf-quanto-int4", "kitty-fp16", "kitty-pro"} <= tried
