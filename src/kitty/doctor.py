"""What this machine has, and what of Kitty will run on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from kitty.driver import examine_driver
from kitty.environment import cpu_name, environment, free_memory_bytes, package_version, revision
from kitty.models import cache_dir, embedded_folder, find_model, known_models

OPTIONAL = {
    "snakemake": "the pipeline (`kitty run`)",
    "lm_eval": "downstream tasks",
    "hqq": "the HQQ baseline of `kitty bench e2e`",
    "optimum-quanto": "the Quanto baseline of `kitty bench e2e`",
}
GIB = 2**30


def examine() -> dict[str, dict[str, Any]]:
    """Versions, machine and abilities: title → name → value."""
    import torch  # imported so that environment() can see its CUDA build

    found = environment()
    versions = {"kitty": found["kitty"], "revision": revision()}
    for name in ("python", "torch", "transformers", "triton", "numpy"):
        versions[name] = found[name] or "not installed"
    for name in OPTIONAL:
        versions[name] = package_version(name.replace("_", "-")) or "not installed"
    cuda = torch.cuda.is_available()
    return {
        "versions": versions,
        "machine": _machine(found),
        "models": _models(),
        "what runs where": _abilities(found, cuda),
    }


def _machine(found: dict[str, Any]) -> dict[str, Any]:
    memory = free_memory_bytes()
    machine = {
        "platform": found["platform"],
        "processor": cpu_name() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "threads of torch": found["threads"],
        "free memory": "unknown" if memory is None else f"{memory / GIB:.1f} GiB",
        "free disk here": _free_disk(Path.cwd()),
        "free disk of the cache": _free_disk(cache_dir()),
        "CUDA of torch": found["cuda"] or "none (CPU build)",
        "GPU": found["gpu"] or examine_driver().problem or "none",
    }
    if found["gpu"]:
        machine["GPUs"] = found["gpu_count"]
        machine["GPU memory"] = f"{found['gpu_memory_bytes'] / GIB:.1f} GiB"
        machine["compute capability"] = found["compute_capability"]
        machine["driver"] = found["driver"] or "unknown"
    return machine


def _free_disk(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / GIB:.1f} GiB"


def _models() -> dict[str, str]:
    places = {}
    for name in known_models():
        spec = find_model(name)
        if spec.embedded is not None:
            folder = embedded_folder(spec)
            places[name] = str(folder) if folder.is_dir() else "not fetched yet"
    return {"cache": str(cache_dir()), **places}


def _abilities(found: dict[str, Any], cuda: bool) -> dict[str, str]:
    where = "GPU" if cuda else "CPU"
    triton = found["triton"] is not None
    kernels = "GPU" if cuda and triton else "torch reference on the CPU"
    if not cuda and triton:
        kernels += " (TRITON_INTERPRET=1 interprets the Triton kernels)"
    abilities = {
        "quality and analysis (simulated cache)": f"CPU, or --device cuda ({where} here)",
        "packed cache": kernels,
    }
    for name, use in OPTIONAL.items():
        installed = package_version(name.replace("_", "-")) is not None
        abilities[use] = "yes" if installed else f"no: {name} is not installed"
    return abilities
