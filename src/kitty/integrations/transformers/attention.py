"""Attention function ``kitty``: appends to and attends over a Kitty cache, else plain sdpa.

A cache's ``update()`` hands over carriers; only this function opens them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from kitty.errors import KittyError
from kitty.integrations.transformers.masks import PaddingMask, kitty_mask, real_tokens

NAME = "kitty"


class Carrier:
    """Keys or values of one call on their way from ``Cache.update`` to the attention function.

    Not a tensor: any other use raises one clear sentence, so that nothing is silently computed
    on the new tokens alone.
    """

    def __init__(self, tensor: Tensor, cache: Any, layer_idx: int) -> None:
        self.tensor = tensor
        self.cache = cache
        self.layer_idx = layer_idx

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the carried tensor."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Device of the carried tensor."""
        return self.tensor.device

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()


def _refuse() -> NoReturn:
    raise KittyError(
        "This model opens the cached keys and values outside the attention implementation "
        f"'{NAME}': call kitty.enable(model), or load the model with attn_implementation='{NAME}'."
    )


def kitty_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | Carrier,
    value: Tensor | Carrier,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for ``AttentionInterface``.

    Args:
        query: ``[B, Hq, T, D]``.
        key, value: carriers from a Kitty cache, else ``[B, H, N, D]`` as for sdpa.
        attention_mask: None, a :class:`PaddingMask`, or a 4D mask.

    Returns:
        ``[B, T, Hq, D]`` and None (no attention weights).

    Raises:
        KittyError: attention weights or dropout are asked for together with a Kitty cache.
    """
    if not isinstance(key, Carrier):
        if isinstance(attention_mask, PaddingMask):
            attention_mask = attention_mask.expand_4d(query.device)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert isinstance(value, Carrier)
    if kwargs.get("output_attentions"):
        raise KittyError(
            "output_attentions=True cannot work with a Kitty cache, which never forms the "
            "attention weights: leave it out, or use the default cache."
        )
    if dropout:
        raise KittyError(
            f"The attention dropout is {dropout}, but a Kitty cache is for inference: call "
            "model.eval() first."
        )
    real = real_tokens(attention_mask, query.shape[2], sliding_window)
    out = key.cache.attend(
        key.layer_idx,
        query,
        key.tensor,
        value.tensor,
        real,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``attn_implementation="kitty"`` known; a second call changes nothing."""
    AttentionInterface.register(NAME, kitty_attention_forward)
    AttentionMaskInterface.register(NAME, kitty_mask)
