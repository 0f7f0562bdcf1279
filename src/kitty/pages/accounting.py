"""Exact bytes of a packed cache: pages, 16-bit buffers, tables.

Every report takes them from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from kitty.pages.layout import BufferLayout, PageLayout

TABLE_BYTES = 4  # int32 page ids and lengths


@dataclasses.dataclass(frozen=True)
class ByteReport:
    """Bytes by kind; reports add up with ``+``.

    Attributes:
        key_pages, value_pages: packed pages.
        buffers: sinks and rings.
        tables: page tables and lengths.
    """

    key_pages: int = 0
    value_pages: int = 0
    buffers: int = 0
    tables: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.key_pages + self.value_pages + self.buffers + self.tables

    def __add__(self, other: ByteReport) -> ByteReport:
        return ByteReport(
            *(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self))
        )


def report_bytes(
    pages: PageLayout,
    buffers: BufferLayout,
    *,
    batch: int,
    heads: int,
    dtype: torch.dtype,
    key_pages: int,
    value_pages: int,
) -> ByteReport:
    """Bytes of one layer.

    Args:
        pages: layout of the layer's pages.
        buffers: layout of its 16-bit buffers.
        batch: sequences B.
        heads: KV heads H.
        dtype: of the 16-bit buffers.
        key_pages: pages, each counted once, however many sequences share it.
        value_pages: the same.
    """
    return ByteReport(
        key_pages=key_pages * heads * pages.key_page_bytes,
        value_pages=value_pages * heads * pages.value_page_bytes,
        buffers=buffers.num_bytes(batch, heads, dtype),
    )


def table_bytes(batch: int, max_pages: int, *, vectors: int = 2) -> ByteReport:
    """Bytes of both page tables ``[B, max_pages]`` and of ``vectors`` int32 ``[B]`` lengths."""
    return ByteReport(tables=TABLE_BYTES * batch * (2 * max_pages + vectors))


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that ``tensors`` hold on their devices, each storage counted once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[(storage.data_ptr(), storage.nbytes())] = storage.nbytes()
    return sum(storages.values())
