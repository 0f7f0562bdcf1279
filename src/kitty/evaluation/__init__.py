"""Offline quality of a method: teacher-forced metrics against the 16-bit model.

``write_reference`` once per model and text, then ``evaluate_offline`` once per method.
"""

from kitty.evaluation.bootstrap import Interval, Pages, bootstrap, paired_difference
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
