"""Inputs and checks of the page ops, shared by the interpreter's tests and the GPU's."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from kitty.methods import Method, get_method
from kitty.ops.append import append
from kitty.ops.dequantize_pages import dequantize_key_pages, dequantize_value_pages
from kitty.ops.quantize_pages import quantize_pages
from kitty.pages import (
    BufferLayout,
    Buffers,
    KeyPages,
    PageLayout,
    ValuePages,
    empty_buffers,
    empty_key_pages,
    empty_value_pages,
    pack_keys,
    pack_values,
)
from kitty.quant import dequantize_keys, dequantize_values, quantize_keys, quantize_values

LAYER = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration; lengths are those of the sequences of a ragged batch."""

    head_dim: int = 64
    boost_ratio: float = 0.25
    selection: str = "magnitude"
    dtype: torch.dtype = torch.float16
    sink: int = 3
    window: int = 7
    rollback: int = 0
    page_size: int = 128
    heads: int = 2
    lengths: tuple[int, ...] = (266, 131)  # a value page and a key page just complete
    special: bool = True  # outliers, ties, subnormal numbers
    unclean: bool = True  # NaN and inf too, in every page

    @property
    def method(self) -> Method:
        return get_method(
            "kitty-pro",
            boost_ratio=self.boost_ratio,
            selection=self.selection,
            sink=self.sink,
            window=self.window,
            rollback=self.rollback,
            page_size=self.page_size,
            seed=2**32 - 5,
        )

    @property
    def layout(self) -> PageLayout:
        return PageLayout.of(self.method, self.head_dim)

    def __str__(self) -> str:
        parts = [f"d{self.head_dim}", f"boost{self.boost_ratio:g}", self.selection]
        parts += [str(self.dtype).removeprefix("torch."), f"s{self.sink}", f"g{self.page_size}"]
        parts.append(f"r{self.rollback}")
        return "-".join(parts if self.unclean else [*parts, "clean"])


CASES = [
    Case(),
    Case(head_dim=128, window=128, sink=32, lengths=(300,), dtype=torch.bfloat16),
    Case(head_dim=80, boost_ratio=0.3, sink=0),
    Case(head_dim=96, boost_ratio=1.0, dtype=torch.bfloat16),
    Case(head_dim=256, boost_ratio=0.25, heads=1, lengths=(150,)),
    Case(head_dim=256, boost_ratio=0.9, heads=1, page_size=256, lengths=(270,)),
    Case(head_dim=256, boost_ratio=1.0, heads=1, lengths=(150,), sink=0),
    Case(boost_ratio=0.0, rollback=5),
    Case(boost_ratio=0.01, lengths=(140, 3)),
    Case(selection="random", heads=3, rollback=2),
    Case(selection="variance", special=False),
    Case(selection="rotary"),
    Case(selection="rotary", head_dim=80, boost_ratio=0.125, dtype=torch.bfloat16, special=False),
    Case(unclean=False),
    Case(head_dim=80, boost_ratio=0.5, dtype=torch.bfloat16, unclean=False),
]


def random_tokens(case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, T, D]`` as a model lays them out (heads inside tokens)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(case.lengths), max(case.lengths), case.heads, case.head_dim)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    if case.special:
        k[..., 1] = 0.0  # a channel of zeros
        k[..., 2] = -1.25  # a constant channel
        k[..., 5] = k[..., 7]
        k[..., 14::2] = 1.5 * k[..., 14:15]  # equal scores on both sides of the cut
        k[..., 9] *= 1e3  # an outlier channel, and one at the end of fp16
        k[..., 11] *= 2e4
        k[..., 12] = torch.where(k[..., 12] < 0, -0.0, 0.0)
        k[..., 13] *= 2.0**-22  # subnormal
        # four steps of fp16 from the least to the largest, and the third of that rounds to one
        k[..., 10] = (torch.arange(shape[1]) % 5 * 2.0**-24)[:, None]
        v[:, 4::11] = torch.arange(case.head_dim) % 5 * 2.0**-24
        v[:, ::3] = v[:, ::3] * 300
        v[:, 1::7] = 0.5
    if case.special and case.unclean:
        for x in (k, v):
            x[:, 20::31, :, 3] = torch.inf
            x[:, 21::37, :, 4] = -torch.inf
            x[:, 22::41, :, 6] = torch.nan
        k[..., 8] = torch.nan  # nothing finite
        v[:, 25:26] = -torch.inf
    return tuple(x.to(case.dtype).transpose(1, 2).to(device) for x in (k, v))  # type: ignore


def poisoned(tensors: tuple[Tensor, ...]) -> None:
    """Fill with NaN (all bits set)."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0xFF)


def storage(case: Case, num_pages: int, device: str) -> tuple[KeyPages, ValuePages]:
    """Poisoned page storage."""
    keys = empty_key_pages(case.layout, num_pages, case.heads, device)
    values = empty_value_pages(case.layout, num_pages, case.heads, device)
    poisoned(keys)
    poisoned(values)
    return keys, values


def shuffled_table(case: Case, device: str, spare: int = 1) -> tuple[Tensor, int]:
    """A table int32 ``[B, P]`` of distinct pages out of order, and the pages it needs."""
    width = max(case.lengths) // case.page_size + 1
    count = len(case.lengths) * width
    ids = torch.randperm(count + spare, generator=torch.Generator().manual_seed(1))[:count]
    return ids.view(-1, width).to(torch.int32).to(device), count + spare


def expected_pages(k: Tensor, v: Tensor, case: Case) -> tuple[list[KeyPages], list[ValuePages]]:
    """Pages of each sequence by kitty.quant and kitty.pages, from tokens 0 … n-1 of each."""
    method, size = case.method, case.page_size
    keys, values = [], []
    for b, length in enumerate(case.lengths):
        full = slice(method.sink, method.sink + method.key_pages(length) * size)
        pages = k[b : b + 1, :, full].cpu().unflatten(2, (-1, size))
        keys.append(pack_keys(quantize_keys(pages, method, layer=LAYER), case.layout))
        full = slice(method.sink, method.sink + method.value_pages(length) * size)
        pages = v[b : b + 1, :, full].cpu().unflatten(2, (-1, size))
        values.append(pack_values(quantize_values(pages, method)))
    return keys, values


def assert_pages_equal(
    stored: tuple[KeyPages | ValuePages, ...],
    tables: tuple[Tensor, ...],
    expected: tuple[list, ...],
) -> None:
    """Every byte of every final page as expected, and no other page touched."""
    for pages, table, sequences in zip(stored, tables, expected, strict=True):
        touched = set()
        for b, want in enumerate(sequences):
            ids = table[b, : want.words.shape[0]].tolist()
            touched |= set(ids)
            for name, part in want._asdict().items():
                got = getattr(pages, name)[ids].cpu()
                same = as_bytes(got) == as_bytes(part)
                where = (~same).nonzero()[:3].flatten().tolist()
                assert same.all(), f"sequence {b}: {name} differs, first at bytes {where}"
        rest = [i for i in range(pages.words.shape[0]) if i not in touched]
        for name, part in pages._asdict().items():
            assert (as_bytes(part[rest]) == 0xFF).all(), f"{name} of a foreign page"


def right_aligned(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``[B, H, T, D]`` with each sequence's tokens moved to the end and NaN in front."""
    out = torch.full_like(x, torch.nan)
    for b, length in enumerate(lengths):
        out[b, :, x.shape[2] - length :] = x[b, :, :length]
    return out


def check_quantize_pages(case: Case, device: str) -> None:
    """Prefill of a ragged, left-padded batch into shuffled pages."""
    k, v = random_tokens(case, device)
    key_table, count = shuffled_table(case, device)
    value_table = key_table.flip(0).contiguous()
    keys, values = storage(case, count, device)
    seq_lens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    quantize_pages(
        right_aligned(k, case.lengths),
        right_aligned(v, case.lengths),
        keys,
        values,
        key_table,
        value_table,
        seq_lens,
        case.method,
        layer=LAYER,
    )
    assert_pages_equal((keys, values), (key_table, value_table), expected_pages(k, v, case))


def check_append(case: Case, device: str, calls: tuple[int, ...] = (61, 40, 1, 17)) -> None:
    """Sequences fed in ragged calls end in the state that one prefill gives."""
    k, v = random_tokens(case, device)
    method = case.method
    key_table, count = shuffled_table(case, device)
    value_table = key_table.flip(1).contiguous()
    keys, values = storage(case, count, device)
    layout = BufferLayout.of(method, case.head_dim, largest_call=max(calls))
    buffers = empty_buffers(layout, len(case.lengths), case.heads, case.dtype, device)
    poisoned(buffers)
    done = [0] * len(case.lengths)
    paged = torch.zeros(len(done), dtype=torch.int32, device=device)
    sizes = itertools.cycle(calls)
    finished = False
    while not finished:
        finished = done == list(case.lengths)  # the last call brings nothing, and finishes pages
        size = next(sizes)
        new = [min(size, end - at) for at, end in zip(done, case.lengths, strict=True)]
        width = max(1, *new)
        call = [
            torch.full((len(new), case.heads, width, case.head_dim), torch.nan, dtype=case.dtype)
            for _ in range(2)
        ]
        for x, source in zip(call, (k, v), strict=True):
            for b, (at, count_new) in enumerate(zip(done, new, strict=True)):
                x[b, :, width - count_new :] = source[b, :, at : at + count_new]
        done = [at + count_new for at, count_new in zip(done, new, strict=True)]
        seq_lens = torch.tensor(done, dtype=torch.int32, device=device)
        num_new = torch.tensor(new, dtype=torch.int32, device=device)
        append(
            call[0].to(device),
            call[1].to(device),
            keys,
            values,
            key_table,
            value_table,
            buffers,
            seq_lens,
            paged,
            method,
            num_new=num_new,
            layer=LAYER,
        )
        paged = torch.maximum(paged, seq_lens - num_new)
    assert_pages_equal((keys, values), (key_table, value_table), expected_pages(k, v, case))
    assert_tokens_kept(k, v, buffers, case, case.lengths)


def assert_tokens_kept(
    k: Tensor, v: Tensor, buffers: Buffers, case: Case, lengths: tuple[int, ...]
) -> None:
    """Sink tokens and all tokens behind the final pages are in the buffers, bit by bit."""
    method = case.method
    for b, length in enumerate(lengths):
        parts = (
            (k, buffers.sink_k, buffers.key_ring, method.key_pages(length)),
            (v, buffers.sink_v, buffers.value_ring, method.value_pages(length)),
        )
        for tokens, sink, ring, num_pages in parts:
            kept = min(method.sink, length)
            assert_bits_equal(sink[b, :, :kept], tokens[b, :, :kept])
            tail = torch.arange(min(method.sink + num_pages * case.page_size, length), length)
            slots = (tail - method.sink) % ring.shape[2]
            assert_bits_equal(ring[b].cpu()[:, slots], tokens[b].cpu()[:, tail])


def check_far_pages(device: str) -> None:
    """A page behind 2^31 elements is written and read where it belongs."""
    case = Case(head_dim=64, heads=1, lengths=(140,), window=0, boost_ratio=1.0)
    far = 2**31 // (16 * 64) + 3
    k, v = random_tokens(case, device)
    # nearly all of it is never touched, so on a CPU the memory is only promised
    keys = empty_key_pages(case.layout, far + 1, 1, device)
    values = empty_value_pages(case.layout, far + 1, 1, device)
    table = torch.tensor([[far]], dtype=torch.int32, device=device)
    lens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    quantize_pages(k, v, keys, values, table, table, lens, case.method, layer=LAYER)
    want_keys, want_values = expected_pages(k, v, case)
    for part, want in zip((*keys, *values), (*want_keys[0], *want_values[0]), strict=True):
        assert_bits_equal(part[far], want[0])
    near = KeyPages(*(part[far:] for part in keys))
    got = dequantize_key_pages(keys, table, torch.float16)
    assert_bits_equal(got, dequantize_key_pages(near, torch.zeros_like(table), torch.float16))


def assert_bits_equal(got: Tensor, want: Tensor) -> None:
    """The same bits, NaN included."""
    assert torch.equal(as_bytes(got), as_bytes(want))


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor in order, on the CPU."""
    return x.cpu().contiguous().flatten().view(torch.uint8)


def check_dequantize(case: Case, device: str, dtype: torch.dtype) -> None:
    """Pages of a table with an absent page, decoded as kitty.quant decodes them."""
    k, v = random_tokens(case, device)
    method, size = case.method, case.page_size
    k, v = (x[:1, :, :size].unflatten(2, (1, size)) for x in (k, v))
    q_keys = quantize_keys(k.cpu(), method, layer=LAYER)
    q_values = quantize_values(v.cpu(), method)
    keys, values = storage(case, 3, device)
    for pages, packed in ((keys, pack_keys(q_keys, case.layout)), (values, pack_values(q_values))):
        for part, want in zip(pages, packed, strict=True):
            part[2] = want[0].to(device)
    table = torch.tensor([[-1, 2]], dtype=torch.int32, device=device)
    for got, want in (
        (dequantize_key_pages(keys, table, dtype), dequantize_keys(q_keys, dtype)),
        (dequantize_value_pages(values, table, dtype), dequantize_values(q_values, dtype)),
    ):
        assert got.shape == (1, case.heads, 2 * size, case.head_dim)
        assert got.dtype == dtype
        assert (got[:, :, :size] == 0).all()
        assert torch.equal(got[:, :, size:].cpu(), want[:, :, 0])
