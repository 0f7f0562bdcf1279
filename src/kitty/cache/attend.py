"""Dense attention over left-compacted keys and values, shared by every 16-bit path.

Grouped queries are folded into the query dimension, so keys and values are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CAPPED_ROWS = 512  # queries at a time where logits are formed, so that they stay small


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention of grouped queries; rows without any visible key give zeros.

    Args:
        query: ``[B, Hq, T, D]`` with Hq a multiple of H.
        keys, values: ``[B, H, N, D]``, finite also where masked.
        mask: bool ``[B or 1, T, N]``, True where visible; None for plain causal with T == N.
        scale: softmax scale.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).

    Returns:
        ``[B, Hq, T, D]``.
    """
    if mask is None and softcap is None:
        groups = query.shape[1] // keys.shape[1]
        if groups > 1:
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
    batch, num_heads, length, dim = query.shape
    groups = num_heads // keys.shape[1]
    if mask is None:
        mask = torch.ones(1, length, length, dtype=torch.bool, device=query.device).tril()
    if softcap is not None and length > CAPPED_ROWS:
        rows = [slice(i, i + CAPPED_ROWS) for i in range(0, length, CAPPED_ROWS)]
        calls = (
            attend(query[:, :, r], keys, values, mask[:, r], scale=scale, softcap=softcap)
            for r in rows
        )
        return torch.cat(list(calls), dim=2)
    empty = ~mask.any(dim=-1, keepdim=True)  # [B, T, 1]: pads, whose row would give NaN
    folded = query.reshape(batch, keys.shape[1], groups * length, dim)
    # torch < 2.5 yields NaN for a row without a key, so such a row sees all and is zeroed below
    visible = (mask | empty).repeat(1, groups, 1).unsqueeze(1)  # [B, 1, g*T, N]
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=visible, scale=scale)
    else:
        logits = (folded @ keys.transpose(-1, -2)) * scale
        logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible, -torch.inf)
        out = torch.softmax(logits, dim=-1, dtype=_softmax_dtype(query)).to(query.dtype) @ values
    out = out.reshape(batch, num_heads, length, dim)
    return out.masked_fill(empty.unsqueeze(1), 0.0)


def _softmax_dtype(query: Tensor) -> torch.dtype:
    """Low precision is summed in fp32; fp64 stays fp64."""
    return torch.promote_types(query.dtype, torch.float32)
