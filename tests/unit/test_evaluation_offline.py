"""One vectorized pass equals decoding token by token; metrics equal hand-made ones."""

import dataclasses
import json
import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
)

from kitty.cache.packed import TORCH_GROUPS_HEADS
from kitty.errors import KittyError
from kitty.evaluation import Pages, Reference, bootstrap, evaluate_offline, write_reference
from kitty.evaluation import offline as offline_module
from kitty.evaluation.offline import (
    AttentionError,
    TokenScores,
    exact_attention,
    page_means,
    score_hidden,
    stored_bits,
    token_scores,
    tokens_needed,
)
from kitty.evaluation.reference import final_hidden, head_logits
from kitty.integrations.transformers import SimulatedCache
from kitty.methods import get_method
from kitty.quant import quantize_keys, quantize_values

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # sharp attention, so that the history matters
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = 71


def tiny_model(config_class=LlamaConfig, seed=0, **changes):
    torch.manual_seed(seed)
    config = config_class(**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="kitty")
    return model.double().eval()


def text(tokens=TOKENS, seed=1):
    return torch.randint(3, 61, (tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    return write_reference(model, text(), tmp_path_factory.mktemp("reference") / "r.safetensors")


def small(name, **changes):
    return get_method(name, **{"sink": 3, "window": 5, "page_size": 8, **changes})


METHODS = [
    small("fp16"),
    small("kivi-k2v2", sink=0),
    small("kitty-pro"),
    small("kitty-pro", page_size=16, rollback=2),
    small("kitty-25-random", sink=4, window=0),
    small("kitty-37.5-variance", page_size=4),
    small("kivi-k4v2-sink"),
    small("k2v1-sink", window=17),
    small("kivi-k2v2-sink", value_bits=16),
]


def record_calls(calls):
    """An observer that keeps each layer's calls as (query, keys, values, output)."""

    def observer(layer_idx, query, keys, values, output, scaling):
        calls.setdefault(layer_idx, []).append([x.clone() for x in (query, keys, values, output)])

    return observer


def joined(calls, layer):
    return [torch.cat(parts, dim=2) for parts in zip(*calls[layer], strict=True)]


def decode(model, ids, method):
    """Final hidden states, the calls seen and the cache of decoding one token after the other."""
    calls, states = {}, []
    cache = SimulatedCache(method, observer=record_calls(calls))
    with torch.inference_mode():
        for token in ids:
            states.append(final_hidden(model, token[None], cache))
    return torch.cat(states), calls, cache


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_one_pass_has_the_codes_scores_and_outputs_of_decoding_token_by_token(
    model, reference, method
):
    stepwise, step_calls, step_cache = decode(model, text(), method)
    calls = {}
    cache = SimulatedCache(method, dense_prefill=False, observer=record_calls(calls))
    with torch.inference_mode():
        hidden = final_hidden(model, text(), cache)
    torch.testing.assert_close(hidden, stepwise, rtol=1e-11, atol=1e-11)
    for layer in range(3):
        for one, other in zip(joined(calls, layer), joined(step_calls, layer), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        _same_pages(method, joined(calls, layer), joined(step_calls, layer), layer)
        keys, values = cache.layers[layer].content(0)
        step_keys, step_values = step_cache.layers[layer].content(0)
        assert torch.equal(_paged(keys, method, "key"), _paged(step_keys, method, "key"))
        assert torch.equal(_paged(values, method, "value"), _paged(step_values, method, "value"))
    scores, expected = (score_hidden(model, h, reference) for h in (hidden, stepwise))
    for name in ("nll", "kl", "nll_reference", "top1"):
        torch.testing.assert_close(
            getattr(scores, name), getattr(expected, name), rtol=1e-9, atol=1e-12
        )


def _same_pages(method, one, other, layer):
    """Codes, scales, zeros and boosted channels of two passes' raw keys and values are equal."""
    for index, quantize, bits, pages in (
        (1, lambda x: quantize_keys(x, method, layer=layer), method.key_bits, method.key_pages),
        (2, lambda x: quantize_values(x, method), method.value_bits, method.value_pages),
    ):
        if bits == 16:
            continue
        count = pages(TOKENS)
        end = method.sink + count * method.page_size
        raw = [x[index][:, :, method.sink : end].unflatten(2, (count, -1)) for x in (one, other)]
        assert count > 0
        for a, b in zip(quantize(raw[0]), quantize(raw[1]), strict=True):
            assert torch.equal(a, b)


def _paged(content, method, part):
    pages = getattr(method, f"{part}_pages")(TOKENS)
    return content[:, method.sink : method.sink + pages * method.page_size]


@pytest.mark.parametrize("method", METHODS[1:4], ids=lambda m: m.name)
def test_metrics_equal_those_computed_by_hand_from_full_logits_of_both_passes(
    model, reference, method
):
    result = evaluate_offline(model, text(), method, reference, page_tokens=16)
    stepwise, _, _ = decode(model, text(), method)
    with torch.inference_mode():
        q = model.lm_head(stepwise).softmax(-1)[:-1]
        p = model(input_ids=text()[None], use_cache=False).logits[0].softmax(-1)[:-1]
    nll = -q[torch.arange(TOKENS - 1), text()[1:]].log()
    kl = (p * (p / q).log()).sum(-1)
    metrics, pages = result["metrics"], result["pages"]
    assert metrics["nll"] == pytest.approx(nll.mean().item(), rel=1e-9)
    assert metrics["kl"] == pytest.approx(kl.mean().item(), rel=1e-8)
    assert metrics["top1"] == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert metrics["kl"] > 1e-3  # the history matters to this model
    assert pages["start"] == [0, 16, 32, 48]
    assert pages["count"] == [16, 16, 16, 22]  # six tokens are no page of their own
    assert pages["kl"][3] == pytest.approx(kl[48:].mean().item(), rel=1e-8)
    interval = bootstrap([Pages(pages["kl"], pages["count"])])
    assert metrics["kl_ci"] == [interval.low, interval.high]
    json.dumps(result, allow_nan=False)  # plain numbers and lists


def test_attention_error_is_the_relative_rms_against_exact_attention_on_the_same_pass(
    model, reference
):
    method = small("kivi-k2v2-sink")
    _, calls, _ = decode(model, text(), method)
    expected = []
    for layer in range(3):
        query, keys, values, output = joined(calls, layer)
        keys, values = (x.repeat_interleave(2, dim=1) for x in (keys, values))
        scores = query @ keys.transpose(-1, -2) / math.sqrt(8)
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        exact = scores.masked_fill(~causal, -math.inf).softmax(-1) @ values
        expected.append(((output - exact).norm() / exact.norm()).item())
    result = evaluate_offline(model, text(), method, reference, page_tokens=16)
    assert result["metrics"]["attention_error"] == pytest.approx(expected, rel=1e-8)


def test_the_16_bit_method_has_no_error_at_all(model, reference):
    metrics = evaluate_offline(model, text(), small("fp16"), reference, page_tokens=16)["metrics"]
    assert abs(metrics["kl"]) < 1e-13
    assert metrics["top1"] == 1.0
    assert metrics["nll"] == pytest.approx(metrics["nll_reference"], rel=1e-13)
    assert max(metrics["attention_error"]) < 1e-13
    assert metrics["quantized_pages_read"] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_models_of_every_dtype_are_evaluated(dtype, tmp_path):
    model = tiny_model().to(dtype)
    reference = write_reference(model, text(), tmp_path / "r.safetensors")
    assert Reference.load(tmp_path / "r.safetensors").hidden.dtype == dtype
    low, high = (
        evaluate_offline(model, text(), small(name), reference, page_tokens=16)["metrics"]
        for name in ("fp16", "kitty-pro")
    )
    assert low["kl"] < 0.2 * high["kl"]
    assert max(low["attention_error"]) <= 2 * torch.finfo(dtype).eps


def test_fewer_bits_lose_more(model, reference):
    kl = [
        evaluate_offline(
            model, text(), small("kivi-k4v4", key_bits=b, value_bits=b), reference, page_tokens=16
        )["metrics"]["kl"]
        for b in (8, 4, 2, 1)
    ]
    assert kl == sorted(kl)


def test_the_size_of_the_chunks_of_logits_changes_nothing(model, reference, monkeypatch):
    whole = evaluate_offline(model, text(), small("kitty"), reference, page_tokens=16)
    monkeypatch.setattr(offline_module, "LOGIT_ELEMENTS", 7 * 61)
    steps = []
    parts = evaluate_offline(
        model,
        text(),
        small("kitty"),
        reference,
        page_tokens=16,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert parts["pages"]["kl"] == pytest.approx(whole["pages"]["kl"], rel=1e-9)
    assert steps == [(i + 1, 13) for i in range(13)]  # 3 layers, then 70 tokens by sevens


def test_kl_and_likelihood_of_two_words_by_hand():
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64))
    expected = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64))
    scores = token_scores(logits, expected, torch.tensor([0, 1]))
    kl = [0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75), 0.9 * math.log(1.8) + 0.1 * math.log(0.2)]
    assert scores.kl.tolist() == pytest.approx(kl)
    assert scores.nll.tolist() == pytest.approx([math.log(4), math.log(2)])
    assert scores.nll_reference.tolist() == pytest.approx([math.log(2), math.log(10)])
    assert scores.top1.tolist() == [0.0, 1.0]  # ties go to the lower word


def test_words_that_the_16_bit_model_rules_out_add_nothing():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert token_scores(logits, logits, torch.tensor([0])).kl.tolist() == [0.0]


@pytest.mark.parametrize(
    "length,starts,counts",
    [
        (256, [0, 128], [128, 128]),
        (319, [0, 128], [128, 191]),
        (320, [0, 128, 256], [128, 128, 64]),
    ],
)
def test_pages_of_predicted_tokens(length, starts, counts):
    values = torch.arange(float(length), dtype=torch.float64)
    pages = page_means(TokenScores(values, values, values, values), 128)
    assert (pages["start"], pages["count"]) == (starts, counts)
    means = [s + (n - 1) / 2 for s, n in zip(starts, counts, strict=True)]
    assert pages["nll"] == means


@pytest.mark.parametrize(
    "name,keys,values",
    [
        ("fp16", 16, 16),
        ("kivi-k2v2-sink", 2.25, 2.25),  # 32 bits of scale and zero for 128 elements each
        ("kitty-pro", 2 + 0.5 + 0.25 + 2 / 128, 2.25),  # and one byte per boosted channel
        ("kivi-k4v2-sink", 4.25, 2.25),
        ("k1v2-boost2-50-magnitude", 1.5 + 0.25 + 4 / 128, 2.25),
    ],
)
def test_effective_bits_by_hand(name, keys, values):
    bits = stored_bits(get_method(name), 128, 4096)
    assert bits["effective_bits_keys"] == pytest.approx(keys)
    assert bits["effective_bits_values"] == pytest.approx(values)
    assert bits["effective_bits"] == pytest.approx((keys + values) / 2)


def test_kitty_pro_saves_what_the_byte_formula_says_with_its_16_bit_buffers():
    ratio = {
        n: 16 / stored_bits(get_method("kitty-pro"), 128, n)["effective_bits_at_length"]
        for n in (8192, 32768)
    }
    assert ratio[8192] == pytest.approx(5.54, abs=0.01)
    assert ratio[32768] == pytest.approx(6.15, abs=0.01)


@pytest.mark.parametrize(
    "config_class,changes",
    [
        (LlamaConfig, {}),
        (Gemma2Config, {"final_logit_softcapping": 2.0, "sliding_window": 16}),
        (CohereConfig, {"logit_scale": 0.0625}),
        (GraniteConfig, {"logits_scaling": 8.0}),
    ],
)
def test_recomputed_logits_equal_the_models_own(config_class, changes, tmp_path):
    model = tiny_model(config_class, **changes)
    reference = write_reference(model, text(), tmp_path / "r.safetensors")
    with torch.inference_mode():
        own = model(input_ids=text()[None], use_cache=False).logits[0]
        torch.testing.assert_close(head_logits(model, reference.hidden), own)


def test_an_output_head_that_is_not_understood_is_refused(tmp_path):
    model = tiny_model()
    forward = model.forward

    def doubled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(KittyError, match="output head of LlamaForCausalLM"):
        write_reference(model, text(), tmp_path / "r.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_sliding_layer_is_compared_with_attention_over_its_window():
    model = tiny_model(Gemma2Config, sliding_window=9, attn_logit_softcapping=None)
    calls = {}
    error = AttentionError(model)
    record = record_calls(calls)

    def observer(*args):
        record(*args)
        error(*args)

    cache = SimulatedCache(small("kivi-k2v2-sink"), dense_prefill=False, observer=observer)
    with torch.inference_mode():
        final_hidden(model, text(), cache)
    sliding, full = error.relative_rms()[:2]
    assert sliding < 1e-12  # sliding layers are not quantized
    assert full > 1e-3


@pytest.mark.parametrize("torch_groups_heads", sorted({TORCH_GROUPS_HEADS, False}))
def test_exact_attention_over_a_window_is_the_softmax_over_its_tokens(
    monkeypatch, torch_groups_heads
):
    monkeypatch.setattr("kitty.evaluation.offline.TORCH_GROUPS_HEADS", torch_groups_heads)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 1, 1, 6, 4, generator=generator, dtype=torch.float64)
    result = exact_attention(query, keys, values, 0.7, 2)
    weights = (0.7 * query[0, 1, 4] @ keys[0, 0, 3:5].T).softmax(-1)
    torch.testing.assert_close(result[0, 1, 4], weights @ values[0, 0, 3:5])


def test_a_saved_reference_reads_back(model, reference, tmp_path):
    reference.save(tmp_path / "r.safetensors")
    back = Reference.load(tmp_path / "r.safetensors")
    assert torch.equal(back.hidden, reference.hidden)
    assert torch.equal(back.token_ids, text())
    back.check(model, text())


@pytest.mark.parametrize("keep", [0, 5, 300])
def test_a_damaged_reference_is_told_with_its_remedy(reference, tmp_path, keep):
    path = tmp_path / "r.safetensors"
    reference.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(KittyError, match=r"r\.safetensors is missing or damaged: delete it"):
        Reference.load(path)


def test_a_reference_of_another_text_or_model_is_refused(model, reference):
    other = text(seed=2)
    with pytest.raises(KittyError, match="another text"):
        evaluate_offline(model, other, small("kitty"), reference, page_tokens=16)
    with pytest.raises(KittyError, match="another model"):
        evaluate_offline(tiny_model(seed=5), text(), small("kitty"), reference, page_tokens=16)


def test_texts_of_wrong_length_or_shape_are_refused(model, reference, tmp_path):
    with pytest.raises(KittyError, match="71 tokens, but Kitty is scored on 289 or more"):
        evaluate_offline(model, text(), get_method("kitty"), reference)
    assert tokens_needed(get_method("fp16")) == 257  # two pages of predictions
    with pytest.raises(KittyError, match="600 tokens, but the model has 512 positions"):
        write_reference(model, text(600), tmp_path / "r.safetensors")
    for wrong in (text()[None], text().bool(), text().to(torch.uint8), text().float()):
        with pytest.raises(KittyError, match="one text"):
            write_reference(model, wrong, tmp_path / "r.safetensors")
    with pytest.raises(KittyError, match="no token"):
        write_reference(model, text(0), tmp_path / "r.safetensors")
    with pytest.raises(KittyError, match="page_tokens is 0"):
        evaluate_offline(model, text(), small("kitty"), reference, page_tokens=0)


def test_tokens_that_the_model_does_not_know_are_refused(model, tmp_path):
    words = model.config.vocab_size
    for strange in (words, -1):
        ids = text().clone()
        ids[7] = strange
        with pytest.raises(KittyError, match=f"id {strange}, .* is 0 to {words - 1}"):
            write_reference(model, ids, tmp_path / "r.safetensors")


def test_a_reference_whose_parts_differ_in_length_is_damaged(reference, tmp_path):
    path = tmp_path / "r.safetensors"
    dataclasses.replace(reference, hidden=reference.hidden[:3]).save(path)
    with pytest.raises(KittyError, match="damaged"):
        Reference.load(path)


def test_a_model_with_another_attention_is_refused(reference):
    model = tiny_model()
    model.config._attn_implementation = "sdpa"
    with pytest.raises(KittyError, match="'sdpa' attention"):
        evaluate_offline(model, text(), small("kitty"), reference, page_tokens=16)
