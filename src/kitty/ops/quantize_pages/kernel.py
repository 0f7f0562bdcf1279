"""Triton kernels of quantize_pages; append quantizes its pages with the same two functions.

Fields of one word come from the same thread, so packing needs no exchange. Keys are read twice
(statistics, codes), the second time out of the cache, STEP rows at a time; values once, plane by
plane (G/8 tokens). No program holds a page: its registers would leave room for few programs.

Instructions per element and waiting for other warps set the speed. So programs are small, and the
fast path has no test for NaN, inf and codes out of range: NaN and inf show in its minima and
maxima, only a subnormal scale lets a code out of range, and such a page is done again with care.
With ASM, inline assembly does in one instruction what takes several otherwise.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# No postponed annotations: the interpreter of Triton 3.0 knows tl.constexpr only as a class.

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
# measured on an H200 with D = G = 128 (docs/kernels.md)
KEY_UNROLL = 8
VALUE_OPTIONS = {"UNROLL": 1, "num_warps": 4}
VALUE_REGISTERS = 56  # of a thread, at most: room for more programs on a multiprocessor
LARGEST_INVERSE = tl.constexpr(16384.0)  # of a normal scale
FIXED_POINT = tl.constexpr(16777216.0)  # 2^24: fp16 numbers are multiples of 2^-24


@triton.jit
def load_rows(p_x, row, MORE: tl.constexpr, stride_t, o_t, mask, o_c, RING: tl.constexpr):
    """Rows ``row + MORE + o_t``, ``[len(o_t), BLOCK_D]``; slots of a ring unless RING is 0."""
    if RING > 0:
        o_x = ((o_t + (row + MORE)) % RING).to(tl.int64) * stride_t
    else:  # in parts that loops have in common
        p_x += row.to(tl.int64) * stride_t + tl.full((), MORE, tl.int64) * stride_t
        o_x = o_t.to(tl.int64) * stride_t
    return tl.load(p_x + o_x[:, None] + o_c[None, :], mask=mask, other=0.0)


@triton.jit
def saturated(b_x):
    """Rounded to fp16, saturated, as fp32; monotone, so it may follow a minimum or maximum."""
    b_y = b_x.to(tl.float32)
    if b_x.dtype != tl.float16:
        b_y = tl.minimum(tl.maximum(b_y, -FP16_MAX), FP16_MAX).to(tl.float16).to(tl.float32)
    return b_y


@triton.jit
def extreme(b_x, p_x):
    """A minimum or maximum, as fp32, of what is at ``p_x``: rounded to fp16, saturated."""
    if p_x.dtype.element_ty != tl.float16:
        b_x = saturated(b_x)
    return b_x


@triton.jit
def finite(b_raw):
    """Whether numbers are neither NaN nor inf."""
    return tl.abs(b_raw.to(tl.float32)) < float("inf")


@triton.jit
def lower(a, b, ASM: tl.constexpr):
    """Minimum, NaN if one is NaN; with ASM of 16-bit numbers, two in one instruction."""
    if ASM and a.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "min.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, True, 2
        )
    elif ASM and a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.bfloat16, True, 2
        )
    else:  # the interpreter compares the bits of bf16
        return least_of_two(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def higher(a, b, ASM: tl.constexpr):
    """Maximum, NaN if one is NaN; with ASM of 16-bit numbers, two in one instruction."""
    if ASM and a.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, True, 2
        )
    elif ASM and a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.bfloat16, True, 2
        )
    else:
        return most_of_two(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def least_of_two(a, b):
    """For reductions: minimum, NaN if one is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def most_of_two(a, b):
    """For reductions: maximum, NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def least(b_x, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Minimum along an axis; -inf or NaN if there is a NaN."""
    if ASM:
        return tl.reduce(b_x, AXIS, least_of_two)
    else:  # the interpreter is fast only at the plain reductions, which skip NaN
        return tl.min(tl.where(b_x == b_x, b_x, float("-inf")), axis=AXIS)


@triton.jit
def most(b_x, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Maximum along an axis; inf or NaN if there is a NaN."""
    if ASM:
        return tl.reduce(b_x, AXIS, most_of_two)
    else:
        return tl.max(tl.where(b_x == b_x, b_x, float("inf")), axis=AXIS)


@triton.jit
def statistics_of_two(low_a, high_a, sum_a, low_b, high_b, sum_b):
    """For reductions: minimum, maximum and sum at once."""
    return least_of_two(low_a, low_b), most_of_two(high_a, high_b), sum_a + sum_b


@triton.jit
def scale_zero(b_low, b_high, b_top, b_part, ASM: tl.constexpr):
    """Scale, zero and inverse scale of groups with extremes ``b_low``, ``b_high``; all fp32.

    ``b_part`` is 1 / ``b_top``. No scale of 2 or 4 bits reaches 65504, so none needs saturation.
    The assembly rounds as a division does: a quotient by 3 or 15 and an inverse of an fp16 number
    are exact after one correction by their remainder (all of them were tried).
    """
    b_range = b_high - b_low
    b_low += 0.0  # -0.0 is stored as +0.0
    if ASM:
        b_scale = b_range * b_part
        b_scale = tl.fma(tl.fma(-b_scale, b_top, b_range), b_part, b_scale)
        b_scale = b_scale.to(tl.float16).to(tl.float32)
        b_inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_scale], tl.float32, True, 1
        )
        b_inverse = tl.fma(tl.fma(-b_scale, b_inverse, 1.0), b_inverse, b_inverse)
        b_inverse = tl.where(b_scale == 0.0, 0.0, b_inverse)
    else:
        b_scale = tl.div_rn(b_range, b_top).to(tl.float16).to(tl.float32)
        b_inverse = tl.where(b_scale == 0.0, 1.0, b_scale)
        b_inverse = tl.div_rn(tl.zeros_like(b_inverse) + 1.0, b_inverse)
        b_inverse = tl.where(b_scale == 0.0, 0.0, b_inverse)
    return b_scale, b_low, b_inverse


@triton.jit
def filled(b_low, b_high):
    """Extremes of groups; those without a finite element (low > high) get 0."""
    empty = b_low > b_high
    return tl.where(empty, 0.0, b_low), tl.where(empty, 0.0, b_high)


@triton.jit
def with_codes(
    b_packed,
    b_raw,
    b_zero,
    b_inverse,
    b_top,
    BITS: tl.constexpr,
    CAREFUL: tl.constexpr,
    ASM: tl.constexpr,
):
    """Shift int32 ``b_packed`` by BITS and put the codes of ``b_raw`` behind.

    Fast: no code can exceed ``b_top``, unless the scale is subnormal. The assembly multiplies by
    the least fp32 number, rounding down: the bits of the product are the code.
    """
    b_code = (saturated(b_raw) - b_zero) * b_inverse + 0.5
    if CAREFUL:
        b_code = tl.maximum(tl.minimum(b_code, b_top), 0.0)
        b_code = tl.where(b_raw.to(tl.float32) > float("-inf"), b_code, 0.0)  # NaN and -inf
        b_code = tl.where(b_raw.to(tl.float32) == float("inf"), b_top, b_code)
    if ASM:
        b_code = tl.inline_asm_elementwise(
            "{ .reg .f32 x; mul.rz.f32 x, $1, 0f00000001; mov.b32 $0, x; }",
            "=r,f",
            [b_code],
            tl.int32,
            True,
            1,
        )
    else:
        b_code = b_code.to(tl.int32)  # truncation is floor, because what it truncates is ≥ 0
    return (b_packed << BITS) + b_code


@triton.jit
def sorted_fields(b_x, ASM: tl.constexpr):
    """Nibbles of int32 ``b_x`` taken apart: bits 0 and 1 of each below, bits 2 and 3 above."""
    b_t = (b_x ^ (b_x >> 2)) & 0x0C0C0C0C
    b_x = b_x ^ b_t ^ (b_t << 2)
    b_t = (b_x ^ (b_x >> 4)) & 0x00F000F0
    b_x = b_x ^ b_t ^ (b_t << 4)
    if ASM:
        b_x = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x3120;", "=r,r", [b_x], tl.int32, True, 1
        )
    else:
        b_t = (b_x ^ (b_x >> 8)) & 0x0000FF00
        b_x = b_x ^ b_t ^ (b_t << 8)
    return b_x


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
    # summed over the first axis: the result then lies like the channels of a page
    above = b_score[:, None] > b_score[None, :]  # [BLOCK_D, BLOCK_D]
    if not SHORT:
        above = above | ((b_score[:, None] == b_score[None, :]) & (o_c[:, None] < o_c[None, :]))
    return (tl.sum(above.to(tl.int32), axis=0) < D_BOOST) & (o_c < D)


@triton.jit
def sum_of_squares(
    p_x, first, stride_t, o_t, o_c, b_mean, G: tl.constexpr, D: tl.constexpr, RING: tl.constexpr
):
    """Σ (x - mean)² of each channel over the page, fp64 ``[BLOCK_D]``."""
    STEP: tl.constexpr = o_t.shape[0]
    b_sum = tl.zeros([STEP, o_c.shape[0]], tl.float64)
    for i_step in range(G // STEP):
        row = first + i_step * STEP
        b_raw = load_rows(p_x, row, 0, stride_t, o_t, (o_c < D)[None, :], o_c, RING)
        b_x = tl.where(finite(b_raw), saturated(b_raw), 0.0)
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
    G: tl.constexpr,
    D: tl.constexpr,
    RING: tl.constexpr,
    SUM: tl.constexpr,
    UNROLL: tl.constexpr,
    ASM: tl.constexpr,
):
    """Minimum, maximum and sum (of magnitudes; of numbers for the variance) of each channel.

    Magnitudes are added in fp32 (see ``highest_magnitudes``), numbers in fp64. NaN and inf show
    in the extremes.
    """
    STEP: tl.constexpr = o_t.shape[0]
    DTYPE: tl.constexpr = p_x.dtype.element_ty if ASM else tl.float32
    b_low = tl.full([STEP, o_c.shape[0]], float("inf"), DTYPE)
    b_high = tl.full([STEP, o_c.shape[0]], float("-inf"), DTYPE)
    b_sum = tl.zeros([STEP, o_c.shape[0]], tl.float64 if SUM == "variance" else tl.float32)
    for i_step in range(G // STEP // UNROLL):
        for i_inner in tl.static_range(UNROLL):
            row, m_c = first + i_step * (UNROLL * STEP), (o_c < D)[None, :]
            b_raw = load_rows(p_x, row, i_inner * STEP, stride_t, o_t, m_c, o_c, RING)
            b_low = lower(b_low, b_raw, ASM)
            b_high = higher(b_high, b_raw, ASM)
            if SUM == "magnitude":
                b_sum += tl.abs(saturated(b_raw))
            elif SUM == "variance":
                b_sum += saturated(b_raw).to(tl.float64)
    return extremes_and_sum(b_low.to(tl.float32), b_high.to(tl.float32), b_sum, ASM)


@triton.jit
def extremes_and_sum(b_low, b_high, b_sum, ASM: tl.constexpr):
    """Reduced over rows, all at once; NaN shows in the extremes."""
    if ASM and b_sum.dtype == tl.float32:
        b_low, b_high, b_sum = tl.reduce((b_low, b_high, b_sum), 0, statistics_of_two)
    else:
        b_low = least(b_low, 0, ASM)
        b_high = most(b_high, 0, ASM)
        b_sum = tl.sum(b_sum, axis=0)
    return b_low, b_high, b_sum


@triton.jit
def careful_key_statistics(
    p_x,
    first,
    stride_t,
    o_t,
    o_c,
    G: tl.constexpr,
    D: tl.constexpr,
    RING: tl.constexpr,
    SUM: tl.constexpr,
):
    """The same of the finite numbers alone; the extremes are saturated."""
    STEP: tl.constexpr = o_t.shape[0]
    b_low = tl.full([STEP, o_c.shape[0]], float("inf"), tl.float32)
    b_high = tl.full([STEP, o_c.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([STEP, o_c.shape[0]], tl.float64 if SUM == "variance" else tl.float32)
    for i_step in range(G // STEP):
        row = first + i_step * STEP
        b_raw = load_rows(p_x, row, 0, stride_t, o_t, (o_c < D)[None, :], o_c, RING)
        m_finite, b_x = finite(b_raw), saturated(b_raw)
        b_low = tl.minimum(b_low, tl.where(m_finite, b_x, float("inf")))
        b_high = tl.maximum(b_high, tl.where(m_finite, b_x, float("-inf")))
        b_x = tl.where(m_finite, b_x, 0.0)
        if SUM == "magnitude":
            b_sum += tl.abs(b_x)
        elif SUM == "variance":
            b_sum += b_x.to(tl.float64)
    b_low, b_high = filled(tl.min(b_low, axis=0), tl.max(b_high, axis=0))
    return b_low, b_high, tl.sum(b_sum, axis=0)


@triton.jit
def of_pair(b_x, o_c, D: tl.constexpr):
    """Sum of ``b_x`` ``[BLOCK_D]`` over each channel's rotary pair, c and (c + D/2) mod D."""
    BLOCK_D: tl.constexpr = o_c.shape[0]
    if BLOCK_D == D:
        b_pair = tl.sum(tl.reshape(b_x, [2, D // 2]), axis=0)
        return tl.reshape(tl.broadcast_to(b_pair[None, :], [2, D // 2]), [D])
    else:
        o_mate = (o_c + D // 2) % D
        b_mate = tl.where(o_c[:, None] == o_mate[None, :], b_x[:, None], 0.0)
        return b_x + tl.sum(b_mate, axis=0)


@triton.jit
def highest_magnitudes(
    p_x,
    first,
    stride_t,
    o_t,
    o_c,
    b_low,
    b_high,
    b_total,
    G: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
    RING: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Which channels have the D_BOOST largest sums of magnitudes, exactly; ``b_total`` in fp32.

    With ROTARY the sums are those of a channel's pair, times the channel's range. Only the gap at
    the cut matters. Where the fp32 scores leave it open, they are formed again in fp64. There the
    sums are exact: fp16 numbers are multiples of 2^-24, and a page's sum stays below 2^24.
    """
    STEP: tl.constexpr = o_t.shape[0]
    # roundings of a score: G - 1 of its sums, and with ROTARY three more
    ROUNDINGS: tl.constexpr = G + 4 if ROTARY else G
    b_total = tl.where(o_c < D, b_total, 0.0)
    if ROTARY:
        b_total = (b_high - b_low) * of_pair(b_total, o_c, D)
    # fp32 numbers ≥ 0 are ordered like their bits; a difference's sign counts those above
    b_bits = b_total.to(tl.int32, bitcast=True)
    above = (b_bits[None, :] - b_bits[:, None]).to(tl.uint32, bitcast=True) >> 31
    boosted = (tl.sum(above, axis=0).to(tl.int32) < D_BOOST) & (o_c < D)
    lowest = tl.min(tl.where(boosted, b_total, float("inf")), axis=0)
    next_one = tl.max(tl.where(boosted, -1.0, b_total), axis=0)
    # equal scores at the cut give too many; each is off by at most ROUNDINGS · 2^-24 of itself
    surplus = tl.sum(boosted.to(tl.int32), axis=0) > D_BOOST
    if surplus | (lowest - next_one <= lowest * (ROUNDINGS / 8388608)):
        b_sum = tl.zeros([STEP, o_c.shape[0]], tl.float64)
        for i_step in range(G // STEP):
            row = first + i_step * STEP
            b_raw = load_rows(p_x, row, 0, stride_t, o_t, (o_c < D)[None, :], o_c, RING)
            b_sum += tl.where(finite(b_raw), tl.abs(saturated(b_raw)), 0.0).to(tl.float64)
        b_exact = tl.sum(b_sum, axis=0)
        if ROTARY:
            b_reach = b_high.to(tl.float64) - b_low.to(tl.float64)
            b_exact = b_reach * of_pair(b_exact, o_c, D)
            # fp64 numbers ≥ 0 are ordered like their bits
            boosted = highest(b_exact.to(tl.int64, bitcast=True), o_c, D, D_BOOST, False)
        else:
            b_score = (b_exact * FIXED_POINT).to(tl.int64)
            boosted = highest(b_score, o_c, D, D_BOOST, True)
    return boosted


@triton.jit
def key_words(
    p_x,
    first,
    stride_t,
    o_t,
    o_c,
    b_zero,
    b_inverse,
    b_top,
    boosted,
    p_words,
    p_high,
    p_boosted,
    G: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
    RING: tl.constexpr,
    CAREFUL: tl.constexpr,
    ASM: tl.constexpr,
):
    """Codes of a page, a few rows of words at a time, packed and stored."""
    ROWS: tl.constexpr = G // N_PLANES
    STEP: tl.constexpr = o_t.shape[0]
    m_c = o_c < D
    b_zero, b_inverse, b_top = b_zero[None, :], b_inverse[None, :], b_top[None, :]
    # place of a boosted channel in the ascending list
    b_count = boosted.to(tl.int32)
    o_list = tl.cumsum(b_count, axis=0) - b_count
    if D_BOOST > 0:
        tl.store(p_boosted + o_list, o_c.to(tl.uint8), mask=boosted)
    for i_step in range(ROWS // STEP):
        b_nibbles = tl.zeros([STEP, o_c.shape[0]], tl.int32)
        for i_inner in tl.static_range(N_PLANES):
            row, PLANE = first + i_step * STEP, N_PLANES - 1 - i_inner  # the last is the highest
            b_raw = load_rows(p_x, row, PLANE * ROWS, stride_t, o_t, m_c[None, :], o_c, RING)
            b_nibbles = with_codes(b_nibbles, b_raw, b_zero, b_inverse, b_top, 4, CAREFUL, ASM)
        b_fields = sorted_fields(b_nibbles, ASM)
        o_row = o_t + i_step * STEP
        p_word = p_words + o_row[:, None] * D + o_c[None, :]
        tl.store(p_word, b_fields.to(tl.int16), mask=m_c[None, :])
        if D_BOOST > 0:
            # channels first, so that neighbouring threads write neighbouring words
            p_word = p_high + o_list[:, None] + o_row[None, :] * D_BOOST
            m_high = boosted[:, None] & (o_row[None, :] >= 0)
            tl.store(p_word, tl.trans((b_fields >> 16).to(tl.int16)), mask=m_high)


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
    STEP: tl.constexpr,
    UNROLL: tl.constexpr,
    ASM: tl.constexpr,
):
    """Quantize one page of keys per channel, the boosted channels with 4 bits, and pack it."""
    o_t = tl.arange(0, STEP)
    o_c = tl.arange(0, BLOCK_D)
    m_c = o_c < D
    CHOOSES: tl.constexpr = (D_BOOST > 0) and (D_BOOST < D)
    ROTARY: tl.constexpr = SELECTION == "rotary"
    SUM: tl.constexpr = ("magnitude" if ROTARY else SELECTION) if CHOOSES else "none"

    b_low, b_high, b_sum = key_statistics(
        p_x, first, stride_t, o_t, o_c, G, D, RING, SUM, UNROLL, ASM
    )
    unclean = tl.max(((b_low > float("-inf")) & (b_high < float("inf"))).to(tl.int32) ^ 1, axis=0)
    b_low, b_high = extreme(b_low, p_x), extreme(b_high, p_x)
    if unclean > 0:
        b_low, b_high, b_sum = careful_key_statistics(
            p_x, first, stride_t, o_t, o_c, G, D, RING, SUM
        )

    if CHOOSES:
        if SELECTION == "random":
            b_hash = hash_channels(seed, layer, i_h, i_page, o_c)
            b_score = 0xFFFFFFFF - b_hash.to(tl.int64)
            boosted = highest(b_score, o_c, D, D_BOOST, True)
        elif SUM == "magnitude":
            boosted = highest_magnitudes(
                p_x, first, stride_t, o_t, o_c, b_low, b_high, b_sum, G, D, D_BOOST, RING, ROTARY
            )
        else:
            b_square = sum_of_squares(p_x, first, stride_t, o_t, o_c, b_sum / G, G, D, RING)
            # fp64 numbers ≥ 0 are ordered like their bits
            boosted = highest((b_square / G).to(tl.int64, bitcast=True), o_c, D, D_BOOST, False)
    else:
        boosted = m_c & (D_BOOST > 0)
    b_top = tl.where(boosted, BOOST_TOP, LOW_TOP)
    b_part = tl.where(boosted, 1.0 / BOOST_TOP, 1.0 / LOW_TOP)
    b_scale, b_zero, b_inverse = scale_zero(b_low, b_high, b_top, b_part, ASM)
    tl.store(p_meta + o_c, b_scale.to(tl.float16), mask=m_c)
    tl.store(p_meta + D + o_c, b_zero.to(tl.float16), mask=m_c)

    # a subnormal scale may be so coarse that a code needs a bound
    if (unclean > 0) | (tl.max(b_inverse, axis=0) > LARGEST_INVERSE):
        key_words(
            p_x, first, stride_t, o_t, o_c, b_zero, b_inverse, b_top, boosted, p_words, p_high,
            p_boosted, G, D, D_BOOST, RING, True, ASM,
        )  # fmt: skip
    else:
        key_words(
            p_x, first, stride_t, o_t, o_c, b_zero, b_inverse, b_top, boosted, p_words, p_high,
            p_boosted, G, D, D_BOOST, RING, False, ASM,
        )  # fmt: skip


@triton.jit
def row_extremes(b_raw, b_raw2, m_c, FULL: tl.constexpr, ASM: tl.constexpr):
    """Minimum and maximum of rows in two halves as fp32 ``[G/8]``; NaN and inf show in them."""
    if not FULL:
        b_raw2 = tl.where(m_c, b_raw2, b_raw)
    b_low = lower(b_raw, b_raw2, ASM).to(tl.float32)
    b_high = higher(b_raw, b_raw2, ASM).to(tl.float32)
    return least(b_low, 1, ASM), most(b_high, 1, ASM)


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
    ASM: tl.constexpr,
):
    """Words of both halves of a group of channels, int32, and whether they are wrong.

    Stores scale and zero of every token. In halves, a row takes half the threads: what is done
    once a row is repeated by fewer.
    """
    ROWS: tl.constexpr = G // N_PLANES
    HALF: tl.constexpr = o_c.shape[0]
    FULL: tl.constexpr = 2 * HALF == GROUP
    m_1 = (o_c < HALF)[None, :]  # all of them
    m_2 = (o_c + HALF < GROUP)[None, :]
    b_words = tl.zeros([ROWS, HALF], tl.int32)
    b_words2 = tl.zeros([ROWS, HALF], tl.int32)
    b_worst = tl.zeros([ROWS], tl.float32)
    b_top = tl.full([ROWS], LOW_TOP, tl.float32)
    b_part = tl.full([ROWS], 1.0 / LOW_TOP, tl.float32)
    for i_step in range(N_PLANES // UNROLL):
        for i_inner in tl.static_range(UNROLL):
            i_plane = N_PLANES - 1 - i_step * UNROLL - i_inner  # the last plane is the highest
            row = first + i_plane * ROWS
            b_raw = load_rows(p_x, row, 0, stride_t, o_t, m_1, o_c, RING)
            b_raw2 = load_rows(p_x + HALF, row, 0, stride_t, o_t, m_2, o_c, RING)
            if CAREFUL:
                m_finite, m_finite2 = finite(b_raw), finite(b_raw2) & m_2
                b_x, b_x2 = saturated(b_raw), saturated(b_raw2)
                b_low = tl.where(m_finite, b_x, float("inf"))
                b_low = tl.minimum(b_low, tl.where(m_finite2, b_x2, float("inf")))
                b_high = tl.where(m_finite, b_x, float("-inf"))
                b_high = tl.maximum(b_high, tl.where(m_finite2, b_x2, float("-inf")))
                b_low, b_high = filled(tl.min(b_low, axis=1), tl.max(b_high, axis=1))
            else:
                b_low, b_high = row_extremes(b_raw, b_raw2, m_2, FULL, ASM)
                b_worst = most_of_two(b_worst, most_of_two(-b_low, b_high))
                b_low, b_high = extreme(b_low, p_x), extreme(b_high, p_x)
            b_scale, b_zero, b_inverse = scale_zero(b_low, b_high, b_top, b_part, ASM)
            if not CAREFUL:  # a subnormal scale may be so coarse that a code needs a bound
                b_worst = tl.where(b_inverse > LARGEST_INVERSE, float("inf"), b_worst)
            b_words = with_codes(
                b_words, b_raw, b_zero[:, None], b_inverse[:, None], LOW_TOP, 2, CAREFUL, ASM
            )
            b_words2 = with_codes(
                b_words2, b_raw2, b_zero[:, None], b_inverse[:, None], LOW_TOP, 2, CAREFUL, ASM
            )
            p_token = p_meta + i_plane * ROWS + o_t
            tl.store(p_token, b_scale.to(tl.float16))
            tl.store(p_token + STRIDE_ZERO, b_zero.to(tl.float16))
    return b_words, b_words2, tl.max((b_worst < float("inf")).to(tl.int32) ^ 1, axis=0)


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
    ASM: tl.constexpr,
):
    """Quantize one page of values per token over groups of channels, and pack it."""
    HALF: tl.constexpr = BLOCK_GROUP // 2
    o_t = tl.arange(0, G // N_PLANES)
    o_c = tl.arange(0, HALF)
    STRIDE_ZERO: tl.constexpr = D // GROUP * G
    for i_group in tl.static_range(D // GROUP):
        p_group = p_x + i_group * GROUP
        p_scale = p_meta + i_group * G
        b_words, b_words2, unclean = value_words(
            p_group, first, stride_t, p_scale, o_t, o_c, G, GROUP, STRIDE_ZERO, RING, UNROLL,
            False, ASM,
        )  # fmt: skip
        if unclean > 0:
            tl.debug_barrier()  # scales and zeros are stored again
            b_words, b_words2, unclean = value_words(
                p_group, first, stride_t, p_scale, o_t, o_c, G, GROUP, STRIDE_ZERO, RING, 1, True,
                ASM,
            )  # fmt: skip
        p_word = p_words + o_t[:, None] * D + i_group * GROUP + o_c[None, :]
        tl.store(p_word, b_words.to(tl.int16))
        tl.store(p_word + HALF, b_words2.to(tl.int16), mask=(o_c + HALF < GROUP)[None, :])


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
    STEP: tl.constexpr,
    UNROLL: tl.constexpr,
    ASM: tl.constexpr,
):
    """One key page of one head per program; grid (H, pages, B)."""
    i_h = tl.program_id(0)
    i_page = tl.program_id(1)
    i_b = tl.program_id(2)
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
                STEP,
                UNROLL,
                ASM,
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
    ASM: tl.constexpr,
):
    """One value page of one head per program; grid (H, pages, B)."""
    i_h = tl.program_id(0)
    i_page = tl.program_id(1)
    i_b = tl.program_id(2)
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
                ASM,
            )


def key_warps(block_d: int, selection: str) -> int:
    """Warps of the keys' kernel; ranks of many channels or of 64 bits spill with two."""
    return 4 if block_d > 128 or selection == "random" else 2


def rows_at_once(page_size: int, block_d: int, num_warps: int) -> int:
    """Rows STEP that the warps of a program load together, with 8 channels a thread."""
    return max(1, min(page_size // 8, 256 * num_warps // block_d))


def launch_quantize_pages(
    k: "Tensor",
    v: "Tensor",
    keys: "KeyPages",
    values: "ValuePages",
    key_table: "Tensor",
    value_table: "Tensor",
    seq_lens: "Tensor",
    *,
    sink: int,
    window: int,
    rollback: int,
    selection: str,
    seed: int,
    layer: int,
    key_options: dict[str, int] | None = None,
    value_options: dict[str, int] | None = None,
) -> None:
    """Launch both kernels, one program per page and head that T tokens can fill at most.

    The options are UNROLL and those of the compiler, to be measured.
    """
    batch, heads, num_tokens, head_dim = k.shape
    page_size = keys.words.shape[2] * 8
    block_d = triton.next_power_of_2(head_dim)
    group = min(head_dim, page_size)
    # contraction of x·y + z would round once where the specification rounds twice
    key_options = {
        "UNROLL": KEY_UNROLL,
        "num_warps": key_warps(block_d, selection),
        "enable_fp_fusion": False,
        **(key_options or {}),
    }
    value_options = {**VALUE_OPTIONS, "enable_fp_fusion": False, **(value_options or {})}
    if page_size * head_dim <= 128 * 128:
        value_options.setdefault("maxnreg", VALUE_REGISTERS)
    key_pages = max(0, num_tokens - sink - rollback) // page_size
    value_pages = max(0, num_tokens - sink - window - rollback) // page_size
    if key_pages > 0:
        quantize_keys_kernel[(heads, key_pages, batch)](
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
            BLOCK_D=block_d,
            UNPAGED=sink + rollback,
            SINK=sink,
            SELECTION=selection,
            STEP=rows_at_once(page_size, block_d, key_options["num_warps"]),
            ASM=k.is_cuda,
            **key_options,
        )
    if value_pages > 0:
        quantize_values_kernel[(heads, value_pages, batch)](
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
            ASM=v.is_cuda,
            **value_options,
        )


def as_int32(number: int) -> int:
    """The low 32 bits of a number, as a signed one, so that it stays a 32-bit argument."""
    return (number + 2**31) % 2**32 - 2**31
