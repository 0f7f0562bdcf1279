"""What a measurement ran on: versions, machine, revision, peak memory.

Every record carries this, so that a number can be traced to what produced it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "numpy", "lm-eval", "kitty")


def package_version(name: str) -> str | None:
    """Version of an installed package; None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Versions and machine, JSON-ready; None where a part is absent."""
    versions = {name: package_version(name) for name in PACKAGES}
    if versions["kitty"] is None:
        versions["kitty"] = "not installed"
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": _torch_threads(),
        **gpu(),
    }


def cpu_name() -> str | None:
    """Model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _torch_threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_num_threads()


def gpu() -> dict[str, Any]:
    """Name, memory and capability of the first GPU, and torch's CUDA version; None where absent."""
    torch = sys.modules.get("torch")
    found: dict[str, Any] = {
        "gpu": None,
        "gpu_count": 0,
        "gpu_memory_bytes": None,
        "compute_capability": None,
        "cuda": None,
        "driver": None,
    }
    if torch is None:
        return found
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_count"] = torch.cuda.device_count()
        found["gpu_memory_bytes"] = properties.total_memory
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["driver"] = _driver_version()
    return found


def _driver_version() -> str | None:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else None


def revision() -> str:
    """Git commit of the code (``+dirty`` with uncommitted changes), else the package version.

    A copy without git, as the container image holds it, has its commit in a file REVISION.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists() and (root / "pyproject.toml").exists():
        commit = _git(root, "rev-parse", "HEAD")
        if commit:
            changed = _git(root, "status", "--porcelain", "--untracked-files=no")
            return commit + ("+dirty" if changed else "")
    if (noted := root / "REVISION").is_file() and (commit := noted.read_text().strip()):
        return commit
    return f"kitty {package_version('kitty') or 'unknown'}"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def peak_memory_bytes() -> int | None:
    """Largest resident size of this process so far, in bytes.

    Read from the kernel's high-water mark of the address space: the figure of ``getrusage`` is
    inherited across fork and exec, so a small job of a large parent would report too much.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def free_memory_bytes() -> int | None:
    """Memory of this machine that new programs can use, in bytes."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
