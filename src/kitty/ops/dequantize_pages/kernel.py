"""Triton kernels of dequantize_pages: the paper's Algorithm 1, whole pages back to 16 bit."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# No postponed annotations: the interpreter of Triton 3.0 knows tl.constexpr only as a class.

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kitty.ops.quantize_pages.kernel import FP16_MAX, N_PLANES

if TYPE_CHECKING:
    from torch import Tensor

    from kitty.pages import KeyPages, ValuePages


@triton.jit
def decoded(b_code, b_scale, b_zero, dtype: tl.constexpr):
    """``code * scale + zero`` in fp32, clamped to ±65504, as ``dtype``."""
    b_x = b_code.to(tl.float32) * b_scale + b_zero
    return tl.minimum(tl.maximum(b_x, -FP16_MAX), FP16_MAX).to(dtype)


@triton.jit
def dequantize_keys_kernel(
    p_words,
    p_high,
    p_meta,
    p_boost_index,  # [B, P, H, D]
    p_table,  # [B, P]
    p_out,  # [B, H, P * G, D]
    num_heads,
    num_pages,
    stride_table,
    G: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One page of one head per program; grid (H, P, B). Pages with id -1 become zeros."""
    i_h, i_page, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = G // N_PLANES
    o_t = tl.arange(0, ROWS)
    o_c = tl.arange(0, BLOCK_D)
    m_c = o_c < D
    page = tl.load(p_table + i_b.to(tl.int64) * stride_table + i_page)
    m_page = o_c < tl.where(page >= 0, D, 0)
    i_part = tl.maximum(page, 0).to(tl.int64) * num_heads + i_h
    i_out = (i_b.to(tl.int64) * num_heads + i_h) * num_pages + i_page
    p_out += i_out * (G * D)
    p_page = p_meta + i_part * (2 * D) + o_c
    b_scale = tl.load(p_page, mask=m_page, other=0.0).to(tl.float32)[None, :]
    b_zero = tl.load(p_page + D, mask=m_page, other=0.0).to(tl.float32)[None, :]
    o_word = o_t[:, None] * D + o_c[None, :]
    m_word = m_page[None, :] & (o_t[:, None] >= 0)
    b_words = tl.load(p_words + i_part * (ROWS * D) + o_word, mask=m_word, other=0).to(tl.int32)
    b_high = tl.zeros([ROWS, BLOCK_D], tl.int32)
    if D_BOOST > 0:
        # a narrow index times a constant may wrap
        i_map = (i_b.to(tl.int64) * num_pages + i_page) * num_heads + i_h
        o_list = tl.load(p_boost_index + i_map * D + o_c, mask=m_page, other=0).to(tl.int32)
        m_high = (o_list < D_BOOST)[None, :] & m_word
        o_high = o_t[:, None] * D_BOOST + o_list[None, :]
        p_part = p_high + i_part * (ROWS * D_BOOST)
        b_high = tl.load(p_part + o_high, mask=m_high, other=0).to(tl.int32)
    for i_plane in tl.static_range(N_PLANES):
        b_code = ((b_words >> (2 * i_plane)) & 3) + ((b_high >> (2 * i_plane)) & 3) * 4
        b_x = decoded(b_code, b_scale, b_zero, p_out.dtype.element_ty)
        tl.store(p_out + i_plane * (ROWS * D) + o_word, b_x, mask=m_c[None, :])


@triton.jit
def dequantize_values_kernel(
    p_words,
    p_meta,
    p_table,  # [B, P]
    p_out,  # [B, H, P * G, D]
    num_heads,
    num_pages,
    stride_table,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """One page of one head per program; grid (H, P, B). Pages with id -1 become zeros."""
    i_h, i_page, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = G // N_PLANES
    N_GROUPS: tl.constexpr = D // GROUP
    o_t = tl.arange(0, ROWS)
    o_c = tl.arange(0, BLOCK_GROUP)
    m_c = (o_c < GROUP)[None, :]
    page = tl.load(p_table + i_b.to(tl.int64) * stride_table + i_page)
    m_t = o_t < tl.where(page >= 0, ROWS, 0)
    i_part = tl.maximum(page, 0).to(tl.int64) * num_heads + i_h
    i_out = (i_b.to(tl.int64) * num_heads + i_h) * num_pages + i_page
    p_out += i_out * (G * D)
    for i_group in tl.static_range(N_GROUPS):
        o_word = o_t[:, None] * D + i_group * GROUP + o_c[None, :]
        p_page = p_words + i_part * (ROWS * D) + o_word
        b_words = tl.load(p_page, mask=m_c & m_t[:, None], other=0).to(tl.int32)
        for i_plane in tl.static_range(N_PLANES):
            o_token = i_group * G + i_plane * ROWS + o_t
            p_token = p_meta + i_part * (2 * N_GROUPS * G) + o_token
            b_scale = tl.load(p_token, mask=m_t, other=0.0).to(tl.float32)
            b_zero = tl.load(p_token + N_GROUPS * G, mask=m_t, other=0.0).to(tl.float32)
            b_code = (b_words >> (2 * i_plane)) & 3
            b_x = decoded(b_code, b_scale[:, None], b_zero[:, None], p_out.dtype.element_ty)
            tl.store(p_out + i_plane * (ROWS * D) + o_word, b_x, mask=m_c)


def launch_dequantize_keys(
    keys: "KeyPages", index: "Tensor", table: "Tensor", out: "Tensor"
) -> None:
    """Launch one program per page and head of ``table`` ``[B, P]``."""
    batch, num_pages = table.shape
    heads, word_rows, head_dim = keys.words.shape[1:]
    if out.numel() == 0:
        return
    dequantize_keys_kernel[(heads, num_pages, batch)](
        keys.words,
        keys.high,
        keys.meta,
        index.contiguous(),
        table,
        out,
        heads,
        num_pages,
        table.stride(0),
        G=word_rows * 8,
        D=head_dim,
        D_BOOST=keys.high.shape[-1],
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
        enable_fp_fusion=False,
    )


def launch_dequantize_values(values: "ValuePages", table: "Tensor", out: "Tensor") -> None:
    """Launch one program per page and head of ``table`` ``[B, P]``."""
    batch, num_pages = table.shape
    heads, word_rows, head_dim = values.words.shape[1:]
    group = min(head_dim, word_rows * 8)
    if out.numel() == 0:
        return
    dequantize_values_kernel[(heads, num_pages, batch)](
        values.words,
        values.meta,
        table,
        out,
        heads,
        num_pages,
        table.stride(0),
        G=word_rows * 8,
        D=head_dim,
        GROUP=group,
        BLOCK_GROUP=triton.next_power_of_2(group),
        num_warps=4,
        enable_fp_fusion=False,
    )
