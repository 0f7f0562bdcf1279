"""How one call's tokens are cut and aligned before they meet the cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kitty.methods import Method


def page_cuts(
    method: Method, lengths: Sequence[int], counts: Sequence[int], *, skip: Sequence[bool]
) -> list[int]:
    """Where a call must be cut so that within a part no sequence's page counts change.

    Args:
        method: gives kp and vp.
        lengths: tokens of each sequence before the call.
        counts: its real tokens in the call.
        skip: sequences whose pages do not matter within the call (dense prefill).

    Returns:
        Ascending offsets into the call's real tokens, the first 0: the starts of the parts.
    """
    cuts = {0}
    for length, count, skipped in zip(lengths, counts, skip, strict=True):
        if skipped:
            continue
        # kp and vp move only where length - rollback - sink (- window) meets a page boundary
        for held, pages in ((0, method.key_pages), (method.window, method.value_pages)):
            base = method.sink + held + method.rollback
            for page in range(pages(length) + 1, pages(length + count) + 1):
                cuts.add(base + page * method.page_size - length)
    return sorted(cut for cut in cuts if cut == 0 or cut < max(counts))


def gather_tokens(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the tokens of ``[B, H, T, D]`` by int64 ``[B, T]``."""
    return x.gather(2, order[:, None, :, None].expand_as(x))
