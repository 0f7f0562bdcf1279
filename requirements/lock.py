"""Write the lock files beside this one: every package pinned, with the sha256 of its files.

lock.txt       every extra, for .venv. Left out are torch, triton and the CUDA libraries: which
               build of those is right depends on the machine, so the Makefile installs torch by its
               pinned version first, then all else from this file with `--no-deps`.
image-cpu.txt  all that the container image's cpu flavour holds, with PyTorch's CPU build of torch.
image-cuda.txt the same of its cuda flavour: torch and CUDA 12.1, which the image fixes.

Needs `uv` beside the running Python (`make lock` puts it in a folder of its own).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "lock.txt"
OF_THE_MACHINE = re.compile(r"^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
# What runs in the image: no linters, no type stubs.
IMAGE_EXTRAS = ["--extra", "workflow", "--extra", "eval", "--extra", "baselines", "--extra", "test"]
# torch's CPU build lies in PyTorch's own index only, so PyPI cannot give its hash.
CPU_TORCH = {"2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"}
# Triton 3.0.0 needs numpy 1, which pyarrow 26 refuses without saying so in its metadata; torch pins
# every CUDA library but nvjitlink, which would float.
CUDA_PINS = [
    *("torch==2.4.1", "triton==3.0.0", "numpy<2", "pyarrow<26"),
    "nvidia-nvjitlink-cu12==12.1.105",
]
HEADER = """\
# Pinned versions and sha256 hashes of {what}.
# For Python 3.11 on Linux x86_64. Written by `make lock`; do not edit by hand.
"""


def blocks(text: str) -> list[str]:
    """The requirements of a compiled file, each with the hash lines that belong to it."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line[0].isspace():
            found[-1].append(line)
        else:
            found.append([line])
    return ["\n".join(lines) for lines in found]


def resolve(source: Path, pins: Sequence[str], extras: Sequence[str], wanted: str) -> list[str]:
    """The packages that ``source`` needs under ``pins``, at the versions of ``wanted`` that fit."""
    with tempfile.TemporaryDirectory() as folder:
        output, constraints = Path(folder) / "lock.txt", Path(folder) / "pins.txt"
        output.write_text(wanted)
        constraints.write_text("".join(f"{pin}\n" for pin in pins))
        command = [
            str(Path(sys.executable).with_name("uv")), "pip", "compile", str(source), *extras,
            "--generate-hashes", "--python-version", "3.11",
            "--python-platform", "x86_64-manylinux_2_28", "--constraint", str(constraints),
            "--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links",
            "--no-config", "--quiet", "--output-file", str(output),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return blocks(output.read_text())


def one_package(requirement: str) -> str:
    """The locked form of a single package, without what it needs."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "wanted.in"
        source.write_text(requirement + "\n")
        return resolve(source, [], ["--no-deps"], "")[0]


def write(path: Path, what: str, packages: Sequence[str]) -> None:
    """Write a lock file, unless it would name a place."""
    text = HEADER.format(what=what) + "\n".join(packages) + "\n"
    if "://" in text:
        raise SystemExit(f"the resolved {path.name} holds a URL; not written")
    path.write_text(text)
    print(f"requirements/{path.name}: {len(packages)} packages")


def main() -> None:
    """Resolve, keep the present lock's versions where they still fit, and replace the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("--torch", required=True, help="the pinned version of torch")
    parser.add_argument("--triton", required=True, help="triton's, where torch brings none")
    arguments = parser.parse_args()
    if arguments.torch not in CPU_TORCH:
        raise SystemExit(f"give the sha256 of torch {arguments.torch}+cpu in {Path(__file__).name}")
    project, torch_pin = HERE.parent / "pyproject.toml", [f"torch=={arguments.torch}"]

    old = LOCK.read_text() if LOCK.exists() and not arguments.upgrade else ""
    found = resolve(project, torch_pin, ["--all-extras"], old)
    kept = [block for block in found if not OF_THE_MACHINE.match(block)]
    write(LOCK, "everything but torch, triton and the CUDA libraries", kept)

    # Both flavours take the versions of the development environment wherever they can.
    found = resolve(project, torch_pin, IMAGE_EXTRAS, LOCK.read_text())
    kept = [block for block in found if not OF_THE_MACHINE.match(block)]
    torch = f"torch=={arguments.torch}+cpu \\\n    --hash=sha256:{CPU_TORCH[arguments.torch]}"
    kept = sorted([*kept, torch, one_package(f"triton=={arguments.triton}")])
    write(HERE / "image-cpu.txt", "all that the image's cpu flavour holds", kept)

    cuda = resolve(project, CUDA_PINS, IMAGE_EXTRAS, LOCK.read_text())
    write(HERE / "image-cuda.txt", "all that the image's cuda flavour holds", cuda)


if __name__ == "__main__":
    main()
