"""Apptainer from outside the image: find it, build, test, measure, compare with the lock file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kitty.errors import KittyError

FLAVOURS = ("cpu", "cuda")
ROOT = Path(__file__).resolve().parents[3]  # of a checkout
PACKAGES = "/opt/venv/lib/python3.11/site-packages"


def apptainer() -> str:
    """Path of the program.

    Raises:
        KittyError: it is not installed.
    """
    found = shutil.which("apptainer")
    if found is None:
        raise KittyError(
            "apptainer was not found, which builds and runs the image: install Apptainer 1.2 or "
            "newer."
        )
    return found


def call(*arguments: str) -> str:
    """Output of an apptainer command.

    Raises:
        KittyError: it failed; with its own last line.
    """
    done = subprocess.run([apptainer(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        reason = re.sub(r"^(FATAL|ERROR):\s*", "", lines[-1]).rstrip(".")
        raise KittyError(f"`apptainer {arguments[0]}` failed: {reason}.")
    return done.stdout


def check_image(image: Path) -> None:
    """Refuse a file that is not there.

    Raises:
        KittyError: it is not.
    """
    if not image.is_file():
        raise KittyError(
            f"The image {image} does not exist: build it with `make image-cpu` or image-cuda."
        )


def build(flavour: str, image: Path, base: str | None) -> int:
    """Build the image from this checkout; its output goes to the terminal.

    Returns:
        The exit status.

    Raises:
        KittyError: the flavour is not known, or this is no checkout.
    """
    script = ROOT / "containers" / "build.sh"
    if flavour not in FLAVOURS:
        raise KittyError(f"Flavour {flavour!r} is not known: use {' or '.join(FLAVOURS)}.")
    if not script.is_file():
        raise KittyError(
            f"There is no kitty.def in {ROOT}, so the image cannot be built from here: call "
            "`kitty image build` from a checkout of the repository."
        )
    apptainer()
    settings = {} if base is None else {"BASE": base}
    command = [str(script), flavour, str(image.absolute())]
    return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode


def test(image: Path) -> int:
    """Run the image's own %test; returns its exit status."""
    check_image(image)
    return subprocess.run([apptainer(), "test", str(image)], check=False).returncode


def labels(image: Path) -> dict[str, str]:
    """The labels of an image."""
    check_image(image)
    answer = json.loads(call("inspect", "--json", "--labels", str(image)))
    return dict(answer["data"]["attributes"]["labels"])


def sizes(image: Path, most: int = 12) -> list[tuple[str, int]]:
    """What takes room: (name, bytes), the file first, then parts as they are unpacked."""
    check_image(image)
    rows = [(image.name, image.stat().st_size)]
    parts = ["/opt/venv", "/opt/kitty", "/usr"]
    for folder, count in ((None, len(parts)), (PACKAGES, most)):
        where = parts if folder is None else [folder]
        depth = "0" if folder is None else "1"
        answer = call("exec", str(image), "du", "-B1", "-d", depth, *where)
        found = [line.split("\t") for line in answer.splitlines()]
        named = [(name, int(size)) for size, name in found if name != folder]
        rows += sorted(named, key=lambda row: -row[1])[:count]
    return rows


# --- locks ----------------------------------------------------------------------------------------


def lock_file(flavour: str) -> Path:
    """The lock file of a flavour."""
    return ROOT / "requirements" / f"image-{flavour}.txt"


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_lock(path: Path) -> int:
    """Number of packages of a lock file.

    Raises:
        KittyError: it is missing, an entry lacks its version or hash, or it names a place.
    """
    if not path.is_file():
        raise KittyError(f"The lock file {path} is missing: write it with `make lock`.")
    text = path.read_text()
    if "://" in text:
        raise KittyError(f"{path.name} names a place: write it anew with `make lock`.")
    entries = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    for entry in map(str.strip, entries):
        if not re.match(r"[A-Za-z0-9_.-]+==\S+ \\\n +--hash=sha256:[0-9a-f]{64}", entry):
            raise KittyError(
                f"{path.name} has {entry.splitlines()[0]!r} without a version or a sha256: write "
                "it anew with `make lock`."
            )
    return len(entries)


def check_image_lock(image: Path) -> Mapping[str, Any]:
    """Compare an image with the lock file of its flavour here, and its packages with its own.

    Returns:
        Its flavour, and the sha256 of the lock file.

    Raises:
        KittyError: they differ.
    """
    found = labels(image)
    flavour, noted = found.get("kitty.flavour", ""), found.get("kitty.lock.sha256")
    if flavour not in FLAVOURS:
        raise KittyError(f"{image} is no image of Kitty: it has no label kitty.flavour.")
    here = sha256(lock_file(flavour))
    if noted != here:
        raise KittyError(
            f"{image} was built from another requirements/{lock_file(flavour).name} (sha256 "
            f"{noted}) than the one here ({here}): build it anew with `make image-{flavour}`."
        )
    call("exec", str(image), "python3", "/opt/kitty/containers/check.py", flavour)
    return {"flavour": flavour, "sha256": here}
