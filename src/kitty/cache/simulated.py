"""Simulation of the quantized cache: dense 16-bit storage whose full pages hold decoded values.

Follows the state rule of the method exactly, at any bit width; only the bytes are not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from kitty.cache.attend import attend
from kitty.cache.calls import gather_tokens, page_cuts
from kitty.errors import KittyError
from kitty.methods import Method
from kitty.quant import dequantize_keys, dequantize_values, quantize_keys, quantize_values


class SimulatedLayer:
    """Keys and values of one attention layer, each sequence left-compacted (pads never enter).

    The content is a function of the K/V tensors, the real lengths and the method alone, however
    the tokens were cut into calls: with n tokens, keys of pages 0 … kp(n)-1 and values of pages
    0 … vp(n)-1 are the decoded quantized ones, everything else is as given (paper section 4.3).

    Args:
        method: bits, boost, sink, window, page size, rollback.
        layer: index of the layer (enters the random selection).
        sliding_window: keep exactly this many tokens, unquantized; None for full attention.
    """

    def __init__(self, method: Method, layer: int, *, sliding_window: int | None = None) -> None:
        self.method = method
        self.layer = layer
        self.sliding_window = sliding_window
        self.lengths: list[int] = []  # real tokens seen, per sequence
        self.dropped: list[int] = []  # tokens that have left a sliding window, per sequence
        self.key_pages: list[int] = []  # quantized pages, per sequence
        self.value_pages: list[int] = []
        self.pages_read = 0
        # keys, values, and with rollback both as they came: [B, H, capacity, D], zeros beyond
        self.buffers: list[Tensor] = []

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
        """Insert the tokens of a call, attend, then quantize what has become final.

        Each query sees the state that its own number of earlier tokens defines, plus everything
        later up to itself in 16 bit. The first call on an empty sequence is dense 16-bit attention
        unless ``dense_prefill`` is False.

        Args:
            query: ``[B, Hq, T, D]``.
            keys, values: ``[B, H, T, D]`` of the same T tokens, keys after RoPE.
            real: bool ``[B, T]``, False for pads; None if all are real.
            counts: real tokens of each sequence; None reads them from ``real``, for which the
                host waits.
            scale: softmax scale.
            softcap: see :func:`kitty.cache.attend.attend`.

        Returns:
            ``[B, Hq, T, D]``; rows of pads are zero.

        Raises:
            KittyError: the shapes do not fit the tokens held already.
        """
        self._begin(keys)
        batch, _, total, _ = query.shape
        if counts is None:
            counts = [total] * batch if real is None else real.sum(dim=1).tolist()
        order = None
        if real is not None and min(counts) < total:
            order = (~real).long().argsort(dim=1, stable=True)  # real tokens first
            query, keys, values = (gather_tokens(x, order) for x in (query, keys, values))
        self._reserve([n + c for n, c in zip(self.lengths, counts, strict=True)])
        fresh = [dense_prefill and length == 0 for length in self.lengths]
        start, outputs = list(self.lengths), []
        cuts = [0]
        if self.sliding_window is None:
            cuts = page_cuts(self.method, self.lengths, counts, skip=fresh)
        for begin, end in zip(cuts, [*cuts[1:], total], strict=True):
            part = slice(begin, end)
            self._insert(keys[:, :, part], values[:, :, part], counts, start, begin)
            outputs.append(self._read(query[:, :, part], start, begin, scale, softcap))
            for b, first in enumerate(start):
                self.lengths[b] = first + min(end, counts[b])
            last = end == total
            self._finalize([b for b in range(batch) if last or not fresh[b]])
        self._slide()
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        if order is None:
            return out
        out = gather_tokens(out, order.argsort(dim=1))
        return out.masked_fill(~real[:, None, :, None], 0.0)  # type: ignore[index]

    def crop(self, removed: Iterable[int]) -> None:
        """Take back the last ``removed[b]`` tokens of each sequence (at most rollback of them).

        Pages that the shorter length no longer makes final are 16-bit tokens again.
        """
        for b, count in enumerate(removed):
            self.lengths[b] -= count
            live = self.lengths[b] - self.dropped[b]
            for buffer in self.buffers:
                buffer[b, :, live:] = 0
        if self.sliding_window is not None or len(self.buffers) == 2:
            return
        keys, values, raw_keys, raw_values = self.buffers
        method = self.method
        for held, count_pages, buffer, raw in (
            (self.key_pages, method.key_pages, keys, raw_keys),
            (self.value_pages, method.value_pages, values, raw_values),
        ):
            for b, length in enumerate(self.lengths):
                held[b] = min(held[b], count_pages(length))
                first = method.sink + held[b] * method.page_size
                buffer[b, :, first:] = raw[b, :, first:]

    def select(self, indices: Tensor) -> None:
        """Make sequence i a copy of sequence ``indices[i]`` (beam search); int64 ``[B']``."""
        self.buffers = [x.index_select(0, indices.to(x.device)) for x in self.buffers]
        order = indices.tolist()
        for name in ("lengths", "dropped", "key_pages", "value_pages"):
            held = getattr(self, name)
            setattr(self, name, [held[i] for i in order])

    def content(self, sequence: int) -> tuple[Tensor, Tensor]:
        """What attention sees of one sequence after its last token: keys, values ``[H, n, D]``."""
        if not self.buffers:
            raise KittyError("The cache is empty: it has no content to show.")
        live = self.lengths[sequence] - self.dropped[sequence]
        return self.buffers[0][sequence, :, :live], self.buffers[1][sequence, :, :live]

    def _begin(self, keys: Tensor) -> None:
        batch, heads, _, dim = keys.shape
        if not self.buffers:
            if self.sliding_window is None and self.method.quantizes_values:
                self.method.value_group(dim)  # says early that the page size does not fit
            copies = 4 if self.method.rollback and self.method.quantized else 2
            self.buffers = [keys.new_zeros(batch, heads, 0, dim) for _ in range(copies)]
            self.lengths, self.dropped = [0] * batch, [0] * batch
            self.key_pages, self.value_pages = [0] * batch, [0] * batch
        held = self.buffers[0]
        if (held.shape[0], held.shape[1], held.shape[3]) != (batch, heads, dim):
            raise KittyError(
                f"Layer {self.layer} of the cache holds {held.shape[0]} sequences of "
                f"{held.shape[1]} heads x {held.shape[3]} channels, but the call brings {batch} of "
                f"{heads} x {dim}: use a new cache, or reset() this one."
            )

    def _reserve(self, lengths: list[int]) -> None:
        """Grow the buffers by at least half, so that single steps copy rarely."""
        need = max(n - d for n, d in zip(lengths, self.dropped, strict=True))
        capacity = self.buffers[0].shape[2]
        if need > capacity:
            size = max(need, capacity + capacity // 2)
            self.buffers = [F.pad(x, (0, 0, 0, size - capacity)) for x in self.buffers]

    def _insert(
        self, keys: Tensor, values: Tensor, counts: list[int], start: list[int], begin: int
    ) -> None:
        size = keys.shape[2]
        places = [(n - d, c) for n, d, c in zip(start, self.dropped, counts, strict=True)]
        even = len(set(places)) == 1
        for b, (place, count) in enumerate(places[:1] if even else places):
            rows = slice(None) if even else slice(b, b + 1)
            fits = max(0, min(size, count - begin))
            where = slice(place + begin, place + begin + fits)
            for i, buffer in enumerate(self.buffers):
                buffer[rows, :, where] = (values if i % 2 else keys)[rows, :, :fits]

    def _read(
        self, query: Tensor, start: list[int], begin: int, scale: float, softcap: float | None
    ) -> Tensor:
        self.pages_read += sum(self.key_pages) + sum(self.value_pages)
        size, capacity = query.shape[2], self.buffers[0].shape[2]
        first = [n - d for n, d in zip(start, self.dropped, strict=True)]
        if len(set(first)) == 1:
            first = first[:1]  # one mask serves the batch
        stop = max(first) + begin + size
        if size == stop and self.sliding_window is None:
            mask = None  # the call holds all tokens there are: plain causal
        else:
            rows = torch.arange(begin, begin + size, device=query.device)
            own = torch.tensor(first, device=query.device)[:, None] + rows  # [1 or B, T]
            stop = min(stop, capacity)  # rows past a sequence's own count are pads
            columns = torch.arange(stop, device=query.device)
            mask = columns <= own[..., None]  # [1 or B, T, N]
            if self.sliding_window is not None:
                mask &= columns > own[..., None] - self.sliding_window
        keys, values = (x[:, :, :stop] for x in self.buffers[:2])
        return attend(query, keys, values, mask, scale=scale, softcap=softcap)

    def _finalize(self, sequences: list[int]) -> None:
        """Quantize the pages that the present lengths make final; groups of equal work together."""
        if self.sliding_window is not None:
            return
        method = self.method
        for held, count, write in (
            (self.key_pages, method.key_pages, self._write_key_pages),
            (self.value_pages, method.value_pages, self._write_value_pages),
        ):
            work: dict[tuple[int, int], list[int]] = {}
            for b in sequences:
                pages = count(self.lengths[b])
                if pages > held[b]:
                    work.setdefault((held[b], pages), []).append(b)
                    held[b] = pages
            for (first, end), group in work.items():
                write(group, first, end)

    def _write_key_pages(self, sequences: list[int], first: int, end: int) -> None:
        def decode(pages: Tensor) -> Tensor:
            quantized = quantize_keys(pages, self.method, layer=self.layer, first_page=first)
            return dequantize_keys(quantized, pages.dtype)

        self._rewrite(self.buffers[0], sequences, first, end, decode)

    def _write_value_pages(self, sequences: list[int], first: int, end: int) -> None:
        def decode(pages: Tensor) -> Tensor:
            return dequantize_values(quantize_values(pages, self.method), pages.dtype)

        self._rewrite(self.buffers[1], sequences, first, end, decode)

    def _rewrite(
        self,
        held: Tensor,
        sequences: list[int],
        first: int,
        end: int,
        decode: Callable[[Tensor], Tensor],
    ) -> None:
        size, sink = self.method.page_size, self.method.sink
        where = slice(sink + first * size, sink + end * size)
        every = len(sequences) == held.shape[0]
        view = held[:, :, where] if every else held[sequences][:, :, where]
        decoded = decode(view.unflatten(2, (end - first, size))).flatten(2, 3)
        if every:
            held[:, :, where] = decoded
        else:
            held[torch.tensor(sequences, device=held.device), :, where] = decoded

    def _slide(self) -> None:
        """Drop what no query of a sliding layer can see again, rollback kept."""
        if self.sliding_window is None:
            return
        keep = self.sliding_window + self.method.rollback
        drops = [max(0, n - keep) - d for n, d in zip(self.lengths, self.dropped, strict=True)]
        if not any(drop > 0 for drop in drops):
            return
        drops = [max(0, drop) for drop in drops]
        self.dropped = [d + drop for d, drop in zip(self.dropped, drops, strict=True)]
        live = [n - d for n, d in zip(self.lengths, self.dropped, strict=True)]
        for i, buffer in enumerate(self.buffers):
            kept = buffer.new_zeros(*buffer.shape[:2], max(live), buffer.shape[3])
            for b, (drop, left) in enumerate(zip(drops, live, strict=True)):
                kept[b, :, :left] = buffer[b, :, drop : drop + left]
            self.buffers[i] = kept
