"""decode_attention: attention of a few new queries over sink, packed pages and 16-bit tails."""

import functools
import math

import torch
from torch import Tensor

from kitty.errors import KittyError
from kitty.methods import Method
from kitty.ops.checks import KERNEL_DTYPES, check_buffers, check_storage
from kitty.ops.decode_attention.reference import decode_attention_reference
from kitty.ops.dispatch import on_device_of, runs_kernel
from kitty.ops.merge_states import merge_states
from kitty.pages import Buffers, KeyPages, PageLayout, ValuePages

DENSE_SPLITS = 24  # further ones for tokens in 16 bit, so that hardly any split has two pages
PROGRAMS_PER_SM = 8  # single-warp programs of up to 255 registers that one SM holds


def decode_attention(
    query: Tensor,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
    buffers: Buffers,
    seq_lens: Tensor,
    method: Method,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a packed cache whose new tokens are already appended (paper section 5).

    Two launches (one where a sequence is not split); every length is read on the device, so a
    CUDA graph can replay them while sequences grow.

    Args:
        query: ``[B, Hq, T, D]`` after RoPE, fp16 or bf16 (fp32 and fp64 also on a CPU), channel
            stride 1; Hq is a multiple of the H KV heads, and query head i reads KV head
            ``i // (Hq / H)``. T is 1 or a few; query t stands behind seq_lens - T + t tokens and
            sees its own pages and, in 16 bit, what is later up to its own token. A call in which
            a page completes must be split there: the page is written by the next append.
        keys: key pages of the layer.
        values: value pages of the layer.
        key_table: int32 ``[B, max_pages]``.
        value_table: int32 ``[B, max_pages]``.
        buffers: the layer's sink and rings, in the query's dtype.
        seq_lens: int32 ``[B]``, tokens of each sequence including the call's.
        method: S, R and r; its page size and boost must be the storage's.
        softmax_scale: factor of the logits; None is 1/√D.
        softcap: logits x become ``softcap · tanh(x / softcap)`` before the softmax (Gemma 2); None
            leaves them. Compiled into the kernel, so a model's one value is meant.
        num_splits: parts that each sequence is cut into; None fits the GPU. Longer tables get
            more, so that a sequence may grow under a captured graph.
        return_lse: also return the log-sum-exp.

    Returns:
        ``[B, Hq, T, D]`` in the query's dtype; with ``return_lse`` also fp32 ``[B, Hq, T]``,
        natural logarithm. Queries before a sequence's first token (pads) give zeros and -inf.

    Raises:
        KittyError: shapes or dtypes do not fit together, or softcap is not positive.
    """
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise KittyError(f"softcap is {softcap}, but it must be a positive number, or None.")
    layout = PageLayout.of(method, query.shape[-1])
    check_storage(layout, keys, values, key_table, value_table)
    _check_query(query, keys, seq_lens)
    least_ring = method.page_size + method.rollback
    check_buffers(buffers, query[:, : keys.words.shape[1]], method.sink, least_ring)
    if num_splits is None:
        num_splits = default_splits(query, keys, key_table)
    out, lse = torch.ops.kitty.decode_attention(
        query,
        *keys,
        *values,
        key_table,
        value_table,
        *buffers,
        seq_lens,
        method.sink,
        method.window,
        method.rollback,
        query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        num_splits,
        softcap,
    )
    return (out, lse) if return_lse else out


def default_splits(query: Tensor, keys: KeyPages, key_table: Tensor) -> int:
    """Splits that fill the GPU once, at most one for each page that the table can hold."""
    from kitty.ops.decode_attention.kernel import launch_plan

    batch, num_query_heads, num_tokens, head_dim = query.shape
    heads = keys.words.shape[1]
    plan = launch_plan(num_query_heads // heads, num_tokens, head_dim)
    programs = batch * heads * plan.tiles * plan.chunks
    slots = _num_multiprocessors(query.device) * PROGRAMS_PER_SM
    return max(1, min(slots // max(1, programs), key_table.shape[1] + DENSE_SPLITS))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_query(query: Tensor, keys: KeyPages, seq_lens: Tensor) -> None:
    heads = keys.words.shape[1]
    if query.dim() != 4 or query.shape[1] % heads or query.stride(-1) != 1:
        raise KittyError(
            f"The query is {tuple(query.shape)}, but it must be [B, Hq, T, D] with contiguous "
            f"channels and Hq a multiple of the {heads} KV heads."
        )
    if query.is_cuda and query.dtype not in KERNEL_DTYPES:
        raise KittyError(
            f"The query is {query.dtype}, but the kernel takes fp16 or bf16: load the model in "
            "one of them."
        )
    if seq_lens.dtype != torch.int32 or seq_lens.shape != query.shape[:1]:
        raise KittyError(
            f"seq_lens is {seq_lens.dtype} {tuple(seq_lens.shape)}, but it must be int32 "
            f"[{query.shape[0]}]."
        )


@torch.library.custom_op(
    "kitty::decode_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key_words, Tensor key_high, Tensor key_meta, "
    "Tensor key_boosted, Tensor value_words, Tensor value_meta, Tensor key_table, "
    "Tensor value_table, Tensor sink_k, Tensor sink_v, Tensor key_ring, Tensor value_ring, "
    "Tensor seq_lens, int sink, int window, int rollback, float softmax_scale, int num_splits, "
    "float? softcap=None) "
    "-> (Tensor, Tensor)",
)
def _decode_attention(
    query: Tensor,
    key_words: Tensor,
    key_high: Tensor,
    key_meta: Tensor,
    key_boosted: Tensor,
    value_words: Tensor,
    value_meta: Tensor,
    key_table: Tensor,
    value_table: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    key_ring: Tensor,
    value_ring: Tensor,
    seq_lens: Tensor,
    sink: int,
    window: int,
    rollback: int,
    softmax_scale: float,
    num_splits: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    tensors = (
        query,
        KeyPages(key_words, key_high, key_meta, key_boosted),
        ValuePages(value_words, value_meta),
        key_table,
        value_table,
        Buffers(sink_k, sink_v, key_ring, value_ring),
        seq_lens,
    )
    if not runs_kernel(query):
        compute = torch.promote_types(query.dtype, torch.float32)
        out, lse = decode_attention_reference(
            *tensors,
            sink=sink,
            window=window,
            rollback=rollback,
            softmax_scale=softmax_scale,
            softcap=softcap,
            compute=compute,
        )
        return out.to(query.dtype), lse.to(torch.float32)
    from kitty.ops.decode_attention.kernel import launch_decode

    split = num_splits > 1
    shape = (*query.shape[:3], num_splits) if split else query.shape[:3]
    out = query.new_empty((*shape, query.shape[-1]), dtype=torch.float32 if split else query.dtype)
    lse = query.new_empty(shape, dtype=torch.float32)
    with on_device_of(query):
        launch_decode(
            *tensors,
            out,
            lse,
            sink=sink,
            window=window,
            rollback=rollback,
            softmax_scale=softmax_scale,
            num_splits=num_splits,
            softcap=softcap,
        )
    return merge_states(out, lse, query.dtype) if split else (out, lse)


@_decode_attention.register_fake
def _decode_attention_fake(query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        query.new_empty(query.shape[:3], dtype=torch.float32),
    )
