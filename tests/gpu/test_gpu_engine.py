"""Decode steps replayed from a CUDA graph give what plain steps give, on tiny random models."""

import sys
from pathlib import Path

import pytest
import torch

import kitty
from kitty import KittyCache
from kitty.integrations.transformers.engine import DecodeEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "generate"))
from tiny_models import greedy, make, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PRO = "kitty-pro"
GPU = torch.device("cuda")


def on_gpu(name: str, dtype: torch.dtype = torch.float16) -> torch.nn.Module:
    return make(name, dtype).to(GPU)


def inputs(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompt(*lengths)
    return ids.to(GPU), mask.to(GPU)


@pytest.mark.parametrize("method", [PRO, "kitty", "fp16"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt-neox"])
def test_greedy_text_with_a_graph_is_the_text_without(name: str, method: str) -> None:
    ids, mask = inputs(5, 190, 61)
    outputs, engines = [], []
    for graph in (False, True):
        model = kitty.enable(on_gpu(name), method, graph=graph)
        cache = KittyCache(method, max_length=640)  # kept, so that its engine is
        outputs.append(greedy(model, ids, mask, max_new_tokens=430, past_key_values=cache))
        engines.append(model.forward.engine(cache))
    assert torch.equal(*outputs)
    assert engines[0].counters["graph_replays"] == 0
    assert "switched off" in engines[0].fallback_reason
    assert engines[1].counters == {
        "graph_captures": 1, "graph_replays": 428, "eager_steps": 1, "prefill_parts": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str
)
def test_beams_and_samples_with_a_graph_are_those_without(mode: dict) -> None:
    ids, mask = inputs(40, 150)
    outputs = []
    for graph in (False, True):
        model = kitty.enable(on_gpu("llama"), PRO, graph=graph)
        torch.manual_seed(3)
        outputs.append(greedy(model, ids, mask, max_new_tokens=300, **mode))
    assert torch.equal(*outputs)


def test_a_sequence_longer_than_announced_is_captured_anew() -> None:
    model = kitty.enable(on_gpu("llama"), PRO)
    ids, mask = inputs(90, 150)
    texts, counters = [], []
    for max_length in (200, 1200):
        engine = DecodeEngine(model, KittyCache(PRO, max_length=max_length))
        with torch.no_grad():
            token = engine.prefill(ids, mask).argmax(-1, keepdim=True)
            text = [token]
            for _ in range(600):
                text.append(engine.step(text[-1]).argmax(-1, keepdim=True))
        texts.append(torch.cat(text, dim=1))
        counters.append(engine.counters)
    assert torch.equal(*texts)
    assert counters[0]["graph_captures"] > 1 == counters[1]["graph_captures"]


def test_a_second_turn_and_a_crop_go_on_with_the_same_graph() -> None:
    ids, mask = inputs(90, 150)
    texts = []
    for graph in (False, True):
        model = kitty.enable(on_gpu("llama"), PRO, rollback=16)
        cache = KittyCache(PRO, max_length=700, rollback=16)
        engine = DecodeEngine(model, cache, graph=graph)
        with torch.no_grad():
            text = [engine.prefill(ids, mask).argmax(-1, keepdim=True)]
            for turn in range(3):
                for _ in range(100):
                    text.append(engine.step(text[-1]).argmax(-1, keepdim=True))
                cache.crop(-10)
                more = torch.full((2, 7), turn + 1, device=GPU)
                out = engine.forward(
                    input_ids=more,
                    position_ids=torch.tensor(cache.real_lengths, device=GPU)[:, None]
                    + torch.arange(7, device=GPU),
                )
                text.append(out.logits[:, -1].argmax(-1, keepdim=True))
        texts.append(torch.cat(text, dim=1))
    assert engine.counters["graph_captures"] == 1
    assert torch.equal(*texts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu_is_captured_there() -> None:
    ids, mask = (x.to("cuda:1") for x in prompt(5, 190, 61))
    texts = []
    for graph in (False, True):
        model = kitty.enable(make("llama", torch.float16).to("cuda:1"), PRO, graph=graph)
        cache = KittyCache(PRO, max_length=640)
        texts.append(greedy(model, ids, mask, max_new_tokens=200, past_key_values=cache))
        counters = model.forward.engine(cache).counters
    assert torch.equal(*texts)
    assert (counters["graph_captures"], counters["graph_replays"]) == (1, 198)


def test_a_compiled_step_is_as_near_fp32_as_the_plain_one() -> None:
    ids, mask = prompt(90, 150)
    logits = []
    for device, dtype, compiled in [
        ("cpu", torch.float32, False),
        ("cuda", torch.float16, False),
        ("cuda", torch.float16, True),
    ]:
        model = kitty.enable(make("qwen3", dtype).to(device), PRO)
        engine = DecodeEngine(model, KittyCache(PRO, max_length=700), compile=compiled)
        with torch.no_grad():
            engine.prefill(ids.to(device), mask.to(device))
            steps = [
                engine.step(torch.full((2, 1), t % 50, device=device)).double() for t in range(140)
            ]
        logits.append(torch.stack(steps).cpu())
        assert engine.counters["graph_replays"] == (139 if device == "cuda" else 0)
    exact = logits[0]
    plain, compiled = (((x - exact).norm() / exact.norm()).item() for x in logits[1:])
    assert 0 < compiled < 1.25 * plain


def test_sliding_windows_run_without_a_graph_and_say_why() -> None:
    model = kitty.enable(on_gpu("gemma3"), PRO)
    ids, mask = inputs(40, 150)
    model.generation_config.cache_implementation = None
    cache = KittyCache(PRO, max_length=200)
    greedy(model, ids, mask, max_new_tokens=5, past_key_values=cache)
    assert "sliding-window" in model.forward.engine(cache).fallback_reason
