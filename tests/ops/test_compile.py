"""Every kernel compiles for each architecture, within its shared memory and without growing.

Needs no GPU. The environment variable KITTY_TRITON_PYTHONS lists further interpreters
(separated by ``:``) whose Triton versions are tested too; they need Triton, not torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from kernel_variants import VARIANTS

HERE = Path(__file__).parent
RESOURCES = json.loads((HERE / "kernel_resources.json").read_text())
BY_NAME = {variant["name"]: variant for variant in VARIANTS}
MAIN = [variant["name"] for variant in VARIANTS if variant.get("main")]
ARCHITECTURES = (80, 86, 89, 90)
PYTHONS = [sys.executable, *filter(None, os.environ.get("KITTY_TRITON_PYTHONS", "").split(":"))]
GROWTH = 1.1


@cache
def compiled(python: str, arch: int, names: tuple[str, ...]) -> list[dict]:
    """Rows of the compile report; a process of its own, because kernels here are interpreted."""
    command = [python, str(HERE / "compile_kernels.py"), "--arch", str(arch)]
    for name in names:
        command += ["--only", name]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")
    }
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def check_row(row: dict) -> None:
    """One kernel on one architecture."""
    name, variant = f"sm_{row['arch']} {row['name']}", BY_NAME[row["name"]]
    assert row["shared"] <= row["shared_limit"], f"{name}: too much shared memory"
    if variant.get("mma"):
        assert row["mma"] > 0, f"{name}: no tensor-core instructions"
        assert row["page_loop_int_to_float"] == 0, f"{name}: conversions in the page loop"
    known = RESOURCES.get(f"triton {row['triton']} {name}")
    if known is None:  # another Triton version than those measured
        return
    for resource, limit in known.items():
        assert row[resource] <= limit * GROWTH, (
            f"{name}: {resource} grew from {limit} to {row[resource]}; if that is meant, run "
            "compile_kernels.py --write"
        )


def test_the_main_kernels_compile_within_their_limits() -> None:
    for row in compiled(sys.executable, 90, tuple(MAIN)):
        check_row(row)


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_within_its_limits(python: str, arch: int) -> None:
    rows = compiled(python, arch, tuple(BY_NAME))
    assert len(rows) == len(VARIANTS)
    for row in rows:
        check_row(row)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_resources_of_every_kernel_are_on_record(arch: int) -> None:
    for name in BY_NAME:
        for version in ("3.0", "3.9"):
            assert f"triton {version} sm_{arch} {name}" in RESOURCES


def test_a_kernel_that_grew_is_noticed() -> None:
    known = RESOURCES["triton 3.9 sm_90 append"]
    row = {**known, "name": "append", "arch": 90, "triton": "3.9", "shared_limit": 232448, "mma": 0}
    check_row(row)
    with pytest.raises(AssertionError, match="stack grew"):
        check_row({**row, "stack": known["stack"] * 1.2 + 8})
