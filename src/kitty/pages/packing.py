"""Pack quantized pages into 16-bit words and back, in torch.

The kernels are held to these functions bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kitty.pages.layout import PLANE_BITS, PLANES, PageLayout
from kitty.pages.storage import KeyPages, ValuePages
from kitty.quant import QuantizedKeys, QuantizedValues


def pack_words(codes: Tensor) -> Tensor:
    """2-bit codes of a page to words.

    Args:
        codes: integer ``[..., G, D]``, 0 to 3.

    Returns:
        int16 ``[..., G/8, D]``: bits 2j, 2j+1 of row t hold token t + j·G/8.
    """
    planes = codes.to(torch.int32).unflatten(-2, (PLANES, -1))  # [..., 8, G/8, D]
    shift = torch.arange(PLANES, device=codes.device, dtype=torch.int32) * PLANE_BITS
    words = (planes << shift[:, None, None]).sum(dim=-3, dtype=torch.int32)
    return words.to(torch.int16)  # wraps: the word's bits, read as a signed number


def unpack_words(words: Tensor) -> Tensor:
    """Inverse of :func:`pack_words`: int16 ``[..., G/8, D]`` to uint8 codes ``[..., G, D]``."""
    shift = torch.arange(PLANES, device=words.device, dtype=torch.int32) * PLANE_BITS
    planes = (words.to(torch.int32).unsqueeze(-3) >> shift[:, None, None]) & (2**PLANE_BITS - 1)
    return planes.flatten(-3, -2).to(torch.uint8)


def pack_keys(quantized: QuantizedKeys, layout: PageLayout) -> KeyPages:
    """Pack quantized keys ``[B, H, P, G, D]`` into B·P pages; page p of sequence b is b·P + p.

    Args:
        quantized: codes of channels outside the list must be below 4. Keys of 4 bits throughout
            have no list: a layout whose ``num_boosted`` is D lists every channel.
        layout: of the pages.
    """
    codes, scale, zero, channels = quantized
    if layout.num_boosted == layout.head_dim:
        every = torch.arange(layout.head_dim, device=codes.device)
        channels = every.expand(*codes.shape[:3], -1)
    index = channels.unsqueeze(-2).expand(*channels.shape[:-1], codes.shape[-2], -1)
    high = codes.gather(-1, index.reshape(*codes.shape[:-1], channels.shape[-1])) >> PLANE_BITS
    meta = torch.cat([_positive_zero(scale), _positive_zero(zero)], dim=-2)  # [B, H, P, 2, D]
    return KeyPages(
        words=_to_pages(pack_words(codes & 3)),
        high=_to_pages(pack_words(high)),
        meta=_to_pages(meta),
        boosted=_to_pages(channels.to(torch.uint8)),
    )


def pack_values(quantized: QuantizedValues) -> ValuePages:
    """Pack quantized values ``[B, H, P, G, D]`` into B·P pages, numbered as in pack_keys."""
    codes, scale, zero = quantized
    meta = torch.stack([_positive_zero(scale), _positive_zero(zero)], dim=-3)  # [..., 2, G, D/g]
    return ValuePages(words=_to_pages(pack_words(codes)), meta=_to_pages(meta.transpose(-1, -2)))


def unpack_keys(pages: KeyPages, page_table: Tensor) -> QuantizedKeys:
    """The pages of a table as quantized keys.

    Args:
        pages: page storage.
        page_table: integer ``[B, P]`` page ids, none negative.

    Returns:
        codes uint8 ``[B, H, P, G, D]``, scale and zero fp16 ``[B, H, P, 1, D]``, channels int64
        ``[B, H, P, D_boost]``.
    """
    words, high, meta, boosted = (_from_pages(part, page_table) for part in pages)
    codes = unpack_words(words)
    channels = boosted.to(torch.int64)
    index = channels.unsqueeze(-2).expand(*codes.shape[:-1], channels.shape[-1])
    codes = codes.scatter_add(-1, index, unpack_words(high) << PLANE_BITS)
    scale, zero = meta.split(1, dim=-2)
    return QuantizedKeys(codes, scale, zero, channels)


def unpack_values(pages: ValuePages, page_table: Tensor) -> QuantizedValues:
    """The pages of a table as quantized values; arguments as in unpack_keys.

    Returns:
        codes uint8 ``[B, H, P, G, D]``, scale and zero fp16 ``[B, H, P, G, D/g]``.
    """
    words, meta = (_from_pages(part, page_table) for part in pages)
    scale, zero = meta.transpose(-1, -2).unbind(dim=-3)
    return QuantizedValues(unpack_words(words), scale, zero)


def boost_index(boosted: Tensor, head_dim: int) -> Tensor:
    """The paper's ``Boost_IDX_uint8`` map, derived from the stored list.

    Args:
        boosted: uint8 ``[..., D_boost]``, the boosted channels.
        head_dim: channels D.

    Returns:
        ``[..., D]``: for a boosted channel its row in the high plane, for others the sentinel
        D_boost; uint8, or int16 where D_boost is 256.
    """
    num_boosted = boosted.shape[-1]
    dtype = torch.uint8 if num_boosted < 256 else torch.int16
    index = torch.full(
        (*boosted.shape[:-1], head_dim), num_boosted, dtype=dtype, device=boosted.device
    )
    rank = torch.arange(num_boosted, device=boosted.device).to(dtype).expand(boosted.shape)
    # pages that were never written hold anything; their map may be anything, too
    return index.scatter(-1, boosted.to(torch.int64).clamp_max(head_dim - 1), rank)


def _positive_zero(x: Tensor) -> Tensor:
    """-0.0 stored as +0.0: which of both a minimum returns is not defined."""
    return x + 0.0


def _to_pages(part: Tensor) -> Tensor:
    """``[B, H, P, ...]`` to pages ``[B·P, H, ...]``."""
    return part.transpose(1, 2).flatten(0, 1).contiguous()


def _from_pages(part: Tensor, page_table: Tensor) -> Tensor:
    """Pages ``[N, H, ...]`` to ``[B, H, P, ...]`` by a table ``[B, P]``."""
    return part[page_table.to(torch.int64)].transpose(1, 2)
