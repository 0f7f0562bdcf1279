"""Every test here runs the kernels: in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kitty.ops.dispatch import interpreting


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with interpreting(not torch.cuda.is_available()):
        yield


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
