"""dequantize_pages: packed pages back to 16 bit, for long second turns and as an oracle."""

import torch
from torch import Tensor

from kitty.ops.dequantize_pages.reference import (
    dequantize_keys_reference,
    dequantize_values_reference,
)
from kitty.ops.dispatch import on_device_of, runs_kernel
from kitty.pages import KeyPages, ValuePages, boost_index


def dequantize_key_pages(
    keys: KeyPages, key_table: Tensor, dtype: torch.dtype, *, index: Tensor | None = None
) -> Tensor:
    """Key pages of each sequence in ``dtype`` (paper section 5, Algorithm 1).

    Args:
        keys: page storage.
        key_table: int32 ``[B, P]`` page ids; a page with id -1 becomes zeros.
        dtype: fp16 or bf16 (also fp32 or fp64 on a CPU).
        index: the paper's ``Boost_IDX`` map of each page of the table, ``[B, P, H, D]``; None
            derives it from the stored lists.

    Returns:
        ``[B, H, P * G, D]``.
    """
    if index is None:
        index = boost_index(keys.boosted[key_table.clamp_min(0)], keys.words.shape[-1])
    return torch.ops.kitty.dequantize_keys(*keys, index, key_table, dtype)


def dequantize_value_pages(values: ValuePages, value_table: Tensor, dtype: torch.dtype) -> Tensor:
    """Value pages of each sequence in ``dtype``; arguments and result as for keys."""
    return torch.ops.kitty.dequantize_values(*values, value_table, dtype)


@torch.library.custom_op(
    "kitty::dequantize_keys",
    mutates_args=(),
    schema="(Tensor words, Tensor high, Tensor meta, Tensor boosted, Tensor index, Tensor table, "
    "ScalarType dtype) -> Tensor",
)
def _dequantize_keys(
    words: Tensor,
    high: Tensor,
    meta: Tensor,
    boosted: Tensor,
    index: Tensor,
    table: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    keys = KeyPages(words, high, meta, boosted)
    if not runs_kernel(words):
        return dequantize_keys_reference(keys, index, table, dtype).contiguous()
    from kitty.ops.dequantize_pages.kernel import launch_dequantize_keys

    out = _out(words, table, dtype)
    with on_device_of(words):
        launch_dequantize_keys(keys, index, table, out)
    return out


@torch.library.custom_op(
    "kitty::dequantize_values",
    mutates_args=(),
    schema="(Tensor words, Tensor meta, Tensor table, ScalarType dtype) -> Tensor",
)
def _dequantize_values(
    words: Tensor,
    meta: Tensor,
    table: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    values = ValuePages(words, meta)
    if not runs_kernel(words):
        return dequantize_values_reference(values, table, dtype).contiguous()
    from kitty.ops.dequantize_pages.kernel import launch_dequantize_values

    out = _out(words, table, dtype)
    with on_device_of(words):
        launch_dequantize_values(values, table, out)
    return out


@_dequantize_keys.register_fake
def _dequantize_keys_fake(
    words: Tensor,
    high: Tensor,
    meta: Tensor,
    boosted: Tensor,
    index: Tensor,
    table: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return _out(words, table, dtype)


@_dequantize_values.register_fake
def _dequantize_values_fake(
    words: Tensor,
    meta: Tensor,
    table: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return _out(words, table, dtype)


def _out(words: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for ``[B, H, P * G, D]``."""
    batch, num_pages = table.shape
    _, heads, word_rows, head_dim = words.shape
    return words.new_empty((batch, heads, num_pages * word_rows * 8, head_dim), dtype=dtype)
