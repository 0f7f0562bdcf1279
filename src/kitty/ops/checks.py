"""Argument checks shared by the ops that take page storage: a wrong tensor is one sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty.errors import KittyError
from kitty.pages import Buffers, KeyPages, PageLayout, ValuePages

KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def check_storage(
    layout: PageLayout,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
) -> None:
    """Raise a KittyError unless storage and tables have the layout's shapes and dtypes."""
    heads = keys.words.shape[1]
    for kind, pages, parts in (
        ("key", keys, layout.key_parts()),
        ("value", values, layout.value_parts()),
    ):
        for name, (shape, dtype) in parts.items():
            part = getattr(pages, name)
            if part.shape[1:] != (heads, *shape) or part.dtype != dtype:
                raise KittyError(
                    f"The {kind} pages' {name} are {part.dtype} {tuple(part.shape)}, but this "
                    f"method needs {dtype} (pages, {heads}, {', '.join(map(str, shape))})."
                )
            if not part.is_contiguous():
                raise KittyError(f"The {kind} pages' {name} must be contiguous.")
    for kind, table in (("key", key_table), ("value", value_table)):
        if table.dtype != torch.int32 or table.dim() != 2 or table.stride(-1) != 1:
            raise KittyError(
                f"The {kind} page table is {table.dtype} {tuple(table.shape)}, but it must be "
                "int32 [B, max_pages] with contiguous rows."
            )


def check_call(k: Tensor, v: Tensor, keys: KeyPages, seq_lens: Tensor) -> None:
    """Raise a KittyError unless a call's keys and values fit the storage and each other."""
    if k.shape != v.shape or k.dim() != 4 or k.shape[1] != keys.words.shape[1]:
        raise KittyError(
            f"Keys {tuple(k.shape)} and values {tuple(v.shape)} must both be "
            f"[B, {keys.words.shape[1]}, T, D]."
        )
    if k.dtype != v.dtype or (k.is_cuda and k.dtype not in KERNEL_DTYPES):
        raise KittyError(
            f"Keys are {k.dtype} and values {v.dtype}, but the kernels take fp16 or bf16, the "
            "same for both: load the model in one of them."
        )
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise KittyError("The channels of keys and values must be contiguous (stride 1).")
    if seq_lens.dtype != torch.int32 or seq_lens.shape != k.shape[:1]:
        raise KittyError(
            f"seq_lens is {seq_lens.dtype} {tuple(seq_lens.shape)}, but it must be int32 "
            f"[{k.shape[0]}]."
        )


def check_buffers(buffers: Buffers, k: Tensor, sink: int, least_ring: int) -> None:
    """Raise a KittyError unless the 16-bit buffers fit the call's keys ``[B, H, T, D]``."""
    batch, heads, _, head_dim = k.shape
    for name, buffer in buffers._asdict().items():
        size = buffer.shape[2]
        fits = size == sink if name.startswith("sink") else size >= least_ring
        if buffer.shape != (batch, heads, size, head_dim) or buffer.dtype != k.dtype or not fits:
            raise KittyError(
                f"The buffer {name} is {buffer.dtype} {tuple(buffer.shape)}, but this call needs "
                f"{k.dtype} [{batch}, {heads}, slots, {head_dim}] with "
                f"{sink if name.startswith('sink') else f'at least {least_ring}'} slots."
            )
        if not buffer.is_contiguous():
            raise KittyError(f"The buffer {name} must be contiguous.")
