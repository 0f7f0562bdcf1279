"""Kitty: accurate 2-bit KV-cache quantization for Hugging Face transformers.

``kitty.enable(model, method="kitty-pro")`` makes every ``generate()`` of a model use the
quantized cache; ``kitty.SimulatedCache`` is a cache to pass by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitty.errors import KittyError
from kitty.methods import Method, get_method, load_methods

if TYPE_CHECKING:
    from kitty.integrations.transformers import KittyCache, SimulatedCache, disable, enable

_FROM_TRANSFORMERS = ("KittyCache", "SimulatedCache", "disable", "enable")

__all__ = [
    "KittyCache",
    "KittyError",
    "Method",
    "SimulatedCache",
    "disable",
    "enable",
    "get_method",
    "load_methods",
]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import; the parts below the hook must not pay for it
    if name in _FROM_TRANSFORMERS:
        from kitty.integrations import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module 'kitty' has no attribute {name!r}")
