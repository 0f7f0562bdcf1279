"""End-to-end measurements on a GPU: captured steps, the memory budget, counters."""

from __future__ import annotations

import pytest
import torch

from kitty.benchmark import e2e, measure
from kitty.benchmark import implementations as ways
from kitty.benchmark.latency import LatencyJob, Workload
from kitty.benchmark.shapes import find_shape, random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def job(implementation: str, **changes: object) -> LatencyJob:
    workload = changes.pop("workload", Workload(40, 200, 3))
    options = {"dummy_weights": True, "device": "cuda", "dtype": "float16"}
    return LatencyJob(
        "qwen3-tiny", "qwen3-tiny", implementation, workload, **{**options, **changes}
    )


@torch.no_grad()
def text(implementation: str, steps: int = 30) -> tuple[torch.Tensor, ways.Runner]:
    """Greedy tokens of a tiny model in fp32, where two ways to add up choose the same."""
    asked = job(implementation, dtype="float32")
    model = random_model(find_shape("qwen3-tiny"), torch.float32, "cuda", "sdpa")
    way = ways.runner_class(asked)(model, asked, 3, 256)
    tokens = [measure.greedy(way.prefill(measure.prompts(model.config, asked.workload, "cuda")))]
    for _ in range(steps):
        tokens.append(measure.greedy(way.step(tokens[-1])))
    return torch.cat(tokens, dim=1), way


def test_the_static_cache_writes_the_same_text_from_a_graph() -> None:
    plain, _ = text("hf-static")
    captured, way = text("hf-static-graph")
    assert torch.equal(plain, captured)
    assert way.fallback_reason is None
    assert way.counters() == {"graph_captures": 1, "graph_replays": 30}


@pytest.mark.parametrize("implementation", ["kitty-pro", "kitty-fp16", "hf-dynamic-gqa"])
def test_a_sampled_run_reports_memory_and_launches(implementation: str, tmp_path) -> None:
    asked = job(implementation, mode="sampled", points=2, steps=8, memory_budget_bytes=2 * 10**9)
    outcome = e2e.run_job(asked, tmp_path)
    assert outcome.fits, outcome.fault
    record = outcome.record
    assert record["budget_enforced"]
    held = sum(record["cache_bytes"].values())
    metrics = record["metrics"]
    assert held < metrics["peak_allocated_bytes"] <= metrics["peak_reserved_bytes"] <= 2 * 10**9
    assert record["counters"]["dense_fallbacks"] == 0
    assert not record["unexpected_fallback"]
    if implementation.startswith("kitty"):
        assert record["counters"]["graph_replays"] > 20
        assert record["counters"]["eager_steps"] == 1


def test_a_cache_beyond_the_budget_is_out_of_memory(tmp_path) -> None:
    # 2 layers x 2 heads x 32 x 2 bytes x 2 = 512 bytes a token: 1 GB is beyond 500 MB
    workload = Workload(40, 2**21, 1)
    asked = job("hf-static", workload=workload, memory_budget_bytes=5 * 10**8)
    outcome = e2e.run_job(asked, tmp_path)
    assert outcome.record is not None, outcome.fault
    assert (outcome.record["outcome"], outcome.record["stage"]) == ("out_of_memory", "cache")
