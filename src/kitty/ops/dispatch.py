"""Which implementation an op runs: the Triton kernel or the torch reference."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

# Triton decides at import whether its kernels are compiled or interpreted, so does this module.
_interpret = os.environ.get("TRITON_INTERPRET") == "1"

# calls of ops by what ran: "kernel" or "reference"; a benchmark looks for unexpected references
calls: collections.Counter[str] = collections.Counter()


def runs_kernel(tensor: Tensor) -> bool:
    """Whether an op on ``tensor`` launches its kernel.

    GPU tensors do. CPU tensors take the torch reference, unless ``TRITON_INTERPRET=1`` was set
    when Kitty was imported: then they run the kernels in Triton's interpreter.
    """
    kernel = tensor.device.type == "cuda" or _interpret
    calls["kernel" if kernel else "reference"] += 1
    return kernel


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the tensor's GPU the current one: Triton launches there, wherever the tensors are."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


@contextlib.contextmanager
def interpreting(enabled: bool) -> Iterator[None]:
    """Switch CPU tensors between interpreted kernels and the torch reference, for tests.

    ``enabled=True`` needs kernels that were imported under ``TRITON_INTERPRET=1``.
    """
    global _interpret
    before, _interpret = _interpret, enabled
    try:
        yield
    finally:
        _interpret = before
