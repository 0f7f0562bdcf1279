"""Analysis of key channels: magnitude, sensitivity, overlap of the two, stability over pages."""

from kitty.analysis.channels import (
    channel_sensitivity,
    key_pages,
    magnitude_map,
    selection_overlap,
    selection_stability,
)
from kitty.analysis.run import analyze

__all__ = [
    "analyze",
    "channel_sensitivity",
    "key_pages",
    "magnitude_map",
    "selection_overlap",
    "selection_stability",
]
