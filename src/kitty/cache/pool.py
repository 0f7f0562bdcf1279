"""PagePool: memory of packed pages, with reference counts; keys and values apart.

An id names a page of one sequence in all layers (see kitty.pages), so one allocation serves a
whole model and one page table serves all its layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kitty.errors import KittyError
from kitty.pages import (
    ByteReport,
    KeyPages,
    PageLayout,
    ValuePages,
    empty_key_pages,
    empty_value_pages,
)

Storage = TypeVar("Storage", KeyPages, ValuePages)
GROWTH = 8  # a growing pool gets 1/8 more pages, so a page is copied about 8 times in its life


@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """Where and how one layer keeps its pages.

    Attributes:
        layout: of its pages.
        heads: KV heads H.
        device: of the layer.
    """

    layout: PageLayout
    heads: int
    device: torch.device


class Pages(Generic[Storage]):
    """The key pages or the value pages of all layers: storage, free list, reference counts.

    Attributes:
        capacity: pages that memory is allocated for.
        page_bytes: bytes of one page in all layers.
        generation: grows with every reallocation; until it does, all addresses stay.
        fixed: whether an exhausted pool raises instead of growing (a CUDA graph needs that).
    """

    def __init__(
        self,
        kind: str,
        layers: Sequence[PagedLayer],
        part_bytes: Callable[[PageLayout], int],
        create: Callable[[PageLayout, int, int, torch.device], Storage],
        room: Callable[[], int | None],
    ) -> None:
        """Empty pages.

        Args:
            kind: ``key`` or ``value``, for messages.
            layers: of the model, in order.
            part_bytes: bytes of one page of one KV head.
            create: makes storage of so many pages.
            room: bytes that may still be allocated; None for no limit.
        """
        self.kind = kind
        self.page_bytes = sum(x.heads * part_bytes(x.layout) for x in layers)
        self.capacity = 0
        self.generation = 0
        self.fixed = False
        self._layers = list(layers)
        self._create: Callable[[PageLayout, int, int, torch.device], Storage] = create
        self._room = room
        self._part_bytes = part_bytes
        self._storage: list[Storage] = [
            create(x.layout, 0, x.heads, x.device) for x in self._layers
        ]
        self._references: list[int] = []
        self._free: list[int] = []

    def storage(self, layer: int) -> Storage:
        """The page tensors of a layer; valid until ``generation`` changes."""
        return self._storage[layer]

    @property
    def in_use(self) -> int:
        """Pages with at least one reference."""
        return self.capacity - len(self._free)

    @property
    def shared(self) -> int:
        """Pages with more than one reference."""
        return sum(count > 1 for count in self._references)

    def add_layer(self, layer: PagedLayer) -> None:
        """Give one more layer room for every page, used or not.

        Raises:
            KittyError: that is more than the limit or the device has; says how many bytes.
        """
        layer_bytes = layer.heads * self._part_bytes(layer.layout)
        needed, room = self.capacity * layer_bytes, self._room()
        if room is not None and needed > room:
            raise self._exhausted(needed - room)
        try:
            storage = self._create(layer.layout, self.capacity, layer.heads, layer.device)
        except torch.cuda.OutOfMemoryError as error:
            raise self._exhausted(needed) from error
        self._layers.append(layer)
        self._storage.append(storage)
        self.page_bytes += layer_bytes

    def references(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._references[page]

    def reserve(self, num_pages: int) -> None:
        """Make room for ``num_pages`` pages in all, once, so that no address changes until then.

        Raises:
            KittyError: that is more than the limit or the device has; says how many bytes.
        """
        if num_pages > self.capacity:
            self._grow(num_pages - self.capacity)

    def allocate(self, count: int) -> list[int]:
        """Ids of ``count`` pages with one reference each.

        Raises:
            KittyError: the pool is exhausted; says how many bytes more are needed. Nothing is
                allocated then.
        """
        missing = count - len(self._free)
        if missing > 0:
            if self.fixed:
                raise self._exhausted(missing * self.page_bytes)
            self._grow(missing, max(missing, self.capacity // GROWTH))
        ids = [self._free.pop() for _ in range(count)]
        for page in ids:
            self._references[page] = 1
        return ids

    def retain(self, ids: Iterable[int]) -> None:
        """Add a reference to each page: a beam or a prefix shares it. Pages must be final."""
        for page in ids:
            if self._references[page] == 0:
                raise RuntimeError(f"{self.kind} page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Take a reference from each page; those without any become free."""
        for page in ids:
            if self._references[page] == 0:
                raise RuntimeError(f"{self.kind} page {page} is released once too often")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def clear(self) -> None:
        """Free every page; memory and addresses stay."""
        self._references = [0] * self.capacity
        self._free = list(range(self.capacity - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' tensors, exactly."""
        return sum(
            storage.words.shape[0] * layer.heads * self._part_bytes(layer.layout)
            for storage, layer in zip(self._storage, self._layers, strict=True)
        )

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of all layers."""
        for storage in self._storage:
            yield from storage

    def _grow(self, least: int, wanted: int = 0) -> None:
        """Add ``wanted`` pages, or fewer where the limit says so, but at least ``least``."""
        room = self._room()
        added = max(least, wanted)
        if room is not None:
            # a pool without layers yet has pages of no bytes
            affordable = max(0, room // self.page_bytes) if self.page_bytes else added
            if least > affordable:
                raise self._exhausted((least - affordable) * self.page_bytes)
            added = min(added, affordable)
        self.generation += 1
        try:
            self._reallocate(self.capacity + added)
        except torch.cuda.OutOfMemoryError as error:
            raise self._exhausted(least * self.page_bytes) from error
        self._references += [0] * added
        first = self.capacity
        self.capacity += added
        self._free = list(range(self.capacity - 1, first - 1, -1)) + self._free

    def _reallocate(self, num_pages: int) -> None:
        """Move the pages to larger tensors, layer by layer, so that little is held twice."""
        for index, layer in enumerate(self._layers):
            old = self._storage[index]
            if old.words.shape[0] >= num_pages:  # enlarged before an attempt that failed
                continue
            new = self._create(layer.layout, num_pages, layer.heads, layer.device)
            for source, target in zip(old, new, strict=True):
                target[: source.shape[0]] = source
            self._storage[index] = new

    def _exhausted(self, missing_bytes: int) -> KittyError:
        return KittyError(
            f"The pool of {self.kind} pages is exhausted: {self.in_use} of {self.capacity} pages "
            f"are in use and {missing_bytes} bytes more are needed (a page takes "
            f"{self.page_bytes} bytes over {len(self._layers)} layers); reserve a longer maximum "
            "length, raise the limit, or use fewer or shorter sequences."
        )


class PagePool:
    """Packed pages of a model's layers.

    Attributes:
        keys: key pages.
        values: value pages; separate, because a value page is written R tokens later.
        max_bytes: limit of both together, None for the device's.
    """

    keys: Pages[KeyPages]
    values: Pages[ValuePages]

    def __init__(self, layers: Sequence[PagedLayer], *, max_bytes: int | None = None) -> None:
        """An empty pool that grows on demand.

        Args:
            layers: one entry a layer that keeps pages, in order.
            max_bytes: limit of the memory of all pages.
        """
        self.layers = list(layers)
        self.max_bytes = max_bytes
        self.keys = Pages("key", layers, attrgetter("key_page_bytes"), empty_key_pages, self._room)
        self.values = Pages(
            "value", layers, attrgetter("value_page_bytes"), empty_value_pages, self._room
        )

    def reserve(self, key_pages: int, value_pages: int, *, fixed: bool = True) -> None:
        """Allocate up front; with ``fixed`` no address changes and no page is added from then on.

        Raises:
            KittyError: more than the limit or the device has.
        """
        self.keys.reserve(key_pages)
        self.values.reserve(value_pages)
        self.keys.fixed = self.values.fixed = fixed

    def add_layer(self, layer: PagedLayer) -> None:
        """Add a layer that keeps pages; it gets room for every page that the others have."""
        self.layers.append(layer)
        self.keys.add_layer(layer)
        self.values.add_layer(layer)

    def clear(self) -> None:
        """Free every page; memory stays."""
        self.keys.clear()
        self.values.clear()

    def report(self) -> ByteReport:
        """Bytes allocated for pages, used or not: the sizes of all tensors of the pool."""
        return ByteReport(
            key_pages=self.keys.num_bytes,
            value_pages=self.values.num_bytes,
        )

    def report_in_use(self) -> ByteReport:
        """Bytes of pages in use, shared ones counted once."""
        return ByteReport(
            key_pages=self.keys.in_use * self.keys.page_bytes,
            value_pages=self.values.in_use * self.values.page_bytes,
        )

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the pool."""
        yield from self.keys.tensors()
        yield from self.values.tensors()

    def _room(self) -> int | None:
        """Bytes that the limit still allows."""
        return None if self.max_bytes is None else self.max_bytes - self.report().total
