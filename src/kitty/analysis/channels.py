"""Why a few key channels deserve more bits: magnitude, score sensitivity, overlap, stability.

The quantities of Figure 2 of arXiv:2511.18643, per page, on keys after RoPE. H KV heads, Hq query
heads, T tokens, P pages of G tokens, D channels; all results are fp64 unless said otherwise.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from kitty.methods import Method
from kitty.quant import channel_scores, dequantize, quantize

SENSITIVITY_BITS = 2


def key_pages(keys: Tensor, method: Method) -> Tensor:
    """The pages of a sequence's keys that decoding quantizes: ``[H, T, D]`` to ``[H, P, G, D]``."""
    pages = method.key_pages(keys.shape[1])
    span = keys[:, method.sink : method.sink + pages * method.page_size]
    return span.unflatten(1, (pages, method.page_size))


def magnitude_map(pages: Tensor) -> Tensor:
    """Mean |K| of each channel over a page, the score of the magnitude choice divided by G.

    Args:
        pages: ``[H, P, G, D]``.

    Returns:
        ``[H, P, D]``.
    """
    return channel_scores(pages[None], "magnitude")[0] / pages.shape[-2]


def queries_of_pages(method: Method, num_tokens: int) -> Tensor:
    """How many queries of a sequence see each page quantized: int64 ``[P']``, all at least 1.

    The query of token t has t tokens before it and sees ``key_pages(t)`` quantized pages, so page
    p is seen by every query from token S + r + (p + 1)·G on.
    """
    seen = method.key_pages(num_tokens - 1)
    first = method.sink + method.rollback + method.page_size * (torch.arange(seen) + 1)
    return num_tokens - first


def channel_sensitivity(
    query: Tensor, pages: Tensor, method: Method, scaling: float, bits: int = SENSITIVITY_BITS
) -> Tensor:
    """MSE of the attention scores when one channel alone is quantized, per page and query head.

    The scores are the scaled products before the softmax. With only channel c quantized, the score
    of query t and key s changes by ``scaling · q[t, c] · e[s, c]``, e being the quantization error.
    The mean runs over all pairs of a key of the page and a query that sees the page quantized.
    Every such query sees every key of the page, so the mean of the squared product is exactly
    ``scaling² · mean_t q[t, c]² · mean_s e[s, c]²``.

    Args:
        query: ``[Hq, T, D]`` after RoPE.
        pages: ``[H, P, G, D]`` of the same T tokens, from :func:`key_pages`.
        method: for S, r and G; its bits and boost play no part.
        scaling: of the scores.
        bits: of the one quantized channel.

    Returns:
        ``[Hq, P', D]``; P' leaves out a last page that no query sees quantized.
    """
    queries = queries_of_pages(method, query.shape[1])  # [P']
    pages = pages[:, : len(queries)]
    restored = dequantize(*quantize(pages, bits, dim=-2), pages.dtype)
    error = (pages.double() - restored.double()).square().mean(dim=-2)  # [H, P', D]
    error = error.repeat_interleave(query.shape[0] // pages.shape[0], dim=0)  # [Hq, P', D]
    return scaling**2 * _mean_square_from(query, queries) * error


def _mean_square_from(query: Tensor, queries: Tensor) -> Tensor:
    """Mean of q² over the last ``queries[p]`` tokens, for each p: ``[Hq, P', D]``."""
    if len(queries) == 0:
        return query.new_zeros(query.shape[0], 0, query.shape[2], dtype=torch.float64)
    # disjoint runs of tokens between two pages' first queries, then sums from the end
    last = int(queries[-1])
    lengths = [int(n) for n in queries[:-1] - queries[1:]] + [last]
    runs = query[:, -int(queries[0]) :].split(lengths, dim=1)
    sums = torch.stack([run.double().square().sum(dim=1) for run in runs], dim=1)
    totals = sums.flip(1).cumsum(1).flip(1)
    return totals / queries.to(totals)[:, None]


def over_pages(sensitivity: Tensor, queries: Tensor) -> Tensor:
    """Mean over all pairs of all pages: ``[Hq, P', D]`` with ``[P']`` queries to ``[Hq, D]``."""
    weights = queries.to(sensitivity)
    return (sensitivity * weights[:, None]).sum(dim=1) / weights.sum()


def top_channels(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` highest scores along the last dimension, ties to the lower channel."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)


def channel_mask(channels: Tensor, head_dim: int) -> Tensor:
    """Lists of channels ``[..., D_boost]`` as a mask ``[..., D]``."""
    mask = torch.zeros(*channels.shape[:-1], head_dim, dtype=torch.bool, device=channels.device)
    return mask.scatter(-1, channels, True)


def selection_overlap(chosen: Tensor, sensitivity: Tensor) -> Tensor:
    """Share of the chosen channels that are among as many most sensitive ones.

    Args:
        chosen: bool ``[..., D]``, the same number in every row.
        sensitivity: ``[..., D]``.

    Returns:
        ``[...]``, 0 to 1; a random choice of ``D_boost`` channels expects ``D_boost / D``.
    """
    count = int(chosen.flatten(0, -2)[0].sum())
    return (chosen & top_channels(sensitivity, count)).sum(-1).double() / count


def captured_share(chosen: Tensor, sensitivity: Tensor) -> Tensor:
    """Share of the summed sensitivity in the chosen channels: ``[..., D]`` to ``[...]``."""
    total = sensitivity.sum(-1)
    part = (sensitivity * chosen).sum(-1)
    return torch.where(total > 0, part / total, 0.0)


def jaccard(first: Tensor, second: Tensor) -> Tensor:
    """Size of the intersection over size of the union of two masks ``[..., D]``: ``[...]``."""
    return (first & second).sum(-1).double() / (first | second).sum(-1)


def selection_stability(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How much the chosen set stays the same from page to page.

    Args:
        chosen: bool ``[..., P, D]``.

    Returns:
        Jaccard indices of each page with the page before it, and with the first: ``[..., P - 1]``.
    """
    later = chosen[..., 1:, :]
    return jaccard(later, chosen[..., :-1, :]), jaccard(later, chosen[..., :1, :])


def chance_jaccard(count: int, head_dim: int) -> float:
    """Expected Jaccard index of two random sets of ``count`` of ``head_dim`` channels."""
    total = comb(head_dim, count)
    common = range(max(0, 2 * count - head_dim), count + 1)
    return sum(
        comb(count, k) * comb(head_dim - count, count - k) / total * k / (2 * count - k)
        for k in common
    )
