"""Triton kernel of append: finish the pages that the previous call left full, write new tokens.

One program per sequence and KV head does both in that order, because the new tokens may take the
ring slots of the tokens that go into pages. Nearly all calls of a decode find no full page.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# No postponed annotations: the interpreter of Triton 3.0 knows tl.constexpr only as a class.

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kitty.ops.positions import num_pages, ring_slot
from kitty.ops.quantize_pages.kernel import (
    N_PLANES,
    as_int32,
    quantize_key_page,
    quantize_value_page,
    rows_at_once,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kitty.pages import Buffers, KeyPages, ValuePages

MAX_BLOCK_T = 16
# The rare full page would take more; with so many, 4 programs share a multiprocessor in the
# calls that only write tokens.
MAX_REGISTERS = 128


@triton.jit
def write_tokens(
    b_x,  # [BLOCK_T, BLOCK_D]
    token,  # [BLOCK_T] absolute indices
    valid,  # [BLOCK_T]
    length,
    p_sink,  # [S, D] of the sequence and head
    p_ring,  # [CAPACITY, D]
    o_c,
    D: tl.constexpr,
    SINK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Tokens into sink or ring; those that later tokens of the call would overwrite are left."""
    m_c = (o_c < D)[None, :]
    b_x = b_x.to(p_ring.dtype.element_ty)
    if SINK > 0:
        in_sink = valid & (token < SINK)
        p_token = p_sink + token[:, None] * D + o_c[None, :]
        tl.store(p_token, b_x, mask=in_sink[:, None] & m_c)
    in_ring = valid & (token >= SINK) & (token >= length - CAPACITY)
    # a divisor's sign decides the remainder's, so no negative number goes in
    slot = ring_slot(tl.maximum(token, SINK), SINK, CAPACITY)
    p_token = p_ring + slot[:, None] * D + o_c[None, :]
    tl.store(p_token, b_x, mask=in_ring[:, None] & m_c)


@triton.jit(do_not_specialize=["seed", "layer"])
def append_kernel(
    p_k,  # [B, H, T, D], strided
    p_v,
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
    p_paged_lens,
    p_num_new,
    num_tokens,
    num_heads,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_key_table,
    stride_value_table,
    seed,
    layer,
    G: tl.constexpr,
    D: tl.constexpr,
    D_BOOST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SINK: tl.constexpr,
    KEY_UNPAGED: tl.constexpr,
    VALUE_UNPAGED: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    RAGGED: tl.constexpr,
    SELECTION: tl.constexpr,
    STEP: tl.constexpr,
    UNROLL: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid (H, B)."""
    i_h = tl.program_id(0)
    i_b = tl.program_id(1)
    i_bh = i_b.to(tl.int64) * num_heads + i_h
    length = tl.load(p_seq_lens + i_b)
    paged = tl.load(p_paged_lens + i_b)
    if RAGGED:  # noqa: SIM108
        new = tl.load(p_num_new + i_b)
    else:
        new = num_tokens
    before = length - new
    p_key_ring += i_bh * (KEY_RING * D)
    p_value_ring += i_bh * (VALUE_RING * D)

    first = num_pages(paged, KEY_UNPAGED, G)
    last = num_pages(before, KEY_UNPAGED, G)
    for i_page in range(first, last):
        page = tl.load(p_key_table + i_b.to(tl.int64) * stride_key_table + i_page)
        if page >= 0:
            i_part = page.to(tl.int64) * num_heads + i_h
            quantize_key_page(
                p_key_ring,
                i_page * G,
                D,
                i_h,
                i_page,
                seed,
                layer,
                p_key_words + i_part * (G // N_PLANES * D),
                p_key_high + i_part * (G // N_PLANES * D_BOOST),
                p_key_meta + i_part * (2 * D),
                p_key_boosted + i_part * D_BOOST,
                G,
                D,
                D_BOOST,
                BLOCK_D,
                KEY_RING,
                SELECTION,
                STEP,
                UNROLL,
                ASM,
            )
    first = num_pages(paged, VALUE_UNPAGED, G)
    last = num_pages(before, VALUE_UNPAGED, G)
    for i_page in range(first, last):
        page = tl.load(p_value_table + i_b.to(tl.int64) * stride_value_table + i_page)
        if page >= 0:
            i_part = page.to(tl.int64) * num_heads + i_h
            quantize_value_page(
                p_value_ring,
                i_page * G,
                D,
                p_value_words + i_part * (G // N_PLANES * D),
                p_value_meta + i_part * (2 * (D // GROUP) * G),
                G,
                D,
                GROUP,
                BLOCK_GROUP,
                VALUE_RING,
                UNROLL,
                ASM,
            )

    tl.debug_barrier()  # every thread has read the ring before any overwrites it
    p_k += i_b.to(tl.int64) * stride_k_b + i_h.to(tl.int64) * stride_k_h
    p_v += i_b.to(tl.int64) * stride_v_b + i_h.to(tl.int64) * stride_v_h
    o_c = tl.arange(0, BLOCK_D)
    o_t = tl.arange(0, BLOCK_T)
    for start in range(0, num_tokens, BLOCK_T):
        row = start + o_t
        token = length - num_tokens + row
        valid = (row < num_tokens) & (token >= before) & (token >= 0)
        mask = valid[:, None] & (o_c < D)[None, :]
        o_row = row.to(tl.int64)[:, None]
        b_k = tl.load(p_k + o_row * stride_k_t + o_c[None, :], mask=mask, other=0.0)
        b_v = tl.load(p_v + o_row * stride_v_t + o_c[None, :], mask=mask, other=0.0)
        p_sink = p_sink_k + i_bh * (SINK * D)
        write_tokens(b_k, token, valid, length, p_sink, p_key_ring, o_c, D, SINK, KEY_RING)
        p_sink = p_sink_v + i_bh * (SINK * D)
        write_tokens(b_v, token, valid, length, p_sink, p_value_ring, o_c, D, SINK, VALUE_RING)


def launch_append(
    k: "Tensor",
    v: "Tensor",
    keys: "KeyPages",
    values: "ValuePages",
    key_table: "Tensor",
    value_table: "Tensor",
    buffers: "Buffers",
    seq_lens: "Tensor",
    paged_lens: "Tensor",
    num_new: "Tensor | None",
    *,
    sink: int,
    window: int,
    rollback: int,
    selection: str,
    seed: int,
    layer: int,
    num_warps: int = 4,
) -> None:
    """Launch the kernel, one program per sequence and KV head."""
    batch, heads, num_tokens, head_dim = k.shape
    page_size = keys.words.shape[2] * 8
    group = min(head_dim, page_size)
    block_d = triton.next_power_of_2(head_dim)
    append_kernel[(heads, batch)](
        k,
        v,
        *keys,
        *values,
        key_table,
        value_table,
        *buffers,
        seq_lens,
        paged_lens,
        seq_lens if num_new is None else num_new,
        num_tokens,
        heads,
        *k.stride()[:3],
        *v.stride()[:3],
        key_table.stride(0),
        value_table.stride(0),
        as_int32(seed),
        layer,
        G=page_size,
        D=head_dim,
        D_BOOST=keys.high.shape[-1],
        BLOCK_D=block_d,
        GROUP=group,
        BLOCK_GROUP=triton.next_power_of_2(group),
        BLOCK_T=min(MAX_BLOCK_T, triton.next_power_of_2(num_tokens)),
        SINK=sink,
        KEY_UNPAGED=sink + rollback,
        VALUE_UNPAGED=sink + window + rollback,
        KEY_RING=buffers.key_ring.shape[2],
        VALUE_RING=buffers.value_ring.shape[2],
        RAGGED=num_new is not None,
        SELECTION=selection,
        STEP=rows_at_once(page_size, block_d, num_warps),
        UNROLL=1,
        ASM=k.is_cuda,
        num_warps=num_warps,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
