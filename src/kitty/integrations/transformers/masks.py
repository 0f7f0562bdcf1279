"""Mask function ``kitty``: for a Kitty cache the 2D padding mask travels to the attention function.

For every other cache, and for none, it is sdpa's mask function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from kitty.errors import KittyError


class KittyLength(int):
    """KV length that a Kitty cache reports: tells the mask function whom its mask is for."""


class PaddingMask(torch.Tensor):
    """Which tokens of a call are real, bool ``[B, T]``, and the way to sdpa's 4D mask.

    A tensor subclass, so that it passes wherever transformers and accelerate move masks.

    Attributes:
        padded: whether any token is a pad.
        local_size: sliding window or chunk that the pattern was made with, else None.
        plain: whether the pattern is causal (and local) without a further one of the model.
        expand_4d: makes the mask that sdpa would get, on a device, once for all layers; for
            layers that leave the cache out (gradient checkpointing does that).
    """

    padded: bool
    local_size: int | None
    plain: bool
    expand_4d: Callable[[torch.device], Tensor | None]

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        source = args[0] if args else None
        if isinstance(out, PaddingMask) and out is not source:
            if func is torch.Tensor.to and isinstance(source, PaddingMask):
                out.__dict__.update(source.__dict__)  # a copy on another device is the same mask
            else:
                out = out.as_subclass(torch.Tensor)
        return out


def kitty_mask(
    batch_size: int,
    cache_position: Tensor,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Mask function for ``AttentionMaskInterface``; the arguments are those of sdpa_mask.

    Returns:
        A :class:`PaddingMask` where ``kv_length`` is a :class:`KittyLength`, else sdpa's mask.
    """

    def make_4d() -> Tensor | None:
        return sdpa_mask(
            batch_size=batch_size,
            cache_position=cache_position,
            kv_length=kv_length,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )

    if not isinstance(kv_length, KittyLength):
        return make_4d()
    mask = _padding_mask(batch_size, cache_position, attention_mask)
    mask.local_size, mask.plain = local_size, allow_is_causal_skip

    def expand_4d(device: torch.device) -> Tensor | None:
        mask = make_4d()
        return None if mask is None else mask.to(device)

    mask.expand_4d = _once_per_device(expand_4d)
    return mask


@torch.compiler.disable  # torch 2.4 cannot trace tensors that become a subclass
def _padding_mask(
    batch_size: int, cache_position: Tensor, attention_mask: Tensor | None
) -> PaddingMask:
    """The tokens of a call as a mask of its own kind."""
    query_length = cache_position.shape[0]
    if attention_mask is None:
        real = cache_position.new_ones(batch_size, query_length, dtype=torch.bool)
        padded = False
    else:
        real = attention_mask[:, -query_length:].bool()
        padded = not bool(real.all())
    mask = real.as_subclass(PaddingMask)
    mask.padded = padded
    return mask


def _once_per_device(
    make: Callable[[torch.device], Tensor | None],
) -> Callable[[torch.device], Tensor | None]:
    """All layers of a forward pass share one 4D mask."""
    made: dict[torch.device, Tensor | None] = {}

    def get(device: torch.device) -> Tensor | None:
        if device not in made:
            made[device] = make(device)
        return made[device]

    return get


def real_tokens(
    mask: Tensor | None, query_length: int, sliding_window: int | None
) -> Tensor | None:
    """Which tokens of a call are real, bool ``[B, T]``; None if all are.

    Args:
        mask: what the model handed to its attention function: None, a :class:`PaddingMask`, or a
            4D mask (bool or additive) from models that build their own.
        query_length: T.
        sliding_window: of the layer.

    Raises:
        KittyError: the mask holds a pattern that a Kitty cache does not follow.
    """
    if mask is None:
        return None
    if isinstance(mask, PaddingMask):
        if not mask.plain:
            raise KittyError(
                "The model asks for an attention pattern beyond causal (for example image tokens "
                "that see each other), which a Kitty cache does not hold: use the default cache."
            )
        if mask.local_size not in (None, sliding_window):
            raise KittyError(
                f"The model attends in chunks of {mask.local_size} tokens, which a Kitty cache "
                "does not hold (sliding windows it does): use the default cache."
            )
        return mask.as_subclass(torch.Tensor) if mask.padded else None
    if mask.dim() != 4 or sliding_window is not None:
        raise KittyError(
            f"The attention mask has {mask.dim()} dimensions in a layer with sliding_window "
            f"{sliding_window}: a Kitty cache takes a 2D padding mask there."
        )
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    before, own = visible[:, 0].tensor_split([visible.shape[-1] - query_length], dim=-1)
    # rows of pads may be opened to avoid NaN, so a token must also be seen by the last one
    real = own.diagonal(dim1=-2, dim2=-1) & own[:, -1]
    # every real token sees the real ones up to itself, and all see the same earlier tokens
    strange = (own != real[:, None, :].expand_as(own).tril()).any(-1)
    strange |= (before != before[:, -1:]).any(-1)
    if bool((strange & real).any()):
        raise KittyError(
            "The 4D attention mask is more than causal with padding, which is the only pattern "
            "that a Kitty cache holds: pass a 2D padding mask, or use the default cache."
        )
    return None if bool(real.all()) else real
