"""One layer of the packed cache against one of the simulation, fed the same tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kitty import Method, get_method
from kitty.cache import PackedLayer, PackedState, SimulatedLayer

METHOD = get_method("kitty-pro", sink=4, window=8)
DIM = 16


class Pair:
    """A packed and a simulated layer that get the same calls and must answer alike."""

    def __init__(self, method: Method = METHOD, **options: int) -> None:
        self.state = PackedState(method, **options)
        self.packed: PackedLayer = self.state.layer(0)
        self.simulated = SimulatedLayer(method, 0)

    def feed(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None, **kwargs) -> Tensor:
        kwargs = {"scale": q.shape[-1] ** -0.5, **kwargs}
        dense = kwargs.get("dense_prefill", True)
        self.state.begin(q.shape[0], q.shape[2], real, dense_prefill=dense)
        out = self.packed.attend(q, k, v, real, **kwargs)
        right = self.simulated.attend(q, k, v, real, **kwargs)
        if real is not None:
            out, right = (x * real[:, None, :, None] for x in (out, right))
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
        return out

    def check_content(self) -> None:
        """Pages decode to the same bits; the packed layer may write the last ones a call later."""
        assert self.packed.lengths == self.simulated.lengths
        for b, length in enumerate(self.packed.lengths):
            paged = self.state.paged[b]
            method = self.state.method
            for mine, right, count in zip(
                self.packed.content(b),
                self.simulated.content(b),
                (method.key_pages, method.value_pages),
                strict=True,
            ):
                written, due = (method.sink + count(n) * method.page_size for n in (paged, length))
                assert torch.equal(mine[:, :written], right[:, :written])
                assert torch.equal(mine[:, max(written, due) :], right[:, max(written, due) :])


def tokens(
    count: int, batch: int = 1, *, heads: int = 2, groups: int = 2, dim: int = DIM, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[B, H * groups, T, D]``, keys and values ``[B, H, T, D]``."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, n, count, dim, generator=generator)
        for n in (heads * groups, heads, heads)
    )  # type: ignore[return-value]


def rows_real(*rows: Sequence[int], width: int) -> Tensor:
    """Bool ``[B, width]``, True in the columns that each row names."""
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, at in zip(real, rows, strict=True):
        row[list(at)] = True
    return real


@pytest.mark.parametrize("method", [METHOD, METHOD.replace(rollback=5), get_method("kivi-k2v2")])
def test_a_sequence_may_begin_after_others_have_tokens(method: Method) -> None:
    pair = Pair(method)
    total = 0
    # the second begins in the second call, the third in the third, each past a page
    for width, real in (
        (150, rows_real(range(150), (), (), width=150)),
        (290, rows_real(range(290), range(20, 290), (), width=290)),
        (300, rows_real(range(40), range(7), range(3, 300), width=300)),
        (1, None),
        (3, rows_real((0, 1, 2), (2,), (), width=3)),
        (131, None),
    ):
        pair.feed(*tokens(width, 3, seed=total), real)
        pair.check_content()
        total += width
    assert pair.packed.lengths == [150 + 290 + 40 + 1 + 3 + 131, 270 + 7 + 133, 297 + 1 + 131]


def test_a_batch_may_begin_with_a_call_of_pads_alone() -> None:
    pair = Pair()
    pair.feed(*tokens(3, 2), rows_real((), (), width=3))
    assert pair.packed.lengths == [0, 0]
    pair.feed(*tokens(300, 2, seed=1), rows_real(range(300), range(160, 300), width=300))
    pair.feed(*tokens(1, 2, seed=2))
    pair.check_content()


PAPER = get_method("kitty-pro")  # S = 32, R = 128, G = 128


def pages_of(layer: PackedLayer, sequence: int, dtype: torch.dtype = torch.uint8) -> list[Tensor]:
    """The stored bytes of all written pages of a sequence, keys then values, in order."""
    state, at = layer.state, layer.state.layers.index(layer)
    paged = state.paged[sequence]
    found = []
    for ids, pages, count in (
        (state.key_ids, state.pool.keys, state.method.key_pages),
        (state.value_ids, state.pool.values, state.method.value_pages),
    ):
        table = torch.tensor(ids[sequence][: count(paged)], dtype=torch.long)
        for part in pages.storage(at):
            found.append(part[table].flatten(1).contiguous().view(dtype))
    return found


def feed_cut(method: Method, qkv: tuple[Tensor, ...], cuts: Sequence[int]) -> Pair:
    pair = Pair(method)
    total = qkv[0].shape[2]
    for begin, end in zip(cuts, [*cuts[1:], total], strict=True):
        pair.feed(*(x[:, :, begin:end] for x in qkv))
    return pair


def test_the_pages_depend_on_the_tokens_alone_however_they_are_cut_into_calls() -> None:
    total = PAPER.sink + PAPER.window + 3 * PAPER.page_size + 5
    qkv = tokens(total)
    several = feed_cut(PAPER, qkv, [0, 200, *range(260, total)])
    for cuts in ([0, total - 1], [0, 1, 2, 31, 32, 33, 159, 161, 290, total - 1]):
        other = feed_cut(PAPER, qkv, cuts)
        for mine, right in zip(pages_of(other.packed, 0), pages_of(several.packed, 0), strict=True):
            assert len(mine) >= 2
            assert torch.equal(mine, right)
        for mine, right in zip(other.packed.content(0), several.packed.content(0), strict=True):
            assert torch.equal(mine, right)


def test_a_page_once_written_never_changes_while_ten_more_are() -> None:
    state = PackedState(METHOD)
    layer = state.layer(0)
    total = METHOD.sink + METHOD.window + 10 * METHOD.page_size + 2
    qkv = tokens(total, heads=1)
    first: list[Tensor] = []
    for at in range(total):
        q, k, v = (x[:, :, at : at + 1] for x in qkv)
        state.begin(1, 1, None, dense_prefill=True)
        layer.attend(q, k, v, scale=0.25)
        now = [page[0] for page in pages_of(layer, 0) if len(page)]
        for page, before in zip(now, first, strict=False):
            assert torch.equal(page, before), f"page 0 changed at token {at}"
        first += [page.clone() for page in now[len(first) :]]
    assert len(first) == 6  # words, high planes, scales and channels of keys; two parts of values
    assert len(state.key_ids[0]) == len(state.value_ids[0]) == 10


def test_a_token_whose_key_is_zero_counts_like_any_other() -> None:
    q, k, v = tokens(300)
    for at in (0, 5, 131, 132, 299):
        k[:, :, at] = 0.0
    pair = feed_cut(METHOD, (q, k, v), [0, 297, 298, 299])
    assert pair.packed.lengths == [300]
    keys = pair.packed.content(0)[0]
    assert (keys[:, [0, 299]] == 0).all()  # in 16 bit, the others lie in pages
    pair.check_content()


def test_constant_channels_and_repeated_tokens_come_back_exactly() -> None:
    q, k, v = tokens(340)
    k[..., 2], k[..., 3] = 1.25, 0.0
    k[:, :, 132:] = k[:, :, 132:133].half().float()  # one token 208 times fills the second page
    v[:, :, 132:] = 0.75
    pair = feed_cut(METHOD, (q, k, v), [0, 338, 339])
    keys, values = pair.packed.content(0)
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()
    assert (keys[..., 2] == 1.25).all()
    assert (keys[..., 3] == 0.0).all()
    assert torch.equal(keys[:, 132:], k[0, :, 132:])
    assert (values[:, 132:] == 0.75).all()
    assert not torch.equal(keys[:, 4:132], k[0, :, 4:132])  # other pages are quantized


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_key_channel_of_a_thousand_stays_finite_and_as_exact_as_the_simulation(
    dtype: torch.dtype,
) -> None:
    q, k, v = tokens(420)
    k[..., 3] += 1000.0
    q[..., 3] *= 1e-3
    q, k, v = (x.to(dtype) for x in (q, k, v))
    state, simulated = PackedState(METHOD), SimulatedLayer(METHOD, 0)
    exact = SimulatedLayer(METHOD, 0)
    layer = state.layer(0)
    for begin, end in ((0, 300), (300, 418), (418, 419), (419, 420)):
        call = [x[:, :, begin:end] for x in (q, k, v)]
        state.begin(1, end - begin, None, dense_prefill=True)
        out = layer.attend(*call, scale=0.25).double()
        plain = simulated.attend(*call, scale=0.25).double()
        right = exact.attend(*(x.double() for x in call), scale=0.25)
        assert torch.isfinite(out).all()
        assert (out - right).norm() <= 2 * (plain - right).norm()


@pytest.mark.parametrize("groups", [1, 4, 7, 16, 32])
@pytest.mark.parametrize("heads", [1, 3])
def test_any_number_of_query_heads_shares_a_kv_head(groups: int, heads: int) -> None:
    pair = Pair()
    pair.feed(*tokens(143, heads=heads, groups=groups))
    pair.feed(*tokens(2, heads=heads, groups=groups, seed=1))
    pair.check_content()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("boost_ratio", [0.0, 0.125, 1.0])
def test_any_head_dim_and_boost_is_held(dim: int, boost_ratio: float) -> None:
    method = METHOD.replace(boost_ratio=boost_ratio)
    if dim == 256:
        method = method.replace(page_size=256)
    pair = Pair(method)
    pair.feed(*tokens(270, dim=dim, groups=1, heads=1))
    pair.feed(*tokens(1, dim=dim, groups=1, heads=1, seed=1))
    pair.check_content()


def test_selected_sequences_share_pages_that_are_never_written_again() -> None:
    pair = Pair()
    pair.feed(*tokens(270, 2))
    shared = [part.clone() for part in pages_of(pair.packed, 1)]
    pair.state.select(torch.tensor([1, 1, 0]))
    pair.simulated.select(torch.tensor([1, 1, 0]))
    for at in range(140):
        pair.feed(*tokens(1, 3, seed=10 + at))
    pair.check_content()
    for sequence in (0, 1):
        for mine, right in zip(pages_of(pair.packed, sequence), shared, strict=True):
            assert torch.equal(mine[: len(right)], right)
            assert len(mine) == len(right) + 1
    ids = pair.state.key_ids
    assert ids[0][:2] == ids[1][:2]
    assert len({ids[0][2], ids[1][2], ids[2][2]}) == 3


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_calls_crops_and_selections_equals_the_simulation(seed: int) -> None:
    draw = random.Random(seed)
    method = METHOD.replace(
        sink=draw.choice([0, 4, 33]),
        window=draw.choice([0, 8, 130]),
        rollback=draw.choice([0, 3, 140]),
        boost_ratio=draw.choice([0.0, 0.25, 1.0]),
    )
    pair = Pair(method, **draw.choice([{}, {"max_length": 300}, {"max_length": 2000}]))
    batch = draw.randint(1, 4)
    longest = [0] * batch
    dense = draw.random() < 0.7
    for step in range(24):
        action = draw.choice(["call", "call", "call", "steps", "crop", "select"])
        if action == "crop" and pair.packed.buffers is not None:
            left = [
                min(n, method.rollback - (most - n))
                for n, most in zip(pair.packed.lengths, longest, strict=True)
            ]
            removed = [draw.randint(0, max(0, most)) for most in left]
            pair.state.crop(removed)
            pair.simulated.crop(removed)
        elif action == "select" and pair.packed.buffers is not None:
            order = [draw.randrange(batch) for _ in range(draw.randint(1, 4))]
            pair.state.select(torch.tensor(order))
            pair.simulated.select(torch.tensor(order))
            longest, batch = [longest[i] for i in order], len(order)
        else:
            for _ in range(draw.randint(2, 5) if action == "steps" else 1):
                width = 1 if action == "steps" else draw.choice([1, 2, 40, 150, 290])
                real = None
                if draw.random() < 0.6:
                    real = torch.rand(batch, width, generator=torch.Generator().manual_seed(step))
                    real = real < draw.choice([0.0, 0.3, 0.95])
                pair.feed(*tokens(width, batch, seed=100 * seed + step), real, dense_prefill=dense)
            longest = [max(x) for x in zip(longest, pair.packed.lengths, strict=True)]
        if pair.packed.buffers is not None:
            pair.check_content()
