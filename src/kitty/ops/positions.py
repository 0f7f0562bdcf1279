"""Where tokens live, computed on the device: page counts and ring slots shared by all kernels.

The host's counterpart is ``kitty.methods.Method``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def num_pages(length, UNPAGED: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Pages of a sequence of ``length`` tokens, int32 (a scalar or a block).

    ``UNPAGED`` counts the tokens that stay outside pages for good: S + r for keys (kp),
    S + R + r for values (vp).
    """
    return tl.maximum(length - UNPAGED, 0) // PAGE_SIZE


@triton.jit
def ring_slot(token, SINK: tl.constexpr, CAPACITY: tl.constexpr):
    """Slot of a token with absolute index ``token`` ≥ ``SINK`` in a ring of ``CAPACITY``."""
    return (token - SINK) % CAPACITY
