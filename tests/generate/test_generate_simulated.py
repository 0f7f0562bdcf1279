"""The simulated cache inside transformers: every way of generating, on tiny random models."""

import copy
import functools
import pickle

import pytest
import torch
from packaging.version import Version
from tiny_models import CONFIGS, FLUSHES, greedy, make, prompt
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    CompileConfig,
    DynamicCache,
)

import kitty
from kitty import KittyError, SimulatedCache

enable = functools.partial(kitty.enable, cache="simulated")
SMALL = kitty.get_method("kitty-pro", sink=4, window=8, page_size=8)
FULL = kitty.get_method("fp16")
# there transformers writes into its expanded mask where a batch without one has a window
OLD_TORCH = Version(torch.__version__) < Version("2.5")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=["greedy", "beams", "group beams", "sampling"],
)
def test_an_unquantized_kitty_cache_generates_what_transformers_does(name: str, mode: dict) -> None:
    ids, mask = prompt(23, 9)
    outputs = []
    for hooked in (False, True):
        model = make(name)
        model.generation_config.cache_implementation = None  # hybrid caches count differently
        if hooked:
            enable(model, FULL)
        torch.manual_seed(5)
        outputs.append(greedy(model, ids, mask, max_new_tokens=30, **mode))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_padded_batch_generates_what_each_prompt_does_alone(name: str) -> None:
    model = enable(make(name), SMALL)
    lengths = (5, 60, 2)  # the first and last are shorter than the sink and a page
    ids, mask = prompt(*lengths)
    together = greedy(model, ids, mask)
    for row, length in zip(range(3), lengths, strict=True):
        alone = greedy(model, ids[row : row + 1, -length:])
        assert torch.equal(together[row, -FLUSHES:], alone[0, -FLUSHES:])


@pytest.mark.parametrize("name", CONFIGS)
def test_quantization_is_really_at_work(name: str) -> None:
    model = make(name)
    ids, mask = prompt(50)
    with torch.no_grad():
        dense = model(ids, attention_mask=mask).logits
        enable(model, SMALL)
        cache = SimulatedCache(SMALL, dense_prefill=False)
        quantized = model(ids, past_key_values=cache).logits
    full_attention = [layer for layer in cache.layers.values() if layer.sliding_window is None]
    if full_attention:
        assert cache.quantized_pages_read > 0
        assert not torch.allclose(dense, quantized, rtol=1e-3)
    else:
        torch.testing.assert_close(dense, quantized, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_second_turn_equals_single_steps_from_its_first_token(name: str) -> None:
    model = enable(make(name), SMALL)
    ids, _ = prompt(20)
    turn, _ = prompt(33, seed=3)
    cache = SimulatedCache(SMALL)
    first = greedy(model, ids, max_new_tokens=15, past_key_values=cache)
    whole = torch.cat([first, turn], dim=1)
    steps = copy.deepcopy(cache)
    second = greedy(model, whole, past_key_values=cache)
    with torch.no_grad():
        while whole.shape[1] < second.shape[1]:
            seen = steps.get_seq_length()
            for at in range(seen, whole.shape[1]):
                logits = model(whole[:, at : at + 1], past_key_values=steps).logits
            whole = torch.cat([whole, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(second, whole)


def test_chunks_of_a_prompt_give_the_content_of_their_own_keys_and_values() -> None:
    model = enable(make(), SMALL)
    ids, _ = prompt(60)
    fed: list[Tensor] = []

    def note(layer_idx, query, keys, values, output, scaling) -> None:
        if layer_idx == 1:
            fed.append(keys)

    cache = SimulatedCache(SMALL, observer=note)
    with torch.no_grad():
        for part in ids.split([31, 1, 17, 11], dim=1):
            model(part, past_key_values=cache)
    replay = kitty.cache.SimulatedLayer(SMALL, 1)
    keys = torch.cat(fed, dim=2)
    replay.attend(keys.repeat_interleave(2, 1), keys, keys, scale=1.0)
    assert torch.equal(cache.layers[1].content(0)[0], replay.content(0)[0])


@pytest.mark.parametrize("method", [SMALL, kitty.get_method("kivi-k2v2", window=0, page_size=4)])
def test_the_teacher_forced_pass_equals_token_by_token_decoding_in_fp64(method) -> None:
    model = enable(make(), method)
    ids, _ = prompt(57)
    whole = SimulatedCache(method, dense_prefill=False)
    steps = SimulatedCache(method, dense_prefill=False)
    with torch.no_grad():
        at_once = model(ids, past_key_values=whole).logits
        singly = torch.cat([model(t, past_key_values=steps).logits for t in ids.split(1, 1)], 1)
    torch.testing.assert_close(at_once, singly, rtol=1e-9, atol=1e-9)
    first, second = whole.layers[0].content(0), steps.layers[0].content(0)
    pages = slice(method.sink, method.sink + whole.layers[0].key_pages[0] * method.page_size)
    assert torch.equal(first[0][:, pages], second[0][:, pages])


def test_assisted_decoding_gives_the_greedy_text() -> None:
    ids, _ = prompt(14)
    method = SMALL.replace(rollback=8)
    assistant = make()
    with torch.no_grad():  # often wrong, sometimes right
        for weight in assistant.parameters():
            weight += 0.05 * torch.randn(weight.shape, dtype=weight.dtype)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    model = enable(make(), method)
    plain = greedy(model, ids, eos_token_id=1)  # prompt look-up needs one
    assert plain.shape[1] == 14 + FLUSHES
    assert torch.equal(greedy(model, ids, eos_token_id=1, assistant_model=assistant), plain)
    assert torch.equal(greedy(model, ids, eos_token_id=1, prompt_lookup_num_tokens=5), plain)


def test_a_crop_beyond_the_rollback_is_refused_and_changes_nothing() -> None:
    model = enable(make(), SMALL)
    ids, mask = prompt(40, 31)
    cache = SimulatedCache(SMALL, rollback=3)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    before = [layer.content(1)[0].clone() for layer in cache.layers.values()]
    with pytest.raises(KittyError, match=r"takes back 4 tokens, but rollback is 3"):
        cache.crop(36)
    assert cache.get_seq_length() == 40
    assert all(
        torch.equal(a, layer.content(1)[0])
        for a, layer in zip(before, cache.layers.values(), strict=True)
    )
    cache.crop(-2)
    assert (cache.get_seq_length(), cache.layers[0].lengths) == (38, [38, 29])
    cache.crop(37)
    with pytest.raises(KittyError, match="0 of it are left"):
        cache.crop(36)


def test_a_sliding_window_that_has_moved_on_cannot_be_cropped_beyond_the_rollback() -> None:
    model = enable(make("mistral"), FULL)  # window of 20, nothing quantized
    ids, _ = prompt(40)
    logits = []
    with torch.no_grad():
        for rollback, detour in ((0, 0), (3, 3)):
            cache = SimulatedCache(FULL, rollback=rollback)
            model(ids[:, : 30 + detour], past_key_values=cache)
            with pytest.raises(KittyError, match=f"rollback is {rollback}"):
                cache.crop(25)
            cache.crop(30)
            logits.append(model(ids[:, 30:], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)
    short = SimulatedCache(FULL)
    with torch.no_grad():
        model(ids[:, :15], past_key_values=short)
    short.crop(5)  # everything is still there
    assert short.layers[0].lengths == [5]


def test_another_number_of_sequences_is_refused_and_changes_nothing() -> None:
    model = enable(make(), SMALL)
    ids, _ = prompt(20, 20)
    for make_cache in (kitty.SimulatedCache, lambda _: kitty.KittyCache("kitty")):
        cache = make_cache(SMALL)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            with pytest.raises(KittyError, match="holds 2 sequences, but the call brings 1"):
                model(ids[:1], past_key_values=cache)
            assert cache.get_seq_length() == 20
            model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 40


def test_crops_with_calls_between_them_together_stay_within_the_rollback() -> None:
    model = enable(make("mistral"), SMALL)  # window of 20
    ids, _ = prompt(40)
    for cache_method in (SMALL, FULL):
        cache = SimulatedCache(cache_method, rollback=3)
        with torch.no_grad():
            model(ids[:, :35], past_key_values=cache)
            cache.crop(32)
            model(ids[:, 32:33], past_key_values=cache)
            with pytest.raises(KittyError, match="takes back 2 tokens, but rollback is 3 and 1"):
                cache.crop(31)  # 4 behind the longest: no longer in the window
            cache.crop(32)
            logits = model(ids[:, 32:], past_key_values=cache).logits
            straight = SimulatedCache(cache_method, rollback=3)
            model(ids[:, :32], past_key_values=straight)
            right = model(ids[:, 32:], past_key_values=straight).logits
        torch.testing.assert_close(logits, right, rtol=1e-9, atol=1e-9)


def test_cropped_and_continued_equals_never_having_had_the_tokens() -> None:
    model = enable(make(), SMALL)
    ids, mask = prompt(40, 22)
    wrong, _ = prompt(3, 3, seed=1)
    right, _ = prompt(12, 12, seed=2)
    logits = []
    with torch.no_grad():
        for detour in (False, True):
            cache = SimulatedCache(SMALL, rollback=3)
            model(ids, attention_mask=mask, past_key_values=cache)
            if detour:
                model(wrong, past_key_values=cache)
                cache.crop(40)
            longer = torch.cat([mask, torch.ones_like(right)], dim=1)
            logits.append(model(right, attention_mask=longer, past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_a_reset_cache_is_as_new() -> None:
    model = enable(make(), SMALL)
    ids, mask = prompt(50, 44)
    short, _ = prompt(12, seed=9)
    cache = SimulatedCache(SMALL)
    greedy(model, ids, mask, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = greedy(model, short, past_key_values=cache)
    assert torch.equal(again, greedy(model, short))


def test_each_generate_gets_the_method_that_holds_at_its_time() -> None:
    model = make()
    ids, _ = prompt(60)
    enable(model, SMALL)
    first = greedy(model, ids, max_new_tokens=20)
    coarse = SMALL.replace(key_bits=1, value_bits=1, boost_ratio=0.0)
    enable(model, coarse)
    second = greedy(model, ids, max_new_tokens=20)
    enable(model, SMALL)
    assert torch.equal(greedy(model, ids, max_new_tokens=20), first)
    assert not torch.equal(first, second)


def test_without_a_kitty_cache_the_attention_equals_sdpa() -> None:
    for name in CONFIGS:
        plain = make(name)
        hooked = make(name)
        hooked.config._attn_implementation = "kitty"
        ids, mask = prompt(30, 11)
        real = mask.bool()
        with torch.no_grad():
            for kwargs in ({}, {"past_key_values": DynamicCache()}):
                a, b = (
                    m(ids, attention_mask=mask, **copy.deepcopy(kwargs)).logits
                    for m in (plain, hooked)
                )
                assert torch.equal(a[real], b[real])
            if not (OLD_TORCH and hasattr(plain.config, "sliding_window")):
                a, b = (m(ids).logits for m in (plain, hooked))
                assert torch.equal(a, b)
            outs = []
            for m in (plain, hooked):  # chunks on a dynamic cache
                cache = DynamicCache()
                m(ids[:, :17], attention_mask=mask[:, :17], past_key_values=cache)
                outs.append(m(ids[:, 17:], attention_mask=mask, past_key_values=cache).logits)
            assert torch.equal(*(out[real[:, 17:]] for out in outs))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_cache_of_fixed_size_generates_what_it_does_without_kitty(name: str) -> None:
    kind = "hybrid" if name == "gemma3" else "static"
    ids, mask = prompt(23, 9)
    outputs = []
    for hooked in (False, True):
        model = make(name)
        if hooked:
            enable(model, SMALL)
        outputs.append(greedy(model, ids, mask, max_new_tokens=12, cache_implementation=kind))
    assert torch.equal(*outputs)


@pytest.mark.skipif(OLD_TORCH, reason="transformers itself does not compile in one graph there")
def test_without_a_kitty_cache_the_model_compiles_in_one_graph() -> None:
    # on a GPU generate() does so by itself with a static cache
    ids, mask = prompt(23, 9)
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    outputs = []
    for config in (None, compiled):
        model = enable(make(), SMALL)
        static = {"cache_implementation": "static", "compile_config": config}
        outputs.append(greedy(model, ids, mask, max_new_tokens=12, **static))
    assert torch.equal(*outputs)


def test_training_through_the_attention_function_equals_sdpa() -> None:
    grads = []
    for implementation in ("sdpa", "kitty"):
        model = make()
        model.config._attn_implementation = implementation
        ids, mask = prompt(12, 7)
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert torch.equal(*grads)


def test_disable_restores_the_model() -> None:
    model = make()
    ids, _ = prompt(30)
    before = greedy(model, ids)
    kitty.disable(enable(enable(model, SMALL), FULL))
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(greedy(model, ids), before)
    out = greedy(model, ids, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, DynamicCache)


def test_a_cache_that_the_call_names_wins() -> None:
    model = enable(make(), SMALL)
    ids, _ = prompt(12)
    out = greedy(model, ids, cache_implementation="static", return_dict_in_generate=True)
    assert not isinstance(out.past_key_values, SimulatedCache)
    out = greedy(model, ids, past_key_values=DynamicCache(), return_dict_in_generate=True)
    assert isinstance(out.past_key_values, DynamicCache)
    out = greedy(model, ids, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, SimulatedCache)
    assert out.past_key_values.quantized_pages_read > 0


def test_a_models_own_default_cache_does_not_collide_with_kittys() -> None:
    model = enable(make("gemma2"), SMALL)
    model.generation_config.cache_implementation = "hybrid"
    ids, _ = prompt(12)
    out = greedy(model, ids, return_dict_in_generate=True)
    turn = torch.cat([out.sequences, ids], dim=1)
    again = greedy(model, turn, past_key_values=out.past_key_values)
    assert again.shape[1] == turn.shape[1] + FLUSHES


def test_a_compiled_forward_with_a_kitty_cache_equals_the_plain_one() -> None:
    model = enable(make(), SMALL)
    ids, mask = prompt(30, 11)
    more = torch.cat([mask, torch.ones_like(mask)], dim=1)
    logits = []
    with torch.no_grad():
        for forward in (model.forward, torch.compile(model.forward, backend="eager")):
            cache = SimulatedCache(SMALL)
            forward(ids, attention_mask=mask, past_key_values=cache)
            for at in range(30):
                step = forward(
                    ids[:, at : at + 1],
                    attention_mask=more[:, : 31 + at],
                    past_key_values=cache,
                ).logits
            logits.append(step)
    assert torch.equal(*logits)


def test_a_copied_or_pickled_model_stays_enabled_by_itself() -> None:
    model = enable(make(), SMALL)
    ids, _ = prompt(30)
    expected = greedy(model, ids, max_new_tokens=9)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        kitty.disable(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()  # the twin must not reach for the model it came from
        out = greedy(twin, ids, max_new_tokens=9, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, SimulatedCache)
        assert torch.equal(out.sequences, expected)
        assert twin._prepare_cache_for_generation.model is twin
        model = twin


def test_a_saved_model_loads_where_kitty_is_not_imported(tmp_path) -> None:
    enable(make(), SMALL).save_pretrained(tmp_path)
    assert all("kitty" not in path.read_text() for path in tmp_path.glob("*.json"))


class Adapter(torch.nn.Module):
    """Wraps a model as PEFT does: attributes and generate() are those of the model inside."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> object:
        if name == "inner":
            return super().__getattr__(name)
        return getattr(super().__getattr__("inner"), name)

    def get_base_model(self) -> torch.nn.Module:
        return self.inner


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [Adapter, compiled, lambda model: compiled(Adapter(model))])
def test_a_wrapped_model_is_enabled_inside(wrap) -> None:
    ids, _ = prompt(30)
    expected = greedy(enable(make(), SMALL), ids, max_new_tokens=9)
    model = wrap(make())
    assert enable(model, SMALL) is model
    out = greedy(model, ids, max_new_tokens=9, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, SimulatedCache)
    assert torch.equal(out.sequences, expected)
    assert kitty.disable(model) is model
    assert model.config._attn_implementation == "sdpa"
    out = greedy(model, ids, max_new_tokens=1, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, DynamicCache)


def test_a_model_without_a_head_takes_a_cache() -> None:
    model = enable(make().model, SMALL)
    cache = SimulatedCache(SMALL)
    with torch.no_grad():
        model(prompt(30)[0], past_key_values=cache)
    assert cache.get_seq_length() == 30
    kitty.disable(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("model", [None, "Qwen/Qwen3-4B", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused_in_one_sentence(model) -> None:
    with pytest.raises(KittyError, match=f"A {type(model).__name__} is no model of transformers"):
        enable(model, SMALL)


def test_a_4d_mask_is_followed_or_refused() -> None:
    ids, mask = prompt(23, 9)
    causal = (torch.ones(23, 23).tril() * mask[:, None, :]).bool()[:, None]  # [B, 1, T, T]
    opened = causal | ~causal.any(-1, keepdim=True)  # as transformers opens rows of pads
    added = torch.zeros(opened.shape, dtype=torch.float64)
    added[~opened] = torch.finfo(torch.float64).min
    hole = causal.clone()
    hole[:, :, 15:, 3:9] = False
    model = enable(make(), SMALL)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, past_key_values=SimulatedCache(SMALL)).logits
        for good in (causal, opened, added):
            cache = SimulatedCache(SMALL)
            logits = model(ids, attention_mask=good, past_key_values=cache).logits
            assert cache.layers[0].lengths == [23, 9]
            assert torch.equal(logits[mask.bool()], expected[mask.bool()])
        for bad in (torch.ones_like(causal), hole):
            with pytest.raises(KittyError, match="more than causal with padding"):
                model(ids, attention_mask=bad, past_key_values=SimulatedCache(SMALL))


def test_a_cache_whose_call_was_interrupted_is_refused_until_reset() -> None:
    model = enable(make(), SMALL)
    ids, _ = prompt(30)
    cache = SimulatedCache(SMALL, rollback=2)

    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        model(ids, past_key_values=cache)
        hook = model.model.layers[0].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], past_key_values=cache)
        hook.remove()
        for again in (lambda: model(ids[:, :1], past_key_values=cache), lambda: cache.crop(29)):
            with pytest.raises(KittyError, match="ended between two layers"):
                again()
        cache.reset()
        after = model(ids, past_key_values=cache).logits
        assert torch.equal(after, model(ids, past_key_values=SimulatedCache(SMALL)).logits)


def test_a_first_call_that_was_interrupted_is_noticed_too() -> None:
    model = enable(make(), SMALL)
    ids, _ = prompt(30)
    cache = SimulatedCache(SMALL)
    with torch.no_grad():
        model.model.layers.insert(1, torch.nn.Identity())  # takes no keywords: fails there
        with pytest.raises(TypeError):
            model(ids, past_key_values=cache)
        del model.model.layers[1]
        with pytest.raises(KittyError, match="ended between two layers"):
            model(ids, past_key_values=cache)


def test_a_cache_may_be_filled_in_inference_mode_and_used_outside() -> None:
    model = enable(make(), SMALL)
    ids, _ = prompt(50)
    cache = SimulatedCache(SMALL)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert cache.layers[0].lengths == [100]


def test_an_encoder_decoder_is_refused_in_one_sentence() -> None:
    config = BartConfig(
        vocab_size=97,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    with pytest.raises(KittyError, match="BartForConditionalGeneration is an encoder-decoder"):
        enable(BartForConditionalGeneration(config))


def test_a_model_with_its_own_attention_is_refused_in_one_sentence() -> None:
    model = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2)
    )
    with pytest.raises(KittyError, match="BloomForCausalLM does not call its attention through"):
        enable(model)


def test_a_cache_in_a_model_that_was_not_enabled_says_what_to_call() -> None:
    for implementation in ("eager", "sdpa"):
        model = make()
        model.config._attn_implementation = implementation
        with pytest.raises(KittyError, match=r"call kitty\.enable\(model\)"), torch.no_grad():
            model(prompt(4)[0], past_key_values=SimulatedCache(SMALL))


def test_contrastive_search_and_legacy_tuples_are_refused_in_one_sentence() -> None:
    model = enable(make(), SMALL)
    ids, _ = prompt(8)
    with pytest.raises(KittyError, match="Contrastive search"):
        greedy(model, ids, penalty_alpha=0.6, top_k=4)
    with pytest.raises(KittyError, match="tuples of keys and values"):
        greedy(model, ids, return_dict_in_generate=True, return_legacy_cache=True)
    with pytest.raises(KittyError, match="tuples of keys and values"):
        SimulatedCache(SMALL)[0]


def test_attention_weights_cannot_be_had_from_a_quantized_cache() -> None:
    model = enable(make(), SMALL)
    with pytest.raises(KittyError, match="output_attentions=True cannot work"), torch.no_grad():
        model(prompt(4)[0], past_key_values=SimulatedCache(SMALL), output_attentions=True)


def test_an_unknown_cache_or_method_changes_nothing() -> None:
    model = make()
    for kwargs in ({"cache": "magic"}, {"method": "kity"}, {"boost_ratio": 2.0}):
        with pytest.raises(KittyError):
            enable(model, **kwargs)
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_models_generate(dtype: torch.dtype) -> None:
    model = enable(make("qwen3", dtype), SMALL)
    ids, mask = prompt(30, 3)
    out = greedy(model, ids, mask, return_dict_in_generate=True)
    assert out.past_key_values.layers[0].content(0)[0].dtype == dtype
    assert out.sequences.shape == (2, 30 + FLUSHES)
