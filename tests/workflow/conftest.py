"""The tiny experiment, run once for all tests of the workflow, and ways to start it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TABLES = Path("results/tiny/tables")


class Pipeline:
    """A working directory in which the launcher is started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "results" / "tiny"

    def command(self, *arguments: str, experiment: str = "tiny") -> list[str]:
        return [sys.executable, "-m", "kitty", "run", experiment, "--cores", "2", *arguments]

    def run(self, *arguments: str, experiment: str = "tiny") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments, experiment=experiment),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            stdin=subprocess.DEVNULL,
        )

    def run_and_kill(self, seconds: float) -> bool:
        """Start the launcher, SIGKILL its process group later; False: it was done before."""
        process = subprocess.Popen(
            self.command(),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        return False

    def tables(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.root / "tables").iterdir())}

    def changes(self) -> dict[Path, int]:
        """Time of the last change of every result but the logs."""
        return {
            path: path.stat().st_mtime_ns
            for path in self.root.rglob("*")
            if path.is_file() and "logs" not in path.parts
        }


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The tiny experiment, complete."""
    pipeline = Pipeline(tmp_path_factory.mktemp("finished"))
    done = pipeline.run()
    assert done.returncode == 0, done.stderr
    return pipeline


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the complete results, to be damaged; times are kept, Snakemake's notes too."""
    subprocess.run(["cp", "-a", f"{finished.folder}/.", str(tmp_path)], check=True)
    return Pipeline(tmp_path)
