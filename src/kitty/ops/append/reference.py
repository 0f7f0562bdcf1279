"""Torch reference of append, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty.methods import Method
from kitty.ops.quantize_pages.reference import store_key_page, store_value_page
from kitty.pages import Buffers, KeyPages, ValuePages


@torch.no_grad()
def append_reference(
    k: Tensor,
    v: Tensor,
    keys: KeyPages,
    values: ValuePages,
    key_table: Tensor,
    value_table: Tensor,
    buffers: Buffers,
    seq_lens: Tensor,
    paged_lens: Tensor,
    num_new: Tensor | None,
    method: Method,
    *,
    layer: int,
) -> None:
    """Finish full pages, then write new tokens; arguments as in ``append``."""
    batch, _, num_tokens, _ = k.shape
    news = [num_tokens] * batch if num_new is None else num_new.tolist()
    size = method.page_size
    for b, (length, paged, new) in enumerate(
        zip(seq_lens.tolist(), paged_lens.tolist(), news, strict=True)
    ):
        before = length - new
        for page in range(method.key_pages(paged), method.key_pages(before)):
            if (page_id := int(key_table[b, page])) >= 0:
                tokens = _from_ring(buffers.key_ring[b], page * size, size)
                store_key_page(tokens, keys, page_id, method, layer=layer, page=page)
        for page in range(method.value_pages(paged), method.value_pages(before)):
            if (page_id := int(value_table[b, page])) >= 0:
                tokens = _from_ring(buffers.value_ring[b], page * size, size)
                store_value_page(tokens, values, page_id, method)
        new_k, new_v = k[b, :, num_tokens - new :], v[b, :, num_tokens - new :]
        _write(new_k, before, method.sink, buffers.sink_k[b], buffers.key_ring[b])
        _write(new_v, before, method.sink, buffers.sink_v[b], buffers.value_ring[b])


def _from_ring(ring: Tensor, first: int, count: int) -> Tensor:
    """``count`` tokens ``[H, count, D]``, the first of them ``first`` tokens behind the sink."""
    slots = torch.arange(first, first + count, device=ring.device) % ring.shape[1]
    return ring[:, slots]


def _write(new: Tensor, before: int, sink_size: int, sink: Tensor, ring: Tensor) -> None:
    """Tokens ``[H, new, D]``, the first with absolute index ``before``, into sink and ring."""
    tokens = torch.arange(before, before + new.shape[1], device=new.device)
    in_sink = tokens < sink_size
    sink[:, tokens[in_sink]] = new[:, in_sink].to(sink.dtype)
    stays = ~in_sink & (tokens >= before + new.shape[1] - ring.shape[1])
    ring[:, (tokens[stays] - sink_size) % ring.shape[1]] = new[:, stays].to(ring.dtype)
