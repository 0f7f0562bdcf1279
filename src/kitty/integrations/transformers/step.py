"""A decode step as CUDA graphs and ``torch.compile`` want it: tensors in, tensors out.

The host has counted the step (``KittyCache.count_step``). The model gets a stand-in for its cache
without any state, and its attention becomes one opaque op over the cache in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kitty.integrations.transformers.cache import KittyCache

NAME = "kitty_step"
_in_use: list[KittyCache] = []  # innermost last


class StepCache(Cache):
    """Hands keys and values through to the attention function."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The call's own keys and values."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """0: positions come from the caller."""
        return 0

    def get_mask_sizes(self, cache_position: Tensor, layer_idx: int) -> tuple[int, int]:
        """The one token of the step; no mask is made."""
        return 1, 0


STAND_IN = StepCache()


@torch.library.custom_op(
    "kitty::attend_step",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, int layer, float scale, float? softcap) "
    "-> Tensor",
)
def _attend_step(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, softcap: float | None
) -> Tensor:
    out = _in_use[-1].layers[layer].attend(query, key, value, scale=scale, softcap=softcap)
    return out.transpose(1, 2).contiguous()


@_attend_step.register_fake
def _attend_step_fake(query: Tensor, *args: object) -> Tensor:
    batch, heads, length, dim = query.shape
    return query.new_empty(batch, length, heads, dim)


def step_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of a step: query ``[B, Hq, 1, D]`` to ``[B, 1, Hq, D]``."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.kitty.attend_step(query, key, value, module.layer_idx, scale, softcap), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def stepping(model: PreTrainedModel, cache: KittyCache) -> Iterator[None]:
    """Within, the model's attention reads ``cache``, whose step the host has counted."""
    AttentionInterface.register(NAME, step_attention_forward)
    AttentionMaskInterface.register(NAME, _no_mask)
    configs = {id(c): c for c in (model.config, model.config.get_text_config())}.values()
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = NAME
    _in_use.append(cache)
    try:
        yield
    finally:
        _in_use.pop()
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
