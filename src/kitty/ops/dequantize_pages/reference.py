"""Torch reference of dequantize_pages: unpack by kitty.pages, decode by kitty.quant."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty.pages import KeyPages, ValuePages, unpack_keys, unpack_values
from kitty.quant import dequantize_keys, dequantize_values


def dequantize_keys_reference(
    keys: KeyPages, index: Tensor, table: Tensor, dtype: torch.dtype
) -> Tensor:
    """Keys ``[B, H, P * G, D]``; the boosted channels are read off the map ``[B, P, H, D]``."""
    taken = [part[table.clamp_min(0)].flatten(0, 1) for part in keys]  # [B * P, H, ...]
    num_boosted = keys.high.shape[-1]
    is_boosted = index.to(torch.int32) < num_boosted
    # as many channels as there are rows, whatever the map of an absent page says
    boosted = is_boosted.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    taken[-1] = boosted[..., :num_boosted].to(torch.uint8).flatten(0, 1)
    pages = torch.arange(table.numel(), device=table.device).view(table.shape)
    return _masked(dequantize_keys(unpack_keys(KeyPages(*taken), pages), dtype), table)


def dequantize_values_reference(values: ValuePages, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Values ``[B, H, P * G, D]``."""
    return _masked(dequantize_values(unpack_values(values, table.clamp_min(0)), dtype), table)


def _masked(x: Tensor, table: Tensor) -> Tensor:
    """Zeros for pages with id -1, and pages joined."""
    absent = (table < 0)[:, None, :, None, None]
    return x.masked_fill(absent, 0.0).flatten(2, 3)
