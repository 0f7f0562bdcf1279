"""The cpu image, built once for each state of its inputs, and how it is run.

KITTY_IMAGE         a finished image to be tested in place of building one
KITTY_IMAGE_CACHE   folder of built images (build/images)
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What kitty.def copies or is made by; a change in any of these is another image.
INPUTS = (
    *("ARTIFACT.md", "LICENSE", "README.md", "Snakefile", "configs", "containers", "docs"),
    *("kitty.def", "patches", "pyproject.toml", "requirements", "results/reference", "src"),
    *("tests", "workflows"),
)
BUILD_LIMIT = 1800  # seconds; three to six minutes on two idle cores


def inputs_hash() -> str:
    """Over the paths and contents of everything that goes into the image."""
    digest = hashlib.sha256()
    for name in INPUTS:
        top = ROOT / name
        for path in sorted([top] if top.is_file() else top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    return digest.hexdigest()[:16]


def cached_image() -> Path:
    """The image of the present inputs; built where it is not there yet."""
    folder = Path(os.environ.get("KITTY_IMAGE_CACHE") or ROOT / "build" / "images")
    image = folder / f"kitty-cpu-{inputs_hash()}.sif"
    if not image.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        before = sorted(folder.glob("kitty-cpu-*.sif"))
        started = image.with_suffix(".new")
        settings = {"BASE": os.environ.get("BASE") or "debootstrap"}
        if before:
            settings["REUSE"] = str(before[-1])
        done = subprocess.run(
            [str(ROOT / "containers" / "build.sh"), "cpu", str(started)],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=BUILD_LIMIT,
        )
        if done.returncode != 0:
            pytest.fail("the image was not built:\n" + (done.stdout + done.stderr)[-3000:])
        started.rename(image)
        for old in before:
            old.unlink()
    return image


@dataclass
class Image:
    """The image and the caller's side of running it.

    Attributes:
        file: the SIF.
        home: folder mounted as the home, so that a write to it shows.
    """

    file: Path
    home: Path

    def command(self, *words: str, action: str = "run", options: tuple[str, ...] = ()) -> list[str]:
        return ["apptainer", action, "--home", str(self.home), *options, str(self.file), *words]

    def run(
        self,
        *words: str,
        cwd: Path,
        action: str = "run",
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        timeout: float = 900,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words, action=action, options=options),
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )


def read_tables(root: Path) -> dict[str, bytes]:
    """Contents of an experiment's tables by name."""
    return {path.name: path.read_bytes() for path in sorted((root / "tables").iterdir())}


@dataclass
class Finished:
    """The tiny experiment, run by the image in a folder that was empty."""

    folder: Path
    done: subprocess.CompletedProcess[str]
    temporary: Path

    @property
    def root(self) -> Path:
        return self.folder / "results" / "tiny"
