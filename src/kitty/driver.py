"""Why this process can or cannot use a GPU, asked of NVIDIA's driver itself.

Takes no time and no torch, so that a command can say at its start what it will run on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_CUDA = (12, 1)  # of the image's torch
DRIVER_NOTE = Path("/proc/driver/nvidia/version")  # of the kernel's module, seen in a container too
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Driver:
    """What the driver says.

    Attributes:
        gpus: devices that this process may use.
        cuda: newest CUDA version that the driver serves, as (major, minor); None without a driver.
        problem: one sentence on why no GPU can be used; None where one can.
    """

    gpus: int
    cuda: tuple[int, int] | None
    problem: str | None


def examine_driver(
    load: Callable[[str], Any] = ctypes.CDLL,
    note: Path = DRIVER_NOTE,
    least: tuple[int, int] = LEAST_CUDA,
) -> Driver:
    """Ask the driver for its version and its devices.

    Args:
        load: opens a shared library by name, or raises OSError.
        note: file that the kernel's part of the driver shows on a machine that has one.
        least: CUDA version that is needed.
    """
    try:
        library = load("libcuda.so.1")
    except OSError:
        if note.exists() and in_image():
            return Driver(0, None, _without_nv())
        return Driver(0, None, "No GPU can be used, as no NVIDIA driver is installed here.")
    version = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    cuda = (version.value // 1000, version.value % 1000 // 10)
    if cuda < least:
        return Driver(
            0,
            cuda,
            f"No GPU can be used, as the driver is for CUDA {_dotted(cuda)} and at least "
            f"{_dotted(least)} is needed: update the NVIDIA driver.",
        )
    count = ctypes.c_int(0)
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if status not in (0, NO_DEVICE):
        return Driver(
            0,
            cuda,
            f"No GPU can be used, as the driver answers with error {status}: see that nvidia-smi "
            "works and that this user may open /dev/nvidia*.",
        )
    if status == NO_DEVICE or count.value == 0:
        return Driver(0, cuda, _no_device())
    return Driver(count.value, cuda, None)


def in_image() -> bool:
    """Whether this process runs in Kitty's container image."""
    return "KITTY_IMAGE" in os.environ


def _without_nv() -> str:
    return (
        "No GPU can be used, as the image was started without the machine's NVIDIA driver: start "
        "it with `apptainer run --nv`."
    )


def _no_device() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return (
            f"No GPU can be used, as CUDA_VISIBLE_DEVICES is {visible!r}, which names none of this "
            "machine's: change or unset it."
        )
    return "No GPU can be used, as the NVIDIA driver finds none on this machine."


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
