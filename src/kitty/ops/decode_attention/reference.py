"""Torch reference of decode_attention, one sequence at a time, in any precision."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty.ops.dequantize_pages.reference import (
    dequantize_keys_reference,
    dequantize_values_reference,
)
from kitty.pages import Buffers, KeyPages, ValuePages, boost_index


@torch.no_grad()
def decode_attention_reference(
    query: Tensor,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
    buffers: Buffers,
    seq_lens: Tensor,
    *,
    sink: int,
    window: int,
    rollback: int,
    softmax_scale: float,
    softcap: float | None = None,
    compute: torch.dtype = torch.float32,
    decoded: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as each query sees it; arguments as in ``decode_attention``.

    Pages are decoded to ``decoded`` (None: the dtype of the buffers, as the simulated cache holds
    them), then all arithmetic is done in ``compute``.

    Returns:
        ``[B, Hq, T, D]`` and the log-sum-exp ``[B, Hq, T]``, both in ``compute``.
    """
    size = keys.words.shape[2] * 8
    num_tokens, head_dim = query.shape[2:]
    heads = keys.words.shape[1]
    out = query.new_zeros(query.shape, dtype=compute)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=compute)
    for b, length in enumerate(seq_lens.tolist()):
        # the last query sees the most pages; earlier ones see the first of them
        k_paged = v_paged = None
        if (count := max(0, length - 1 - sink - rollback) // size) > 0:
            table = key_table[b : b + 1, :count]
            index = boost_index(keys.boosted[table.long()], head_dim)
            dtype = decoded or buffers.sink_k.dtype
            k_paged = dequantize_keys_reference(keys, index, table, dtype)[0]
        if (count := max(0, length - 1 - sink - window - rollback) // size) > 0:
            table = value_table[b : b + 1, :count]
            dtype = decoded or buffers.sink_v.dtype
            v_paged = dequantize_values_reference(values, table, dtype)[0]
        for t in range(num_tokens):
            before = length - num_tokens + t
            if before < 0:
                continue
            key_paged = max(0, before - sink - rollback) // size * size
            value_paged = max(0, before - sink - window - rollback) // size * size
            k = _sequence(b, before, key_paged, sink, buffers.sink_k, buffers.key_ring)
            v = _sequence(b, before, value_paged, sink, buffers.sink_v, buffers.value_ring)
            if k_paged is not None:
                k.insert(1, k_paged[:, :key_paged])
            if v_paged is not None:
                v.insert(1, v_paged[:, :value_paged])
            q = query[b, :, t].to(compute).view(heads, -1, head_dim) * softmax_scale
            k_all = torch.cat([part.to(compute) for part in k], dim=1)  # [H, n, D]
            v_all = torch.cat([part.to(compute) for part in v], dim=1)
            logits = q @ k_all.transpose(-1, -2)  # [H, queries per KV head, n]
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            out[b, :, t] = (torch.softmax(logits, -1) @ v_all).flatten(0, 1)
            lse[b, :, t] = torch.logsumexp(logits, -1).flatten()
    return out, lse


def _sequence(
    b: int, before: int, paged: int, sink: int, sink_part: Tensor, ring: Tensor
) -> list[Tensor]:
    """16-bit tokens ``[H, n, D]`` that a query behind ``before`` tokens sees: sink, then ring."""
    in_sink = sink_part[b, :, : min(before + 1, sink)]
    slots = torch.arange(paged, max(before + 1 - sink, paged), device=ring.device) % ring.shape[2]
    return [in_sink, ring[b][:, slots]]
