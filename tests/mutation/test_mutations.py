"""The suite must notice a broken method: each mutation of the source makes its tests fail.

Run by ``make test-slow``; every case copies the package, changes one line and runs a few tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kitty

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(kitty.__file__).resolve().parent

QUANT = "tests/unit/test_quant.py"
CACHE = "tests/cache/test_simulated_layer.py"
PAGES = "tests/ops/test_pages.py"

MUTATIONS = {
    "scale and zero swapped": (
        "quant/groupwise.py",
        "x = codes.float() * scale.float() + zero.float()",
        "x = codes.float() * zero.float() + scale.float()",
        [QUANT],
    ),
    "half-way points round down": (
        "quant/groupwise.py",
        "code = torch.floor((h - low) * inverse + 0.5)",
        "code = torch.ceil((h - low) * inverse - 0.5)",
        [QUANT],
    ),
    "inf enters the range": (
        "quant/groupwise.py",
        "high = torch.where(finite, h, -torch.inf)",
        "high = torch.where(x == x, h, -torch.inf)",
        [QUANT],
    ),
    "scale not rounded to fp16": (
        "quant/groupwise.py",
        "step = scale.float()",
        "step = (high - low) / levels",
        [QUANT],
    ),
    "ties go to the higher channel": (
        "quant/selection.py",
        "order = scores.argsort(dim=-1, descending=True, stable=True)",
        "order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)\n"
        "    order = scores.shape[-1] - 1 - order",
        [QUANT],
    ),
    "the smallest channels are boosted": (
        "quant/selection.py",
        "descending=True, stable=True",
        "descending=False, stable=True",
        [QUANT],
    ),
    "random channels ignore the page": (
        "quant/selection.py",
        "x = _mix(x ^ pages[:, None, :])",
        "x = _mix(x ^ (pages * 0)[:, None, :])",
        [QUANT],
    ),
    "boosted channels rounded half down": (
        "methods.py",
        "math.floor(self.boost_ratio * head_dim + 0.5)",
        "math.ceil(self.boost_ratio * head_dim - 0.5)",
        ["tests/unit/test_methods.py"],
    ),
    "one page shifted": (
        "cache/simulated.py",
        "where = slice(sink + first * size, sink + end * size)",
        "where = slice(sink + first * size - 1, sink + end * size - 1)",
        [CACHE],
    ),
    "value pages without the local window": (
        "methods.py",
        "return max(0, length - self.sink - self.window - self.rollback) // self.page_size",
        "return max(0, length - self.sink - self.rollback) // self.page_size",
        [CACHE],
    ),
    "pages flushed one token late": (
        "methods.py",
        "return max(0, length - self.sink - self.rollback) // self.page_size",
        "return max(0, length - 1 - self.sink - self.rollback) // self.page_size",
        [CACHE],
    ),
    "pads enter the cache": (
        "cache/simulated.py",
        "if real is not None and min(counts) < total:",
        "if False:",
        [CACHE],
    ),
    "a crop keeps the page of the longer length": (
        "cache/simulated.py",
        "buffer[b, :, first:] = raw[b, :, first:]",
        "pass",
        [CACHE],
    ),
    "a plane flipped": (
        "pages/packing.py",
        "planes = codes.to(torch.int32).unflatten(-2, (PLANES, -1))",
        "planes = codes.to(torch.int32).unflatten(-2, (PLANES, -1)).flip(-3)",
        [PAGES],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_suite_goes_red_when_the_method_is_broken(name: str, tmp_path: Path) -> None:
    file, line, mutated, tests = MUTATIONS[name]
    shutil.copytree(
        PACKAGE, tmp_path / "src" / "kitty", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in ("configs", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    path = tmp_path / "src" / "kitty" / file
    source = path.read_text()
    assert source.count(line) == 1, f"{file} no longer holds the line to mutate: {line}"
    path.write_text(source.replace(line, mutated))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, f"the suite stayed green:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
    assert "error" not in run.stdout.splitlines()[-1], run.stdout[-2000:]
