"""State of the KV cache of attention layers, without any framework around it."""

from kitty.cache.packed import PackedLayer, PackedState
from kitty.cache.simulated import SimulatedLayer

__all__ = ["PackedLayer", "PackedState", "SimulatedLayer"]
