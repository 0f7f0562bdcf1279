"""Triton kernels of quantize_pages; append quantizes its pages with the same two functions.

A page is read plane by plane (G/8 tokens, all channels): fields of one word come from the same
thread, so packing needs no exchange. Keys are read twice (statistics, codes), the second time out
of the cache; values once. A program holds UNROLL planes at a time, never a page: fully unrolled,
the compiler hoists all loads and its registers leave room for few programs.

Instructions per element set the speed, so the fast path has no test for NaN and inf: they show in
its minima, maxima or magnitudes, and such a page is done again with care.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kitty.ops.positions import num_pages

if TYPE_CHECKING:
    from torch import Tensor

    from kitty.pages import KeyPages, ValuePages

# The method's constants, restated for the kernels and checked against kitty.quant by the tests.
FP16_MAX = tl.constexpr(65504.0)
LOW_TOP = tl.constexpr(3.0)  # highest code of 2 bits
BOOST_TOP = tl.constexpr(15.0)  # highest code of 4 bits
N_PLANES = tl.constexpr(8)
VALUE_REGISTERS = 72  # of a thread, at most
FIXED_POINT = tl.constexpr(16777216.0)  # 2^24: fp16 numbers are multiples of 2^-24


@triton.jit
def load_rows(p_x, rows, stride_t, mask, o_c):
    """Rows of a plane as fp32 ``[G/8, BLOCK_D]``: as stored, and rounded to fp16, saturated."""
    raw = tl.load(p_x + rows.to(tl.int64)[:, None] * stride_t + o_c[None, :], mask=mask, other=0.0)
    b_raw = raw.to(tl.float32)
    if p_x.dtype.element_ty == tl.float16:
        b_x = b_raw
    else:
        b_x = tl.minimum(tl.maximum(b_raw, -FP16_MAX), FP16_MAX).to(tl.float16).to(tl.float32)
    return b_raw, b_x


@triton.jit
def plane_rows(first, i_plane, o_t, ROWS: tl.constexpr, RING: tl.constexpr):
    """Row numbers of a plane's tokens; in a ring of ``RING`` slots unless that is 0."""
    rows = first + i_plane * ROWS + o_t
    if RING > 0:
        rows = rows % RING
    return rows


@triton.jit
def extremes(b_low, b_high, b_raw, b_x, CAREFUL: tl.constexpr):
    """Running minimum and maximum. Fast: NaN and inf show in them; careful: both are left out."""
    if CAREFUL:
        finite = tl.abs(b_raw) < float("inf")
        b_low = tl.minimum(b_low, tl.where(finite, b_x, float("inf")))
        b_high = tl.maximum(b_high, tl.where(finite, b_x, float("-inf")))
    else:
        b_low = tl.minimum(b_low, b_raw, propagate_nan=tl.PropagateNan.ALL)
        b_high = tl.maximum(b_high, b_raw, propagate_nan=tl.PropagateNan.ALL)
    return b_low, b_high


@triton.jit
def saturated(b_x):
    """fp32 rounded to fp16, saturated; monotone, so it may follow a minimum or maximum."""
    return tl.minimum(tl.maximum(b_x, -FP16_MAX), FP16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def scale_zero(b_low, b_high, b_top):
    """Scale, zero and inverse scale of groups with extremes ``b_low``, ``b_high``; all fp32.

    Groups without a finite element have low > high: scale and zero become 0. No scale of 2 or
    4 bits reaches 65504, so none needs saturation.
    """
    empty = b_low > b_high
    b_low = tl.where(empty, 0.0, b_low) + 0.0  # -0.0 is stored as +0.0
    b_high = tl.where(empty, 0.0, b_high)
    b_scale = tl.div_rn(b_high - b_low, b_top).to(tl.float16).to(tl.float32) + 0.0
    b_divisor = tl.where(b_scale == 0.0, 1.0, b_scale)
    b_inverse = tl.where(b_scale == 0.0, 0.0, tl.div_rn(tl.zeros_like(b_divisor) + 1.0, b_divisor))
    return b_scale, b_low, b_inverse


@triton.jit
def codes_of(b_raw, b_x, b_zero, b_inverse, b_top, CAREFUL: tl.constexpr):
    """Codes as int32; truncation is floor, because what it truncates is ≥ 0."""
    b_code = tl.minimum((b_x - b_zero) * b_inverse + 0.5, b_top)
    if CAREFUL:
        b_code = tl.maximum(b_code, 0.0)
        b_code = tl.where(b_raw > float("-inf"), b_code, 0.0)  # NaN and -inf
        b_code = tl.where(b_raw == float("inf"), b_top, b_code)
    return b_code.to(tl.int32)


@triton.jit
def gathered_fields(b_x):
    """Bits 0 and 1 of each of the 8 nibbles of ``b_x``, side by side: a word."""
    b_x = b_x & 0x33333333
    b_x = (b_x | (b_x >> 2)) & 0x0F0F0F0F
    b_x = (b_x | (b_x >> 4)) & 0x00FF00FF
    return ((b_x | (b_x >> 8)) & 0xFFFF).to(tl.int16)


@triton.jit
def mix32(x):
    """MurmurHash3's finalizer on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def hash_channels(seed, layer, i_h, i_page, o_c):
    """The counter hash of kitty.quant, uint32 ``[BLOCK_D]``."""
    x = mix32((o_c * 0 + seed).to(tl.uint32))
    x = mix32(x ^ (o_c * 0 + layer).to(tl.uint32))
    x = mix32(x ^ (o_c * 0 + i_h).to(tl.uint32))
    x = mix32(x ^ (o_c * 0 + i_page).to(tl.uint32))
    return mix32(x ^ o_c.to(tl.uint32))


@triton.jit
def highest(b_score, o_c, D: tl.constexpr, D_BOOST: tl.constexpr, SHORT: tl.constexpr):
    """Which of int64 ``b_score`` ``[BLOCK_D]`` ≥ 0 are the D_BOOST highest; ties: lower channel.

    ``SHORT`` scores have 8 bits to spare, which take the channel: then none are equal.
    """
    if SHORT:
        b_score = b_score * 256 + (255 - o_c)
    b_score = tl.where(o_c < D, b_score, -1)
    above = b_score[None, :] > b_score[:, None]  # [BLOCK_D, BLOCK_D]
    if not SHORT:
        above = above | ((b_score[None, :] == b_score[:, None]) & (o_c[None, :] < o_c[:, None]))
    return (tl.sum(above.to(tl.int32), axis=1) < D_BOOST) & (o_c < D)


@triton.jit
def sum_of_squares(
    p_x, first, stride_t, o_t, o_c, b_mean, ROWS: tl.constexpr, RING: tl.constexpr, D: tl.constexpr
):
    """Σ (x - mean)² of each channel over the page, fp64 ``[BLOCK_D]``."""
    b_sum = tl.zeros([o_t.shape[0], o_c.shape[0]], tl.float64)
    for i_plane in range(N_PLANES):
        rows = plane_rows(first, i_plane, o_t, ROWS, RING)
        b_raw, b_x = load_rows(p_x, rows, stride_t, o_c[None, :] < D, o_c)
        b_x = tl.where(tl.abs(b_raw) < float("inf"), b_x, 0.0)
        b_gap = b_x.to(tl.float64) - b_mean[None, :]
        b_sum += b_gap * b_gap
    return tl.sum(b_sum, axis=0)


@triton.jit
def key_statistics(
    p_x,
    first,
    stride_t,
    o_t,
    o_c,
    D: tl.constexpr,
    RING: tl.constexpr,
    SUM: tl.constexpr,
    UNROLL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Minimum, maximum and sum (of magnitudes; of numbers for the variance) of each channel.

    ``[G/8, BLOCK_D]`` of each, over the planes. Magnitudes are added in fp32 (see
    ``highest_magnitudes``), numbers in fp64.
    """
    ROWS: tl.constexpr = o_t.shape[0]
    b_low = tl.full([ROWS, o_c.shape[0]], float("inf"), tl.float32)
    b_high = tl.full([ROWS, o_c.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS, o_c.shape[0]], tl.float64 if SUM == "variance" else tl.float32)
    for i_step in range(N_PLANES // UNROLL):
        for i_inner in tl.static_range(UNROLL):
            rows = plane_rows(first, i_step * UNROLL + i_inner, o_t, ROWS, RING)
            b_raw, b_x = load_rows(p_x, rows, stride_t, (o_c < D)[None, :], o_c)
            b_low, b_high = extremes(b_low, b_high, b_raw, b_x, CAREFUL)
            if CAREFUL:
                b_x = tl.where(tl.abs(b_raw) < float("inf"), b_x, 0.0)
            if SUM == "magnitude":
                b_sum += tl.abs(b_x)
            elif SUM == "variance":
                b_sum += b_x.to(tl.float64)
    return b_low, b_high, b_sum


@triton.jit
def highest_magnitudes(
    p_x,
    first,
    stride_t,
    o_t,
    o_c,
    b_total,
    ROWS: tl.constexpr,
    RING: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
):
    """Which channels have the D_BOOST largest sums of magnitudes, exactly; ``b_total`` in fp32.

    Only the gap at the cut matters. Where the fp32 sums leave it open, they are formed again in
    fp64, exact: fp16 numbers are multiples of 2^-24, and a page's sum stays below 2^24.
    """
    b_total = tl.where(o_c < D, b_total, -1.0)
    above = b_total[None, :] > b_total[:, None]  # [BLOCK_D, BLOCK_D]
    boosted = (tl.sum(above.to(tl.int32), axis=1) < D_BOOST) & (o_c < D)
    least = tl.min(tl.where(boosted, b_total, float("inf")), axis=0)
    most = tl.max(tl.where(boosted, -1.0, b_total), axis=0)
    # equal sums at the cut give too many; a sum of G magnitudes in fp32 is off by at most
    # (G - 1) · 2^-24 of itself
    surplus = tl.sum(boosted.to(tl.int32), axis=0) > D_BOOST
    if surplus | (least - most <= least * (ROWS * N_PLANES / 8388608)):
        b_sum = tl.zeros([ROWS, o_c.shape[0]], tl.float64)
        for i_plane in range(N_PLANES):
            rows = plane_rows(first, i_plane, o_t, ROWS, RING)
            b_raw, b_x = load_rows(p_x, rows, stride_t, o_c[None, :] < D, o_c)
            b_sum += tl.where(tl.abs(b_raw) < float("inf"), tl.abs(b_x), 0.0).to(tl.float64)
        b_score = (tl.sum(b_sum, axis=0) * FIXED_POINT).to(tl.int64)
        boosted = highest(b_score, o_c, D, D_BOOST, True)
    return boosted


@triton.jit
def key_codes(
    p_x,
    first,
    stride_t,
    o_t,
    o_c,
    b_zero,
    b_inverse,
    b_top,
    D: tl.constexpr,
    RING: tl.constexpr,
    UNROLL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Codes of the 8 planes in the 8 nibbles of int32 ``[G/8, BLOCK_D]``."""
    ROWS: tl.constexpr = o_t.shape[0]
    b_nibbles = tl.zeros([ROWS, o_c.shape[0]], tl.int32)
    for i_step in range(N_PLANES // UNROLL):
        for i_inner in tl.static_range(UNROLL):
            i_plane = i_step * UNROLL + i_inner
            rows = plane_rows(first, i_plane, o_t, ROWS, RING)
            b_raw, b_x = load_rows(p_x, rows, stride_t, (o_c < D)[None, :], o_c)
            b_code = codes_of(
                b_raw, b_x, b_zero[None, :], b_inverse[None, :], b_top[None, :], CAREFUL
            )
            b_nibbles |= b_code << (4 * i_plane)
    return b_nibbles


@triton.jit
def any_unclean(b_low, b_high):
    """Whether NaN or inf shows in the extremes of the fast path: a number > 0."""
    unclean = ((b_low > float("-inf")) & (b_high < float("inf"))).to(tl.int32) ^ 1
    return tl.max(tl.max(unclean, axis=1), axis=0)


@triton.jit
def quantize_key_page(
    p_x,  # first channel of the head's row 0
    first,  # row of the page's first token
    stride_t,
    i_h,
    i_page,  # absolute number of the page, for the random selection
    seed,
    layer,
    p_words,  # [G/8, D] of the page and head, and so on
    p_high,
    p_meta,
    p_boosted,
    G: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RING: tl.constexpr,
    SELECTION: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Quantize one page of keys per channel, the boosted channels with 4 bits, and pack it."""
    ROWS: tl.constexpr = G // N_PLANES
    o_t = tl.arange(0, ROWS)
    o_c = tl.arange(0, BLOCK_D)
    m_c = o_c < D
    CHOOSES: tl.constexpr = (D_BOOST > 0) and (D_BOOST < D)
    SUM: tl.constexpr = SELECTION if CHOOSES else "none"

    b_low, b_high, b_sum = key_statistics(
        p_x, first, stride_t, o_t, o_c, D, RING, SUM, UNROLL, False
    )
    unclean = any_unclean(b_low, b_high)
    b_low, b_high = saturated(b_low), saturated(b_high)
    if unclean > 0:
        b_low, b_high, b_sum = key_statistics(p_x, first, stride_t, o_t, o_c, D, RING, SUM, 1, True)
    b_low, b_high = tl.min(b_low, axis=0), tl.max(b_high, axis=0)  # [BLOCK_D]

    if CHOOSES:
        if SELECTION == "random":
            b_hash = hash_channels(seed, layer, i_h, i_page, o_c)
            b_score = 0xFFFFFFFF - b_hash.to(tl.int64)
            boosted = highest(b_score, o_c, D, D_BOOST, True)
        elif SELECTION == "magnitude":
            b_total = tl.sum(b_sum, axis=0)
            boosted = highest_magnitudes(
                p_x, first, stride_t, o_t, o_c, b_total, ROWS, RING, D, D_BOOST
            )
        else:
            b_mean = tl.sum(b_sum, axis=0) / G
            b_square = sum_of_squares(p_x, first, stride_t, o_t, o_c, b_mean, ROWS, RING, D)
            # fp64 numbers ≥ 0 are ordered like their bits
            boosted = highest((b_square / G).to(tl.int64, bitcast=True), o_c, D, D_BOOST, False)
    else:
        boosted = m_c & (D_BOOST > 0)
    b_top = tl.where(boosted, BOOST_TOP, LOW_TOP)
    b_scale, b_zero, b_inverse = scale_zero(b_low, b_high, b_top)
    tl.store(p_meta + o_c, b_scale.to(tl.float16), mask=m_c)
    tl.store(p_meta + D + o_c, b_zero.to(tl.float16), mask=m_c)

    if unclean > 0:
        b_nibbles = key_codes(
            p_x, first, stride_t, o_t, o_c, b_zero, b_inverse, b_top, D, RING, 1, True
        )
    else:
        b_nibbles = key_codes(
            p_x, first, stride_t, o_t, o_c, b_zero, b_inverse, b_top, D, RING, UNROLL, False
        )
    o_word = o_t[:, None] * D + o_c[None, :]
    tl.store(p_words + o_word, gathered_fields(b_nibbles), mask=m_c[None, :])
    if D_BOOST > 0:
        # place of a boosted channel in the ascending list
        b_count = boosted.to(tl.int32)
        o_list = tl.cumsum(b_count, axis=0) - b_count
        tl.store(p_boosted + o_list, o_c.to(tl.uint8), mask=boosted)
        o_high = o_t[:, None] * D_BOOST + o_list[None, :]
        m_high = boosted[None, :] & (o_t[:, None] >= 0)
        tl.store(p_high + o_high, gathered_fields(b_nibbles >> 2), mask=m_high)


@triton.jit
def value_words(
    p_x,  # first channel of the group
    first,
    stride_t,
    p_meta,  # scale of the group's first token
    o_t,
    o_c,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE_ZERO: tl.constexpr,
    RING: tl.constexpr,
    UNROLL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Words of a group of channels, int32 ``[G/8, BLOCK_GROUP]``, and largest magnitudes.

    Stores scale and zero of every token. Fast: NaN and inf show in the magnitudes.
    """
    ROWS: tl.constexpr = G // N_PLANES
    m_c = (o_c < GROUP)[None, :]
    b_words = tl.zeros([ROWS, o_c.shape[0]], tl.int32)
    b_largest = tl.zeros([ROWS, o_c.shape[0]], tl.float32)
    b_top = tl.full([ROWS], LOW_TOP, tl.float32)
    for i_step in range(N_PLANES // UNROLL):
        for i_inner in tl.static_range(UNROLL):
            i_plane = i_step * UNROLL + i_inner
            rows = plane_rows(first, i_plane, o_t, ROWS, RING)
            b_raw, b_x = load_rows(p_x, rows, stride_t, m_c, o_c)
            if CAREFUL:
                finite = (tl.abs(b_raw) < float("inf")) & m_c
                b_low = tl.min(tl.where(finite, b_x, float("inf")), axis=1)
                b_high = tl.max(tl.where(finite, b_x, float("-inf")), axis=1)
            else:
                b_largest = tl.maximum(b_largest, tl.abs(b_raw), propagate_nan=tl.PropagateNan.ALL)
                if o_c.shape[0] == GROUP:
                    b_low = tl.min(b_x, axis=1)
                    b_high = tl.max(b_x, axis=1)
                else:
                    b_low = tl.min(tl.where(m_c, b_x, float("inf")), axis=1)
                    b_high = tl.max(tl.where(m_c, b_x, float("-inf")), axis=1)
            b_scale, b_zero, b_inverse = scale_zero(b_low, b_high, b_top)
            b_code = codes_of(b_raw, b_x, b_zero[:, None], b_inverse[:, None], LOW_TOP, CAREFUL)
            b_words |= b_code << (2 * i_plane)
            p_token = p_meta + i_plane * ROWS + o_t
            tl.store(p_token, b_scale.to(tl.float16))
            tl.store(p_token + STRIDE_ZERO, b_zero.to(tl.float16))
    return b_words, b_largest


@triton.jit
def quantize_value_page(
    p_x,
    first,
    stride_t,
    p_words,
    p_meta,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    RING: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Quantize one page of values per token over groups of channels, and pack it."""
    o_t = tl.arange(0, G // N_PLANES)
    o_c = tl.arange(0, BLOCK_GROUP)
    STRIDE_ZERO: tl.constexpr = D // GROUP * G
    for i_group in tl.static_range(D // GROUP):
        p_group = p_x + i_group * GROUP
        p_scale = p_meta + i_group * G
        b_words, b_largest = value_words(
            p_group, first, stride_t, p_scale, o_t, o_c, G, GROUP, STRIDE_ZERO, RING, UNROLL, False
        )
        if any_unclean(-b_largest, b_largest) > 0:
            tl.debug_barrier()  # scales and zeros are stored again
            b_words, b_largest = value_words(
                p_group, first, stride_t, p_scale, o_t, o_c, G, GROUP, STRIDE_ZERO, RING, 1, True
            )
        o_word = o_t[:, None] * D + i_group * GROUP + o_c[None, :]
        tl.store(p_words + o_word, b_words.to(tl.int16), mask=(o_c < GROUP)[None, :])


@triton.jit(do_not_specialize=["seed", "layer"])
def quantize_keys_kernel(
    p_k,  # [B, H, T, D], strided
    p_words,
    p_high,
    p_meta,
    p_boosted,
    p_table,  # [B, max_pages]
    p_seq_lens,
    num_tokens,
    num_heads,
    stride_b,
    stride_h,
    stride_t,
    stride_table,
    seed,
    layer,
    G: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNPAGED: tl.constexpr,
    SINK: tl.constexpr,
    SELECTION: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One key page of one head per program; grid (pages · H, B), heads fastest."""
    i_h = tl.program_id(0) % num_heads
    i_page = tl.program_id(0) // num_heads
    i_b = tl.program_id(1)
    length = tl.load(p_seq_lens + i_b)
    if i_page < num_pages(length, UNPAGED, G):
        page = tl.load(p_table + i_b.to(tl.int64) * stride_table + i_page)
        if page >= 0:
            i_part = page.to(tl.int64) * num_heads + i_h
            quantize_key_page(
                p_k + i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h,
                num_tokens - length + SINK + i_page * G,
                stride_t,
                i_h,
                i_page,
                seed,
                layer,
                p_words + i_part * (G // N_PLANES * D),
                p_high + i_part * (G // N_PLANES * D_BOOST),
                p_meta + i_part * (2 * D),
                p_boosted + i_part * D_BOOST,
                G,
                D,
                D_BOOST,
                BLOCK_D,
                0,
                SELECTION,
                UNROLL,
            )


@triton.jit
def quantize_values_kernel(
    p_v,  # [B, H, T, D], strided
    p_words,
    p_meta,
    p_table,  # [B, max_pages]
    p_seq_lens,
    num_tokens,
    num_heads,
    stride_b,
    stride_h,
    stride_t,
    stride_table,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    UNPAGED: tl.constexpr,
    SINK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One value page of one head per program; grid (pages · H, B), heads fastest."""
    i_h = tl.program_id(0) % num_heads
    i_page = tl.program_id(0) // num_heads
    i_b = tl.program_id(1)
    length = tl.load(p_seq_lens + i_b)
    if i_page < num_pages(length, UNPAGED, G):
        page = tl.load(p_table + i_b.to(tl.int64) * stride_table + i_page)
        if page >= 0:
            i_part = page.to(tl.int64) * num_heads + i_h
            quantize_value_page(
                p_v + i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h,
                num_tokens - length + SINK + i_page * G,
                stride_t,
                p_words + i_part * (G // N_PLANES * D),
                p_meta + i_part * (2 * (D // GROUP) * G),
                G,
                D,
                GROUP,
                BLOCK_GROUP,
                0,
                UNROLL,
            )


def launch_quantize_pages(
    k: Tensor,
    v: Tensor,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
    seq_lens: Tensor,
    *,
    sink: int,
    window: int,
    rollback: int,
    selection: str,
    seed: int,
    layer: int,
    unroll: int = 1,
    **options: int,
) -> None:
    """Launch both kernels, one program per page and head that T tokens can fill at most."""
    batch, heads, num_tokens, head_dim = k.shape
    page_size = keys.words.shape[2] * 8
    # contraction of x·y + z would round once where the specification rounds twice
    compiler = {"num_warps": 4, "enable_fp_fusion": False, **options}
    # room for one more program on an SM hides more latency; the keys' kernel would spill
    value_cap = {"maxnreg": VALUE_REGISTERS} if head_dim <= 128 else {}
    group = min(head_dim, page_size)
    key_pages = max(0, num_tokens - sink - rollback) // page_size
    value_pages = max(0, num_tokens - sink - window - rollback) // page_size
    if key_pages > 0:
        quantize_keys_kernel[(key_pages * heads, batch)](
            k,
            *keys,
            key_table,
            seq_lens,
            num_tokens,
            heads,
            *k.stride()[:3],
            key_table.stride(0),
            as_int32(seed),
            layer,
            G=page_size,
            D=head_dim,
            D_BOOST=keys.high.shape[-1],
            BLOCK_D=triton.next_power_of_2(head_dim),
            UNPAGED=sink + rollback,
            SINK=sink,
            SELECTION=selection,
            UNROLL=unroll,
            **compiler,
        )
    if value_pages > 0:
        quantize_values_kernel[(value_pages * heads, batch)](
            v,
            *values,
            value_table,
            seq_lens,
            num_tokens,
            heads,
            *v.stride()[:3],
            value_table.stride(0),
            G=page_size,
            D=head_dim,
            GROUP=group,
            BLOCK_GROUP=triton.next_power_of_2(group),
            UNPAGED=sink + window + rollback,
            SINK=sink,
            UNROLL=unroll,
            **{**value_cap, **compiler},
        )


def as_int32(number: int) -> int:
    """The low 32 bits of a number, as a signed one, so that it stays a 32-bit argument."""
    return (number + 2**31) % 2**32 - 2**31
