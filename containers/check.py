"""Check an image from inside: versions as locked, CUDA build, plug-ins, the embedded model."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "requirements"
OWN = {"kitty", "pip"}
MODULES = (
    *("transformers", "lm_eval.evaluator", "hqq", "optimum.quanto"),
    "snakemake_executor_plugin_slurm",
)


def locked(flavour: str) -> dict[str, str]:
    """Versions of the flavour's lock file by package."""
    text = (LOCKS / f"image-{flavour}.txt").read_text()
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.MULTILINE))


def unlocked(flavour: str) -> list[str]:
    """Installed packages that the lock file does not name."""
    found = {plain(str(package.metadata["Name"])) for package in distributions()}
    return sorted(found - OWN - {plain(name) for name in locked(flavour)})


def plain(name: str) -> str:
    """A package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unlike_the_lock(flavour: str) -> list[str]:
    """Packages whose installed version is not the locked one."""
    found = []
    for name, wanted in locked(flavour).items():
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
    faults += [f"{name} is not in the lock file" for name in unlocked(flavour)]
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
    if sys.argv[1] == "--unlocked":
        sys.exit(print(*unlocked(sys.argv[2])))
    sys.exit(main(sys.argv[1]))
