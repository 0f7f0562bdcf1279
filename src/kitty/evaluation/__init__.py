"""Offline quality of a method: teacher-forced metrics against the 16-bit model.

``write_reference`` once per model and text, then ``evaluate_offline`` once per method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitty.evaluation.bootstrap import Interval, Pages, bootstrap, paired_difference

if TYPE_CHECKING:
    from kitty.evaluation.offline import PAGE_TOKENS, evaluate_offline, tokens_needed
    from kitty.evaluation.reference import Reference, write_reference

_HOMES = {
    "PAGE_TOKENS": "offline",
    "evaluate_offline": "offline",
    "tokens_needed": "offline",
    "Reference": "reference",
    "write_reference": "reference",
}

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
    # tables and figures need the intervals only and must not wait for torch and transformers
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"kitty.evaluation.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kitty.evaluation' has no attribute {name!r}")
