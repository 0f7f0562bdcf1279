"""Torch reference of merge_states."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states_reference(outputs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean ``[..., D]`` of ``[..., S, D]`` and the joint log-sum-exp ``[...]``."""
    total = torch.logsumexp(lse, dim=-1)
    empty = total == -torch.inf
    weights = torch.exp(lse - total.masked_fill(empty, 0.0).unsqueeze(-1)).unsqueeze(-1)
    # a part without keys may hold anything, NaN too
    parts = outputs.to(lse.dtype).masked_fill(weights == 0, 0.0)
    return (weights * parts).sum(dim=-2), total
