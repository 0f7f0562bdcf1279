"""Offline quality of a method: teacher-forced metrics against the 16-bit model.

``write_reference`` once per model and text, then ``evaluate_offline`` once per method.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kitty.evaluation.bootstrap import Interval, Pages, bootstrap, paired_difference

if TYPE_CHECKING:
    from kitty.evaluation.offline import PAGE_TOKENS, evaluate_offline, tokens_needed
    from kitty.evaluation.reference import Reference, write_reference

__all__ = [
    "PAGE_TOKENS",
    "Interval",
    "Pages",
    "Reference",
    "bootstrap",
    "evaluate_offline",
    "paired_difference",
    "tokens_needed",
    "write_reference",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch and transformers when it is first asked for: tables need neither."""
    for module in ("offline", "reference"):
        loaded = importlib.import_module(f"kitty.evaluation.{module}")
        if name in __all__ and hasattr(loaded, name):
            return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
