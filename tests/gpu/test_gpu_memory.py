"""What the packed cache takes on a GPU: a long prompt's peak, and the bytes of a filled cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import kitty
from kitty import KittyCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPT = 32768
LAYERS, HEADS, DIM = 16, 8, 128


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Narrow layers with wide keys, so that the cache is what fills the memory."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=PROMPT + 16,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float16)
    return kitty.enable(model.cuda().eval())


def fill(model: PreTrainedModel, new_cache: Callable[[], object]) -> tuple[object, int, int]:
    """A cache with one long prompt; bytes at the peak of the call, and held after it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(128, (1, PROMPT), generator=generator).cuda()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cache = new_cache()
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return cache, peak, torch.cuda.memory_allocated() - before


def test_a_long_prompt_peaks_below_the_16_bit_cache(model: PreTrainedModel) -> None:
    peaks = {}
    for name, new_cache in (("warm-up", KittyCache), ("kitty", KittyCache), ("16", DynamicCache)):
        cache, peaks[name], _ = fill(model, new_cache)
        del cache
    layer = 2 * PROMPT * HEADS * DIM * 2  # keys and values of one layer in 16 bit
    print({name: f"{peak / 2**20:.0f} MiB" for name, peak in peaks.items()})
    # 14 of 16 layers' worth of 16-bit keys and values less, besides what 2 bits take
    assert peaks["kitty"] < peaks["16"] - (LAYERS * 0.8 - 2) * layer


@pytest.mark.parametrize("options", [{}, {"max_length": PROMPT + 16}])
def test_a_filled_cache_takes_the_bytes_that_it_reports(
    model: PreTrainedModel, options: dict[str, int]
) -> None:
    fill(model, lambda: KittyCache(**options))
    cache, _, held = fill(model, lambda: KittyCache(**options))
    assert isinstance(cache, KittyCache)
    report = cache.bytes_held()
    dense = LAYERS * 2 * PROMPT * HEADS * DIM * 2
    print(f"{held / 2**20:.1f} MiB held, {report}, {dense / report.total:.2f} times less than fp16")
    assert report.total <= held <= report.total * 1.01 + 2**20  # the allocator rounds up
    # 6.1 times less is the ceiling of Kitty-Pro at this length; a growing pool holds spare pages
    assert report.total * (5.9 if options else 5.2) < dense
