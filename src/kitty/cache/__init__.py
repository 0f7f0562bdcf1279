"""State of the KV cache of one attention layer, without any framework around it."""

from kitty.cache.simulated import SimulatedLayer

__all__ = ["SimulatedLayer"]
