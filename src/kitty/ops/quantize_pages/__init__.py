"""quantize_pages: quantize and pack all full pages of a first call (prefill), page by page."""

import torch
from torch import Tensor

from kitty.methods import Method
from kitty.ops.checks import check_call, check_storage
from kitty.ops.dispatch import on_device_of, runs_kernel
from kitty.ops.quantize_pages.reference import packed_method, quantize_pages_reference
from kitty.pages import KeyPages, PageLayout, ValuePages


def quantize_pages(
    k: Tensor,
    v: Tensor,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
    seq_lens: Tensor,
    method: Method,
    *,
    layer: int = 0,
) -> None:
    """Write the pages kp(n), vp(n) of every sequence of a first call (paper section 4.3).

    Nothing is read back and nothing allocated on the device: a program holds a few rows of a page.

    Args:
        k: ``[B, H, T, D]`` keys after RoPE, fp16 or bf16 (fp32 also on a CPU), channel stride 1;
            the last ``seq_lens[b]`` of the T tokens are real.
        v: values, the same.
        keys: key page storage of the layer, written in place.
        values: value page storage of the layer, written in place.
        key_table: int32 ``[B, max_pages]`` ids of the pages to fill; pages with id -1 are skipped.
        value_table: the same for values.
        seq_lens: int32 ``[B]`` on the device, the real tokens.
        method: S, R, r and the selection; its page size and boost must be the storage's.
        layer: for the random selection.

    Raises:
        KittyError: shapes, dtypes or devices do not fit together.
    """
    layout = PageLayout.of(method, k.shape[-1])
    check_storage(layout, keys, values, key_table, value_table)
    check_call(k, v, keys, seq_lens)
    torch.ops.kitty.quantize_pages(
        k,
        v,
        *keys,
        *values,
        key_table,
        value_table,
        seq_lens,
        method.sink,
        method.window,
        method.rollback,
        method.selection,
        method.seed,
        layer,
    )


@torch.library.custom_op(
    "kitty::quantize_pages",
    mutates_args=(
        "key_words",
        "key_high",
        "key_meta",
        "key_boosted",
        "value_words",
        "value_meta",
    ),
    schema="(Tensor k, Tensor v, Tensor(a!) key_words, Tensor(b!) key_high, Tensor(c!) key_meta, "
    "Tensor(d!) key_boosted, Tensor(e!) value_words, Tensor(f!) value_meta, Tensor key_table, "
    "Tensor value_table, Tensor seq_lens, int sink, int window, int rollback, str selection, "
    "int seed, int layer) -> ()",
)
def _quantize_pages(
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
    seq_lens: Tensor,
    sink: int,
    window: int,
    rollback: int,
    selection: str,
    seed: int,
    layer: int,
) -> None:
    keys = KeyPages(key_words, key_high, key_meta, key_boosted)
    values = ValuePages(value_words, value_meta)
    if not runs_kernel(k):
        method = packed_method(
            keys, sink=sink, window=window, rollback=rollback, selection=selection, seed=seed
        )
        quantize_pages_reference(
            k, v, keys, values, key_table, value_table, seq_lens, method, layer=layer
        )
        return
    from kitty.ops.quantize_pages.kernel import launch_quantize_pages

    with on_device_of(k):
        launch_quantize_pages(
            k,
            v,
            keys,
            values,
            key_table,
            value_table,
            seq_lens,
            sink=sink,
            window=window,
            rollback=rollback,
            selection=selection,
            seed=seed,
            layer=layer,
        )


@_quantize_pages.register_fake
def _quantize_pages_fake(*args: object) -> None:
    return None
