"""Triton kernel of decode_attention: one fused split-KV pass over sink, rings and packed pages.

Formula. Per query row q, with logits x_n = softmax_scale · log2(e) · q·K_n and the running m:

    key page     x = κ · (Σ_c (q_c · scale_c) · code_nc + Σ_c q_c · zero_c)
    boosted      x += κ · Σ_b 4 · (q_b · scale_b) · high_nb
    value page   Σ_n (2^(x-m) · scale_n) · code_nc + Σ_n 2^(x-m) · zero_n

A model that caps its logits (Gemma 2) replaces x by c · tanh(x / c), c = SOFTCAP · log2(e), before
the maximum is taken; SOFTCAP 0 leaves all of that out.

Plane j of a word masked in place *is* the fp16 subnormal code · 4^j · 2^-24, which tensor cores
multiply exactly: no conversion, one shift for the three planes that would touch the exponent.
Products are transposed (tokens or channels are the 16 rows, queries the 8 columns), so a KV head's
few queries waste little. One warp owns a program; occupancy comes from programs.

Range. A query row is normalized to |q| ≤ 1 by a power of two, so q·scale ≤ 43669 and
4·q·scale ≤ 34936 fit fp16 whatever the page. The running m of a value page also absorbs its
largest scale, so P·scale stays below 2^15 without losing small values to subnormals.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# No postponed annotations: the interpreter of Triton 3.0 knows tl.constexpr only as a class.

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from kitty.ops.positions import num_pages

if TYPE_CHECKING:
    from torch import Tensor

    from kitty.pages import Buffers, KeyPages, ValuePages

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# older layout propagation may recompute the instruction's operand in another layout
MOVMATRIX_HOLDS = TRITON_VERSION >= (3, 3)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
N_PLANES = tl.constexpr(8)
SUBNORMAL = tl.constexpr(2.0**24)  # the fp16 subnormal of code 1 is 2^-24
# P is stored 2^10 times larger: 2^4 (lazy maximum) · 2^10 < 65504, and plane 4 takes 2^-8 of it
P_GAIN = tl.constexpr(2.0**10)
LAZY_BITS = tl.constexpr(4.0)  # the accumulator is rescaled when the maximum rose by more
LEAST_SCALE = tl.constexpr(2.0**-14)
LEAST_QUERY = tl.constexpr(2.0**-13)  # its factor, and four times it, fit fp16: 0 · inf is no 0
MASKED = tl.constexpr(-1.0e30)  # finite, so that differences of two are no NaN

# time of a unit of work in quarters of a page's, for the division among splits
PAGE_COST = tl.constexpr(4)
PLANE_COST = tl.constexpr(2)  # of a page whose values are in 16 bit
DENSE_COST = tl.constexpr(3)
BLOCK_DENSE = tl.constexpr(32)


@triton.jit
def shift_words(b_words, ASM: tl.constexpr):
    """Words whose planes 5 … 7 stand at bits 0 … 5; bits above are another word's."""
    if ASM:
        return tl.inline_asm_elementwise(
            "shr.b32 $0, $1, 10;", "=r,r", [b_words], dtype=tl.uint16, is_pure=True, pack=2
        )
    return (b_words.to(tl.int32) >> 10).to(tl.uint16)


@triton.jit
def masked_field(b_words, FIELD: tl.constexpr, ASM: tl.constexpr):
    """Bits 2·FIELD and 2·FIELD+1 as fp16: code · 4^FIELD · 2^-24; one instruction for two words."""
    if ASM:
        if FIELD == 0:
            b_field = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x00030003;", "=r,r", [b_words], tl.uint16, True, 2
            )
        elif FIELD == 1:
            b_field = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x000c000c;", "=r,r", [b_words], tl.uint16, True, 2
            )
        elif FIELD == 2:
            b_field = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x00300030;", "=r,r", [b_words], tl.uint16, True, 2
            )
        elif FIELD == 3:
            b_field = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x00c000c0;", "=r,r", [b_words], tl.uint16, True, 2
            )
        else:
            b_field = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x03000300;", "=r,r", [b_words], tl.uint16, True, 2
            )
    else:
        b_field = (b_words.to(tl.int32) & (3 << (2 * FIELD))).to(tl.uint16)
    return b_field.to(tl.float16, bitcast=True)


@triton.jit
def plane(b_words, b_shifted, J: tl.constexpr, ASM: tl.constexpr):
    """Plane J as fp16: code · 4^(J mod 5) · 2^-24."""
    if J < 5:  # noqa: SIM108
        b_plane = masked_field(b_words, J, ASM)
    else:
        b_plane = masked_field(b_shifted, J - 5, ASM)
    return b_plane


@triton.jit
def gathered_queries(b_list, p_meta, p_query_rows, b_norm):
    """4 · q · scale of the boosted channels ``b_list``, fp16 ``[N, BLOCK_B]``."""
    o_list = b_list.to(tl.int32)
    b_scale = tl.load(p_meta + o_list)
    b_q = tl.load(p_query_rows[:, None] + o_list[None, :])
    if b_q.dtype == tl.float16:
        b_q = b_q * (b_norm * 4.0).to(tl.float16)[:, None]
    else:
        b_q = (b_q.to(tl.float32) * (b_norm * 4.0)[:, None]).to(tl.float16)
    return b_q * b_scale[None, :]


@triton.jit
def any_plane(b_words, j, ASM: tl.constexpr):
    """Plane j, a number on the device, as fp16: code · 2^-24."""
    if ASM:
        b_plane = tl.inline_asm_elementwise(
            "{ .reg .b32 s; and.b32 s, $2, 15; shr.b32 s, $1, s; and.b32 $0, s, 0x00030003; }",
            "=r,r,r",
            [b_words, tl.full(b_words.shape, 0, tl.uint16) + (2 * j).to(tl.uint16)],
            dtype=tl.uint16,
            is_pure=True,
            pack=2,
        )
    else:
        b_plane = ((b_words.to(tl.int32) >> (2 * j)) & 3).to(tl.uint16)
    return b_plane.to(tl.float16, bitcast=True)


@triton.jit
def key_page(
    i_part,  # page · H + head, int64
    p_words,
    p_meta,
    b_q,  # [N, BLOCK_D] normalized
    b_qt,  # its transpose
    o_t,
    o_c,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A key page's words ``[ROWS, BLOCK_D]``, (q · scale) transposed, and Σ q · zero."""
    p_page = p_meta + i_part * (2 * D)
    p_word = p_words + i_part * (ROWS * D) + o_t[:, None] * D + o_c[None, :]
    if D == BLOCK_D:
        b_scale = tl.load(p_page + o_c)
        b_zero = tl.load(p_page + D + o_c)
        b_w = tl.load(p_word)
    else:
        m_c = o_c < D
        b_scale = tl.load(p_page + o_c, mask=m_c, other=0.0)
        b_zero = tl.load(p_page + D + o_c, mask=m_c, other=0.0)
        b_w = tl.load(p_word, mask=m_c[None, :] & (o_t[:, None] >= 0), other=0)
    b_z = tl.dot(tl.broadcast_to(b_zero[None, :], (ROWS, BLOCK_D)), b_qt)
    return b_w, tl.trans(b_q * b_scale[None, :]), b_z


@triton.jit
def high_words(p_page, o_t, o_b, D_BOOST: tl.constexpr, BLOCK_B: tl.constexpr):
    """A key page's high planes ``[ROWS, BLOCK_B]``."""
    p_word = p_page + o_t[:, None] * D_BOOST + o_b[None, :]
    if D_BOOST == BLOCK_B:
        b_h = tl.load(p_word)
    else:
        b_h = tl.load(p_word, mask=(o_b < D_BOOST)[None, :] & (o_t[:, None] >= 0), other=0)
    return b_h


@triton.jit
def plane_dots(b_w, b_q, ASM: tl.constexpr):
    """Products of the planes of ``[ROWS, C]`` words with ``[C, N]``, 4^(j mod 5) · 2^-24 large."""
    b_w5 = shift_words(b_w, ASM)
    s0 = tl.dot(plane(b_w, b_w5, 0, ASM), b_q)
    s1 = tl.dot(plane(b_w, b_w5, 1, ASM), b_q)
    s2 = tl.dot(plane(b_w, b_w5, 2, ASM), b_q)
    s3 = tl.dot(plane(b_w, b_w5, 3, ASM), b_q)
    s4 = tl.dot(plane(b_w, b_w5, 4, ASM), b_q)
    s5 = tl.dot(plane(b_w, b_w5, 5, ASM), b_q)
    s6 = tl.dot(plane(b_w, b_w5, 6, ASM), b_q)
    s7 = tl.dot(plane(b_w, b_w5, 7, ASM), b_q)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def add_plane_dots(b_w, b_q, s0, s1, s2, s3, s4, s5, s6, s7, ASM: tl.constexpr):
    """The same, added to earlier sums."""
    b_w5 = shift_words(b_w, ASM)
    s0 = tl.dot(plane(b_w, b_w5, 0, ASM), b_q, s0)
    s1 = tl.dot(plane(b_w, b_w5, 1, ASM), b_q, s1)
    s2 = tl.dot(plane(b_w, b_w5, 2, ASM), b_q, s2)
    s3 = tl.dot(plane(b_w, b_w5, 3, ASM), b_q, s3)
    s4 = tl.dot(plane(b_w, b_w5, 4, ASM), b_q, s4)
    s5 = tl.dot(plane(b_w, b_w5, 5, ASM), b_q, s5)
    s6 = tl.dot(plane(b_w, b_w5, 6, ASM), b_q, s6)
    s7 = tl.dot(plane(b_w, b_w5, 7, ASM), b_q, s7)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def largest_logit(b_z, s0, s1, s2, s3, s4, s5, s6, s7, b_k0):
    """Largest logit of a page per query ``[N]``, from raw plane sums; b_k0 is κ · 2^24."""
    b_x = tl.maximum(s0, s5) * b_k0[None, :]
    b_x = tl.maximum(b_x, tl.maximum(s1, s6) * (b_k0 * 0.25)[None, :])
    b_x = tl.maximum(b_x, tl.maximum(s2, s7) * (b_k0 * 0.0625)[None, :])
    b_x = tl.maximum(b_x, s3 * (b_k0 * 0.015625)[None, :])
    b_x = tl.maximum(b_x, s4 * (b_k0 * 0.00390625)[None, :])
    return tl.max(b_x + b_z, 0)


@triton.jit
def capped(b_x, SOFTCAP: tl.constexpr):
    """Logits in units of log2, bent to ±SOFTCAP · log2(e); the interpreter has no tanh."""
    if SOFTCAP > 0:
        # 2^(2x / SOFTCAP) is e^(2x'/SOFTCAP) of the natural logit x' = x · ln 2
        b_out = 1.0 - 2.0 / (tl.exp2(b_x * (2.0 / SOFTCAP)) + 1.0)
        b_out = b_out * (SOFTCAP * LOG2_E)
    else:
        b_out = b_x
    return b_out


@triton.jit
def page_weights(b_s, b_k, b_z, b_m, SOFTCAP: tl.constexpr):
    """2^(x - m) of one plane ``[ROWS, N]``; without a cap m is in b_z already."""
    if SOFTCAP > 0:
        b_e = tl.exp2(capped(b_s * b_k[None, :] + b_z, SOFTCAP) - b_m[None, :])
    else:
        b_e = tl.exp2(b_s * b_k[None, :] + b_z)
    return b_e


@triton.jit
def raised(b_m, b_new):
    """The running maximum and the factor that old sums are to be multiplied by."""
    b_next = tl.maximum(b_m, b_new)
    return b_next, tl.exp2(b_m - b_next)


@triton.jit
def value_meta(p_page, o_g, ROWS: tl.constexpr, STRIDE_ZERO: tl.constexpr, FUSED: tl.constexpr):
    """Scale and zero of a value page's tokens by plane: 16 blocks ``[ROWS]`` fp16, scales first."""
    if FUSED:
        # one load, which the pipeline can prefetch; each split takes the next bit of the token
        b_meta = tl.load(p_page + o_g)
        b_meta = tl.permute(tl.reshape(b_meta, (2, 2, 2, 2, ROWS)), (4, 3, 2, 1, 0))
        b_scale, b_zero = tl.split(b_meta)
        s0, s4 = tl.split(b_scale)
        s0, s2 = tl.split(s0)
        s4, s6 = tl.split(s4)
        s0, s1 = tl.split(s0)
        s2, s3 = tl.split(s2)
        s4, s5 = tl.split(s4)
        s6, s7 = tl.split(s6)
        z0, z4 = tl.split(b_zero)
        z0, z2 = tl.split(z0)
        z4, z6 = tl.split(z4)
        z0, z1 = tl.split(z0)
        z2, z3 = tl.split(z2)
        z4, z5 = tl.split(z4)
        z6, z7 = tl.split(z6)
    else:
        p_zero = p_page + STRIDE_ZERO
        s0, z0 = tl.load(p_page + o_g), tl.load(p_zero + o_g)
        s1, z1 = tl.load(p_page + 1 * ROWS + o_g), tl.load(p_zero + 1 * ROWS + o_g)
        s2, z2 = tl.load(p_page + 2 * ROWS + o_g), tl.load(p_zero + 2 * ROWS + o_g)
        s3, z3 = tl.load(p_page + 3 * ROWS + o_g), tl.load(p_zero + 3 * ROWS + o_g)
        s4, z4 = tl.load(p_page + 4 * ROWS + o_g), tl.load(p_zero + 4 * ROWS + o_g)
        s5, z5 = tl.load(p_page + 5 * ROWS + o_g), tl.load(p_zero + 5 * ROWS + o_g)
        s6, z6 = tl.load(p_page + 6 * ROWS + o_g), tl.load(p_zero + 6 * ROWS + o_g)
        s7, z7 = tl.load(p_page + 7 * ROWS + o_g), tl.load(p_zero + 7 * ROWS + o_g)
    return s0, s1, s2, s3, s4, s5, s6, s7, z0, z1, z2, z3, z4, z5, z6, z7


@triton.jit
def scaled_weights(b_e, b_scale, GAIN: tl.constexpr, MOVMATRIX: tl.constexpr):
    """P · scale · GAIN in fp16 ``[ROWS, N]``."""
    b_p = (b_e * (b_scale.to(tl.float32) * GAIN)[:, None]).to(tl.float16)
    if MOVMATRIX:
        # A result of tensor cores holds pairs of queries, their next operand pairs of tokens. One
        # instruction transposes an 8 × 8 block across the warp; the permutation below undoes it
        # in the tensor's indices, and costs nothing.
        b_p = tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
            "=r,r",
            [b_p],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
        ROWS: tl.constexpr = b_e.shape[0]
        N: tl.constexpr = b_e.shape[1]
        b_p = tl.permute(tl.reshape(b_p, (ROWS // 8, 8, N // 8, 8)), (0, 3, 2, 1))
        b_p = tl.reshape(b_p, (ROWS, N))
    return b_p


@triton.jit
def page_values(b_acc, b_w, p0, p1, p2, p3, p4, p5, p6, p7, ASM: tl.constexpr):
    """Add Σ_n P_n · code_nc of one page to ``[BLOCK_V, N]``; b_w is ``[BLOCK_V, ROWS]``."""
    b_w5 = shift_words(b_w, ASM)
    b_acc = tl.dot(plane(b_w, b_w5, 0, ASM), p0, b_acc)
    b_acc = tl.dot(plane(b_w, b_w5, 1, ASM), p1, b_acc)
    b_acc = tl.dot(plane(b_w, b_w5, 2, ASM), p2, b_acc)
    b_acc = tl.dot(plane(b_w, b_w5, 3, ASM), p3, b_acc)
    b_acc = tl.dot(plane(b_w, b_w5, 4, ASM), p4, b_acc)
    b_acc = tl.dot(plane(b_w, b_w5, 5, ASM), p5, b_acc)
    b_acc = tl.dot(plane(b_w, b_w5, 6, ASM), p6, b_acc)
    return tl.dot(plane(b_w, b_w5, 7, ASM), p7, b_acc)


@triton.jit
def top_scale(v0, v1, v2, v3, v4, v5, v6, v7):
    """Largest value scale of a page, fp32, at least 2^-14."""
    b_v = tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3))
    b_v = tl.maximum(b_v, tl.maximum(tl.maximum(v4, v5), tl.maximum(v6, v7)))
    return tl.maximum(tl.max(b_v.to(tl.float32), 0), LEAST_SCALE)


@triton.jit
def exponent(x):
    """The least integer n with x < 2^n, as fp32, without a conversion (x normal and positive)."""
    biased = (x.to(tl.uint32, bitcast=True) >> 23) | 0x4B000000  # 2^23 + exponent + 127
    return biased.to(tl.float32, bitcast=True) - 8388734.0


@triton.jit
def weighted_zeros(e0, e1, e2, e3, e4, e5, e6, e7, z0, z1, z2, z3, z4, z5, z6, z7):
    """Σ_j P_j · zero_j, fp32 ``[ROWS, N]``."""
    b_sum = e0 * z0.to(tl.float32)[:, None]
    b_sum += e1 * z1.to(tl.float32)[:, None]
    b_sum += e2 * z2.to(tl.float32)[:, None]
    b_sum += e3 * z3.to(tl.float32)[:, None]
    b_sum += e4 * z4.to(tl.float32)[:, None]
    b_sum += e5 * z5.to(tl.float32)[:, None]
    b_sum += e6 * z6.to(tl.float32)[:, None]
    return b_sum + e7 * z7.to(tl.float32)[:, None]


@triton.jit
def load_list(p_list, o_b, D_BOOST: tl.constexpr, BLOCK_B: tl.constexpr):
    """A page's boosted channels, padded with channel 0."""
    if D_BOOST == BLOCK_B:
        b_list = tl.load(p_list + o_b)
    else:
        b_list = tl.load(p_list + o_b, mask=o_b < D_BOOST, other=0)
    return b_list


@triton.jit
def load_value_words(p_page, o_t, o_v, D: tl.constexpr, BLOCK_V: tl.constexpr):
    """A value page's words, channels first ``[BLOCK_V, ROWS]``."""
    p_word = p_page + o_t[None, :] * D + o_v[:, None]
    if D % BLOCK_V == 0:
        b_w = tl.load(p_word)
    else:
        b_w = tl.load(p_word, mask=(o_v < D)[:, None] & (o_t[None, :] >= 0), other=0)
    return b_w


@triton.jit
def exact(b_x, ASM: tl.constexpr):
    """A factor of a product; the interpreter multiplies bf16 wrongly, so there it is widened."""
    if ASM:  # noqa: SIM108
        b_out = b_x
    else:
        b_out = b_x.to(tl.float32)
    return b_out


@triton.jit
def wrapped(start, o_s, capacity):
    """Ring slots of consecutive tokens, at most as many as it has; one division for all."""
    o_slot = start % capacity + o_s
    return tl.where(o_slot >= capacity, o_slot - capacity, o_slot)


@triton.jit
def share_of(first, last, start, size, COST: tl.constexpr):
    """Which of ``size`` units, beginning at ``start``, fall to a split of work [first, last)."""
    begin = (tl.maximum(first - start, 0) + COST - 1) // COST
    end = (tl.maximum(last - start, 0) + COST - 1) // COST
    return tl.minimum(begin, size), tl.minimum(end, size)


@triton.jit(do_not_specialize=["num_splits"])
def decode_kernel(
    p_query,  # [B, Hq, T, D], strided
    p_key_words,
    p_key_high,
    p_key_meta,
    p_key_boosted,
    p_value_words,
    p_value_meta,
    p_key_table,  # [B, max_pages]
    p_value_table,
    p_sink_k,
    p_sink_v,
    p_key_ring,
    p_value_ring,
    p_seq_lens,
    p_out,  # [B, Hq, T, S, D] fp32 with splits, [B, Hq, T, D] else
    p_lse,  # [B, Hq, T, S]
    num_heads,
    stride_query_b,
    stride_query_h,
    stride_query_t,
    stride_key_table,
    stride_value_table,
    softmax_scale,
    num_splits,
    G: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SINK: tl.constexpr,
    KEY_UNPAGED: tl.constexpr,
    VALUE_UNPAGED: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    ASM: tl.constexpr,
    MOVMATRIX: tl.constexpr,
    SOFTCAP: tl.constexpr = 0.0,
):
    """Grid (B · H, splits, query tiles · value chunks); a program takes its share of the work.

    The work of a sequence in order: tokens in 16 bit, pages whose values (of some query) are in
    16 bit, pages. Its division follows the length on the device, so the grid may be too large.
    """
    N_ROWS: tl.constexpr = QUERIES_PER_KV * T
    N_CHUNKS: tl.constexpr = (D + BLOCK_V - 1) // BLOCK_V
    ROWS: tl.constexpr = G // N_PLANES
    N_GROUPS: tl.constexpr = D // GROUP
    FUSED: tl.constexpr = N_GROUPS == 1
    i_bh = tl.program_id(0)
    i_split = tl.program_id(1)
    i_tile = tl.program_id(2) // N_CHUNKS
    i_chunk = tl.program_id(2) % N_CHUNKS
    i_b = (i_bh // num_heads).to(tl.int64)
    i_h = i_bh % num_heads

    # columns: query r = g·T + t of this KV head; surplus columns repeat the last
    o_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N_ROWS
    o_r = tl.minimum(o_n, N_ROWS - 1)
    o_head = i_h * QUERIES_PER_KV + o_r // T
    o_c = tl.arange(0, BLOCK_D)
    o_v = i_chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    o_t = tl.arange(0, ROWS)
    o_b = tl.arange(0, BLOCK_B)
    p_row = p_query + i_b * stride_query_b + o_head * stride_query_h + (o_r % T) * stride_query_t
    # the pages' query: rows normalized to at most 1, the factor goes into κ
    b_query = tl.load(p_row[:, None] + o_c[None, :], mask=(o_c < D)[None, :], other=0.0)
    b_q = b_query.to(tl.float32)
    b_largest = tl.maximum(tl.max(tl.abs(b_q), 1), LEAST_QUERY)
    b_norm = tl.exp2(-tl.ceil(tl.log2(b_largest)))
    b_q = (b_q * b_norm[:, None]).to(tl.float16)
    b_qt = tl.trans(b_q)
    scale = softmax_scale * LOG2_E
    b_kappa = (1.0 / b_norm) * scale  # powers of two: exact
    b_k0 = b_kappa * SUBNORMAL
    length = tl.load(p_seq_lens + i_b)
    # tokens before each query's own; the earliest and latest query of the call bound the pages
    before = length - T + o_r % T  # [BLOCK_N]
    least = tl.maximum(length - T, 0)
    least_key_pages = num_pages(least, KEY_UNPAGED, G)
    key_pages = num_pages(length - 1, KEY_UNPAGED, G)
    pages = num_pages(least, VALUE_UNPAGED, G)
    num_sink = tl.minimum(length, SINK)
    sink_blocks = (num_sink + BLOCK_DENSE - 1) // BLOCK_DENSE
    ring_start = least_key_pages * G  # counted from the sink's end, like the slots of a ring
    num_ring = tl.maximum(length - SINK - ring_start, 0)
    blocks = sink_blocks + (num_ring + BLOCK_DENSE - 1) // BLOCK_DENSE

    start_mixed = blocks * DENSE_COST
    start_pages = start_mixed + (key_pages - pages) * (N_PLANES * PLANE_COST)
    work = start_pages + pages * PAGE_COST
    first = (work * i_split) // num_splits
    last = (work * (i_split + 1)) // num_splits

    b_m = tl.full((BLOCK_N,), MASKED, tl.float32)
    b_l = tl.zeros((ROWS, BLOCK_N), tl.float32)  # summed over rows at the end
    b_offset = tl.zeros((ROWS, BLOCK_N), tl.float32)  # Σ P·zero, likewise
    b_acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)

    begin, end = share_of(first, last, 0, blocks, DENSE_COST)
    if begin < end:
        b_dense_qt = tl.trans(b_query)
        o_s = tl.arange(0, BLOCK_DENSE)
        i_kv = i_bh.to(tl.int64)
        b_sum = tl.zeros((BLOCK_DENSE, BLOCK_N), tl.float32)
        for i in tl.range(begin, end, num_stages=1):
            in_sink = i < sink_blocks
            # first token of the block: its distance from the buffer's first, slots up to a wrap
            start = tl.where(in_sink, i * BLOCK_DENSE, ring_start + (i - sink_blocks) * BLOCK_DENSE)
            o_token = start + o_s + tl.where(in_sink, 0, SINK)
            m_s = o_token < tl.where(in_sink, num_sink, length)
            p_k = tl.where(
                in_sink, p_sink_k + i_kv * (SINK * D), p_key_ring + i_kv * (KEY_RING * D)
            )
            o_slot = wrapped(start, o_s, tl.where(in_sink, SINK + BLOCK_DENSE, KEY_RING))
            m_k = m_s[:, None] & (o_c < D)[None, :]
            b_k = tl.load(p_k + o_slot[:, None] * D + o_c[None, :], mask=m_k, other=0.0)
            p_v = tl.where(
                in_sink, p_sink_v + i_kv * (SINK * D), p_value_ring + i_kv * (VALUE_RING * D)
            )
            o_slot = wrapped(start, o_s, tl.where(in_sink, SINK + BLOCK_DENSE, VALUE_RING))
            m_v = m_s[None, :] & (o_v < D)[:, None]
            b_v = tl.load(p_v + o_slot[None, :] * D + o_v[:, None], mask=m_v, other=0.0)
            b_x = capped(tl.dot(exact(b_k, ASM), exact(b_dense_qt, ASM)) * scale, SOFTCAP)
            visible = m_s[:, None] & (o_n[None, :] >= 0)
            if T > 1:
                paged = tl.where(in_sink, 0, SINK + num_pages(before, KEY_UNPAGED, G) * G)
                visible = m_s[:, None] & (o_token[:, None] <= before[None, :])
                visible = visible & (o_token[:, None] >= paged[None, :])
            b_x = tl.where(visible, b_x, float("-inf"))
            b_m, b_alpha = raised(b_m, tl.max(b_x, 0))
            b_e = tl.exp2(b_x - b_m[None, :])
            b_sum = b_sum * b_alpha[None, :] + b_e
            b_acc = b_acc * b_alpha[None, :]
            b_acc = tl.dot(exact(b_v, ASM), exact(b_e.to(b_v.dtype), ASM), b_acc)
        b_l += tl.sum(b_sum, 0)[None, :] * (1.0 / ROWS)

    p_key_row = p_key_table + i_b * stride_key_table
    p_value_row = p_value_table + i_b * stride_value_table

    begin, end = share_of(first, last, start_mixed, (key_pages - pages) * N_PLANES, PLANE_COST)
    p_ring = p_value_ring + i_bh.to(tl.int64) * (VALUE_RING * D)
    begin += pages * N_PLANES
    end += pages * N_PLANES
    for i in tl.range(begin // N_PLANES, (end + N_PLANES - 1) // N_PLANES, num_stages=1):
        i_part = tl.maximum(tl.load(p_key_row + i), 0).to(tl.int64) * num_heads + i_h
        b_w, b_qs, b_z = key_page(
            i_part, p_key_words, p_key_meta, b_q, b_qt, o_t, o_c, ROWS, D, BLOCK_D
        )
        b_h, b_qh = b_w, b_qs
        if D_BOOST > 0:
            b_list = load_list(p_key_boosted + i_part * D_BOOST, o_b, D_BOOST, BLOCK_B)
            b_qh = tl.trans(gathered_queries(b_list, p_key_meta + i_part * (2 * D), p_row, b_norm))
            b_h = high_words(p_key_high + i_part * (ROWS * D_BOOST), o_t, o_b, D_BOOST, BLOCK_B)
        unseen = i >= num_pages(before, KEY_UNPAGED, G)
        b_hidden = tl.where(unseen, float("-inf"), 0.0)
        if SOFTCAP > 0:  # noqa: SIM108
            b_z = b_z * b_kappa[None, :]
        else:
            b_z = b_z * b_kappa[None, :] + b_hidden[None, :]
        # queries whose value page this is too take it quantized, the others from the ring
        in_ring = tl.where(i < num_pages(before, VALUE_UNPAGED, G), 0.0, 1.0)
        first_plane = tl.maximum(begin - i * N_PLANES, 0)
        last_plane = tl.minimum(end - i * N_PLANES, N_PLANES)
        for j in tl.range(first_plane, last_plane, num_stages=1):
            b_x = tl.dot(any_plane(b_w, j, ASM), b_qs)
            if D_BOOST > 0:
                b_x = tl.dot(any_plane(b_h, j, ASM), b_qh, b_x)
            b_x = b_x * b_k0[None, :] + b_z
            if SOFTCAP > 0:
                b_x = capped(b_x, SOFTCAP) + b_hidden[None, :]
            b_m, b_alpha = raised(b_m, tl.max(b_x, 0))
            b_e = tl.exp2(b_x - b_m[None, :])
            b_l = b_l * b_alpha[None, :] + b_e
            b_offset = b_offset * b_alpha[None, :]
            b_acc = b_acc * b_alpha[None, :]
            b_p = b_e * in_ring[None, :]
            o_slot = wrapped(i * G + j * ROWS, o_t, VALUE_RING)
            m_v = (o_v < D)[:, None] & (o_slot[None, :] >= 0)
            b_v = tl.load(p_ring + o_slot[None, :] * D + o_v[:, None], mask=m_v, other=0.0)
            b_acc = tl.dot(exact(b_v, ASM), exact(b_p.to(b_v.dtype), ASM), b_acc)
            if T > 1:  # noqa: SIM102
                if i < num_pages(length - 1, VALUE_UNPAGED, G):
                    b_rest = b_e - b_p
                    page = tl.maximum(tl.load(p_value_row + i), 0).to(tl.int64)
                    i_value = page * num_heads + i_h
                    p_page = p_value_meta + i_value * (2 * N_GROUPS * G) + j * ROWS + o_t
                    p_page += i_chunk * BLOCK_V // GROUP * G
                    b_scale = tl.load(p_page).to(tl.float32)
                    b_zero = tl.load(p_page + N_GROUPS * G).to(tl.float32)
                    b_offset += b_rest * b_zero[:, None]
                    # in units of the largest scale, so that the products fit fp16
                    unit = tl.maximum(tl.max(b_scale, 0), LEAST_SCALE)
                    b_rest = (b_rest * (b_scale * (1.0 / unit))[:, None]).to(tl.float16)
                    p_word = p_value_words + i_value * (ROWS * D)
                    b_u = load_value_words(p_word, o_t, o_v, D, BLOCK_V)
                    b_acc += tl.dot(any_plane(b_u, j, ASM), b_rest) * (unit * SUBNORMAL)

    # from here on the accumulator is in units of 2^-24 · P_GAIN
    b_acc = b_acc * (P_GAIN / SUBNORMAL)
    begin, end = share_of(first, last, start_pages, pages, PAGE_COST)
    key_id = tl.load(p_key_row + begin, mask=begin < end, other=0)
    value_id = tl.load(p_value_row + begin, mask=begin < end, other=0)
    b_next = tl.zeros((BLOCK_B,), tl.uint8)
    if D_BOOST > 0:
        i_part = tl.maximum(key_id, 0).to(tl.int64) * num_heads + i_h
        m_b = o_b < tl.where(begin < end, D_BOOST, 0)
        b_next = tl.load(p_key_boosted + i_part * D_BOOST + o_b, mask=m_b, other=0)
    for i in range(begin, end):
        i_part = tl.maximum(key_id, 0).to(tl.int64) * num_heads + i_h
        i_value = tl.maximum(value_id, 0).to(tl.int64) * num_heads + i_h
        key_id = tl.load(p_key_row + i + 1, mask=i + 1 < end, other=0)
        value_id = tl.load(p_value_row + i + 1, mask=i + 1 < end, other=0)
        b_qg = b_q
        if D_BOOST > 0:
            b_qg = gathered_queries(b_next, p_key_meta + i_part * (2 * D), p_row, b_norm)
        b_w, b_qs, b_z = key_page(
            i_part, p_key_words, p_key_meta, b_q, b_qt, o_t, o_c, ROWS, D, BLOCK_D
        )
        s0, s1, s2, s3, s4, s5, s6, s7 = plane_dots(b_w, b_qs, ASM)
        if D_BOOST > 0:
            p_page = p_key_high + i_part * (ROWS * D_BOOST)
            b_h = high_words(p_page, o_t, o_b, D_BOOST, BLOCK_B)
            s0, s1, s2, s3, s4, s5, s6, s7 = add_plane_dots(
                b_h, tl.trans(b_qg), s0, s1, s2, s3, s4, s5, s6, s7, ASM
            )
            # one page ahead: the gathers that depend on the list stand at the top of the loop
            i_part = tl.maximum(key_id, 0).to(tl.int64) * num_heads + i_h
            b_next = load_list(p_key_boosted + i_part * D_BOOST, o_b, D_BOOST, BLOCK_B)
        b_z = b_z * b_kappa[None, :]
        b_top = capped(largest_logit(b_z, s0, s1, s2, s3, s4, s5, s6, s7, b_k0), SOFTCAP)
        p_page = p_value_meta + i_value * (2 * N_GROUPS * G)
        if FUSED:
            v0, v1, v2, v3, v4, v5, v6, v7, z0, z1, z2, z3, z4, z5, z6, z7 = value_meta(
                p_page, tl.arange(0, 2 * G), ROWS, G, True
            )
        else:
            p_page += i_chunk * BLOCK_V // GROUP * G + o_t
            v0, v1, v2, v3, v4, v5, v6, v7, z0, z1, z2, z3, z4, z5, z6, z7 = value_meta(
                p_page, 0, ROWS, N_GROUPS * G, False
            )
        b_top += exponent(top_scale(v0, v1, v2, v3, v4, v5, v6, v7))
        if tl.max(b_top - b_m, 0) > LAZY_BITS:
            b_m, b_alpha = raised(b_m, b_top)
            b_l = b_l * b_alpha[None, :]
            b_offset = b_offset * b_alpha[None, :]
            b_acc = b_acc * b_alpha[None, :]
        if SOFTCAP == 0:
            b_z -= b_m[None, :]
        e0 = page_weights(s0, b_k0, b_z, b_m, SOFTCAP)
        e1 = page_weights(s1, b_k0 * 0.25, b_z, b_m, SOFTCAP)
        e2 = page_weights(s2, b_k0 * 0.0625, b_z, b_m, SOFTCAP)
        e3 = page_weights(s3, b_k0 * 0.015625, b_z, b_m, SOFTCAP)
        e4 = page_weights(s4, b_k0 * 0.00390625, b_z, b_m, SOFTCAP)
        e5 = page_weights(s5, b_k0, b_z, b_m, SOFTCAP)
        e6 = page_weights(s6, b_k0 * 0.25, b_z, b_m, SOFTCAP)
        e7 = page_weights(s7, b_k0 * 0.0625, b_z, b_m, SOFTCAP)
        b_l += e0 + e1 + e2 + e3 + e4 + e5 + e6 + e7
        b_offset += weighted_zeros(e0, e1, e2, e3, e4, e5, e6, e7, z0, z1, z2, z3, z4, z5, z6, z7)
        p0 = scaled_weights(e0, v0, P_GAIN, MOVMATRIX)
        p1 = scaled_weights(e1, v1, P_GAIN * 0.25, MOVMATRIX)
        p2 = scaled_weights(e2, v2, P_GAIN * 0.0625, MOVMATRIX)
        p3 = scaled_weights(e3, v3, P_GAIN * 0.015625, MOVMATRIX)
        p4 = scaled_weights(e4, v4, P_GAIN * 0.00390625, MOVMATRIX)
        p5 = scaled_weights(e5, v5, P_GAIN, MOVMATRIX)
        p6 = scaled_weights(e6, v6, P_GAIN * 0.25, MOVMATRIX)
        p7 = scaled_weights(e7, v7, P_GAIN * 0.0625, MOVMATRIX)
        b_w = load_value_words(p_value_words + i_value * (ROWS * D), o_t, o_v, D, BLOCK_V)
        b_acc = page_values(b_acc, b_w, p0, p1, p2, p3, p4, p5, p6, p7, ASM)

    b_l = tl.sum(b_l, 0)
    b_acc = b_acc * (SUBNORMAL / P_GAIN) + tl.sum(b_offset, 0)[None, :]
    empty = b_l == 0.0
    b_acc = b_acc / tl.where(empty, 1.0, b_l)[None, :]
    b_lse = tl.where(empty, float("-inf"), (b_m + tl.log2(b_l)) * LN_2)
    num_rows = num_heads * N_ROWS
    o_out = (i_b * num_rows + i_h * N_ROWS + o_r) * num_splits + i_split
    m_out = m_n[None, :] & (o_v < D)[:, None]
    tl.store(p_out + o_out[None, :] * D + o_v[:, None], b_acc, mask=m_out)
    if i_chunk == 0:
        tl.store(p_lse + o_out, b_lse, mask=m_n)


class Plan(NamedTuple):
    """How query rows and channels of a KV head are cut: tiles of columns, chunks of channels."""

    block_n: int
    tiles: int
    block_v: int
    chunks: int
    num_warps: int
    num_stages: int


def launch_plan(queries_per_kv: int, num_tokens: int, head_dim: int) -> Plan:
    """Blocks of one launch.

    Products have 8 columns at least where Triton allows it (from 3.3 on), 16 before; a warp for
    every 8 of them. More than 32 columns (16 before 3.3, which mixes incompatible layouts in
    wider programs), or more than 128 channels of a value, go to further programs that read the
    page again.
    """
    recent = TRITON_VERSION >= (3, 3)
    least, most = (8, 32) if recent else (16, 16)
    rows = queries_per_kv * num_tokens
    block_n = min(most, max(least, triton.next_power_of_2(rows)))
    block_v = min(128, triton.next_power_of_2(head_dim))
    return Plan(
        block_n=block_n,
        tiles=-(-rows // block_n),
        block_v=block_v,
        chunks=-(-head_dim // block_v),
        num_warps=max(1, block_n // 8),
        # the loop pipeline of older versions cannot order the dependent loads
        num_stages=2 if recent else 1,
    )


def launch_decode(
    query: "Tensor",
    keys: "KeyPages",
    values: "ValuePages",
    key_table: "Tensor",
    value_table: "Tensor",
    buffers: "Buffers",
    seq_lens: "Tensor",
    out: "Tensor",
    lse: "Tensor",
    *,
    sink: int,
    window: int,
    rollback: int,
    softmax_scale: float,
    num_splits: int,
    softcap: float | None = None,
    **options: int,
) -> object:
    """Launch the kernel; ``out`` ``[B, Hq, T, S, D]`` and ``lse`` ``[B, Hq, T, S]`` take splits.

    Returns the compiled kernel (None in the interpreter), for its resources.
    """
    import torch  # the kernels above need Triton alone

    batch, num_query_heads, num_tokens, head_dim = query.shape
    heads, word_rows = keys.words.shape[1:3]
    num_boosted = keys.high.shape[-1]
    plan = launch_plan(num_query_heads // heads, num_tokens, head_dim)
    grid = (batch * heads, num_splits, plan.tiles * plan.chunks)
    page_size = word_rows * 8
    return decode_kernel[grid](
        query,
        keys.words.view(torch.uint16),
        keys.high.view(torch.uint16),
        keys.meta,
        keys.boosted,
        values.words.view(torch.uint16),
        values.meta,
        key_table,
        value_table,
        *buffers,
        seq_lens,
        out,
        lse,
        heads,
        *query.stride()[:3],
        key_table.stride(0),
        value_table.stride(0),
        softmax_scale,
        num_splits,
        G=page_size,
        D=head_dim,
        D_BOOST=num_boosted,
        GROUP=min(head_dim, page_size),
        QUERIES_PER_KV=num_query_heads // heads,
        T=num_tokens,
        BLOCK_N=plan.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_B=max(16, triton.next_power_of_2(num_boosted)),
        BLOCK_V=plan.block_v,
        SINK=sink,
        KEY_UNPAGED=sink + rollback,
        VALUE_UNPAGED=sink + window + rollback,
        KEY_RING=buffers.key_ring.shape[2],
        VALUE_RING=buffers.value_ring.shape[2],
        SOFTCAP=softcap or 0.0,
        **{
            "ASM": query.is_cuda,
            "MOVMATRIX": query.is_cuda and MOVMATRIX_HOLDS,
            "num_warps": plan.num_warps,
            "num_stages": plan.num_stages,
            **options,
        },
    )
