"""Torch reference of quantize_pages: kitty.quant, packed by kitty.pages, page by page."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty.methods import Method
from kitty.pages import KeyPages, PageLayout, ValuePages, pack_keys, pack_values
from kitty.quant import quantize_keys, quantize_values


def packed_method(
    keys: KeyPages,
    *,
    sink: int,
    window: int,
    rollback: int,
    selection: str = "magnitude",
    seed: int = 0,
) -> Method:
    """The method that page storage and an op's plain arguments amount to."""
    head_dim = keys.words.shape[-1]
    return Method(
        name="packed",
        title="packed",
        key_bits=2,
        value_bits=2,
        boost_ratio=keys.high.shape[-1] / head_dim,
        boost_bits=4,
        selection=selection,
        sink=sink,
        window=window,
        page_size=keys.words.shape[-2] * 8,
        rollback=rollback,
        seed=seed,
    )


def store_key_page(
    tokens: Tensor, pages: KeyPages, page_id: int, method: Method, *, layer: int, page: int
) -> None:
    """Quantize ``tokens`` ``[H, G, D]``, the sequence's page ``page``, into page ``page_id``."""
    quantized = quantize_keys(tokens[None, :, None], method, layer=layer, first_page=page)
    packed = pack_keys(quantized, PageLayout.of(method, tokens.shape[-1]))
    for storage, part in zip(pages, packed, strict=True):
        storage[page_id] = part[0]


def store_value_page(tokens: Tensor, pages: ValuePages, page_id: int, method: Method) -> None:
    """Quantize ``tokens`` ``[H, G, D]`` into page ``page_id``."""
    packed = pack_values(quantize_values(tokens[None, :, None], method))
    for storage, part in zip(pages, packed, strict=True):
        storage[page_id] = part[0]


@torch.no_grad()
def quantize_pages_reference(
    k: Tensor,
    v: Tensor,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
    seq_lens: Tensor,
    method: Method,
    *,
    layer: int,
) -> None:
    """Quantize all full pages of a first call; arguments as in ``quantize_pages``."""
    size = method.page_size
    for b, length in enumerate(seq_lens.tolist()):
        first = k.shape[2] - length + method.sink
        for page in range(method.key_pages(length)):
            rows = slice(first + page * size, first + (page + 1) * size)
            if (page_id := int(key_table[b, page])) >= 0:
                store_key_page(k[b, :, rows], keys, page_id, method, layer=layer, page=page)
        for page in range(method.value_pages(length)):
            rows = slice(first + page * size, first + (page + 1) * size)
            if (page_id := int(value_table[b, page])) >= 0:
                store_value_page(v[b, :, rows], values, page_id, method)
