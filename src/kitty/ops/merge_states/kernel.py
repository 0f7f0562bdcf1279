"""Triton kernel of merge_states: one program joins the parts of one query."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# No postponed annotations: the interpreter of Triton 3.0 knows tl.constexpr only as a class.

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MOST_ELEMENTS = 16384  # of one block of parts


@triton.jit
def merge_states_kernel(
    p_outputs,  # [N, S, D]
    p_lse,  # [N, S]
    p_out,  # [N, D]
    p_total,  # [N]
    num_parts,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid (N, ceil(D / BLOCK_D))."""
    i_n = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_s = tl.arange(0, BLOCK_S)
    m_c = o_c < D
    p_lse += i_n * num_parts
    p_outputs += i_n * num_parts * D
    b_max = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    for start in range(0, num_parts, BLOCK_S):
        m_s = start + o_s < num_parts
        b_max = tl.maximum(b_max, tl.load(p_lse + start + o_s, mask=m_s, other=float("-inf")))
    top = tl.max(b_max, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    b_sum = tl.zeros((BLOCK_S,), tl.float32)
    b_acc = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for start in range(0, num_parts, BLOCK_S):
        m_s = start + o_s < num_parts
        b_lse = tl.load(p_lse + start + o_s, mask=m_s, other=float("-inf"))
        p_part = p_outputs + (start + o_s)[:, None] * D + o_c[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & m_c[None, :], other=0.0).to(tl.float32)
        b_weight = tl.exp2((b_lse - top) * LOG2_E)
        b_sum += b_weight
        # a part without keys may hold anything, NaN too
        b_part = tl.where((b_weight != 0.0)[:, None], b_part, 0.0)
        b_acc += b_part * b_weight[:, None]
    total = tl.sum(b_sum, 0)
    empty = total == 0.0
    b_out = tl.sum(b_acc, 0) / tl.where(empty, 1.0, total)
    tl.store(p_out + i_n * D + o_c, b_out, mask=m_c)
    if tl.program_id(1) == 0:
        tl.store(p_total + i_n, tl.where(empty, float("-inf"), top + tl.log2(total) * LN_2))


def launch_merge_states(outputs: "Tensor", lse: "Tensor", out: "Tensor", total: "Tensor") -> None:
    """Launch the kernel on contiguous ``[..., S, D]`` and ``[..., S]``."""
    num_parts, head_dim = outputs.shape[-2:]
    block_s = min(256, triton.next_power_of_2(num_parts))
    # many parts: several programs a query, so that few queries still fill the GPU
    block_d = triton.next_power_of_2(head_dim)
    if num_parts > 16:
        block_d = min(block_d, 32)
    block_s = min(block_s, max(1, MOST_ELEMENTS // block_d))
    merge_states_kernel[(total.numel(), -(-head_dim // block_d))](
        outputs.contiguous(),
        lse.contiguous(),
        out,
        total,
        num_parts,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_S=block_s,
        num_warps=1 if num_parts <= 16 else 4,
    )
