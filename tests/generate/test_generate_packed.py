"""The packed cache inside transformers against the dense simulation fed the same calls."""

import copy
import io

import pytest
import torch
from tiny_models import CONFIGS, greedy, make, prompt
from torch import Tensor

import kitty
from kitty import KittyCache, KittyError, SimulatedCache
from kitty.pages import tensor_bytes

PRO = kitty.get_method("kitty-pro")
PAST_FLUSHES = PRO.sink + 3 * PRO.page_size + 5  # tokens that fill three key pages


def both(name: str, method=PRO, **kwargs) -> tuple[Tensor, Tensor]:
    """The same generation through the packed and through the simulated cache, in fp32."""
    outputs = []
    for cache in ("packed", "simulated"):
        model = make(name, torch.float32)
        model.generation_config.cache_implementation = None
        kitty.enable(model, method, cache=cache)
        torch.manual_seed(5)
        outputs.append(greedy(model, **kwargs))
    return outputs[0], outputs[1]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_packed_cache_generates_what_the_simulation_does_with_the_papers_buffers(
    name: str,
) -> None:
    ids, mask = prompt(5, 190)
    packed, simulated = both(name, ids=ids, mask=mask, max_new_tokens=PAST_FLUSHES)
    assert torch.equal(packed, simulated)


@pytest.mark.parametrize(
    "name",
    [
        "kitty",
        "kivi-k2v2",
        "kivi-k4v2-sink",
        "kitty-37.5-variance",
        "kitty-25-random",
        "kitty-plus",
    ],
)
def test_every_packable_method_holds_what_the_simulation_holds(name: str) -> None:
    model = kitty.enable(make("llama", torch.float32), name)
    ids, mask = prompt(300, 431)
    caches = KittyCache(name), SimulatedCache(name)
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :420], attention_mask=mask[:, :420], past_key_values=cache)
            model(ids[:, 420:], attention_mask=mask, past_key_values=cache)
    for layer in range(2):
        for row in range(2):
            packed, dense = (cache.layers[layer].content(row) for cache in caches)
            method = caches[0].method
            written = method.sink + method.page_size * len(caches[0].state.key_ids[row])
            assert packed[0].shape == dense[0].shape
            # rounding of the model before it reaches the cache may flip a code now and then
            close = torch.isclose(packed[0][:, :written], dense[0][:, :written], atol=1e-4)
            assert close.float().mean() > 0.999


def test_a_second_turn_and_chunks_equal_the_simulation() -> None:
    ids, _ = prompt(170)
    turn, _ = prompt(140, seed=3)
    texts = []
    for make_cache in (KittyCache, SimulatedCache):
        model = kitty.enable(make("llama", torch.float32), PRO)
        cache = make_cache(PRO)
        first = greedy(model, ids, max_new_tokens=20, past_key_values=cache)
        whole = torch.cat([first, turn], dim=1)
        texts.append(greedy(model, whole, max_new_tokens=150, past_key_values=cache))
    assert torch.equal(*texts)


def test_a_copied_or_saved_cache_goes_on_as_the_one_it_came_from() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO, cache="packed")
    ids, mask = prompt(170, 30)
    first = greedy(model, ids, mask, max_new_tokens=20, return_dict_in_generate=True)
    cache = first.past_key_values
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    twins = [copy.deepcopy(cache), torch.load(file, weights_only=False)]
    turn = torch.cat([first.sequences, prompt(140, 140)[0]], dim=1)
    mask = torch.cat([mask, torch.ones(2, 160, dtype=torch.long)], dim=1)
    text = greedy(model, turn, mask, past_key_values=cache)
    for twin in twins:
        assert torch.equal(greedy(model, turn, mask, past_key_values=twin), text)


def test_another_batch_on_a_filled_cache_is_refused_and_changes_nothing() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    ids, mask = prompt(20, 9)
    cache = KittyCache(PRO)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(KittyError, match="holds 2 sequences, but the call brings 1"):
            model(ids[:1], past_key_values=cache)
    assert (cache.get_seq_length(), cache.layers[0].lengths) == (20, [20, 9])


def test_a_cache_filled_in_inference_mode_and_cropped_to_nothing_is_as_new() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    ids, mask = prompt(20, 9)
    cache = KittyCache(PRO, rollback=20)
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask, past_key_values=cache).logits
    cache.crop(0)
    assert (cache.get_seq_length(), cache.layers[0].lengths) == (0, [0, 0])
    with torch.no_grad():
        again = model(ids, attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(again, expected)
        model(ids, past_key_values=cache)
    assert cache.layers[0].lengths == [40, 29]


def test_assisted_decoding_gives_the_greedy_text_across_flushes() -> None:
    ids, _ = prompt(150)
    method = PRO.replace(rollback=8)
    model = kitty.enable(make("llama", torch.float32), method, cache="packed")
    plain = greedy(model, ids, max_new_tokens=300, eos_token_id=1)
    looked_up = greedy(model, ids, max_new_tokens=300, eos_token_id=1, prompt_lookup_num_tokens=5)
    assert torch.equal(plain, looked_up)


def test_beams_share_full_pages_and_never_write_them() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO, cache="packed")
    ids, mask = prompt(200, 40)
    cache = KittyCache(PRO)
    greedy(model, ids, mask, max_new_tokens=200, num_beams=3, past_key_values=cache)
    held = [page for row in cache.state.key_ids for page in row]
    pages = cache.state.pool.keys
    assert pages.in_use == len(set(held)) < len(held)
    assert all(pages.references(page) == held.count(page) for page in set(held))


def test_reset_frees_everything_and_a_crop_frees_the_pages_it_opens() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    cache = KittyCache(PRO, rollback=4)
    ids, _ = prompt(170)
    with torch.no_grad():
        model(ids[:, :164], past_key_values=cache)  # sink + page + rollback: one key page
        assert cache.state.pool.keys.in_use == 1
        cache.crop(-2)
        assert cache.state.pool.keys.in_use == 0
        model(ids[:, 162:], past_key_values=cache)
        straight = KittyCache(PRO, rollback=4)
        model(ids[:, :162], past_key_values=straight)
        model(ids[:, 162:], past_key_values=straight)
    for mine, right in zip(cache.layers[1].content(0), straight.layers[1].content(0), strict=True):
        torch.testing.assert_close(mine, right)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.bytes_held().total == 0


def test_the_report_counts_every_byte_that_the_cache_can_reach() -> None:
    model = kitty.enable(make("gemma3", torch.float32), PRO)
    cache = KittyCache(PRO)
    ids, _ = prompt(300)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    state = cache.state
    reached = [*state.pool.tensors(), *(t for pair in state._tables.values() for t in pair)]
    for layer in cache.layers.values():
        reached.extend(layer.buffers)
    assert cache.bytes_held().total == tensor_bytes(reached)


def test_packing_saves_what_the_layout_says() -> None:
    model = kitty.enable(make("llama", torch.float16), PRO)
    cache = KittyCache(PRO)
    ids, _ = prompt(160 + 2 * 128)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    report, layers, heads, dim = cache.bytes_held(), 2, 2, 16
    boosted = 4
    key_page = (16 * dim + 16 * boosted) * 2 + 4 * dim + boosted
    value_page = 16 * dim * 2 + 4 * 128
    assert report.key_pages == layers * heads * 3 * key_page
    assert report.value_pages == layers * heads * 2 * value_page


def test_a_method_that_cannot_be_packed_says_so() -> None:
    with pytest.raises(KittyError, match=r"'kivi-k2v4-sink' cannot be packed.*4 bits"):
        KittyCache("kivi-k2v4-sink")
    with pytest.raises(KittyError, match=r"'fp16' keeps every token in 16 bit.*max_length"):
        KittyCache("fp16")
    model = make("llama")
    with pytest.raises(KittyError, match=r"'kivi-k2v4-sink' cannot be packed.*4 bits"):
        kitty.enable(model, "kivi-k2v4-sink")
    assert model.config._attn_implementation == "sdpa"


def test_an_exhausted_pool_says_how_many_bytes_are_missing() -> None:
    model = kitty.enable(make("llama", torch.float32), PRO)
    cache = KittyCache(PRO, max_bytes=1000)
    with pytest.raises(KittyError, match="bytes more are needed"), torch.no_grad():
        model(prompt(400)[0], past_key_values=cache)


def test_capped_attention_logits_are_capped_in_prefill_and_decoding() -> None:
    ids, mask = prompt(60, 190)
    logits = {}
    for softcap in (1.0, None):
        config = copy.deepcopy(CONFIGS["gemma2"])
        config.attn_logit_softcapping = softcap
        model = kitty.enable(make("gemma2", torch.float32, config), PRO)
        for kind in (KittyCache, SimulatedCache):
            cache = kind(PRO)
            with torch.no_grad():
                first = model(ids[:, :170], attention_mask=mask[:, :170], past_key_values=cache)
                later = model(ids[:, 170:], attention_mask=mask, past_key_values=cache)
            assert cache.quantized_pages_read > 0
            logits[softcap, kind] = torch.cat([first.logits[1:], later.logits[1:]], dim=1)
    for softcap in (1.0, None):
        packed, simulated = (logits[softcap, kind] for kind in (KittyCache, SimulatedCache))
        torch.testing.assert_close(packed, simulated, rtol=1e-3, atol=1e-3)
    gap = logits[1.0, KittyCache] - logits[None, KittyCache]
    assert gap.abs().amax(dim=(0, 2)).gt(0.05)[5:].all()
