"""The paper's three-kernel form of attention over packed pages: scores, softmax, weighted sum.

A baseline of the benchmark (arXiv:2511.18643, section 5): full pages only, no split of a
sequence, every logit and every weight through memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitty.ops.decode_attention.kernel import (
    N_PLANES,
    any_plane,
    high_words,
    key_page,
    launch_plan,
    load_list,
    load_value_words,
)
from kitty.pages import KeyPages, ValuePages

SUBNORMAL = tl.constexpr(2.0**24)
GAIN = tl.constexpr(2.0**8)  # of a weight, at most 1, times a value scale


@triton.jit
def scores_kernel(
    p_query,  # [B, Hq, D]
    p_words,
    p_high,
    p_meta,
    p_boosted,
    p_table,  # [B, P]
    p_scores,  # [B, Hq, P * G] fp16
    num_heads,
    num_pages,
    softmax_scale,
    G: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Logits of one page; grid (B · H, P)."""
    ROWS: tl.constexpr = G // N_PLANES
    i_bh, i_page = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // num_heads, i_bh % num_heads
    o_n = tl.arange(0, BLOCK_N)
    o_r = tl.minimum(o_n, QUERIES_PER_KV - 1)
    o_c, o_t, o_b = tl.arange(0, D), tl.arange(0, ROWS), tl.arange(0, BLOCK_B)
    p_row = p_query + (i_bh * QUERIES_PER_KV + o_r) * D
    b_q = tl.load(p_row[:, None] + o_c[None, :])
    i_part = tl.load(p_table + i_b * num_pages + i_page).to(tl.int64) * num_heads + i_h
    b_w, b_qs, b_z = key_page(i_part, p_words, p_meta, b_q, tl.trans(b_q), o_t, o_c, ROWS, D, D)
    b_h, b_qh = b_w, b_qs
    if D_BOOST > 0:
        b_list = load_list(p_boosted + i_part * D_BOOST, o_b, D_BOOST, BLOCK_B).to(tl.int32)
        b_scale = tl.load(p_meta + i_part * (2 * D) + b_list)
        b_qh = tl.trans(tl.load(p_row[:, None] + b_list[None, :]) * (b_scale * 4.0)[None, :])
        b_h = high_words(p_high + i_part * (ROWS * D_BOOST), o_t, o_b, D_BOOST, BLOCK_B)
    p_out = p_scores + (i_bh.to(tl.int64) * QUERIES_PER_KV + o_n) * (num_pages * G) + i_page * G
    for j in tl.range(0, N_PLANES, num_stages=1):
        b_s = tl.dot(any_plane(b_w, j, True), b_qs)
        if D_BOOST > 0:
            b_s = tl.dot(any_plane(b_h, j, True), b_qh, b_s)
        b_s = (b_s * SUBNORMAL + b_z) * softmax_scale
        p_token = p_out[None, :] + (j * ROWS + o_t)[:, None]
        tl.store(p_token, b_s, mask=(o_n < QUERIES_PER_KV)[None, :])


@triton.jit
def weighted_sum_kernel(
    p_weights,  # [B, Hq, P * G] fp16
    p_words,
    p_meta,
    p_table,  # [B, P]
    p_out,  # [B, Hq, D]
    num_heads,
    num_pages,
    G: tl.constexpr,
    D: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Output of all queries of a KV head; grid (B · H)."""
    ROWS: tl.constexpr = G // N_PLANES
    i_bh = tl.program_id(0)
    i_b, i_h = i_bh // num_heads, i_bh % num_heads
    o_n = tl.arange(0, BLOCK_N)
    o_v, o_t = tl.arange(0, D), tl.arange(0, ROWS)
    b_acc = tl.zeros((D, BLOCK_N), tl.float32)
    b_offset = tl.zeros((ROWS, BLOCK_N), tl.float32)
    o_r = tl.minimum(o_n, QUERIES_PER_KV - 1)
    p_row = p_weights + (i_bh.to(tl.int64) * QUERIES_PER_KV + o_r) * (num_pages * G)
    for i in tl.range(0, num_pages, num_stages=1):
        i_part = tl.load(p_table + i_b * num_pages + i).to(tl.int64) * num_heads + i_h
        b_w = load_value_words(p_words + i_part * (ROWS * D), o_t, o_v, D, D)
        for j in tl.range(0, N_PLANES, num_stages=1):
            p_token = p_meta + i_part * (2 * G) + j * ROWS + o_t
            b_scale = tl.load(p_token).to(tl.float32)
            b_zero = tl.load(p_token + G).to(tl.float32)
            b_p = tl.load(p_row[None, :] + (i * G + j * ROWS + o_t)[:, None]).to(tl.float32)
            b_offset += b_p * b_zero[:, None]
            b_p = (b_p * (b_scale * GAIN)[:, None]).to(tl.float16)
            b_acc = tl.dot(any_plane(b_w, j, True), b_p, b_acc)
    b_acc = b_acc * (SUBNORMAL / GAIN) + tl.sum(b_offset, 0)[None, :]
    o_out = (i_bh * QUERIES_PER_KV + o_n)[None, :] * D + o_v[:, None]
    tl.store(p_out + o_out, b_acc, mask=(o_n < QUERIES_PER_KV)[None, :])


def three_kernel_attention(
    query: Tensor,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
    scores: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Attention ``[B, Hq, D]`` of one query a sequence over full pages, unsplit.

    Args:
        query: ``[B, Hq, D]`` fp16, D a power of two.
        keys, values: page storage.
        key_table, value_table: int32 ``[B, P]``, every entry a page.
        scores: fp16 workspace ``[B, Hq, P * G]``.
        softmax_scale: factor of the logits.
    """
    batch, num_query_heads, head_dim = query.shape
    heads, word_rows = keys.words.shape[1:3]
    num_pages = key_table.shape[1]
    num_boosted = keys.high.shape[-1]
    queries_per_kv = num_query_heads // heads
    shapes = {
        "G": word_rows * 8,
        "D": head_dim,
        "QUERIES_PER_KV": queries_per_kv,
        "BLOCK_N": launch_plan(queries_per_kv, 1, head_dim).block_n,
        "num_warps": 1,
    }
    scores_kernel[(batch * heads, num_pages)](
        query,
        keys.words.view(torch.uint16),
        keys.high.view(torch.uint16),
        keys.meta,
        keys.boosted,
        key_table,
        scores,
        heads,
        num_pages,
        softmax_scale,
        D_BOOST=num_boosted,
        BLOCK_B=max(16, triton.next_power_of_2(num_boosted)),
        **shapes,
    )
    weights = torch.softmax(scores, dim=-1)
    out = torch.empty_like(query)
    weighted_sum_kernel[(batch * heads,)](
        weights,
        values.words.view(torch.uint16),
        values.meta,
        value_table,
        out,
        heads,
        num_pages,
        **shapes,
    )
    return out
