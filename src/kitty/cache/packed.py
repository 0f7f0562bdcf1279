"""The packed cache: 2-bit pages in a pool, 16-bit sinks and rings, one state for all layers.

The host mirrors lengths and page ids; the device holds everything that kernels read. With a known
maximum length nothing on the device moves, so that a CUDA graph can replay a decode step.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from kitty.cache.attend import attend
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

TORCH_GROUPS_HEADS = Version(torch.__version__) >= Version("2.5")  # sdpa's enable_gqa


@dataclasses.dataclass
class Part:
    """Tokens of a call within which no sequence's page counts change.

    Attributes:
        begin, end: offsets into each sequence's real tokens of the call.
        before: tokens of each sequence before the part.
        news: its tokens in the part.
        paged: length up to which its pages are written when the part begins.
        dense: the tokens are the first ones of their sequences, which attend densely (prefill).
    """

    begin: int
    end: int
    before: list[int]
    news: list[int]
    paged: list[int]
    dense: bool = False

    @functools.cached_property
    def ragged(self) -> bool:
        """Whether some sequence has fewer tokens than the part is wide."""
        return min(self.news) < self.end - self.begin

    def lengths_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """seq_lens, paged_lens, num_new (None: all), int32 ``[B]``; made once per device."""
        if device not in self._made:
            vectors = (self.after, self.paged, self.news)
            made = [torch.tensor(x, dtype=torch.int32, device=device) for x in vectors]
            self._made[device] = (made[0], made[1], made[2] if self.ragged else None)
        return self._made[device]

    @property
    def after(self) -> list[int]:
        """Tokens of each sequence after the part."""
        return [n + new for n, new in zip(self.before, self.news, strict=True)]

    def use(self, device: torch.device, seq_lens: Tensor, paged_lens: Tensor) -> None:
        """Take these vectors on ``device``; the part is not ragged."""
        self._made[device] = (seq_lens, paged_lens, None)

    def __post_init__(self) -> None:
        self._made: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = {}


@dataclasses.dataclass
class Call:
    """One forward pass over the model: what all its layers do alike.

    Attributes:
        counts: real tokens of each sequence.
        total: tokens of the call, pads included.
        order: int64 ``[B, T]`` that brings the real tokens last; None if there are no pads.
        parts: in order; the dense one, if any, is the first.
        rows: the sequences of the batch that the call brings.
    """

    counts: list[int]
    total: int
    order: Tensor | None
    parts: list[Part]
    rows: slice

    @property
    def simple(self) -> bool:
        """Whether every sequence brings the same tokens, all of one part."""
        return len(self.parts) == 1 and self.order is None

    def order_on(self, device: torch.device) -> Tensor | None:
        """``order`` where a layer needs it."""
        if self.order is not None and self.order.device != device:
            self.order = self.order.to(device)
        return self.order


class PackedState:
    """Lengths, page ids and page memory of a model's full-attention layers.

    Args:
        method: one that the packed format holds, or one without quantization, whose tokens then
            all stand in the sink.
        max_length: reserve pages for sequences of so many tokens at the first call, and keep
            every address; longer sequences grow on demand. None grows from the start.
        max_bytes: limit of the page memory.

    Raises:
        KittyError: the method cannot be packed.
    """

    def __init__(
        self, method: Method, *, max_length: int | None = None, max_bytes: int | None = None
    ) -> None:
        self.dense = not method.quantized
        self.method = _all_in_sink(method, max_length) if self.dense else method
        reason = self.method.packed_reason()
        if reason is not None:
            raise KittyError(
                f"Method {method.name!r} cannot be packed, because its {reason}: use the "
                "simulated cache."
            )
        self.max_length = max_length
        self.pool = PagePool([], max_bytes=max_bytes)
        self.batch = 0  # sequences that there is room for; fewer are filled in a first call by rows
        self.lengths: list[int] = []
        self.paged: list[int] = []  # lengths up to which pages are written
        self.key_ids: list[list[int]] = []
        self.value_ids: list[list[int]] = []
        self.call: Call | None = None
        self.pages_read = 0  # of one layer, quantized keys and values
        self.layers: list[PackedLayer] = []
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._step_lens: dict[torch.device, Tensor] = {}  # int32 [2, B] of steps by one token

    def layer(self, layer: int) -> PackedLayer:
        """A new layer of this state; ``layer`` is its index in the model."""
        return PackedLayer(self, layer)

    def begin(
        self,
        batch: int,
        total: int,
        real: Tensor | None,
        *,
        dense_prefill: bool,
        rows: slice | None = None,
        counts: list[int] | None = None,
    ) -> None:
        """Plan a call for all layers and allocate the pages that it will write.

        Args:
            batch: sequences B of the call.
            total: tokens T of the call.
            real: bool ``[B, T]``, False for pads; None if all are real.
            dense_prefill: whether a first call is dense attention.
            rows: the call is the first one of these sequences alone, the next of a larger batch
                (``make_room``); None: it brings all.
            counts: real tokens of each sequence; None reads them from ``real``, for which the
                host waits.

        Raises:
            KittyError: the pool is exhausted, or a cache without quantization is full.
        """
        rows = slice(0, batch) if rows is None else rows
        self.make_room(max(self.batch, rows.stop))
        new = rows.stop - len(self.lengths)
        self.lengths += [0] * new
        self.paged += [0] * new
        self.key_ids += [[] for _ in range(new)]
        self.value_ids += [[] for _ in range(new)]
        if counts is None:
            counts = [total] * batch if real is None else real.sum(dim=1).tolist()
        order = None
        if real is not None and min(counts) < total:
            order = real.long().argsort(dim=1, stable=True)
        lengths = self.lengths[rows]
        after = [n + c for n, c in zip(lengths, counts, strict=True)]
        if self.dense and max(after) > self.method.sink:
            raise KittyError(
                f"A sequence grows to {max(after)} tokens, but this 16-bit cache was made for "
                f"{self.max_length}: give a larger max_length."
            )
        parts = self._parts(lengths, self.paged[rows], counts, total, dense_prefill)
        last = parts[-1]
        paged = [max(x) for x in zip(last.before, last.paged, strict=True)]
        self._allocate(rows, paged)
        self.paged[rows] = paged
        self.lengths[rows] = last.after
        self.call = Call(counts, total, order, parts, rows)
        pages = (self.method.key_pages, self.method.value_pages)
        read = [n for part in parts if not part.dense for n in part.before]
        self.pages_read += sum(count(n) for n in read for count in pages)
        if self.call.simple and total == 1 and self.max_length is not None and not last.dense:
            self._enter_step(last)

    def make_room(self, batch: int) -> None:
        """Let the buffers and tables that are still to be made hold ``batch`` sequences."""
        self.batch = batch

    def _enter_step(self, part: Part) -> None:
        """Put a one-token step's lengths where a captured graph reads them."""
        for layer in self.layers:
            device = layer.device
            if device not in self._step_lens:
                self._step_lens[device] = torch.zeros(
                    2, self.batch, dtype=torch.int32, device=device
                )
        for device, lens in self._step_lens.items():
            _overwrite(lens, [part.after, part.paged])
            part.use(device, lens[0], lens[1])

    def _parts(
        self,
        lengths: list[int],
        paged: list[int],
        counts: list[int],
        total: int,
        dense_prefill: bool,
    ) -> list[Part]:
        """Cut a call: first tokens of sequences that are empty, then those of all the others."""
        first = [c if dense_prefill and n == 0 else 0 for n, c in zip(lengths, counts, strict=True)]
        parts = []
        if any(first) or not any(counts):
            written = [max(x) for x in zip(paged, first, strict=True)]
            parts = [Part(0, total, lengths, first, written, dense=True)]
            lengths = parts[0].after
            counts = [c - done for c, done in zip(counts, first, strict=True)]
            paged = [max(x) for x in zip(written, parts[0].before, strict=True)]
        if parts and not any(counts):
            return parts
        cuts = page_cuts(self.method, lengths, counts, skip=[False] * len(counts))
        for begin, end in zip(cuts, [*cuts[1:], max(counts)], strict=True):
            before = [n + min(begin, c) for n, c in zip(lengths, counts, strict=True)]
            news = [max(0, min(end, c) - begin) for c in counts]
            parts.append(Part(begin, end, before, news, list(paged)))
            paged = [max(x) for x in zip(paged, before, strict=True)]
        return parts

    def _allocate(self, rows: slice, lengths: Sequence[int]) -> None:
        """Give the sequences ``rows`` ids for the pages of ``lengths``."""
        changed = False
        for ids, pages, count in (
            (self.key_ids[rows], self.pool.keys, self.method.key_pages),
            (self.value_ids[rows], self.pool.values, self.method.value_pages),
        ):
            missing = [max(0, count(n) - len(held)) for n, held in zip(lengths, ids, strict=True)]
            if any(missing):
                new = iter(pages.allocate(sum(missing)))
                for held, more in zip(ids, missing, strict=True):
                    held.extend(next(new) for _ in range(more))
                changed = True
        if changed:
            self._tables_changed()

    def tables_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Key and value page tables, int32 ``[B, max_pages]``."""
        if device not in self._tables:
            keys, values = (
                torch.tensor(x, dtype=torch.int32, device=device).reshape(len(x), len(x[0]))
                for x in self._table_rows()
            )
            self._tables[device] = (keys, values)
        return self._tables[device]

    def _table_rows(self) -> list[list[list[int]]]:
        """Page ids of all sequences, keys and values, filled up with NO_PAGE to one width."""
        tables = []
        for ids, count in (
            (self.key_ids, self.method.key_pages),
            (self.value_ids, self.method.value_pages),
        ):
            reserved = 0 if self.max_length is None else count(self.max_length)
            width = max(reserved, *(len(held) for held in ids))
            rows = [held + [NO_PAGE] * (width - len(held)) for held in ids]
            tables.append(rows + [[NO_PAGE] * width for _ in range(self.batch - len(rows))])
        return tables

    def _tables_changed(self) -> None:
        """Bring the device's tables up to date: in place if they may not move, else when asked."""
        if self.max_length is None:
            self._tables.clear()
            return
        rows = self._table_rows()
        for device, tables in list(self._tables.items()):
            if any(t.shape != (len(x), len(x[0])) for t, x in zip(tables, rows, strict=True)):
                del self._tables[device]
                continue
            for table, new in zip(tables, rows, strict=True):
                _overwrite(table, new)

    def addresses(self) -> tuple[int, ...]:
        """What a captured graph depends on: changes when anything that kernels read has moved."""
        tensors = [x for pair in self._tables.values() for x in pair]
        tensors += self._step_lens.values()
        for layer in self.layers:
            tensors += layer.buffers or ()
        moved = (self.pool.keys.generation, self.pool.values.generation)
        return (self.batch, *moved, *(x.data_ptr() for x in tensors))

    def register(self, layer: PackedLayer, heads: int, dim: int, device: torch.device) -> int:
        """Add a layer to the pool at its first call; its index there."""
        layout = PageLayout.of(self.method, dim)
        self.pool.add_layer(PagedLayer(layout, heads, device))
        self.layers.append(layer)
        if self.max_length is not None and len(self.layers) == 1:
            counts = (self.method.key_pages, self.method.value_pages)
            needed = [self.batch * count(self.max_length) for count in counts]
            self.pool.reserve(*needed, fixed=False)
        return len(self.layers) - 1

    def pretend(self, length: int) -> None:
        """Hold ``length`` tokens of every sequence, their pages with whatever memory contains."""
        lengths = [length] * len(self.lengths)
        self._allocate(slice(0, len(lengths)), lengths)
        self.lengths, self.paged = lengths, list(lengths)

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
        self._tables_changed()

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
        if len(order) != self.batch:
            self.batch = len(order)
            self._step_lens.clear()
        self._tables_changed()
        for layer in self.layers:
            layer.select_buffers(indices)

    def report(self) -> ByteReport:
        """Bytes of everything the state holds on devices."""
        buffers = sum(tensor_bytes(layer.buffers) for layer in self.layers if layer.buffers)
        tables = sum(tensor_bytes(pair) for pair in self._tables.values())
        tables += tensor_bytes(self._step_lens.values())
        return self.pool.report() + ByteReport(buffers=buffers, tables=tables)


class PackedLayer:
    """One attention layer of a :class:`PackedState`."""

    def __init__(self, state: PackedState, layer: int) -> None:
        # weak, as the state knows its layers: a cycle would keep their memory after the last use
        self._state = weakref.ref(state)
        self.layer = layer
        self.buffers: Buffers | None = None
        self._index = -1

    def __getstate__(self) -> dict[str, Any]:
        # a weak reference is not followed when a cache is copied, and cannot be saved
        return {**self.__dict__, "_state": self.state}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields, _state=weakref.ref(fields["_state"]))

    @property
    def state(self) -> PackedState:
        """What all layers share; the cache keeps it."""
        state = self._state()
        assert state is not None
        return state

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each sequence, as of the latest call of the model."""
        return self.state.lengths

    @property
    def pages_read(self) -> int:
        """Quantized pages that the layer's attention has read, over all calls."""
        return self.state.pages_read

    @property
    def device(self) -> torch.device:
        """Where the layer's buffers are."""
        assert self.buffers is not None
        return self.buffers.sink_k.device

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        real: Tensor | None = None,
        *,
        counts: list[int] | None = None,
        scale: float,
        softcap: float | None = None,
        dense_prefill: bool = True,
    ) -> Tensor:
        """Insert the tokens of the planned call and attend; see ``SimulatedLayer.attend``.

        ``PackedState.begin`` has planned the call with the same ``real`` and ``dense_prefill``.
        """
        call = self.state.call
        assert call is not None
        self._begin(keys)
        order = call.order_on(keys.device)
        if order is not None:
            query, keys, values = (gather_tokens(x, order) for x in (query, keys, values))
        out = query if call.simple else torch.zeros_like(query)
        for part in call.parts:
            q, k, v = (_align(x, part, call) for x in (query, keys, values))
            self._append(k, v, part)
            if part.dense:
                out = _dense_prefill(q, k, v, part.news, scale, softcap)
                self._quantize(k, v, part)
            elif call.simple:
                out = self._decode(q, part, scale, softcap)
            else:
                _scatter(out, self._decode(q, part, scale, softcap), part, call)
        return out if order is None else gather_tokens(out, order.argsort(dim=1))

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
            table = torch.tensor([ids[sequence][:pages]], dtype=torch.int32, device=device)
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
            selected = (x.index_select(0, indices.to(x.device)) for x in self.buffers)
            if len(indices) == self.buffers.sink_k.shape[0]:
                for buffer, new in zip(self.buffers, selected, strict=True):
                    buffer.copy_(new)  # addresses stay
            else:
                self.buffers = Buffers(*selected)

    def crop(self, removed: Iterable[int]) -> None:
        """Nothing to do: buffers still hold what the shorter length needs."""

    def select(self, indices: Tensor) -> None:
        """Nothing to do: the state selects all its layers at once."""

    def _begin(self, keys: Tensor) -> None:
        _, heads, _, dim = keys.shape
        if self.buffers is None:
            layout = BufferLayout.of(self.state.method, dim)
            self.buffers = empty_buffers(layout, self.state.batch, heads, keys.dtype, keys.device)
            for buffer in self.buffers:
                buffer.zero_()  # kernels multiply masked slots by 0, which NaN would survive
            self._index = self.state.register(self, heads, dim, keys.device)

    def _storage(self) -> tuple[KeyPages, ValuePages, Tensor, Tensor]:
        pool, call = self.state.pool, self.state.call
        assert call is not None
        key_table, value_table = self.state.tables_on(self.device)
        return (
            pool.keys.storage(self._index),
            pool.values.storage(self._index),
            key_table[call.rows],
            value_table[call.rows],
        )

    def _row_buffers(self) -> Buffers:
        call = self.state.call
        assert self.buffers is not None
        assert call is not None
        return Buffers(*(x[call.rows] for x in self.buffers))

    def _append(self, k: Tensor, v: Tensor, part: Part) -> None:
        seq_lens, paged, news = part.lengths_on(k.device)
        append(
            k, v, *self._storage(), self._row_buffers(), seq_lens, paged, self.state.method,
            num_new=news, layer=self.layer,
        )  # fmt: skip

    def _quantize(self, k: Tensor, v: Tensor, part: Part) -> None:
        seq_lens, _, news = part.lengths_on(k.device)
        first = seq_lens if news is None else news  # 0 for sequences that the part leaves alone
        quantize_pages(k, v, *self._storage(), first, self.state.method, layer=self.layer)

    def _decode(self, q: Tensor, part: Part, scale: float, softcap: float | None) -> Tensor:
        out = decode_attention(
            q, *self._storage(), self._row_buffers(), part.lengths_on(q.device)[0],
            self.state.method, softmax_scale=scale, softcap=softcap,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out


def _align(x: Tensor, part: Part, call: Call) -> Tensor:
    """A part's tokens ``[B, H, w, D]``, real ones last; ``x`` has the call's real tokens last."""
    width = part.end - part.begin
    if width == x.shape[2]:
        return x
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
    if call.order is None and not part.ragged:
        out[:, :, part.begin : part.end] = result
        return
    for b, (count, new) in enumerate(zip(call.counts, part.news, strict=True)):
        place = call.total - count + part.begin
        out[b, :, place : place + new] = result[b, :, result.shape[2] - new :]


def _dense_prefill(
    q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], scale: float, softcap: float | None
) -> Tensor:
    """Causal 16-bit attention of a first call whose real tokens stand last in each row."""
    groups = q.shape[1] // k.shape[1]

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if softcap is not None:
            return attend(q, k, v, None, scale=scale, softcap=softcap)
        if groups == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        if q.is_cuda and TORCH_GROUPS_HEADS:  # no repeated keys and values in memory
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
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


def _overwrite(target: Tensor, rows: Sequence[Sequence[int]]) -> None:
    """Replace an int32 tensor's content; the host does not wait for the device."""
    new = torch.tensor(rows, dtype=torch.int32)
    if target.is_cuda:
        new = new.pin_memory()
    target.copy_(new, non_blocking=True)


def _all_in_sink(method: Method, max_length: int | None) -> Method:
    """What holds an unquantized method: a sink as long as the sequences, no page ever.

    Raises:
        KittyError: the length is not known.
    """
    if max_length is None:
        raise KittyError(
            f"Method {method.name!r} keeps every token in 16 bit, for which the packed cache needs "
            "to know the longest sequence: give max_length, or use the default cache."
        )
    return method.replace(
        name=method.name, key_bits=2, value_bits=2, boost_ratio=0.0, rollback=0,
        window=0, sink=max_length,
    )  # fmt: skip
