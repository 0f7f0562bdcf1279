"""A real one-node SLURM with one fake GPU, and site settings for it; skipped where it cannot start.

The scripts that start it lie beside the repository, or where KITTY_SLURM_SCRIPTS says. The image
is the file named in KITTY_IMAGE; without it jobs use this installation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kitty.paths import shipped

BESIDE = shipped("configs").parent.parent / "shared" / "containers"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster():
    """The node is up; it is stopped at the end unless it was up before."""
    scripts = Path(os.environ.get("KITTY_SLURM_SCRIPTS", BESIDE))
    if not (scripts / "slurm-up.sh").is_file():
        pytest.skip(f"there is no script {scripts / 'slurm-up.sh'} that starts a SLURM node")
    if os.geteuid() != 0:
        pytest.skip("starting a SLURM node needs root")
    was_up = _is_up()
    subprocess.run(["bash", scripts / "slurm-up.sh"], check=True, timeout=600)
    yield
    if not was_up:
        subprocess.run(["bash", scripts / "slurm-down.sh"], check=True, timeout=120)


def _is_up() -> bool:
    if shutil.which("sinfo") is None:
        return False
    return subprocess.run(["sinfo", "-h"], capture_output=True, timeout=60).returncode == 0


@pytest.fixture(scope="session")
def site(cluster, tmp_path_factory):
    """A site file for the node."""
    image = os.environ.get("KITTY_IMAGE")
    settings = {"account": "default", "partition": "cpu", "jobs": 8}
    if image is not None:
        settings |= {"image": str(Path(image).absolute()), "apptainer_args": ""}
    path = tmp_path_factory.mktemp("site") / "site.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def command(site, tmp_path):
    """Starts kitty in an empty folder that the site's jobs work in."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kitty", *arguments],
            cwd=tmp_path,
            env={**os.environ, "KITTY_SITE": str(site)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start
