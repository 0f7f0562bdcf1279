"""append: insert a call's tokens, after finishing the pages that the previous call left full."""

import torch
from torch import Tensor

from kitty.methods import Method
from kitty.ops.append.reference import append_reference
from kitty.ops.checks import check_buffers, check_call, check_storage
from kitty.ops.dispatch import on_device_of, runs_kernel
from kitty.ops.quantize_pages.reference import packed_method
from kitty.pages import Buffers, KeyPages, PageLayout, ValuePages


def append(
    k: Tensor,
    v: Tensor,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
    buffers: Buffers,
    seq_lens: Tensor,
    paged_lens: Tensor,
    method: Method,
    *,
    num_new: Tensor | None = None,
    layer: int = 0,
) -> None:
    """Quantize due pages, then write the call's tokens into sink and rings (paper section 4.3).

    One launch; all positions are read on the device, so a CUDA graph can replay it.

    Args:
        k: ``[B, H, T, D]`` keys after RoPE, fp16 or bf16 (fp32 also on a CPU), channel stride 1.
        v: values, the same.
        keys: key page storage of the layer, written in place.
        values: value page storage of the layer, written in place.
        key_table: int32 ``[B, max_pages]``; the ids of pages that fall due must be in it, pages
            with id -1 are skipped.
        value_table: the same for values.
        buffers: the layer's sink and rings, in the dtype of ``k``, written in place.
        seq_lens: int32 ``[B]``, tokens of each sequence including this call's.
        paged_lens: int32 ``[B]``, lengths up to which pages have been written: pages
            kp(paged_lens) … kp(c) - 1 are, c = seq_lens - num_new.
        method: S, R, r and the selection; its page size and boost must be the storage's.
        num_new: int32 ``[B]``, real tokens of this call, the last ones of the T; None: all T.
        layer: for the random selection.

    Raises:
        KittyError: shapes, dtypes or devices do not fit together.
    """
    layout = PageLayout.of(method, k.shape[-1])
    check_storage(layout, keys, values, key_table, value_table)
    check_call(k, v, keys, seq_lens)
    check_buffers(buffers, k, method.sink, method.page_size + method.rollback)
    torch.ops.kitty.append(
        k,
        v,
        *keys,
        *values,
        key_table,
        value_table,
        *buffers,
        seq_lens,
        paged_lens,
        num_new,
        method.sink,
        method.window,
        method.rollback,
        method.selection,
        method.seed,
        layer,
    )


@torch.library.custom_op(
    "kitty::append",
    mutates_args=(
        "key_words",
        "key_high",
        "key_meta",
        "key_boosted",
        "value_words",
        "value_meta",
        "sink_k",
        "sink_v",
        "key_ring",
        "value_ring",
    ),
    schema="(Tensor k, Tensor v, Tensor(a!) key_words, Tensor(b!) key_high, Tensor(c!) key_meta, "
    "Tensor(d!) key_boosted, Tensor(e!) value_words, Tensor(f!) value_meta, Tensor key_table, "
    "Tensor value_table, Tensor(g!) sink_k, Tensor(h!) sink_v, Tensor(i!) key_ring, "
    "Tensor(j!) value_ring, Tensor seq_lens, Tensor paged_lens, Tensor? num_new, int sink, "
    "int window, int rollback, str selection, int seed, int layer) -> ()",
)
def _append(
    k: Tensor,
    v: Tensor,
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
    paged_lens: Tensor,
    num_new: Tensor | None,
    sink: int,
    window: int,
    rollback: int,
    selection: str,
    seed: int,
    layer: int,
) -> None:
    keys = KeyPages(key_words, key_high, key_meta, key_boosted)
    values = ValuePages(value_words, value_meta)
    buffers = Buffers(sink_k, sink_v, key_ring, value_ring)
    tensors = (k, v, keys, values, key_table, value_table, buffers, seq_lens, paged_lens, num_new)
    if not runs_kernel(k):
        method = packed_method(
            keys, sink=sink, window=window, rollback=rollback, selection=selection, seed=seed
        )
        append_reference(*tensors, method, layer=layer)
        return
    from kitty.ops.append.kernel import launch_append

    with on_device_of(k):
        launch_append(
            *tensors,
            sink=sink,
            window=window,
            rollback=rollback,
            selection=selection,
            seed=seed,
            layer=layer,
        )


@_append.register_fake
def _append_fake(*args: object) -> None:
    return None
