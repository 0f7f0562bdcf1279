"""The engine under generate(): prompt parts, preallocated pages, 16-bit cache, steps by hand."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny_models import greedy, make, prompt
from transformers import DynamicCache

import kitty
from kitty import KittyCache, KittyError
from kitty.benchmark.random_cache import fill_random
from kitty.integrations.transformers import prepare_native
from kitty.integrations.transformers.engine import DecodeEngine
from kitty.pages import tensor_bytes

PRO = "kitty-pro"
LENGTHS = (5, 190, 61)


def test_settings_of_one_native_call_neither_pile_up_nor_stay() -> None:
    model = make("llama", torch.float32)
    plain = model.forward
    config = copy.deepcopy(model.generation_config)
    for graph, count in ((False, 3), (None, 1)):
        for _ in range(count):
            config.cache_config = SimpleNamespace(method=PRO, cache="packed")
            if graph is not None:
                config.cache_config.graph = graph
            prepare_native(model, config, None, 2, 100)
            assert model.forward.original == plain
    assert model.forward.options == {}


def test_a_native_call_keeps_the_settings_of_enable() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO, graph=False)
    prepare_native(model, copy.deepcopy(model.generation_config), None, 2, 100)
    assert model.forward.options["graph"] is False


def test_a_batch_filled_by_parts_holds_what_one_call_fills() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    ids, mask = prompt(*LENGTHS, 300)
    whole, parts = (KittyCache(PRO, max_length=400) for _ in range(2))
    with torch.no_grad():
        expected = DecodeEngine(model, whole).prefill(ids, mask)
        engine = DecodeEngine(model, parts, prefill_tokens=2 * ids.shape[1])
        found = engine.prefill(ids, mask)
    torch.testing.assert_close(found, expected)
    assert engine.counters["prefill_parts"] == 2
    for layer in range(2):
        for row in range(4):
            for one, other in zip(
                whole.layers[layer].content(row), parts.layers[layer].content(row), strict=True
            ):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_generate_splits_a_large_prompt_batch_without_changing_a_token(mode: dict) -> None:
    ids, mask = prompt(*LENGTHS)
    outputs = []
    for prefill_tokens in (16384, 1):
        model = kitty.enable(make("llama", torch.float32), PRO, prefill_tokens=prefill_tokens)
        torch.manual_seed(1)
        outputs.append(greedy(model, ids, mask, max_new_tokens=20, **mode))
    assert torch.equal(*outputs)


def test_steps_by_hand_give_what_generate_gives() -> None:
    model = kitty.enable(make("qwen3", torch.float32), PRO)
    ids, mask = prompt(*LENGTHS)
    engine = DecodeEngine(model, KittyCache(PRO, max_length=500))
    with torch.no_grad():
        tokens = [engine.prefill(ids, mask).argmax(-1, keepdim=True)]
        for _ in range(150):
            tokens.append(engine.step(tokens[-1]).argmax(-1, keepdim=True))
    expected = greedy(model, ids, mask, max_new_tokens=151)[:, ids.shape[1] :]
    assert torch.equal(torch.cat(tokens, dim=1), expected)
    assert engine.counters["eager_steps"] == 150
    assert "CUDA graphs need a GPU" in str(engine.fallback_reason)


def test_a_compiled_step_needs_no_graph_and_gives_the_same_tokens(monkeypatch) -> None:
    compiled = []

    def counted(forward, **options):
        def run(**inputs):
            compiled.append(inputs["input_ids"].shape)
            return forward(**inputs)

        return run

    monkeypatch.setattr(torch, "compile", counted)
    ids, mask = prompt(*LENGTHS)
    expected = greedy(kitty.enable(make("llama", torch.float32), PRO), ids, mask, max_new_tokens=9)
    model = kitty.enable(make("llama", torch.float32), PRO, compile=True)
    assert torch.equal(greedy(model, ids, mask, max_new_tokens=9), expected)
    assert compiled == [(3, 1)] * 8


def test_preallocated_pages_keep_their_addresses_and_give_the_same_tokens() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    ids, mask = prompt(*LENGTHS)
    grown, fixed = KittyCache(PRO), KittyCache(PRO, max_length=LENGTHS[1] + 450)
    engine, addresses, outputs = DecodeEngine(model, fixed), set(), []
    with torch.no_grad():
        for cache in (grown, fixed):
            logits = DecodeEngine(model, cache).prefill(ids, mask)
            steps = []
            for _ in range(440):  # three pages of keys
                token = logits.argmax(-1, keepdim=True)
                logits = DecodeEngine(model, cache).step(token)
                steps.append(token)
                if cache is fixed:
                    addresses.add(fixed.state.addresses())
            outputs.append(torch.cat(steps, dim=1))
    assert torch.equal(*outputs)
    assert len(addresses) == 1
    assert engine.cache.graph_obstacle() is None
    assert "grows on demand" in str(grown.graph_obstacle())


def test_beams_keep_addresses_too() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    cache = KittyCache(PRO, max_length=400)
    with torch.no_grad():
        engine = DecodeEngine(model, cache)
        engine.prefill(prompt(200, 300)[0])
        engine.step(torch.ones(2, 1, dtype=torch.long))
        before, longer = cache.state.addresses(), cache.layers[0].content(1)
        cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.state.addresses() == before
    assert all(map(torch.equal, cache.layers[0].content(0), longer))


def test_the_sixteen_bit_cache_gives_what_a_dynamic_cache_gives() -> None:
    model = make("qwen3", torch.float32)
    ids, mask = prompt(*LENGTHS)
    expected = greedy(model, ids, mask, max_new_tokens=200, past_key_values=DynamicCache())
    kitty.enable(model, "fp16")
    assert torch.equal(greedy(model, ids, mask, max_new_tokens=200), expected)


def test_the_sixteen_bit_cache_holds_no_page_and_refuses_more_than_it_was_made_for() -> None:
    model = kitty.enable(make("llama", torch.float32), "fp16")
    cache = KittyCache("fp16", max_length=64)
    with torch.no_grad():
        model(prompt(60)[0], past_key_values=cache)
        assert cache.bytes_held().key_pages == cache.bytes_held().value_pages == 0
        with pytest.raises(KittyError, match=r"grows to 70 tokens.*made for 64"):
            model(prompt(10)[0], past_key_values=cache)
    assert cache.quantized_pages_read == 0


def test_a_cache_pretends_a_length_with_pages_to_read() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    cache = KittyCache(PRO, max_length=700)
    with torch.no_grad():
        engine = DecodeEngine(model, cache)
        engine.prefill(prompt(3, 3)[0])
        fill_random(cache, 600)
        assert engine.step(torch.ones(2, 1, dtype=torch.long)).isfinite().all()
    # (600 - 32) // 128 key and (600 - 160) // 128 value pages of two sequences and two layers
    assert cache.quantized_pages_read == (4 + 3) * 2 * 2
    assert cache.get_seq_length() == 601


def test_an_interrupted_filling_is_noticed() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    cache = KittyCache(PRO)
    ids, _ = prompt(20, 20)

    def fill_one() -> None:
        with torch.no_grad(), cache.filling(2) as fill:
            fill(slice(0, 1))
            model(ids[:1], past_key_values=cache)

    with pytest.raises(KittyError, match="1 of 2 sequences"):
        fill_one()


def test_bytes_equal_the_tensors_of_a_preallocated_cache() -> None:
    model = kitty.enable(make("llama", torch.float16), PRO)
    cache = KittyCache(PRO, max_length=600)
    with torch.no_grad():
        engine = DecodeEngine(model, cache)
        engine.prefill(prompt(200, 300)[0])
        engine.step(torch.ones(2, 1, dtype=torch.long))
    state = cache.state
    reached = [*state.pool.tensors(), *(t for pair in state._tables.values() for t in pair)]
    reached.extend(state._step_lens.values())
    for layer in state.layers:
        reached.extend(layer.buffers)
    assert tensor_bytes(reached) == cache.bytes_held().total


def test_a_cache_is_freed_with_its_last_use_without_the_garbage_collector() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    gc.collect()
    gc.disable()
    try:
        cache = KittyCache(PRO, max_length=300)
        with torch.no_grad():
            model(prompt(200)[0], past_key_values=cache)
            model(prompt(1)[0], past_key_values=cache)
        gone = weakref.ref(cache.state), weakref.ref(cache.layers[0].buffers.sink_k)
        del cache
        assert [x() for x in gone] == [None, None]
    finally:
        gc.enable()
