"""The packed page format: the only place that knows sizes, offsets, planes and bytes.

CONTRACT between this package, the cache, and the kernels
=========================================================

Symbols: B sequences, H KV heads, D head_dim, G page_size, D_boost boosted channels, S sink,
R window, r rollback, n tokens of a sequence, g = min(D, G) channels of a value group.

Page ids. One id names one page of **one sequence in all layers**; each layer stores its part of
it, all KV heads together, in tensors with leading dimensions ``[num_pages, H]``, all contiguous.
Keys and values are separate allocations with separate ids, tables and reference counts.

===============  ==================  =======  ================================================
tensor           shape               dtype    content
===============  ==================  =======  ================================================
``K.words``      [N, H, G/8, D]      int16    low plane of all channels
``K.high``       [N, H, G/8, D_boost] int16   high plane of boosted channels, in list order
``K.meta``       [N, H, 2, D]        fp16     [0] scale, [1] zero of each channel
``K.boosted``    [N, H, D_boost]     uint8    boosted channels, ascending
``V.words``      [N, H, G/8, D]      int16    codes
``V.meta``       [N, H, 2, D/g, G]   fp16     [0] scale, [1] zero of each group and token
===============  ==================  =======  ================================================

A word is 16 unsigned bits (kept as int16 because torch lacks most uint16 operations; view it as
uint16 before it goes to a kernel). Word (t, c) holds channel c of the 8 tokens t, t + G/8, …,
t + 7·G/8 of the page; plane j, bits 2j and 2j+1, is token t + j·G/8. G = 256 has the same 8
planes of 32 tokens. A boosted key code is ``low + 4 * high``. A 4-bit K method has D_boost = D.
-0.0 in scale or zero is stored as +0.0. Element offsets are 64-bit: a pool may exceed 2^31 bytes.

Page tables. ``key_table``, ``value_table``: int32 ``[B, max_pages]``, entry p of a sequence is
the id of its p-th page (tokens S + pG … S + (p+1)G - 1), or -1. Pages may be shared between
sequences and stand in any order. The host enters ids before the call that fills or reads them.

16-bit buffers of a layer, in the cache's dtype (fp16 or bf16, fp32 on a CPU), contiguous:
``sink_k``, ``sink_v`` ``[B, H, S, D]``, ``key_ring`` ``[B, H, CK, D]``, ``value_ring``
``[B, H, CV, D]``. Token n < S lies in the sink at n; token n ≥ S in both rings at slot
``(n - S) % C``. Sizes: :class:`BufferLayout` (CK ≥ G + r + max(T, r), CV = CK + R, T the largest
call).

Lengths. ``seq_lens`` int32 ``[B]`` on the device: tokens of each sequence **including the
call's own**; the host adds a call's tokens before its first layer. A sequence of n tokens has
``kp(n) = max(0, n - S - r) // G`` key pages and ``vp(n) = max(0, n - S - R - r) // G`` value
pages; kernels compute them with the helpers in ``kitty.ops.positions``.

append (one launch per layer, before decode_attention). The call's tensors are ``[B, H, T, D]``;
the real tokens of sequence b are the **last** ``num_new[b]`` of the T positions (None: all), so
left-padded calls need no copy; other pads are gathered away by the caller. With c = seq_lens -
num_new, append first quantizes key pages kp(paged_lens) … kp(c) - 1 and value pages
vp(paged_lens) … vp(c) - 1 out of the rings, then writes the new tokens. ``paged_lens`` int32
``[B]``, shared by all layers: the largest length whose pages are written already; after a call
the host sets ``paged_lens = max(paged_lens, c)`` (device-side), after a prefill paged_lens = n.
A call longer than the ring writes only the tokens that stay.

quantize_pages (prefill). Takes the call's dense ``[B, H, T, D]`` keys and values, real tokens
last as above, and writes all pages kp(n), vp(n); append with ``paged_lens = n`` beforehand then
fills the sink and the rings.

decode_attention. Query t of T (0 … T-1; right-aligned: pads first) stands behind
c = seq_len - T + t tokens. It sees the sink, key pages 0 … kp(c) - 1 and value pages
0 … vp(c) - 1, and all later tokens up to and including itself (absolute index ≤ c) from the sink
and the rings, in 16 bit. Where a token's value is still 16-bit while its key is paged, its logit
comes from the page and its value from the ring. Queries with c < 0 are pads: they return zeros
(LSE -inf). All pages and counts come from device memory. Since append writes the pages that are
full before a call, the caller splits a call in which kp(c) or vp(c) would rise between its first
and its last query: behind the token that fills the page.
"""

from kitty.pages.accounting import ByteReport, report_bytes, table_bytes, tensor_bytes
from kitty.pages.layout import NO_PAGE, PLANE_BITS, PLANES, BufferLayout, PageLayout
from kitty.pages.packing import (
    boost_index,
    pack_keys,
    pack_values,
    pack_words,
    unpack_keys,
    unpack_values,
    unpack_words,
)
from kitty.pages.storage import (
    Buffers,
    KeyPages,
    ValuePages,
    empty_buffers,
    empty_key_pages,
    empty_value_pages,
)

__all__ = [
    "BufferLayout",
    "Buffers",
    "ByteReport",
    "KeyPages",
    "NO_PAGE",
    "PLANES",
    "PLANE_BITS",
    "PageLayout",
    "ValuePages",
    "boost_index",
    "empty_buffers",
    "empty_key_pages",
    "empty_value_pages",
    "pack_keys",
    "pack_values",
    "pack_words",
    "report_bytes",
    "table_bytes",
    "tensor_bytes",
    "unpack_keys",
    "unpack_values",
    "unpack_words",
]
