"""Runs a program that a model wrote, in a process of its own with little time, memory and disk.

The limits keep a clumsy program from harming the machine. They are no jail: run code of a model
that you do not trust in a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: of processor time; three times as long on the clock.
        memory_bytes: of address space.
        file_bytes: of each file it writes, below a scratch folder that is removed.
        files: open at once.
    """

    seconds: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    files: int = 64


def outcome(program: str, limits: Limits = Limits()) -> str:
    """Run a Python program: ``passed``, ``failed: …`` with its last line, or ``timed out``.

    The program gets an empty environment, a scratch folder as its working directory, no standard
    input and none of this process's files.
    """

    def confine() -> None:
        for what, limit in (
            (resource.RLIMIT_CPU, limits.seconds),
            (resource.RLIMIT_AS, limits.memory_bytes),
            (resource.RLIMIT_FSIZE, limits.file_bytes),
            (resource.RLIMIT_NOFILE, limits.files),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (limit, limit))

    with (
        tempfile.TemporaryDirectory(prefix="kitty-code-") as scratch,
        tempfile.TemporaryFile() as said,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", program],
            cwd=scratch,
            env={"PATH": "/nonexistent", "HOME": scratch, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            preexec_fn=confine,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=3 * limits.seconds)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end_group(process)
        if status == 0:
            return "passed"
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return "timed out"
        said.seek(0)
        lines = said.read(1 << 16).decode(errors="replace").strip().splitlines()
        return f"failed: {lines[-1][:200]}" if lines else f"failed: exit status {status}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the program and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def humaneval_program(doc: dict[str, str], completion: str) -> str:
    """The whole program of a HumanEval problem: completed function, tests, call of the tests."""
    return f"{completion}\n{doc['test']}\ncheck({doc['entry_point']})\n"
