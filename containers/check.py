"""Check an image from inside: versions as locked, CUDA build, plug-ins, the embedded model."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "requirements"
MODULES = ("transformers", "lm_eval", "hqq", "optimum.quanto", "snakemake_executor_plugin_slurm")


def unlike_the_lock(flavour: str) -> list[str]:
    """Packages whose installed version is not the locked one."""
    found = []
    text = (LOCKS / f"image-{flavour}.txt").read_text()
    for name, wanted in re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.MULTILINE):
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = "missing"
        if installed != wanted:
            found.append(f"{name} {installed}, locked {wanted}")
    return found


def main(flavour: str) -> int:
    """Print what is there; 1 where something is not as it must be."""
    import torch

    from kitty.models import check_folder, embedded_folder, find_model, known_models

    faults = unlike_the_lock(flavour)
    wanted = "12.1" if flavour == "cuda" else None
    if torch.version.cuda != wanted:
        faults.append(f"torch is built for CUDA {torch.version.cuda}, not {wanted}")
    for name in MODULES:
        importlib.import_module(name)
    for spec in map(find_model, known_models()):
        if spec.embedded is not None:
            check_folder(embedded_folder(spec))
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {version('triton')}")
    for fault in faults:
        print(f"kitty: error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
