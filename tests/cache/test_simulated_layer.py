"""One layer of the simulated cache against the state rule, written out query by query in fp64."""

import math

import pytest
import torch
from torch import Tensor

from kitty import KittyError, Method, get_method
from kitty.cache import SimulatedLayer
from kitty.cache.attend import attend
from kitty.quant import dequantize_keys, dequantize_values, quantize_keys, quantize_values

SMALL = get_method("kitty-pro", sink=3, window=6, page_size=4)
DIM = 8


def tokens(
    count: int, *, batch: int = 1, heads: int = 2, groups: int = 2, dim: int = DIM, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries ``[B, H*g, T, D]``, keys and values ``[B, H, T, D]`` in fp64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randn(batch, n, count, dim, generator=generator, dtype=torch.float64)

    return draw(heads * groups), draw(heads), draw(heads)


def pages_at(method: Method, length: int) -> tuple[int, int]:
    """Design's kp(n) and vp(n), written out."""
    base = length - method.sink - method.rollback
    kp = max(0, base) // method.page_size if method.key_bits < 16 else 0
    vp = max(0, base - method.window) // method.page_size if method.value_bits < 16 else 0
    return kp, vp


def state(keys: Tensor, values: Tensor, method: Method, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[H, n, D]`` that a cache of ``length`` tokens shows."""
    keys, values = keys[0, :, :length].clone(), values[0, :, :length].clone()
    for page in range(pages_at(method, length)[0]):
        at = slice(
            method.sink + page * method.page_size, method.sink + (page + 1) * method.page_size
        )
        single = quantize_keys(keys[None, :, None, at], method, layer=0, first_page=page)
        keys[:, at] = dequantize_keys(single, keys.dtype)[0, :, 0]
    for page in range(pages_at(method, length)[1]):
        at = slice(
            method.sink + page * method.page_size, method.sink + (page + 1) * method.page_size
        )
        single = quantize_values(values[None, :, None, at], method)
        values[:, at] = dequantize_values(single, values.dtype)[0, :, 0]
    return keys, values


def expected(query: Tensor, keys: Tensor, values: Tensor, method: Method, first: int) -> Tensor:
    """Output of every query from ``first`` on: each sees the state before it, and itself."""
    groups = query.shape[1] // keys.shape[1]
    outputs = []
    for i in range(first, query.shape[2]):
        k, v = state(keys, values, method, i)
        k = torch.cat([k, keys[0, :, i : i + 1]], dim=1).repeat_interleave(groups, 0)
        v = torch.cat([v, values[0, :, i : i + 1]], dim=1).repeat_interleave(groups, 0)
        logits = (k @ query[0, :, i, :, None]).squeeze(-1) / math.sqrt(query.shape[-1])
        outputs.append((torch.softmax(logits, -1)[:, None] @ v).squeeze(1))
    return torch.stack(outputs, dim=1)[None]


def run(layer: SimulatedLayer, qkv: tuple[Tensor, ...], cuts: list[int], **kwargs) -> Tensor:
    """Feed the tokens in calls that start at ``cuts``; outputs of all calls joined."""
    total = qkv[0].shape[2]
    parts = [
        layer.attend(*(x[:, :, a:b] for x in qkv), scale=qkv[0].shape[-1] ** -0.5, **kwargs)
        for a, b in zip(cuts, [*cuts[1:], total], strict=True)
    ]
    return torch.cat(parts, dim=2)


def assert_state(layer: SimulatedLayer, qkv: tuple[Tensor, ...], method: Method) -> None:
    for held, right in zip(
        layer.content(0), state(qkv[1], qkv[2], method, qkv[0].shape[2]), strict=True
    ):
        assert torch.equal(held, right)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 12, 13, 14, 17, 18, 40])
def test_one_call_from_the_first_token_shows_every_query_its_own_state(count: int) -> None:
    qkv = tokens(count)
    layer = SimulatedLayer(SMALL, 0)
    out = run(layer, qkv, [0], dense_prefill=False)
    torch.testing.assert_close(out, expected(*qkv, SMALL, 0), rtol=1e-12, atol=1e-12)
    assert_state(layer, qkv, SMALL)


@pytest.mark.parametrize(
    "name", ["kivi-k4v4", "kivi-k2v4-sink", "k1v2-boost2-25-magnitude", "fp16"]
)
def test_every_method_follows_the_same_rule(name: str) -> None:
    method = get_method(name, sink=3, window=5, page_size=4)
    qkv = tokens(33)
    layer = SimulatedLayer(method, 0)
    out = run(layer, qkv, [0], dense_prefill=False)
    torch.testing.assert_close(out, expected(*qkv, method, 0), rtol=1e-12, atol=1e-12)
    assert_state(layer, qkv, method)


@pytest.mark.parametrize("rollback", [0, 3])
@pytest.mark.parametrize(
    "cuts", [[0, 1, 2, 9, 10, 22, 23, 36], [0, 20], list(range(40)), [0, 7, 39]]
)
def test_chunks_on_a_filled_cache_give_what_single_steps_give(
    cuts: list[int], rollback: int
) -> None:
    method = SMALL.replace(rollback=rollback)
    qkv = tokens(40)
    layer = SimulatedLayer(method, 0)
    out = run(layer, qkv, cuts)
    first = cuts[1]
    right = expected(*qkv, method, first)
    torch.testing.assert_close(out[:, :, first:], right, rtol=1e-12, atol=1e-12)
    assert_state(layer, qkv, method)


def test_prefill_is_dense_and_leaves_the_state_of_its_length() -> None:
    qkv = tokens(40)
    layer = SimulatedLayer(SMALL, 0)
    out = run(layer, qkv, [0])
    dense = get_method("fp16", sink=3, window=6, page_size=4)
    torch.testing.assert_close(out, expected(*qkv, dense, 0), rtol=1e-12, atol=1e-12)
    assert_state(layer, qkv, SMALL)


def padded(rows: list[tuple[Tensor, ...]], places: list[list[int]], width: int):
    """A batch in which row b's tokens lie in columns ``places[b]``, poisoned elsewhere."""
    batch = [torch.full((len(rows), *x.shape[1:2], width, DIM), 7e3).double() for x in rows[0]]
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, (row, at) in enumerate(zip(rows, places, strict=True)):
        real[b, at] = True
        for whole, x in zip(batch, row, strict=True):
            whole[b, :, at] = x[0]
    return batch, real


def test_pads_never_enter_wherever_they_stand() -> None:
    lengths = [30, 5, 17, 29]
    rows = [tokens(n, seed=n) for n in lengths]
    places = [
        list(range(30)),
        list(range(25, 30)),  # left-padded
        list(range(17)),  # right-padded
        [i for i in range(30) if i != 11],  # a hole
    ]
    (q, k, v), real = padded(rows, places, 30)
    layer = SimulatedLayer(SMALL, 0)
    out = layer.attend(q, k, v, real, scale=DIM**-0.5)
    steps = [tokens(12, seed=100 + n) for n in lengths]
    more = tuple(torch.cat(x) for x in zip(*steps, strict=True))
    later = run(layer, more, list(range(12)))
    assert (out.masked_select(~real[:, None, :, None]) == 0).all()
    for b, (row, step) in enumerate(zip(rows, steps, strict=True)):
        alone = SimulatedLayer(SMALL, 0)
        right = run(alone, row, [0])
        torch.testing.assert_close(out[b : b + 1, :, places[b]], right, rtol=1e-12, atol=1e-12)
        right = run(alone, step, list(range(12)))
        torch.testing.assert_close(later[b : b + 1], right, rtol=1e-12, atol=1e-12)
        for held, single in zip(layer.content(b), alone.content(0), strict=True):
            assert torch.equal(held, single)


def test_padding_in_a_later_chunk_is_honoured_too() -> None:
    first, rows = tokens(9, batch=2, seed=1), [tokens(14, seed=2), tokens(5, seed=3)]
    layer = SimulatedLayer(SMALL, 0)
    run(layer, first, [0])
    (q, k, v), real = padded(rows, [list(range(14)), list(range(9, 14))], 14)
    out = layer.attend(q, k, v, real, scale=DIM**-0.5)
    for b, row in enumerate(rows):
        alone = SimulatedLayer(SMALL, 0)
        run(alone, tuple(x[b : b + 1] for x in first), [0])
        right = run(alone, row, [0])
        at = real[b].nonzero().squeeze(1)
        torch.testing.assert_close(out[b : b + 1, :, at], right, rtol=1e-12, atol=1e-12)
        assert torch.equal(layer.content(b)[0], alone.content(0)[0])


def test_a_batch_with_an_empty_sequence_prefills_it_later() -> None:
    (q, k, v), real = padded([tokens(6), tokens(0)], [list(range(6)), []], 6)
    layer = SimulatedLayer(SMALL, 0)
    layer.attend(q, k, v, real, scale=1.0)
    assert layer.lengths == [6, 0]
    qkv = tokens(20, batch=2, seed=5)
    out = run(layer, qkv, [0])
    alone = SimulatedLayer(SMALL, 0)
    right = run(alone, tuple(x[1:] for x in qkv), [0])
    torch.testing.assert_close(out[1:], right, rtol=1e-12, atol=1e-12)


def test_a_final_page_never_changes() -> None:
    qkv = tokens(60)
    layer = SimulatedLayer(SMALL, 0)
    at, seen = slice(SMALL.sink, SMALL.sink + SMALL.page_size), []
    for i in range(60):
        run(layer, tuple(x[:, :, i : i + 1] for x in qkv), [0])
        if layer.key_pages[0]:
            seen.append(layer.content(0)[0][:, at].clone())
    assert len(seen) > 10 * SMALL.page_size
    assert all(torch.equal(page, seen[0]) for page in seen)


@pytest.mark.parametrize("length", range(10, 31))
@pytest.mark.parametrize("removed", [1, 3])
def test_a_crop_within_the_rollback_leaves_the_state_of_the_new_length(
    length: int, removed: int
) -> None:
    method = SMALL.replace(rollback=3)
    qkv = tokens(40)
    layer = SimulatedLayer(method, 0)
    run(layer, tuple(x[:, :, :length] for x in qkv), [0, 5])
    layer.crop([removed])
    kept = length - removed
    assert_state(layer, tuple(x[:, :, :kept] for x in qkv), method)
    out = run(layer, tuple(x[:, :, kept:] for x in qkv), [0])
    torch.testing.assert_close(out, expected(*qkv, method, kept), rtol=1e-12, atol=1e-12)
    assert_state(layer, qkv, method)


def test_selected_sequences_are_independent_copies() -> None:
    qkv = tokens(20, batch=2)
    layer = SimulatedLayer(SMALL, 0)
    run(layer, qkv, [0])
    layer.select(torch.tensor([1, 1, 0]))
    more = tokens(9, batch=3, seed=8)
    run(layer, more, [0])
    for b, source in enumerate([1, 1, 0]):
        alone = SimulatedLayer(SMALL, 0)
        run(alone, tuple(x[source : source + 1] for x in qkv), [0])
        run(alone, tuple(x[b : b + 1] for x in more), [0])
        assert torch.equal(layer.content(b)[0], alone.content(0)[0])
        assert torch.equal(layer.content(b)[1], alone.content(0)[1])


@pytest.mark.parametrize("cuts", [[0], [0, 1, 2, 3], list(range(30)), [0, 11, 12, 25]])
@pytest.mark.parametrize("rollback", [0, 2])
def test_a_sliding_layer_keeps_exactly_its_window_in_full_precision(
    cuts: list[int], rollback: int
) -> None:
    qkv = tokens(30)
    layer = SimulatedLayer(SMALL.replace(rollback=rollback), 0, sliding_window=7)
    out = run(layer, qkv, cuts)
    q, k, v = qkv
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    logits = q @ k.transpose(-1, -2) * DIM**-0.5
    i, j = torch.arange(30)[:, None], torch.arange(30)
    logits = logits.masked_fill((j > i) | (j <= i - 7), -torch.inf)
    torch.testing.assert_close(out, torch.softmax(logits, -1) @ v, rtol=1e-12, atol=1e-12)
    keys, values = layer.content(0)
    assert torch.equal(keys, qkv[1][0, :, -(7 + rollback) :])
    assert torch.equal(values, qkv[2][0, :, -(7 + rollback) :])


def test_a_sliding_layer_serves_a_ragged_batch() -> None:
    rows = [tokens(20, seed=1), tokens(4, seed=2)]
    (q, k, v), real = padded(rows, [list(range(20)), list(range(16, 20))], 20)
    layer = SimulatedLayer(SMALL, 0, sliding_window=6)
    layer.attend(q, k, v, real, scale=DIM**-0.5)
    more = tokens(9, batch=2, seed=3)
    out = run(layer, more, list(range(9)))
    for b, row in enumerate(rows):
        alone = SimulatedLayer(SMALL, 0, sliding_window=6)
        run(alone, row, [0])
        right = run(alone, tuple(x[b : b + 1] for x in more), list(range(9)))
        torch.testing.assert_close(out[b : b + 1], right, rtol=1e-12, atol=1e-12)


def test_soft_capping_bends_the_logits() -> None:
    q, k, v = tokens(10)
    layer = SimulatedLayer(SMALL, 0)
    out = layer.attend(q, k, v, scale=2.0, softcap=1.5)
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 2.0
    logits = 1.5 * torch.tanh(logits / 1.5)
    logits = logits.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
    right = torch.softmax(logits, -1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 4, 7, 16, 32])
@pytest.mark.parametrize("heads", [1, 2])
def test_any_number_of_query_heads_shares_a_kv_head(groups: int, heads: int) -> None:
    qkv = tokens(15, heads=heads, groups=groups)
    out = run(SimulatedLayer(SMALL, 0), qkv, [0], dense_prefill=False)
    torch.testing.assert_close(out, expected(*qkv, SMALL, 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_any_head_dim_works_with_the_papers_page(dim: int) -> None:
    method = get_method("kitty")
    qkv = tokens(300, heads=1, groups=1, dim=dim)
    layer = SimulatedLayer(method, 0)
    out = run(layer, qkv, [0, 290])
    right = expected(*qkv, method, 290)
    torch.testing.assert_close(out[:, :, 290:], right, rtol=1e-12, atol=1e-12)
    assert_state(layer, qkv, method)


def test_a_token_of_zeros_counts_and_a_constant_channel_comes_back_exactly() -> None:
    q, k, v = tokens(30)
    k[:, :, 5] = 0.0
    k[..., 2] = 1.25
    v[:, :, 6:] = v[:, :, 5:6]
    layer = SimulatedLayer(SMALL, 0)
    run(layer, (q, k, v), [0])
    assert layer.lengths == [30]
    keys, values = layer.content(0)
    assert (keys[..., 2] == 1.25).all()
    assert torch.isfinite(values).all()


def test_outlier_channels_of_a_thousand_stay_finite_in_bf16() -> None:
    q, k, v = (x.bfloat16() for x in tokens(40))
    k[..., 3] += 1000.0
    layer = SimulatedLayer(SMALL, 0)
    out = run(layer, (q, k, v), [0, 20])
    assert torch.isfinite(out.float()).all()
    assert layer.content(0)[0].dtype == torch.bfloat16


def test_another_batch_on_a_filled_cache_is_refused_in_one_sentence() -> None:
    layer = SimulatedLayer(SMALL, 0)
    run(layer, tokens(5, batch=2), [0])
    with pytest.raises(KittyError, match=r"holds 2 sequences .* brings 3 .* reset"):
        run(layer, tokens(1, batch=3), [0])


def test_a_page_size_that_does_not_divide_the_head_is_refused_before_anything_is_stored() -> None:
    layer = SimulatedLayer(get_method("kitty", page_size=6), 0)
    with pytest.raises(KittyError, match="page_size 6 does not divide head_dim 8"):
        run(layer, tokens(5), [0])
    assert layer.lengths == []


def test_the_cache_counts_the_quantized_pages_it_reads() -> None:
    layer = SimulatedLayer(SMALL, 0)
    run(layer, tokens(12), [0])
    assert layer.pages_read == 0  # prefill is dense
    assert (layer.key_pages, layer.value_pages) == ([2], [0])
    run(layer, tokens(1), [0])
    assert layer.pages_read == 2


def test_capped_attention_over_many_queries_equals_that_of_a_few_at_a_time(monkeypatch) -> None:
    q, k, v = tokens(50)
    visible = torch.rand(1, 50, 50, generator=torch.Generator().manual_seed(0)) < 0.5
    whole = [attend(q, k, v, mask, scale=1.0, softcap=1.5) for mask in (None, visible)]
    monkeypatch.setattr("kitty.cache.attend.CAPPED_ROWS", 8)
    for mask, right in zip((None, visible), whole, strict=True):
        split = attend(q, k, v, mask, scale=1.0, softcap=1.5)
        torch.testing.assert_close(split, right, rtol=1e-12, atol=1e-12)
