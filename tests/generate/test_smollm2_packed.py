"""The packed cache in a real small model against the simulation, teacher-forced over one text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitty import KittyCache, SimulatedCache, get_method
from kitty.evaluation import write_reference
from kitty.evaluation.offline import chunk_tokens, score_hidden
from kitty.evaluation.reference import final_hidden, head_logits
from kitty.models import load_model
from kitty.texts import load_passage

MODEL, TEXT = "smollm2-135m-instruct", "python-data-model"
TOLERANCE = 2.0  # error against fp64, in errors of the simulation in the same dtype


def relative_rms(model: torch.nn.Module, hidden: Tensor, exact_model, exact: Tensor) -> float:
    """Of the logits ``[T, vocabulary]``, a chunk of tokens at a time."""
    error = norm = 0.0
    for rows in torch.arange(len(hidden)).split(chunk_tokens(exact_model)):
        right = head_logits(exact_model, exact[rows])
        error += (head_logits(model, hidden[rows]).double() - right).square().sum().item()
        norm += right.square().sum().item()
    return (error / norm) ** 0.5


def check_agreement(name: str, tokens: int, tmp_path) -> None:
    model, tokenizer = load_model(MODEL, dtype="float32")
    ids = torch.tensor(tokenizer(load_passage(TEXT).text).input_ids[:tokens])
    assert len(ids) == tokens
    method = get_method(name)
    reference = write_reference(model, ids, tmp_path / "reference.safetensors")
    hidden, caches = {}, {}
    with torch.inference_mode():
        for kind in (KittyCache, SimulatedCache):
            caches[kind] = kind(method, dense_prefill=False)
            hidden[kind] = final_hidden(model, ids, caches[kind])
        scores = {kind: score_hidden(model, h, reference) for kind, h in hidden.items()}
        exact_model, _ = load_model(MODEL, dtype="float64")
        exact_cache = SimulatedCache(method, dense_prefill=False)
        exact = final_hidden(exact_model, ids, exact_cache)
        error, allowed, effect = (
            relative_rms(model, x, exact_model, exact)
            for x in (hidden[KittyCache], hidden[SimulatedCache], reference.hidden)
        )
    kl = {kind: x.kl.mean().item() for kind, x in scores.items()}
    print(
        f"{name}, {tokens} tokens: relative RMS of the logits {error:.2e} packed, {allowed:.2e} "
        f"simulated, {effect:.2e} of the method; KL {kl[KittyCache]:.6f} packed, "
        f"{kl[SimulatedCache]:.6f} simulated"
    )
    assert caches[KittyCache].quantized_pages_read == caches[SimulatedCache].quantized_pages_read
    assert caches[KittyCache].quantized_pages_read > 0
    assert error <= TOLERANCE * allowed
    # Rounding in fp32 moves a key across a boundary now and then, and one 2-bit code is a third of
    # its group's range: past many pages that adds up, to less than the method itself changes.
    assert error < 0.5 * effect
    apart = scores[KittyCache].kl - scores[SimulatedCache].kl
    assert apart.mean().abs() <= 3 * apart.std() / len(apart) ** 0.5
    assert kl[KittyCache] == pytest.approx(kl[SimulatedCache], rel=0.02)
    # the packed cache writes a page with the call after the one that fills it
    paged = caches[KittyCache].state.paged[0]
    pages = (method.key_pages(paged), method.value_pages(paged))
    for layer in (0, 17):
        right = exact_cache.layers[layer].content(0)
        packed, simulated = (
            max(
                codes_apart(x[:, : method.sink + count * method.page_size], y)
                for x, y, count in zip(cache.layers[layer].content(0), right, pages, strict=True)
            )
            for cache in caches.values()
        )
        # a code may differ where its input stands on a rounding boundary
        assert packed <= max(TOLERANCE * simulated, 1e-4)


def codes_apart(found: Tensor, exact: Tensor) -> float:
    """Share of the elements of ``found`` ``[H, n, D]`` that are off by more than rounding."""
    near = torch.isclose(found.double(), exact[:, : found.shape[1]], rtol=1e-3, atol=1e-3)
    return 1.0 - near.double().mean().item()


def test_packed_logits_are_the_simulations_past_two_flushes(tmp_path) -> None:
    check_agreement("kitty-pro", 330, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kitty-pro", "kivi-k2v2"])
def test_packed_logits_are_the_simulations_over_2048_tokens(name: str, tmp_path) -> None:
    check_agreement(name, 2048, tmp_path)
