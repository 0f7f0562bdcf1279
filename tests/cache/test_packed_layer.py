"""One layer of the packed cache against one of the simulation, fed the same tensors."""

from __future__ import annotations

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
