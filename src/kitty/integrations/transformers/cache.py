"""Kitty caches as transformers sees them: lengths are padded ones, updates return carriers.

The state itself lives in kitty.cache, one object per attention layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from transformers import Cache

from kitty.cache import PackedLayer, PackedState, SimulatedLayer
from kitty.errors import KittyError
from kitty.integrations.transformers.attention import Carrier
from kitty.integrations.transformers.masks import KittyLength
from kitty.methods import Method, get_method
from kitty.pages import ByteReport, tensor_bytes


class Observer(Protocol):
    """Called after the attention of every layer; nothing it does may change the tensors."""

    def __call__(
        self,
        layer_idx: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        scaling: float,
    ) -> None:
        """Query and output are ``[B, Hq, T, D]``, keys and values ``[B, H, T, D]``, of the call."""


class KittyCacheBase(Cache):
    """What every Kitty cache shares: padded lengths, padding, crop, reset, beams.

    A subclass says how one layer's state is made.

    Args:
        method: a name from configs/methods.yaml or a Method.
        dense_prefill: the first call on an empty sequence is dense 16-bit attention (paper
            section 4.3). False shows every query what token-by-token decoding shows it, so that
            one call over a whole text equals decoding it.
        observer: called after every attention call, see :class:`Observer`.
        overrides: fields of the method to change, for example ``rollback=16``.
    """

    def __init__(
        self,
        method: str | Method = "kitty-pro",
        *,
        dense_prefill: bool = True,
        observer: Observer | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.method = get_method(method, **overrides)
        self.dense_prefill = dense_prefill
        self.observer = observer
        self.reset()

    def reset(self) -> None:
        """Forget everything; the cache is as new."""
        self.layers: dict[int, SimulatedLayer | PackedLayer] = {}
        self._real: list[Tensor] = []  # per call, bool [B, T]
        self._total = 0  # columns of all calls, the present one too
        self._columns: dict[int, int] = {}  # padded length, per layer
        self._rows: slice | None = None  # sequences that calls bring, where a batch is split
        self._counts: list[int] = []  # real tokens of each sequence of the present call
        self._lengths: list[int] = []  # real tokens of each sequence
        self._longest: list[int] = []  # the most it ever had: what is r behind that is final

    def _make_layer(
        self, layer_idx: int, sliding_window: int | None
    ) -> SimulatedLayer | PackedLayer:
        raise NotImplementedError

    def _begin_call(self, length: int, real: Tensor | None, counts: list[int]) -> None:
        """Called before the first layer of every forward pass; counts are real tokens."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Wrap a call's keys and values ``[B, H, T, D]``; the attention function appends them."""
        carriers = tuple(Carrier(x, self, layer_idx) for x in (key_states, value_states))
        return carriers  # type: ignore[return-value]

    @torch.inference_mode(False)  # what the cache makes there could not be written elsewhere
    @torch.no_grad()
    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        real: Tensor | None,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Append a call's tokens to one layer and attend.

        Args:
            query: ``[B, Hq, T, D]``.
            keys, values: ``[B, H, T, D]``.
            real: bool ``[B, T]``; None if there are no pads.

        Returns:
            ``[B, Hq, T, D]``.

        Raises:
            KittyError: an earlier call ended between two layers.
        """
        seen = self._columns.get(layer_idx, 0)
        if seen == self._total:  # the first layer to see this call
            self._check_whole(seen)
            self._start(keys.shape[0], keys.shape[2], real)
        elif seen + keys.shape[2] != self._total:
            _interrupted()
        if layer_idx not in self.layers:
            self.layers[layer_idx] = self._make_layer(layer_idx, sliding_window)
        out = self.layers[layer_idx].attend(
            query,
            keys,
            values,
            real,
            counts=self._counts,
            scale=scale,
            softcap=softcap,
            dense_prefill=self.dense_prefill,
        )
        self._columns[layer_idx] = seen + keys.shape[2]
        if self.observer is not None:
            self.observer(layer_idx, query, keys, values, out, scale)
        return out

    def _start(self, batch: int, length: int, real: Tensor | None) -> None:
        """Count a call before its first layer."""
        self._check_batch(batch)
        counts = [length] * batch if real is None else real.sum(dim=1).tolist()
        self._begin_call(length, real, counts)
        self._count(counts)
        columns = torch.ones(batch, length, dtype=torch.bool)
        self._real.append(columns if real is None else real.cpu())
        self._total += length

    @property
    def quantized_pages_read(self) -> int:
        """Quantized key and value pages read so far, over all layers and sequences."""
        return sum(layer.pages_read for layer in self.layers.values())

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Padded length: columns seen, as transformers counts them."""
        if layer_idx in self._columns or not self._columns:
            return self._columns.get(layer_idx or 0, 0)
        return next(iter(self._columns.values()))

    @torch.compiler.disable  # a length of its own type is nothing to trace
    def get_mask_sizes(self, cache_position: Tensor, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask covers: all columns, those of the call too."""
        return KittyLength(self.get_seq_length(layer_idx) + len(cache_position)), 0

    def get_max_cache_shape(self) -> int | None:
        """None: the cache grows."""
        return None

    def crop(self, max_length: int) -> None:
        """Take back the latest columns, down to ``max_length`` (negative: that many fewer).

        Raises:
            KittyError: a sequence would become shorter than the longest it ever was by more than
                the method's rollback (what lies before is final), or a call ended between two
                layers; nothing has changed then.
        """
        length = self.get_seq_length()
        keep = max(0, length + max_length) if max_length < 0 else max_length
        if keep >= length:
            return
        self._check_whole(self._total)
        columns = torch.cat(self._real, dim=1)  # [B, N]
        removed = columns[:, keep:].sum(dim=1).tolist()
        final = self.method.quantized or any(
            isinstance(layer, SimulatedLayer) and any(layer.dropped)
            for layer in self.layers.values()
        )
        left = [
            self.method.rollback - (most - now)
            for most, now in zip(self._longest, self._lengths, strict=True)
        ]
        for taken, allowed in zip(removed, left, strict=True):
            if final and taken > max(allowed, 0):
                raise KittyError(
                    f"Cropping from {length} to {keep} takes back {taken} tokens, but rollback is "
                    f"{self.method.rollback} and {max(allowed, 0)} of it are left behind the "
                    "longest text seen: give the cache a larger rollback (for assisted decoding at "
                    "least the number of assistant tokens), or reset() it."
                )
        self._lengths = [n - taken for n, taken in zip(self._lengths, removed, strict=True)]
        self._real, self._total = [columns[:, :keep]], keep
        for layer_idx, layer in self.layers.items():
            layer.crop(removed)
            self._columns[layer_idx] = keep

    def _check_whole(self, total: int) -> None:
        """Refuse to go on where the layers hold different tokens."""
        if any(columns != total for columns in self._columns.values()):
            _interrupted()

    def _check_batch(self, batch: int) -> None:
        if self._rows is None and self._lengths and len(self._lengths) != batch:
            raise KittyError(
                f"The cache holds {len(self._lengths)} sequences, but the call brings {batch}: use "
                "a new cache, or reset() this one."
            )

    def _count(self, news: list[int]) -> None:
        """Add a call's real tokens to the lengths."""
        self._counts = news
        if self._rows is not None:
            self._lengths += news
            self._longest += news
            return
        before = self._lengths or [0] * len(news)
        self._lengths = [n + new for n, new in zip(before, news, strict=True)]
        longest = self._longest or [0] * len(news)
        self._longest = [max(x) for x in zip(longest, self._lengths, strict=True)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence i a copy of sequence ``beam_idx[i]``, int64 ``[B]`` (beam search)."""
        for layer in self.layers.values():
            layer.select(beam_idx)
        self._real = [x.index_select(0, beam_idx.to(x.device)) for x in self._real]
        if self._real:
            order = beam_idx.tolist()
            self._lengths = [self._lengths[i] for i in order]
            self._longest = [self._longest[i] for i in order]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences ``indices``, in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        if self._real:
            batch = self._real[0].shape[0]
            self.reorder_cache(torch.arange(batch).repeat_interleave(repeats))

    def __getitem__(self, layer_idx: int) -> NoReturn:
        _no_legacy()

    def __iter__(self) -> NoReturn:
        _no_legacy()

    def to_legacy_cache(self) -> NoReturn:
        """Raises a KittyError: the quantized state is no tuple of tensors."""
        _no_legacy()


def _interrupted() -> NoReturn:
    raise KittyError(
        "An earlier call of the model ended between two layers (an interrupt or an error), so the "
        "cache's layers hold different tokens: reset() the cache and feed it the text again."
    )


def _no_legacy() -> NoReturn:
    raise KittyError(
        "A Kitty cache cannot be read as tuples of keys and values (contrastive search and "
        "return_legacy_cache=True need that): use another decoding mode or the default cache."
    )


class SimulatedCache(KittyCacheBase):
    """The quantized cache simulated in dense 16-bit storage: any method, any bits, any device.

    Pass it to a model whose attention implementation is ``kitty`` (``kitty.enable(model)`` or
    ``attn_implementation="kitty"``), as ``past_key_values``. See :class:`KittyCacheBase`.
    """

    def _make_layer(self, layer_idx: int, sliding_window: int | None) -> SimulatedLayer:
        return SimulatedLayer(self.method, layer_idx, sliding_window=sliding_window)


class KittyCache(KittyCacheBase):
    """The packed cache: 2-bit pages in a pool, 16-bit sinks, windows and buffers.

    Holds the methods with 2-bit values and 2-bit keys at any boost ratio, and, with a
    ``max_length``, those that quantize nothing. Layers with a sliding window keep exactly their
    window in 16 bit. Needs fp16 or bf16 on a GPU.

    Args:
        method: a name from configs/methods.yaml or a Method.
        max_length: reserve pages for sequences of so many tokens at the first call, at addresses
            that stay, so that a CUDA graph can replay the decode step; None grows on demand.
        max_bytes: limit of the page memory; None for the device's.
        dense_prefill: the first call on an empty sequence is dense 16-bit attention, as in the
            paper; False shows every query what token-by-token decoding shows it.
        observer: called after every attention call.
        overrides: fields of the method to change, such as ``sink=64`` or ``rollback=16``.

    Raises:
        KittyError: the packed format cannot hold the method.

    Example:
        >>> cache = kitty.KittyCache("kitty-pro")
        >>> kitty.enable(model, "kitty-pro")
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=300)
        >>> cache.bytes_held()  # what it really occupies, by part
    """

    def __init__(
        self,
        method: str | Method = "kitty-pro",
        *,
        max_length: int | None = None,
        max_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.max_length = max_length
        self.max_bytes = max_bytes
        super().__init__(method, **kwargs)

    def reset(self) -> None:
        """Forget everything and free the memory; the cache is as new."""
        super().reset()
        self.state = PackedState(self.method, max_length=self.max_length, max_bytes=self.max_bytes)

    def bytes_held(self) -> ByteReport:
        """Bytes on devices by kind: pages, buffers (sliding windows among them), tables."""
        sliding = [x for x in self.layers.values() if isinstance(x, SimulatedLayer)]
        windows = sum(tensor_bytes(layer.buffers) for layer in sliding)
        return self.state.report() + ByteReport(buffers=windows)

    def _make_layer(
        self, layer_idx: int, sliding_window: int | None
    ) -> SimulatedLayer | PackedLayer:
        if sliding_window is not None:
            return SimulatedLayer(self.method, layer_idx, sliding_window=sliding_window)
        return self.state.layer(layer_idx)

    def _begin_call(self, length: int, real: Tensor | None, counts: list[int]) -> None:
        self.state.begin(
            len(counts), length, real,
            dense_prefill=self.dense_prefill, rows=self._rows, counts=counts,
        )  # fmt: skip

    @contextlib.contextmanager
    def filling(self, batch: int) -> Iterator[Callable[[slice], None]]:
        """Fill an empty cache a few sequences at a time; exact, since no sequence sees another.

        Within, call what is yielded with the next sequences (a slice that begins where the last
        one ended), then the model with these sequences alone; all calls have as many columns.

        Args:
            batch: sequences in all.

        Raises:
            KittyError: the cache is not empty, or not all sequences were filled.
        """
        if self._total or batch <= 0:
            raise KittyError(
                f"The cache already holds {self._total} columns, but only an empty one can be "
                "filled by parts of a batch: reset() it."
            )
        self.state.make_room(batch)
        columns: list[Tensor] = []

        def select(rows: slice) -> None:
            columns.extend(self._real)
            self._real, self._total, self._columns = [], 0, {}
            self._rows = rows

        try:
            yield select
        finally:
            self._rows = None
        if len(self._lengths) != batch:
            raise KittyError(
                f"{len(self._lengths)} of {batch} sequences were filled: reset() the cache."
            )
        self._real = [torch.cat([*columns, *self._real])]

    @property
    def real_lengths(self) -> list[int]:
        """Real tokens of each sequence."""
        return list(self._lengths)

    @property
    def device(self) -> torch.device:
        """Of the first layer; the cache must not be empty."""
        layer = next(iter(self.layers.values()))
        assert isinstance(layer, PackedLayer)
        return layer.device

    def graph_obstacle(self) -> str | None:
        """Why a CUDA graph cannot replay decode steps over this cache; None where it can."""
        if self.max_length is None:
            return "the cache grows on demand, so its addresses change (give max_length)"
        devices = {x.device for x in self.layers.values() if isinstance(x, PackedLayer)}
        if len(devices) > 1:
            return "the model's layers are on several devices"
        return None

    def count_step(self) -> None:
        """Count one more token of every sequence on the host; a captured graph does the rest.

        Raises:
            KittyError: the pool is exhausted, or an earlier call ended between two layers.
        """
        self._check_whole(self._total)
        self._start(len(self._lengths), 1, None)
        self._columns = dict.fromkeys(self._columns, self._total)

    def pretend(self, length: int) -> None:
        """Hold ``length`` tokens of every sequence, with whatever its memory contains.

        For benchmarks, which time a step at a length without decoding up to it.

        Raises:
            KittyError: the cache is empty, or longer already; or the pool is exhausted.
        """
        if not self._lengths or max(self._lengths) > length:
            raise KittyError(
                f"The cache holds {max(self._lengths, default=0)} tokens, but it can only pretend "
                f"to hold more than that after a first call, not {length}."
            )
        batch = len(self._lengths)
        self.state.pretend(length)
        self._lengths, self._longest = [length] * batch, [length] * batch
        self._real, self._total = [torch.ones(batch, length, dtype=torch.bool)], length
        self._columns = dict.fromkeys(self._columns, length)

    def crop(self, max_length: int) -> None:
        """See :meth:`KittyCacheBase.crop`."""
        before = self._lengths
        super().crop(max_length)
        if before != self._lengths:
            self.state.crop(x - y for x, y in zip(before, self._lengths, strict=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See :meth:`KittyCacheBase.reorder_cache`; full pages are shared, never copied."""
        super().reorder_cache(beam_idx)
        if self.state.lengths:
            self.state.select(beam_idx)
