"""The packed cache: 2-bit pages in a pool, 16-bit sinks and rings, one state for all layers.

The host mirrors lengths and page ids; the device holds everything that kernels read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kitty.cache.calls import gather_tokens, page_cuts
from kitty.cache.pool import PagedLayer, PagePool
from kitty.errors import KittyError
from kitty.methods import Method
from kitty.ops.append import append
from kitty.ops.decode_attention import decode_attention
from kitty.ops.dequantize_pages import dequantize_key_pages, dequantize_value_pages
from kitty.ops.quantize_pages import quantize_pages
from kitty.pages import (
    NO_PAGE,
    BufferLayout,
    Buffers,
    ByteReport,
    KeyPages,
    PageLayout,
    ValuePages,
    empty_buffers,
    tensor_bytes,
)


@dataclasses.dataclass
class Part:
    """Tokens of a call within which no sequence's page counts change.

    Attributes:
        begin, end: offsets into each sequence's real tokens of the call.
        before: tokens of each sequence before the part.
        news: its tokens in the part.
        paged: length up to which its pages are written when the part begins.
    """

    begin: int
    end: int
    before: list[int]
    news: list[int]
    paged: list[int]

    @functools.cached_property
    def ragged(self) -> bool:
        """Whether some sequence has fewer tokens than the part is wide."""
        return min(self.news) < self.end - self.begin

    def lengths_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """seq_lens, paged_lens, num_new (None: all), int32 ``[B]``; made once per device."""
        if device not in self._made:
            after = [n + new for n, new in zip(self.before, self.news, strict=True)]
            vectors = (after, self.paged, self.news)
            made = [torch.tensor(x, dtype=torch.int32, device=device) for x in vectors]
            self._made[device] = (made[0], made[1], made[2] if self.ragged else None)
        return self._made[device]

    def __post_init__(self) -> None:
        self._made: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = {}


@dataclasses.dataclass
class Call:
    """One forward pass over the model: what all its layers do alike.

    Attributes:
        counts: real tokens of each sequence.
        total: tokens of the call, pads included.
        order: int64 ``[B, T]`` that brings the real tokens last; None if there are no pads.
        dense: whether attention within the call is dense (prefill).
        parts: in order.
    """

    counts: list[int]
    total: int
    order: Tensor | None
    dense: bool
    parts: list[Part]


class PackedState:
    """Lengths, page ids and page memory of a model's full-attention layers.

    Args:
        method: one that the packed format holds.
        max_length: reserve pages for sequences of so many tokens at the first call, so that no
            address changes later; None grows on demand.
        max_bytes: limit of the page memory.

    Raises:
        KittyError: the method cannot be packed.
    """

    def __init__(
        self, method: Method, *, max_length: int | None = None, max_bytes: int | None = None
    ) -> None:
        if method.packed_reason() is not None:
            raise KittyError(
                f"Method {method.name!r} cannot be packed, because its {method.packed_reason()}: "
                "use the simulated cache."
            )
        self.method = method
        self.max_length = max_length
        self.pool = PagePool([], max_bytes=max_bytes)
        self.lengths: list[int] = []
        self.paged: list[int] = []  # lengths up to which pages are written
        self.key_ids: list[list[int]] = []
        self.value_ids: list[list[int]] = []
        self.call: Call | None = None
        self._layers: list[PackedLayer] = []
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def layer(self, layer: int) -> PackedLayer:
        """A new layer of this state; ``layer`` is its index in the model."""
        return PackedLayer(self, layer)

    def begin(self, batch: int, total: int, real: Tensor | None, *, dense_prefill: bool) -> None:
        """Plan a call for all layers and allocate the pages that it will write.

        Args:
            batch: sequences B.
            total: tokens T of the call.
            real: bool ``[B, T]``, False for pads; None if all are real.

        Raises:
            KittyError: the pool is exhausted, or a sequence is still empty after its first call.
        """
        if not self.lengths:
            self.lengths, self.paged = [0] * batch, [0] * batch
            self.key_ids = [[] for _ in range(batch)]
            self.value_ids = [[] for _ in range(batch)]
        counts = [total] * batch if real is None else real.sum(dim=1).tolist()
        order = None
        if real is not None and min(counts) < total:
            order = real.long().argsort(dim=1, stable=True)
        dense = dense_prefill and not any(self.lengths)
        if dense_prefill and not dense and not all(self.lengths):
            raise KittyError(
                f"Sequence {self.lengths.index(0)} of the batch had no token in the first call: "
                "give every prompt at least one token, or use the simulated cache."
            )
        if dense:
            after = [n + c for n, c in zip(self.lengths, counts, strict=True)]
            parts = [Part(0, total, list(self.lengths), counts, after)]
        else:
            parts = self._parts(counts, total)
        last = parts[-1]
        self._allocate([max(x) for x in zip(last.before, last.paged, strict=True)])
        self.paged = [max(x) for x in zip(last.before, last.paged, strict=True)]
        self.lengths = [n + new for n, new in zip(last.before, last.news, strict=True)]
        self.call = Call(counts, total, order, dense, parts)

    def _parts(self, counts: list[int], total: int) -> list[Part]:
        cuts = page_cuts(self.method, self.lengths, counts, skip=[False] * len(counts))
        parts, paged = [], self.paged
        for begin, end in zip(cuts, [*cuts[1:], max(*counts, 1)], strict=True):
            before = [n + min(begin, c) for n, c in zip(self.lengths, counts, strict=True)]
            news = [max(0, min(end, c) - begin) for c in counts]
            parts.append(Part(begin, end, before, news, list(paged)))
            paged = [max(x) for x in zip(paged, before, strict=True)]
        return parts

    def _allocate(self, lengths: Sequence[int]) -> None:
        """Give every sequence ids for the pages of ``lengths``."""
        changed = False
        for ids, pages, count in (
            (self.key_ids, self.pool.keys, self.method.key_pages),
            (self.value_ids, self.pool.values, self.method.value_pages),
        ):
            missing = [max(0, count(n) - len(held)) for n, held in zip(lengths, ids, strict=True)]
            if any(missing):
                new = iter(pages.allocate(sum(missing)))
                for held, more in zip(ids, missing, strict=True):
                    held.extend(next(new) for _ in range(more))
                changed = True
        if changed:
            self._tables.clear()

    def tables_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Key and value page tables, int32 ``[B, max_pages]``."""
        if device not in self._tables:
            self._tables[device] = (_table(self.key_ids, device), _table(self.value_ids, device))
        return self._tables[device]

    def register(self, layer: PackedLayer, heads: int, dim: int, device: torch.device) -> int:
        """Add a layer to the pool at its first call; its index there."""
        layout = PageLayout.of(self.method, dim)
        self.pool.add_layer(PagedLayer(layout, heads, device))
        self._layers.append(layer)
        if self.max_length is not None and len(self._layers) == 1:
            batch = len(self.lengths)
            counts = (self.method.key_pages, self.method.value_pages)
            self.pool.reserve(*(batch * count(self.max_length) for count in counts), fixed=False)
        return len(self._layers) - 1

    def crop(self, removed: Iterable[int]) -> None:
        """Take back the last ``removed[b]`` tokens; pages that are not final again are freed."""
        self.lengths = [n - r for n, r in zip(self.lengths, removed, strict=True)]
        self.paged = [min(x) for x in zip(self.paged, self.lengths, strict=True)]
        for ids, pages, count in (
            (self.key_ids, self.pool.keys, self.method.key_pages),
            (self.value_ids, self.pool.values, self.method.value_pages),
        ):
            for length, held in zip(self.lengths, ids, strict=True):
                keep = min(len(held), count(length))
                pages.release(held[keep:])
                del held[keep:]
        self._tables.clear()

    def select(self, indices: Tensor) -> None:
        """Make sequence i a copy of sequence ``indices[i]``; full pages are shared."""
        order = indices.tolist()
        for ids, pages in ((self.key_ids, self.pool.keys), (self.value_ids, self.pool.values)):
            new = [list(ids[i]) for i in order]
            for held in new:
                pages.retain(held)
            for held in ids:
                pages.release(held)
            ids[:] = new
        self.lengths = [self.lengths[i] for i in order]
        self.paged = [self.paged[i] for i in order]
        self._tables.clear()
        for layer in self._layers:
            layer.select_buffers(indices)

    def report(self) -> ByteReport:
        """Bytes of everything the state holds on devices."""
        buffers = sum(tensor_bytes(layer.buffers) for layer in self._layers if layer.buffers)
        tables = sum(tensor_bytes(pair) for pair in self._tables.values())
        return self.pool.report() + ByteReport(buffers=buffers, tables=tables)


class PackedLayer:
    """One attention layer of a :class:`PackedState`."""

    def __init__(self, state: PackedState, layer: int) -> None:
        self.state = state
        self.layer = layer
        self.buffers: Buffers | None = None
        self.pages_read = 0
        self._index = -1

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each sequence, as of the latest call of the model."""
        return self.state.lengths

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        real: Tensor | None = None,
        *,
        scale: float,
        softcap: float | None = None,
        dense_prefill: bool = True,
    ) -> Tensor:
        """Insert the tokens of the planned call and attend; see ``SimulatedLayer.attend``.

        ``PackedState.begin`` has planned the call with the same ``real`` and ``dense_prefill``.
        """
        call = self.state.call
        assert call is not None
        if softcap is not None:
            raise KittyError(
                "This model caps its attention logits, which the packed kernels do not: use the "
                "simulated cache."
            )
        self._begin(keys)
        if call.order is not None:
            query, keys, values = (gather_tokens(x, call.order) for x in (query, keys, values))
        out = torch.zeros_like(query)
        for part in call.parts:
            q, k, v = (_align(x, part, call) for x in (query, keys, values))
            self._append(k, v, part)
            if call.dense:
                out = _dense_prefill(q, k, v, call.counts, scale)
                self._quantize(k, v, part)
            else:
                _scatter(out, self._decode(q, part, scale), part, call)
        return out if call.order is None else gather_tokens(out, call.order.argsort(dim=1))

    def content(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Decoded keys and values ``[H, n, D]`` of one sequence, pages as far as written."""
        if self.buffers is None:
            raise KittyError("The cache is empty: it has no content to show.")
        state, n = self.state, self.state.lengths[sequence]
        method, paged = state.method, state.paged[sequence]
        device = self.buffers.sink_k.device
        dtype = self.buffers.sink_k.dtype
        shown = []
        for ids, pages, decode, sink, ring in (
            (state.key_ids, method.key_pages(paged), self._decode_keys, *self.buffers[0::2]),
            (state.value_ids, method.value_pages(paged), self._decode_values, *self.buffers[1::2]),
        ):
            table = _table([ids[sequence][:pages]], device)
            at = (
                torch.arange(pages * method.page_size, max(n - method.sink, 0), device=device)
                % ring.shape[2]
            )
            parts = (
                sink[sequence, :, : min(n, method.sink)],
                decode(table, dtype)[0],
                ring[sequence][:, at],
            )
            shown.append(torch.cat(parts, dim=1))
        return shown[0], shown[1]

    def _decode_keys(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_key_pages(self.state.pool.keys.storage(self._index), table, dtype)

    def _decode_values(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_value_pages(self.state.pool.values.storage(self._index), table, dtype)

    def select_buffers(self, indices: Tensor) -> None:
        """Copy the 16-bit buffers of the selected sequences."""
        if self.buffers is not None:
            self.buffers = Buffers(*(x.index_select(0, indices.to(x.device)) for x in self.buffers))

    def crop(self, removed: Iterable[int]) -> None:
        """Nothing to do: buffers still hold what the shorter length needs."""

    def select(self, indices: Tensor) -> None:
        """Nothing to do: the state selects all its layers at once."""

    def _begin(self, keys: Tensor) -> None:
        batch, heads, _, dim = keys.shape
        if self.buffers is None:
            self._index = self.state.register(self, heads, dim, keys.device)
            layout = BufferLayout.of(self.state.method, dim)
            self.buffers = empty_buffers(layout, batch, heads, keys.dtype, keys.device)
            for buffer in self.buffers:
                buffer.zero_()  # kernels multiply masked slots by 0, which NaN would survive

    def _storage(self) -> tuple[KeyPages, ValuePages, Tensor, Tensor]:
        pool, device = self.state.pool, self.buffers[0].device  # type: ignore[index]
        tables = self.state.tables_on(device)
        return pool.keys.storage(self._index), pool.values.storage(self._index), *tables

    def _append(self, k: Tensor, v: Tensor, part: Part) -> None:
        assert self.buffers is not None
        seq_lens, paged, news = part.lengths_on(k.device)
        append(
            k, v, *self._storage(), self.buffers, seq_lens, paged, self.state.method,
            num_new=news, layer=self.layer,
        )  # fmt: skip

    def _quantize(self, k: Tensor, v: Tensor, part: Part) -> None:
        seq_lens = part.lengths_on(k.device)[0]
        quantize_pages(k, v, *self._storage(), seq_lens, self.state.method, layer=self.layer)

    def _decode(self, q: Tensor, part: Part, scale: float) -> Tensor:
        assert self.buffers is not None
        method = self.state.method
        self.pages_read += sum(method.key_pages(n) + method.value_pages(n) for n in part.before)
        out = decode_attention(
            q, *self._storage(), self.buffers, part.lengths_on(q.device)[0], method,
            softmax_scale=scale,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out


def _align(x: Tensor, part: Part, call: Call) -> Tensor:
    """A part's tokens ``[B, H, w, D]``, real ones last; ``x`` has the call's real tokens last."""
    width = part.end - part.begin
    if len(call.parts) == 1 and width == x.shape[2]:
        return x.contiguous()
    if min(call.counts) == call.total:
        return x[:, :, part.begin : part.end].contiguous()
    first = [
        call.total - count + part.begin - (width - new)
        for count, new in zip(call.counts, part.news, strict=True)
    ]
    at = torch.tensor(first, device=x.device)[:, None] + torch.arange(width, device=x.device)
    return x.gather(
        2, at.clamp(0, call.total - 1)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])
    )


def _scatter(out: Tensor, result: Tensor, part: Part, call: Call) -> None:
    """Write a part's outputs back to the places of its real tokens."""
    if min(call.counts) == call.total:
        out[:, :, part.begin : part.end] = result
        return
    for b, (count, new) in enumerate(zip(call.counts, part.news, strict=True)):
        place = call.total - count + part.begin
        out[b, :, place : place + new] = result[b, :, result.shape[2] - new :]


def _dense_prefill(q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], scale: float) -> Tensor:
    """Causal 16-bit attention of a first call whose real tokens stand last in each row."""
    groups = q.shape[1] // k.shape[1]

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    if min(counts) == q.shape[2]:
        return causal(q, k, v)
    out = torch.zeros_like(q)  # a sequence at a time: no mask of T x T is ever made
    for b, count in enumerate(counts):
        if count:
            rows = (x[b : b + 1, :, x.shape[2] - count :] for x in (q, k, v))
            out[b : b + 1, :, q.shape[2] - count :] = causal(*rows)
    return out


def _table(ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Page ids of all sequences as int32 ``[B, max_pages]``."""
    width = max(len(held) for held in ids)
    rows = [[*held, *[NO_PAGE] * (width - len(held))] for held in ids]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)
