"""Quantization of whole pages: keys per channel over the page, values per token over channels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kitty.errors import KittyError
from kitty.methods import Method
from kitty.quant.groupwise import dequantize, quantize
from kitty.quant.selection import select_channels


class QuantizedKeys(NamedTuple):
    """Quantized key pages.

    Attributes:
        codes: uint8 ``[B, H, P, G, D]``; boosted channels use all ``boost_bits``.
        scale, zero: fp16 ``[B, H, P, 1, D]``.
        channels: int64 ``[B, H, P, D_boost]``, boosted channels in ascending order.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    channels: Tensor


class QuantizedValues(NamedTuple):
    """Quantized value pages, in groups of g = min(D, G) channels.

    Attributes:
        codes: uint8 ``[B, H, P, G, D]``.
        scale, zero: fp16 ``[B, H, P, G, D / g]``.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor


def quantize_keys(
    keys: Tensor,
    method: Method,
    *,
    layer: int,
    first_page: int | Tensor = 0,
    checked: bool = False,
) -> QuantizedKeys:
    """Quantize key pages per channel, boosted channels with more bits (paper section 4.1).

    Args:
        keys: ``[B, H, P, G, D]`` after RoPE, any floating dtype.
        method: bits, boost and selection; ``key_bits`` must not be 16.
        layer, first_page: place of the pages, for the random selection.
        checked: raise a KittyError on NaN or inf.
    """
    if not method.quantizes_keys:
        raise KittyError(
            f"Method {method.name!r} keeps keys in 16 bit: there is nothing to quantize."
        )
    channels = select_channels(keys, method, layer=layer, first_page=first_page)
    bits = torch.full((*keys.shape[:3], keys.shape[-1]), method.key_bits, device=keys.device)
    bits = bits.scatter(-1, channels, method.boost_bits)
    codes, scale, zero = quantize(keys, bits.unsqueeze(-2), dim=-2, checked=checked)
    return QuantizedKeys(codes, scale, zero, channels)


def quantize_values(values: Tensor, method: Method, *, checked: bool = False) -> QuantizedValues:
    """Quantize value pages per token over groups of min(D, G) channels (paper section 4.1).

    Args:
        values: ``[B, H, P, G, D]``, any floating dtype.
        method: ``value_bits`` must not be 16.
        checked: raise a KittyError on NaN or inf.
    """
    if not method.quantizes_values:
        raise KittyError(
            f"Method {method.name!r} keeps values in 16 bit: there is nothing to quantize."
        )
    grouped = values.unflatten(-1, (-1, method.value_group(values.shape[-1])))
    codes, scale, zero = quantize(grouped, method.value_bits, dim=-1, checked=checked)
    return QuantizedValues(codes.flatten(-2), scale.squeeze(-1), zero.squeeze(-1))


def dequantize_keys(pages: QuantizedKeys, dtype: torch.dtype) -> Tensor:
    """Key pages back to ``dtype``: ``[B, H, P, G, D]``."""
    return dequantize(pages.codes, pages.scale, pages.zero, dtype)


def dequantize_values(pages: QuantizedValues, dtype: torch.dtype) -> Tensor:
    """Value pages back to ``dtype``: ``[B, H, P, G, D]``."""
    groups = pages.scale.shape[-1]
    codes = pages.codes.unflatten(-1, (groups, -1))
    x = dequantize(codes, pages.scale.unsqueeze(-1), pages.zero.unsqueeze(-1), dtype)
    return x.flatten(-2)
