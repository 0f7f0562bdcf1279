"""Tensors that hold packed pages and 16-bit buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kitty.pages.layout import BufferLayout, PageLayout


class KeyPages(NamedTuple):
    """Storage of N key pages of H KV heads, contiguous (package docstring).

    Attributes:
        words: int16 ``[N, H, G/8, D]``, low planes of every channel.
        high: int16 ``[N, H, G/8, D_boost]``, high planes of the boosted channels.
        meta: fp16 ``[N, H, 2, D]``, scale (0) and zero (1) of every channel.
        boosted: uint8 ``[N, H, D_boost]``, the boosted channels, ascending.
    """

    words: Tensor
    high: Tensor
    meta: Tensor
    boosted: Tensor


class ValuePages(NamedTuple):
    """Storage of N value pages of H KV heads, contiguous (package docstring).

    Attributes:
        words: int16 ``[N, H, G/8, D]``.
        meta: fp16 ``[N, H, 2, D/g, G]``, scale (0) and zero (1) of every token's groups.
    """

    words: Tensor
    meta: Tensor


def empty_key_pages(
    layout: PageLayout, num_pages: int, heads: int, device: torch.device | str = "cpu"
) -> KeyPages:
    """Uninitialized storage of ``num_pages`` key pages."""
    return KeyPages(
        **{
            name: torch.empty((num_pages, heads, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in layout.key_parts().items()
        }
    )


def empty_value_pages(
    layout: PageLayout, num_pages: int, heads: int, device: torch.device | str = "cpu"
) -> ValuePages:
    """Uninitialized storage of ``num_pages`` value pages."""
    return ValuePages(
        **{
            name: torch.empty((num_pages, heads, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in layout.value_parts().items()
        }
    )


class Buffers(NamedTuple):
    """16-bit buffers of one layer, contiguous (package docstring).

    Attributes:
        sink_k: ``[B, H, S, D]``.
        sink_v: ``[B, H, S, D]``.
        key_ring: ``[B, H, CK, D]``.
        value_ring: ``[B, H, CV, D]``.
    """

    sink_k: Tensor
    sink_v: Tensor
    key_ring: Tensor
    value_ring: Tensor


def empty_buffers(
    layout: BufferLayout,
    batch: int,
    heads: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Buffers:
    """Uninitialized buffers of one layer."""
    return Buffers(
        **{
            name: torch.empty(shape, dtype=part_dtype, device=device)
            for name, (shape, part_dtype) in layout.parts(batch, heads, dtype).items()
        }
    )
