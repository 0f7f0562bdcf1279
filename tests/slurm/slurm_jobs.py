"""What SLURM knows of the jobs of a test."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass

FIELDS = ("JobIDRaw", "State", "Start", "End", "AllocTRES", "ReqMem", "Timelimit", "WorkDir")
PATIENCE_S = 600


@dataclass(frozen=True)
class Job:
    """A job as the accounting has it; start and end as sortable text."""

    number: str
    state: str
    start: str
    end: str
    resources: str
    memory: str
    limit: str

    @property
    def has_gpu(self) -> bool:
        return "gres/gpu=1" in self.resources


def jobs_in(folder) -> list[Job]:
    """Every job that was submitted with this working directory, restarts included, oldest first."""
    command = ["sacct", "-X", "-n", "-P", "-D", "-S", "now-1day", "-o", ",".join(FIELDS)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    rows = [line.split("|") for line in answer.stdout.splitlines()]
    return [Job(*row[:-1]) for row in rows if row[-1] == str(folder)]


def running(folder) -> list[str]:
    """Numbers of the folder's jobs that run now."""
    command = ["squeue", "-h", "-t", "R", "-o", "%i|%Z"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    rows = [line.split("|") for line in answer.stdout.splitlines()]
    return [number for number, place in rows if place == str(folder)]


def wait_for(condition, process=None):
    """Wait until a function returns something true, and return that; the process must live."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        time.sleep(0.5)
    return found


def scancel(*arguments: str) -> None:
    subprocess.run(["scancel", *arguments], check=True, timeout=60)
