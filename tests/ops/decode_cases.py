"""Caches, references and the tolerance rule of decode_attention, shared with the GPU's tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from page_cases import poisoned
from torch import Tensor

from kitty.methods import Method, get_method
from kitty.ops.decode_attention import decode_attention
from kitty.ops.decode_attention.reference import decode_attention_reference
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
from kitty.quant import quantize_keys, quantize_values

TOLERANCE = 2.0  # error against fp64, in errors of the same maths in plain 16-bit torch


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One configuration; ``lengths`` include the call's ``num_tokens`` tokens."""

    lengths: tuple[int, ...] = (430, 300)
    head_dim: int = 64
    heads: int = 2
    queries_per_kv: int = 4
    num_tokens: int = 1
    boost_ratio: float = 0.25
    dtype: torch.dtype = torch.float16
    sink: int = 32
    window: int = 128
    rollback: int = 0
    page_size: int = 128
    num_splits: int = 3
    key_range: float = 1.0
    value_range: float = 1.0
    query_range: float = 1.0
    softcap: float | None = None

    @property
    def method(self) -> Method:
        return get_method(
            "kitty-pro",
            boost_ratio=self.boost_ratio,
            sink=self.sink,
            window=self.window,
            rollback=self.rollback,
            page_size=self.page_size,
        )

    def __str__(self) -> str:
        default = DecodeCase()
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return ",".join(changed).replace("torch.", "").replace(" ", "") or "default"


CASES = [
    DecodeCase(),
    DecodeCase(head_dim=128, lengths=(450,), heads=1),
    DecodeCase(head_dim=128, lengths=(450,), heads=1, dtype=torch.bfloat16),
    DecodeCase(head_dim=80, boost_ratio=0.3, heads=1, lengths=(310,)),
    DecodeCase(head_dim=96, boost_ratio=1.0, heads=1, lengths=(300,), dtype=torch.bfloat16),
    DecodeCase(head_dim=256, heads=1, lengths=(430,)),
    DecodeCase(head_dim=256, heads=1, page_size=256, lengths=(700,), num_splits=2),
    DecodeCase(boost_ratio=0.0, sink=0),
    DecodeCase(boost_ratio=0.02, window=0, lengths=(300,)),
    DecodeCase(queries_per_kv=1, heads=3, lengths=(290,)),
    DecodeCase(queries_per_kv=7, heads=1, lengths=(290,)),
    DecodeCase(queries_per_kv=16, heads=1, lengths=(430,)),
    DecodeCase(queries_per_kv=32, heads=1, lengths=(430,)),
    DecodeCase(lengths=(1, 5, 32, 33, 160, 161, 289), heads=1, num_splits=2),
    DecodeCase(lengths=(2, 33, 294), num_tokens=3, heads=1),
    DecodeCase(lengths=(417, 293), num_tokens=5, queries_per_kv=7, heads=1, window=64),
    DecodeCase(rollback=9, lengths=(441, 298), window=40, sink=5),
    DecodeCase(lengths=(430, 300), num_splits=1),
    DecodeCase(lengths=(300,), num_splits=40, heads=1),
]
# pages complete within the call: its queries see different pages
CROSSING = [
    DecodeCase(lengths=(163, 292), num_tokens=4, heads=1),
    DecodeCase(lengths=(163, 292), num_tokens=4, heads=1, window=0, dtype=torch.bfloat16),
]
# caps that most logits reach, and one that bends them a little; logits of both signs
CAPPED = [
    DecodeCase(softcap=2.0, query_range=4.0),
    DecodeCase(softcap=30.0, query_range=20.0, dtype=torch.bfloat16),
    DecodeCase(softcap=1.0, lengths=(163, 292), num_tokens=4, heads=1),
    DecodeCase(softcap=50.0, head_dim=256, heads=1, lengths=(430,)),
    DecodeCase(softcap=0.5, lengths=(2, 33, 294), num_tokens=3, heads=1, num_splits=1),
    DecodeCase(softcap=50.0, key_range=6e4, query_range=4e-2),
    DecodeCase(softcap=5.0, boost_ratio=0.0, rollback=9, window=40, lengths=(441, 298)),
]
RANGES = [
    DecodeCase(key_range=1e3, query_range=0.02),
    DecodeCase(key_range=6e4, query_range=4e-4),
    DecodeCase(key_range=1.0, query_range=200.0),
    DecodeCase(value_range=6e4),
    DecodeCase(value_range=1e-4),
    DecodeCase(key_range=6e4, query_range=4e-4, dtype=torch.bfloat16),
]


class Cache:
    """A filled packed cache: poisoned storage, pages in arbitrary order, rings as append leaves."""

    def __init__(self, case: DecodeCase, device: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        method, size = case.method, case.page_size
        layout = PageLayout.of(method, case.head_dim)
        batch, longest = len(case.lengths), max(case.lengths)
        width = method.key_pages(longest) + 1
        shape = (batch, case.heads, longest, case.head_dim)
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        # a few channels far out, as models have them, and the range that the case asks for
        k[..., ::9] *= 4.0
        k, v = (
            (x / x.abs().max() * limit if limit != 1.0 else x).to(case.dtype)
            for x, limit in ((k, case.key_range), (v, case.value_range))
        )
        self.keys = empty_key_pages(layout, batch * width + 3, case.heads)
        self.values = empty_value_pages(layout, batch * width + 3, case.heads)
        buffer_layout = BufferLayout.of(method, case.head_dim, case.num_tokens)
        self.buffers = empty_buffers(buffer_layout, batch, case.heads, case.dtype)
        for tensors in (self.keys, self.values, self.buffers):
            poisoned(tensors)
        self.key_table, self.value_table = (
            torch.randperm(batch * width + 3, generator=generator)[: batch * width]
            .view(batch, width)
            .to(torch.int32)
            for _ in range(2)
        )
        for b, length in enumerate(case.lengths):
            # what the last query of the call sees
            num_key, num_value = method.key_pages(length - 1), method.value_pages(length - 1)
            for p in range(num_key):
                part = slice(case.sink + p * size, case.sink + (p + 1) * size)
                page = pack_keys(
                    quantize_keys(k[b : b + 1, :, None, part], method, layer=0), layout
                )
                self._put(self.keys, self.key_table[b, p], page)
            for p in range(num_value):
                part = slice(case.sink + p * size, case.sink + (p + 1) * size)
                page = pack_values(quantize_values(v[b : b + 1, :, None, part], method))
                self._put(self.values, self.value_table[b, p], page)
            self.key_table[b, num_key:] = -1
            self.value_table[b, num_value:] = -1
            self._fill(k[b], length, self.buffers.sink_k[b], self.buffers.key_ring[b])
            self._fill(v[b], length, self.buffers.sink_v[b], self.buffers.value_ring[b])
        query_shape = (batch, case.heads * case.queries_per_kv, case.num_tokens, case.head_dim)
        query = torch.randn(query_shape, generator=generator) * case.query_range
        self.query = query.to(case.dtype)
        self.seq_lens = torch.tensor(case.lengths, dtype=torch.int32)
        self._move(device)

    @staticmethod
    def _put(pages: tuple[Tensor, ...], page_id: Tensor, page: tuple[Tensor, ...]) -> None:
        for part, content in zip(pages, page, strict=True):
            part[page_id] = content[0]

    def _fill(self, tokens: Tensor, length: int, sink: Tensor, ring: Tensor) -> None:
        kept = min(self.case.sink, length)
        sink[:, :kept] = tokens[:, :kept]
        first = max(self.case.sink, length - ring.shape[1])
        stay = torch.arange(first, max(first, length))
        ring[:, (stay - self.case.sink) % ring.shape[1]] = tokens[:, stay]

    def _move(self, device: str) -> None:
        self.keys = KeyPages(*(part.to(device) for part in self.keys))
        self.values = ValuePages(*(part.to(device) for part in self.values))
        self.buffers = Buffers(*(part.to(device) for part in self.buffers))
        for name in ("key_table", "value_table", "query", "seq_lens"):
            setattr(self, name, getattr(self, name).to(device))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Arguments of the op in order."""
        tables = (self.key_table, self.value_table)
        return (self.query, self.keys, self.values, *tables, self.buffers, self.seq_lens)

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        """The op under test: output and log-sum-exp."""
        options = {"num_splits": self.case.num_splits, "softcap": self.case.softcap, **options}
        return decode_attention(*self.tensors, self.case.method, return_lse=True, **options)

    def reference(self, compute: torch.dtype, decoded: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Attention computed in ``compute`` over pages decoded to ``decoded``."""
        case = self.case
        return decode_attention_reference(
            *self.tensors,
            sink=case.sink,
            window=case.window,
            rollback=case.rollback,
            softmax_scale=case.head_dim**-0.5,
            softcap=case.softcap,
            compute=compute,
            decoded=decoded,
        )


def check_decode(case: DecodeCase, device: str, seed: int = 0) -> None:
    """Output and log-sum-exp within the flash-attention rule."""
    cache = Cache(case, device, seed)
    out, lse = cache.run()
    exact, exact_lse = cache.reference(torch.float64, torch.float64)
    plain, _ = cache.reference(case.dtype, None)
    assert_within_rule(out, plain, exact)
    pads = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, pads)
    assert (out[pads] == 0).all()
    # logits carry the relative error of a 16-bit factor, but are summed in fp32
    largest = exact_lse[~pads].abs().max().clamp_min(1.0)
    assert ((lse.double() - exact_lse)[~pads].abs().max() / largest) < 2.0**-9


def assert_within_rule(out: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Relative RMS error at most twice that of plain low-precision arithmetic."""
    error, allowed = relative_rms(out, exact), TOLERANCE * relative_rms(plain, exact)
    print(f"relative RMS error {error:.2e}, allowed {allowed:.2e}")
    assert error <= allowed


def relative_rms(x: Tensor, exact: Tensor) -> float:
    """‖x - exact‖ / ‖exact‖; infinite where x has a NaN that exact lacks."""
    error = ((x.double() - exact).norm() / exact.norm()).item()
    return error if error == error else float("inf")
