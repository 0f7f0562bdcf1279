"""An installed wheel has all that a checkout has, and works away from it."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kitty.paths import configs_dir, shipped

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("not in a checkout")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs Python with the wheel's package, in a folder away from the checkout."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, timeout=300)
    away = tmp_path_factory.mktemp("away")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=away,
            env={**os.environ, "PYTHONPATH": str(target)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout

    run.target = target
    return run


def test_the_wheel_ships_the_one_copy_of_configs_patches_and_workflow(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in ("configs", "patches", "workflows"):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"kitty/{path.relative_to(ROOT)}" in names
    assert "kitty/Snakefile" in names


def test_an_installed_wheel_finds_its_own_files(installed):
    code = "import kitty.paths as p; print(p.configs_dir()); print(p.shipped('Snakefile'))"
    for line in installed("-c", code).split():
        assert Path(line).is_relative_to(installed.target)
        assert Path(line).exists()


def test_an_installed_wheel_lists_methods_and_plans_the_pipeline(installed):
    assert "kitty-pro" in installed("-m", "kitty", "methods")
    installed("-m", "kitty", "run", "tiny", "--cores", "1", "--", "--dry-run", "--quiet", "all")


def test_the_checkout_has_every_shipped_part():
    assert (configs_dir() / "methods.yaml").is_file()
    assert shipped("Snakefile").is_file()
    assert shipped("patches").is_dir()


def test_the_lock_file_pins_and_hashes_all_but_torch_and_names_no_place():
    text = (ROOT / "requirements" / "lock.txt").read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    pins = re.findall(r"^([a-z0-9.-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    packages = re.findall(r"^([a-z0-9.-]+)", text, re.MULTILINE)
    assert pins == packages
    assert len(pins) > 100
    assert not [name for name in pins if name in ("torch", "triton") or name.startswith("nvidia")]
    assert {"transformers", "snakemake", "lm-eval", "pytest", "hqq"} <= set(pins)
