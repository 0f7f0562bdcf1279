"""Faults that users of other KV caches met, each with the tests that keep it out of this one.

KNOWN maps every fault to its tests; the tests that only this list needs follow below.
"""

from __future__ import annotations

import copy
import re
import weakref
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, greedy, make, prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, BartConfig, DynamicCache, LlamaConfig

import kitty
from kitty import KittyCache, KittyError, SimulatedCache
from kitty.cache import PackedLayer
from kitty.integrations.transformers.cache import KittyCacheBase

ROOT = Path(__file__).resolve().parents[1]
PRO = kitty.get_method("kitty-pro")  # S = 32, R = 128, G = 128
SMALL = PRO.replace(sink=4, window=8)
CACHES = [KittyCache, SimulatedCache]

KNOWN: dict[str, list[str]] = {
    "padding enters the groups, so that batched results differ": [
        "generate/test_known_faults.py::test_a_padded_batch_holds_what_each_prompt_alone_holds",
        "generate/test_generate_simulated.py"
        "::test_a_padded_batch_generates_what_each_prompt_does_alone",
        "cache/test_simulated_layer.py::test_pads_never_enter_wherever_they_stand",
    ],
    "a flush is tested with == and missed by a chunk": [
        "cache/test_packed_layer.py"
        "::test_the_pages_depend_on_the_tokens_alone_however_they_are_cut_into_calls",
        "generate/test_known_faults.py::test_a_chunk_over_a_flush_is_what_the_simulation_makes_of_it",
        "ops/test_page_ops.py::test_pages_do_not_depend_on_how_tokens_were_cut_into_calls",
    ],
    "nothing is tested past the first flush": [
        "generate/test_matrix.py::test_the_packed_cache_generates_what_the_simulation_does",
        "generate/test_generate_packed.py"
        "::test_the_packed_cache_generates_what_the_simulation_does_with_the_papers_buffers",
    ],
    "a second call on a filled cache goes wrong": [
        "generate/test_known_faults.py::test_a_second_turn_equals_single_steps_from_its_first_token",
        "generate/test_generate_packed.py::test_a_second_turn_and_chunks_equal_the_simulation",
    ],
    "beams past a flush write into each other's pages": [
        "generate/test_known_faults.py::test_a_page_that_beams_share_is_never_written",
        "generate/test_generate_packed.py::test_beams_share_full_pages_and_never_write_them",
        "cache/test_packed_layer.py"
        "::test_selected_sequences_share_pages_that_are_never_written_again",
    ],
    "state of an earlier text is left after a reset": [
        "generate/test_known_faults.py::test_a_reset_cache_on_poisoned_memory_is_as_new",
        "generate/test_generate_simulated.py::test_a_reset_cache_is_as_new",
    ],
    "the length is guessed from the content": [
        "cache/test_packed_layer.py::test_a_token_whose_key_is_zero_counts_like_any_other",
        "cache/test_simulated_layer.py"
        "::test_a_token_of_zeros_counts_and_a_constant_channel_comes_back_exactly",
    ],
    "the mask of an unregistered attention function is dropped": [
        "generate/test_known_faults.py::test_a_padded_batch_holds_what_each_prompt_alone_holds",
        "generate/test_generate_simulated.py::test_without_a_kitty_cache_the_attention_equals_sdpa",
    ],
    "constant groups divide by zero": [
        "cache/test_packed_layer.py::test_constant_channels_and_repeated_tokens_come_back_exactly",
        "unit/test_quant.py::test_constant_groups_come_back_exactly",
    ],
    "prefill takes more memory than a 16-bit cache": [
        "generate/test_known_faults.py::test_prefill_keeps_the_dense_keys_of_one_layer_alone",
        "gpu/test_gpu_memory.py::test_a_long_prompt_peaks_below_the_16_bit_cache",
    ],
    "bit widths and boost are hard-coded": [
        "generate/test_known_faults.py::test_every_bit_width_is_simulated",
        "cache/test_packed_layer.py::test_any_head_dim_and_boost_is_held",
        "unit/test_quant.py::test_codes_scales_and_zeros_are_those_of_the_written_rule",
    ],
    "offsets overflow 32 bits": [
        "ops/test_page_ops.py::test_pages_behind_two_to_the_31_elements_are_addressed",
        "gpu/test_gpu_page_ops.py::test_pages_behind_two_to_the_31_elements_are_addressed",
        "gpu/test_gpu_decode_attention.py"
        "::test_pages_behind_two_to_the_31_elements_are_read_where_they_are",
    ],
    "some ratio of query heads to KV heads is wrong": [
        "cache/test_packed_layer.py::test_any_number_of_query_heads_shares_a_kv_head",
        "cache/test_simulated_layer.py::test_any_number_of_query_heads_shares_a_kv_head",
        "ops/test_decode_attention.py::test_attention_is_as_exact_as_plain_16_bit_arithmetic",
    ],
    "some head dimension is wrong": [
        "cache/test_packed_layer.py::test_any_head_dim_and_boost_is_held",
        "cache/test_simulated_layer.py::test_any_head_dim_works_with_the_papers_page",
        "ops/test_pages.py::test_a_shape_that_the_format_cannot_hold_is_refused",
    ],
    "settled tokens are quantized again": [
        "cache/test_packed_layer.py::test_a_page_once_written_never_changes_while_ten_more_are",
        "cache/test_simulated_layer.py::test_a_final_page_never_changes",
    ],
    "a 2-bit cache that saves nothing": [
        "generate/test_generate_packed.py::test_packing_saves_what_the_layout_says",
        "generate/test_generate_packed.py"
        "::test_the_report_counts_every_byte_that_the_cache_can_reach",
        "gpu/test_gpu_memory.py::test_a_filled_cache_takes_the_bytes_that_it_reports",
    ],
    "the configuration of a second call is ignored": [
        "generate/test_generate_simulated.py"
        "::test_each_generate_gets_the_method_that_holds_at_its_time",
        "generate/test_native.py"
        "::test_the_patched_transformers_makes_the_cache_by_name_and_the_released_one_comes_back",
    ],
    "assisted decoding rejects tokens across a flush": [
        "generate/test_known_faults.py::test_an_assistant_that_is_often_wrong_changes_no_token",
        "generate/test_matrix.py::test_the_packed_cache_generates_what_the_simulation_does",
    ],
    "outliers of some models' keys overflow": [
        "cache/test_packed_layer.py"
        "::test_a_key_channel_of_a_thousand_stays_finite_and_as_exact_as_the_simulation",
        "generate/test_known_faults.py::test_a_bias_of_a_thousand_on_the_keys_stays_finite",
        "ops/test_decode_attention.py::test_no_range_of_keys_values_or_queries_overflows",
    ],
    "layers on several devices": [
        "generate/test_device_map.py::test_layers_on_cpu_and_meta_keep_their_state_there",
        "generate/test_device_map.py::test_layers_on_a_gpu_and_on_the_cpu_give_the_text_of_the_gpu",
        "generate/test_device_map.py::test_layers_on_two_gpus_give_the_text_of_one",
    ],
    "narrow index arithmetic wraps": [
        "ops/test_decode_attention.py::test_attention_is_as_exact_as_plain_16_bit_arithmetic",
        "ops/test_page_ops.py::test_prefill_writes_the_bytes_of_the_reference",
        "ops/test_compile.py::test_every_kernel_compiles_within_its_limits",
    ],
    "modes that cannot work fail obscurely": [
        "generate/test_known_faults.py::test_what_cannot_work_says_so_in_one_sentence",
        "generate/test_generate_simulated.py"
        "::test_contrastive_search_and_legacy_tuples_are_refused_in_one_sentence",
        "generate/test_generate_simulated.py::test_an_encoder_decoder_is_refused_in_one_sentence",
        "cache/test_simulated_layer.py"
        "::test_a_sliding_layer_keeps_exactly_its_window_in_full_precision",
    ],
}


@pytest.mark.parametrize("fault", KNOWN)
def test_every_known_fault_has_its_tests(fault: str) -> None:
    for place in KNOWN[fault]:
        file, name = place.split("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), place


@pytest.mark.parametrize("kind", CACHES)
def test_a_padded_batch_holds_what_each_prompt_alone_holds(kind: type[KittyCacheBase]) -> None:
    model = kitty.enable(make(), PRO)  # fp64: the rounding of a batch moves no code
    ids, mask = prompt(5, 300)
    together = kind(PRO)
    text = greedy(model, ids, mask, max_new_tokens=160, past_key_values=together)
    for row, length in enumerate((5, 300)):
        cache = kind(PRO)
        alone = greedy(model, ids[row, None, -length:], max_new_tokens=160, past_key_values=cache)
        assert torch.equal(text[row, -160:], alone[0, -160:])
        for layer in range(2):
            for mine, right in zip(
                together.layers[layer].content(row), cache.layers[layer].content(0), strict=True
            ):
                torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


def test_a_chunk_over_a_flush_is_what_the_simulation_makes_of_it() -> None:
    model = kitty.enable(make("qwen2"), PRO)
    total = PRO.sink + PRO.window + 3 * PRO.page_size + 5
    ids, _ = prompt(total)
    logits = []
    for kind in CACHES:
        cache = kind(PRO)
        with torch.no_grad():
            parts = ids.split([200, 60, *[1] * (total - 260)], dim=1)
            out = [model(part, past_key_values=cache).logits for part in parts]
        logits.append(torch.cat(out, dim=1))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)  # the ops return fp32 sums


@pytest.mark.parametrize("kind", CACHES)
def test_a_second_turn_equals_single_steps_from_its_first_token(
    kind: type[KittyCacheBase],
) -> None:
    model = kitty.enable(make(), SMALL)
    ids, mask = prompt(120, 100)
    turn, _ = prompt(150, 150, seed=3)
    cache = kind(SMALL)
    first = greedy(model, ids, mask, max_new_tokens=9, past_key_values=cache)
    whole = torch.cat([first, turn], dim=1)
    mask = torch.cat([mask, torch.ones_like(whole[:, ids.shape[1] :])], dim=1)
    steps = copy.deepcopy(cache)
    second = greedy(model, whole, mask, max_new_tokens=20, past_key_values=cache)
    with torch.no_grad():
        while whole.shape[1] < second.shape[1]:
            for at in range(steps.get_seq_length(), whole.shape[1]):
                seen = mask[:, : at + 1]
                token = whole[:, at : at + 1]
                places = seen.sum(1, keepdim=True) - 1
                logits = model(
                    token, attention_mask=seen, position_ids=places, past_key_values=steps
                ).logits
            whole = torch.cat([whole, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    assert torch.equal(second, whole)


def test_a_page_that_beams_share_is_never_written() -> None:
    ids, mask = prompt(200, 40)
    shared: dict[int, Tensor] = {}
    changed: list[int] = []

    def watch(layer_idx: int, *args: object) -> None:
        if layer_idx != 1:
            return
        pages = cache.state.pool.keys
        words = pages.storage(1).words
        for page in range(pages.capacity):
            if pages.references(page) < 2:
                shared.pop(page, None)  # its last holder may drop it
            elif page not in shared:
                shared[page] = words[page].clone()
            elif not torch.equal(shared[page], words[page]):
                changed.append(page)

    model = kitty.enable(make("llama", torch.float32), SMALL)
    cache = KittyCache(SMALL, observer=watch)
    beams = {"num_beams": 3, "max_new_tokens": SMALL.page_size + 20}
    text = greedy(model, ids, mask, past_key_values=cache, **beams)
    assert shared
    assert not changed
    simulated = SimulatedCache(SMALL)
    assert torch.equal(text, greedy(model, ids, mask, past_key_values=simulated, **beams))


@pytest.fixture
def poisoned_memory():
    """Every tensor that torch.empty() makes holds NaN, and integers their largest."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.usefixtures("poisoned_memory")
def test_a_reset_cache_on_poisoned_memory_is_as_new(kind: type[KittyCacheBase]) -> None:
    model = kitty.enable(make("llama", torch.float32), SMALL)
    ids, mask = prompt(290, 284, seed=1)
    short, short_mask = prompt(130, 2, 61, seed=2)
    cache = kind(SMALL)
    greedy(model, ids, mask, max_new_tokens=5, past_key_values=cache)
    cache.reset()
    texts = [
        greedy(model, short, short_mask, max_new_tokens=20, past_key_values=used)
        for used in (cache, kind(SMALL))
    ]
    assert torch.equal(*texts)
    for row in range(3):
        assert torch.isfinite(torch.stack(cache.layers[1].content(row))).all()


@pytest.mark.parametrize("lengths", [(300,), (300, 40)])
def test_prefill_keeps_the_dense_keys_of_one_layer_alone(lengths: tuple[int, ...]) -> None:
    config = LlamaConfig(
        **{**CONFIGS["llama"].to_dict(), "num_hidden_layers": 5, "dtype": "float32"}
    )
    model = kitty.enable(make(config=config, dtype=torch.float32), SMALL)
    ids, mask = prompt(*lengths)
    seen: list[list[weakref.ref]] = []
    alive: list[int] = []

    def watch(layer_idx: int, query: Tensor, keys: Tensor, values: Tensor, *args: object) -> None:
        alive.append(sum(ref() is not None for earlier in seen for ref in earlier))
        seen.append([weakref.ref(keys), weakref.ref(values)])

    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=KittyCache(SMALL, observer=watch))
    assert alive == [0] * 5
    assert [ref() for refs in seen for ref in refs] == [None] * 10


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_every_bit_width_is_simulated(bits: int) -> None:
    exact = kitty.get_method("fp16")
    method = SMALL.replace(key_bits=bits, value_bits=bits, boost_ratio=0.0)
    ids, _ = prompt(300)
    model = kitty.enable(make("llama", torch.float32), method, cache="simulated")
    held = []
    with torch.no_grad():
        for each in (method, exact):
            cache = SimulatedCache(each)
            model(ids, past_key_values=cache)
            held.append(cache.layers[0].content(0))
    for mine, right, per_token in zip(*held, (False, True), strict=True):
        # the second page; keys have a scale per channel, values one per token
        page = slice(4 + 128, 4 + 256)
        spread = right[:, page].amax(-1 if per_token else 1) - right[:, page].amin(
            -1 if per_token else 1
        )
        step = spread.unsqueeze(-1 if per_token else 1) / (2**bits - 1)
        error = (mine - right)[:, page].abs()
        assert (error <= 0.51 * step + 2e-3 * right.abs().max()).all()
        assert error.max() > 0.3 * step.max()
        levels = [len(mine[0, page, c].unique()) for c in range(16)]
        assert per_token or max(levels) <= 2**bits


def test_an_assistant_that_is_often_wrong_changes_no_token() -> None:
    ids, _ = prompt(100)
    method = SMALL.replace(rollback=5)  # exactly the look-ahead
    model = kitty.enable(make("llama", torch.float32), method, cache="packed")
    assistant = make("llama", torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # always all five
    plain = greedy(model, ids, max_new_tokens=190)
    calls: list[int] = []
    model.register_forward_hook(lambda *args: calls.append(1))
    found = greedy(model, ids, max_new_tokens=190, assistant_model=assistant)
    assert torch.equal(found, plain)
    assert 190 / 6 < len(calls) < 190  # some were right, some were wrong


@pytest.mark.parametrize("kind", CACHES)
def test_a_bias_of_a_thousand_on_the_keys_stays_finite(kind: type[KittyCacheBase]) -> None:
    ids, mask = prompt(300, 12)
    outputs = []
    for cache in (kind(SMALL), DynamicCache()):
        model = make("qwen2", torch.bfloat16)
        for layer in model.model.layers:
            with torch.no_grad():
                layer.self_attn.k_proj.bias[3] = 1000.0
        kitty.enable(model, SMALL)
        with torch.no_grad():
            first = model(ids, attention_mask=mask, past_key_values=cache).logits
            longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            step = model(ids[:, -1:], attention_mask=longer, past_key_values=cache).logits
        outputs.append((first[:, -1].float(), step[:, -1].float()))
    (first, step), (exact_first, exact_step) = outputs
    assert torch.isfinite(first).all()
    assert torch.isfinite(step).all()
    # prefill is 16-bit attention; the step of the short sequence has no page yet
    scale = exact_first.abs().max()
    assert (first - exact_first).abs().max() < 0.05 * scale
    assert (step[1] - exact_step[1]).abs().max() < 0.05 * scale


def test_what_cannot_work_says_so_in_one_sentence() -> None:
    model = kitty.enable(make("llama", torch.float32), SMALL, cache="packed")
    ids, _ = prompt(8)
    encoder_decoder = BartConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip

    def legacy() -> None:
        greedy(model, ids, return_dict_in_generate=True, return_legacy_cache=True)

    for attempt, said in (
        (lambda: greedy(model, ids, penalty_alpha=0.6, top_k=4), "Contrastive search"),
        (legacy, "tuples of keys and values"),
        (lambda: KittyCache(SMALL)[0], "tuples of keys and values"),
        (lambda: KittyCache(SMALL).to_legacy_cache(), "tuples of keys and values"),
        (lambda: kitty.enable(bart(encoder_decoder), SMALL), "is an encoder-decoder model"),
    ):
        with pytest.raises(KittyError, match=said) as caught:
            attempt()
        assert str(caught.value).count(". ") == 0


def bart(config: BartConfig) -> torch.nn.Module:
    from transformers import BartForConditionalGeneration

    return BartForConditionalGeneration(config)


@pytest.mark.parametrize("kind", CACHES)
def test_sliding_window_layers_keep_their_window_and_full_layers_their_pages(
    kind: type[KittyCacheBase],
) -> None:
    model = kitty.enable(make("gemma3", torch.float32), SMALL)
    assert isinstance(model, AutoModelForCausalLM._model_mapping[type(model.config)])
    ids, _ = prompt(300)
    cache = kind(SMALL)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    window, full = cache.layers[0], cache.layers[1]
    assert window.content(0)[0].shape[1] == 20
    assert full.content(0)[0].shape[1] == 301
    assert isinstance(full, PackedLayer) == (kind is KittyCache)
