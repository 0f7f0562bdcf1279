"""Groupwise asymmetric quantizer: rounding, tie and degenerate-group rules in one place.

A group is one line of a tensor along one dimension; it shares an fp16 scale and an fp16 zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kitty.errors import KittyError

FP16_MAX = 65504.0


class Quantized(NamedTuple):
    """Codes with the scale and zero of each group.

    Attributes:
        codes: uint8, shaped like the input.
        scale, zero: fp16, shaped like the input but of size 1 along the group dimension.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor


def to_fp16(x: Tensor) -> Tensor:
    """``x`` rounded to fp16 and saturated at ±65504; NaN stays NaN."""
    if x.dtype == torch.float64:
        x = _to_fp32_odd(x)
    return x.to(torch.float16).clamp(-FP16_MAX, FP16_MAX)


def _to_fp32_odd(x: Tensor) -> Tensor:
    """fp64 to fp32, rounded to odd, so that rounding on to fp16 gives what one rounding would.

    torch goes from fp64 to fp16 by way of the nearest fp32, which may turn a value just beside the
    middle of two fp16 numbers into a tie.
    """
    near = x.float()
    inexact = near.double() != x
    beyond = near.double().abs() > x.abs()
    bits = near.view(torch.int32)
    return torch.where(inexact, (bits - beyond.int()) | 1, bits).view(torch.float32)


def quantize(x: Tensor, bits: int | Tensor, dim: int, *, checked: bool = False) -> Quantized:
    """Quantize each group of ``x`` along ``dim`` to ``bits`` bits (paper section 2.2).

    With h = fp16(x) saturated at ±65504, in fp32: zero = min h, scale = fp16((max h - min h) /
    (2^bits - 1)), code = floor((h - zero) * (1 / scale) + 0.5) clamped to 0 … 2^bits - 1; where
    the scale is 0 its inverse is taken as 0, so a constant group comes back exactly. The error
    before the last rounding is at most max(scale / 2, (2^bits - 1) * 2^-25) * (1 + 2^-20).

    NaN and inf are left out of a group's minimum and maximum, so they touch no other element:
    NaN and -inf get code 0, +inf the highest code, and a group with no finite element gets
    scale = zero = 0.

    Args:
        x: floating point, any shape with at least one element along ``dim``.
        bits: 1 to 8; an integer tensor of them must broadcast against the scale.
        dim: the dimension along which a group runs.
        checked: raise on NaN or inf instead.

    Raises:
        KittyError: ``bits`` is out of range, groups have no element, or ``checked`` and ``x`` has
            NaN or inf. The values of a tensor of bits are looked at only if ``checked``, since
            that waits for a GPU.
    """
    _check_bits(bits, checked)
    if x.dim() and x.shape[dim] == 0:
        raise KittyError(
            f"The tensor to quantize has shape {tuple(x.shape)}, so its groups along dimension "
            f"{dim} have no element: give each at least one."
        )
    finite = torch.isfinite(x)
    if checked and not bool(finite.all()):
        raise KittyError(
            f"The tensor to quantize has {int((~finite).sum())} NaN or inf elements of "
            f"{x.numel()}: only finite keys and values can be quantized."
        )
    levels = _levels(bits, x.device)
    h = to_fp16(x).float()
    low = torch.where(finite, h, torch.inf).amin(dim, keepdim=True)
    high = torch.where(finite, h, -torch.inf).amax(dim, keepdim=True)
    empty = low > high
    low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
    scale = to_fp16((high - low) / levels)
    step = scale.float()
    inverse = torch.where(step == 0, 0.0, 1.0 / step)
    # inf saturates to ±65504; against a group without finite elements it must still land on a code
    code = torch.floor((h - low) * inverse + 0.5)
    code = torch.where(x == torch.inf, levels, code).nan_to_num(nan=0.0)
    code = torch.minimum(code.clamp_min(0.0), levels)
    return Quantized(code.to(torch.uint8), scale, low.to(torch.float16))


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """``code * scale + zero`` in fp32, clamped to ±65504 and rounded to ``dtype``.

    Args:
        codes: uint8, any shape.
        scale, zero: fp16, broadcastable against ``codes``.
        dtype: of the result.
    """
    x = codes.float() * scale.float() + zero.float()
    return x.clamp(-FP16_MAX, FP16_MAX).to(dtype)


def _check_bits(bits: int | Tensor, checked: bool) -> None:
    if isinstance(bits, Tensor):
        whole = not bits.is_floating_point() and not bits.is_complex()
        sound = whole and not (checked and bool(((bits < 1) | (bits > 8)).any()))
    else:
        sound = isinstance(bits, int) and 1 <= bits <= 8
    if not sound:
        raise KittyError(f"bits is {bits}, but the quantizer takes whole numbers from 1 to 8.")


def _levels(bits: int | Tensor, device: torch.device) -> Tensor:
    """Highest code 2^bits - 1 as fp32."""
    if isinstance(bits, Tensor):
        return torch.exp2(bits.to(device=device, dtype=torch.float32)) - 1
    return torch.tensor(2.0**bits - 1, device=device)
