"""Channel boost: which key channels of a page get more bits (paper section 4.1).

The choice is made anew for every page and KV head; ties go to the lower channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kitty.methods import Method
from kitty.quant.groupwise import to_fp16

_U32 = 0xFFFFFFFF


def channel_scores(
    keys: Tensor, selection: str, *, seed: int = 0, layer: int = 0, first_page: int | Tensor = 0
) -> Tensor:
    """Score of every channel; the highest scores are boosted.

    Args:
        keys: ``[B, H, P, G, D]``, any floating dtype; NaN and inf count as 0.
        selection: ``magnitude`` (sum of |fp16(x)| over the page, exact), ``variance`` (over the
            page, fp64), ``random`` (a counter-based hash; no generator state), or ``rotary``
            (the channel's range times the magnitudes of both channels of its rotary pair).
        seed, layer: enter the random selection.
        first_page: absolute number of page 0, an int or int64 ``[B]``; enters the random one.

    Returns:
        fp64 ``[B, H, P, D]``.
    """
    batch, heads, pages, _, head_dim = keys.shape
    if selection == "random":
        ids = torch.arange(pages, device=keys.device)
        ids = torch.as_tensor(first_page, device=keys.device).reshape(-1, 1) + ids
        return (
            -hash_channels(seed, layer, heads, ids, head_dim)
            .double()
            .expand(batch, heads, pages, head_dim)
        )
    h = torch.where(torch.isfinite(keys), to_fp16(keys), 0.0).double()
    if selection == "variance":
        return h.var(dim=-2, unbiased=False)
    # multiples of 2^-24 below 2^16: fp64 adds up to 2^13 of them without rounding
    magnitude = h.abs().sum(dim=-2)
    return magnitude if selection == "magnitude" else _rotary(keys, h, magnitude)


def _rotary(keys: Tensor, h: Tensor, magnitude: Tensor) -> Tensor:
    """Range of each channel times the summed magnitude of its rotary pair, rounded once.

    The range sets the step of a channel's codes and so its error. How much that error moves the
    scores depends on the queries, which are not at hand: the rotation turns both channels of a
    pair (c and c ± D/2) into each other, so a pair that is large in the keys matters as a whole.

    Args:
        keys: ``[B, H, P, G, D]``.
        h: the same, rounded, fp64, 0 where not finite.
        magnitude: ``[B, H, P, D]``.
    """
    finite = torch.isfinite(keys)
    low = torch.where(finite, h, torch.inf).amin(dim=-2)
    high = torch.where(finite, h, -torch.inf).amax(dim=-2)
    reach = torch.where(low > high, 0.0, high - low)
    mate = magnitude.roll(-(keys.shape[-1] // 2), dims=-1)
    return reach * (magnitude + mate)


def select_channels(
    keys: Tensor, method: Method, *, layer: int, first_page: int | Tensor = 0
) -> Tensor:
    """The boosted channels of each page, ascending: int64 ``[B, H, P, D_boost]``.

    Args:
        keys: ``[B, H, P, G, D]`` after RoPE.
        method: gives D_boost, the selection and its seed.
        layer, first_page: as in :func:`channel_scores`.
    """
    count = method.num_boosted(keys.shape[-1])
    if count == 0:
        return torch.empty(*keys.shape[:3], 0, dtype=torch.int64, device=keys.device)
    scores = channel_scores(
        keys, method.selection, seed=method.seed, layer=layer, first_page=first_page
    )
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values


def hash_channels(seed: int, layer: int, heads: int, pages: Tensor, head_dim: int) -> Tensor:
    """Counter-based hash of (seed, layer, KV head, page, channel): uint32 values in int64.

    Each counter is folded in by ``x = mix(x ^ counter)`` with the 32-bit finalizer of MurmurHash3,
    so a kernel computes the same numbers in uint32 arithmetic.

    Args:
        pages: int64 ``[B, P]`` absolute page numbers.

    Returns:
        int64 ``[B, H, P, D]``, each in 0 … 2^32 - 1.
    """
    device = pages.device
    x = _mix(torch.tensor(seed & _U32, device=device))
    x = _mix(x ^ layer)
    x = _mix(x ^ torch.arange(heads, device=device))[None, :, None]  # [1, H, 1]
    x = _mix(x ^ pages[:, None, :])  # [B, H, P]
    return _mix(x[..., None] ^ torch.arange(head_dim, device=device))


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer on int64 tensors that hold uint32 values."""
    x = x ^ (x >> 16)
    x = _mul32(x, 0x85EBCA6B)
    x = x ^ (x >> 13)
    x = _mul32(x, 0xC2B2AE35)
    return x ^ (x >> 16)


def _mul32(x: Tensor, factor: int) -> Tensor:
    """``x * factor`` modulo 2^32, in two halves so that int64 never overflows."""
    return ((x & 0xFFFF) * factor + (((x >> 16) * factor & 0xFFFF) << 16)) & _U32
