"""Starts the pipeline: one at a time in a folder, going on where a killed one stopped.

Snakemake leaves a lock behind when it is killed. Whether its process is gone is known here from a
lock that the kernel frees with the process: a stale one is cleared, a live one is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitty.environment import free_memory_bytes
from kitty.errors import KittyError
from kitty.paths import configs_dir, shipped
from kitty.site import load_site
from kitty.workflow import Plan

PROGRAMS = ("snakemake", "kitty.snakemake")
STATE = Path(".snakemake")  # Snakemake's own folder, below the working directory
LOCK = STATE / "kitty-run.lock"
ERROR_MARK = "kitty: error: "
INTERRUPTED = 128 + signal.SIGINT
MEMORY_SHARE = 0.8  # of the free memory, given to the jobs together
GPUS_OF_A_RUN = 1  # jobs take the first GPU that they see, so two at once would share it
DEFAULT_PROFILE = "default"
TARGETS = (
    "all",
    "accuracy",
    "analysis",
    "tasks",
    "latency",
    "tables",
    "figures",
    "report",
    "claims",
)


@dataclass(frozen=True)
class Run:
    """One start of the pipeline in the working directory.

    Attributes:
        experiment: name or file.
        results: folder of the results.
        target: rule to make.
        cores: a number, or ``all``.
        memory_mb: of all jobs together; None: most of what is free.
        profile: a folder of configs/profiles; others than ``default`` know cores and memory.
        extra: further arguments of snakemake.
        files: make these files and no others, in place of the target.
        run_code: let tasks run what the model writes.
    """

    experiment: str
    results: str = "results"
    target: str = "all"
    cores: str = "all"
    memory_mb: int | None = None
    extra: Sequence[str] = ()
    files: Sequence[str] = ()
    profile: str = DEFAULT_PROFILE
    run_code: bool = False

    def command(self) -> list[str]:
        """The snakemake command line."""
        return [
            *(sys.executable, "-m", "kitty.snakemake", *(self.files or [self.target])),
            *("--snakefile", str(shipped("Snakefile"))),
            *("--workflow-profile", str(configs_dir() / "profiles" / self.profile)),
            *self._limits(),
            *("--config", f"experiment={self.experiment}", f"results={self.results}"),
            *(["run_code=true"] if self.run_code else []),
            *self.extra,
        ]

    def _limits(self) -> list[str]:
        """Cores, memory and GPUs of all jobs together, where the profile leaves them open."""
        if self.profile == DEFAULT_PROFILE:
            memory = self.memory_mb or memory_to_use()
            resources = ["--resources", f"mem_mb={memory}", f"gpu={GPUS_OF_A_RUN}"]
            return ["--cores", self.cores, *resources]
        limits = [] if self.cores == "all" else ["--cores", self.cores]
        if self.memory_mb is not None:
            limits += ["--resources", f"mem_mb={self.memory_mb}", f"gpu={GPUS_OF_A_RUN}"]
        return limits


def memory_to_use() -> int:
    """Memory for all jobs together, in MB: most of what is free."""
    return int(MEMORY_SHARE * (free_memory_bytes() or 8 * 2**30) / 2**20)


def launch(run: Run) -> int:
    """Run the pipeline and wait for it.

    Returns:
        Snakemake's exit status, or 130 where an interrupt from the keyboard ended it. The reasons
        of failed jobs are printed on stderr, a line each.

    Raises:
        KittyError: the experiment is wrong, the folder cannot be written, or another run is in it.
    """
    if run.target not in TARGETS:
        raise KittyError(f"Target {run.target!r} is not known: use one of {', '.join(TARGETS)}.")
    _check_cores(run.cores)
    _check_profile(run.profile)
    plan = Plan.load(run.experiment, run.results)
    _check_run_code(plan, run)
    check_writable(plan.root)
    check_writable(STATE)
    with only_run(LOCK, {"experiment": plan.experiment.name}) as handle:
        clear_stale_lock()
        before = log_states(plan.root)
        # Held back until the child can answer one (kitty.snakemake), and this process wait for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(run.command(), pass_fds=(handle,))
            status, interrupted = _wait(process)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if interrupted and status != 0:
        print("kitty: stopped; the same command goes on where it was", file=sys.stderr)
        return INTERRUPTED
    if status != 0:
        for reason in failures(plan.root, before):
            print(f"{ERROR_MARK}{reason}", file=sys.stderr)
    return status


def _check_cores(cores: str) -> None:
    if cores != "all" and not (cores.isdigit() and int(cores) > 0):
        raise KittyError(f"cores is {cores!r}, but it must be a number of at least 1, or all.")


def _check_profile(profile: str) -> None:
    known = sorted(path.parent.name for path in configs_dir().glob("profiles/*/config.yaml"))
    if profile not in known:
        raise KittyError(f"Profile {profile!r} is not known: use one of {', '.join(known)}.")
    load_site()  # its mistakes are told here in a sentence, by Snakemake with a page of usage
    if profile == "slurm" and shutil.which("sbatch") is None:
        raise KittyError(
            "The program sbatch is not here: start profile slurm on a machine of the cluster."
        )


def _check_run_code(plan: Plan, run: Run) -> None:
    """Say before anything is measured that some tasks would refuse at their start."""
    if run.run_code or run.files or run.target in ("accuracy", "analysis", "claims"):
        return
    if {"-n", "--dry-run", "--dryrun"} & set(run.extra) or not plan.runs_code():
        return
    raise KittyError(
        f"Experiment {plan.experiment.name!r} has tasks that run code which the model writes "
        f"({', '.join(plan.runs_code())}): add --run-code if you want that on this machine, or use "
        "an experiment without them."
    )


def check_writable(folder: Path) -> None:
    """Make a folder and see whether a file can be written in it.

    Raises:
        KittyError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise KittyError(
            f"The folder {folder} cannot be written ({error.strerror}): choose a folder that you "
            "may write to and that has room."
        ) from error


@contextlib.contextmanager
def only_run(path: Path, note: dict[str, Any]) -> Iterator[int]:
    """Hold the folder's lock; yields a handle that the child inherits and so keeps locked.

    Raises:
        KittyError: another run holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KittyError(
                f"Another run works in this folder ({_holder(path)}): wait for it or stop it, or "
                "start this one from another working directory."
            ) from None
        except OSError as error:
            raise KittyError(
                f"The lock {path} cannot be taken ({error.strerror}): use a working directory on a "
                "file system with locks."
            ) from error
        os.ftruncate(handle, 0)
        holder = {"pid": os.getpid(), "host": platform.node(), **note}
        os.pwrite(handle, json.dumps(holder).encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}, experiment {holder['experiment']}"
    except (OSError, ValueError, KeyError):
        return "its process is not known"


def clear_stale_lock() -> None:
    """Remove the lock files of a Snakemake that is gone; to be called with the folder's lock held.

    Raises:
        KittyError: a Snakemake that was started by hand is alive in this folder.
    """
    locks = sorted((STATE / "locks").glob("*.lock"))
    if not locks:
        return
    if (alive := _snakemake_here()) is not None:
        raise KittyError(
            f"A Snakemake (process {alive}) works in this folder: wait for it or stop it, or start "
            "this run from another working directory."
        )
    for lock in locks:
        lock.unlink(missing_ok=True)


def _snakemake_here() -> int | None:
    """Process id of a Snakemake of this machine that has this working directory.

    Not this process and those that started it: with the image one of their arguments says the same.
    """
    import psutil

    here = str(Path.cwd())
    own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for process in psutil.process_iter(["cmdline", "cwd"]):  # None: it ended, or is another user's
        words = (process.info["cmdline"] or [])[:4]
        is_snakemake = any(Path(word).name in PROGRAMS for word in words)
        if is_snakemake and process.info["cwd"] == here and process.pid not in own:
            return int(process.pid)
    return None


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Wait for Snakemake; an interrupt reaches it too, and it ends its jobs first.

    Returns:
        Its exit status, and whether there was an interrupt from the keyboard.
    """

    def forward(number: int, frame: object) -> None:
        process.send_signal(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, forward)
    interrupted = False
    try:
        while True:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                return process.wait(), interrupted
            except KeyboardInterrupt:
                interrupted = True  # the terminal has sent it to Snakemake as well
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def log_states(root: Path) -> dict[Path, int]:
    """Time of the last change of every job log, in ns."""
    return {path: path.stat().st_mtime_ns for path in (root / "logs").rglob("*.log")}


def failures(root: Path, before: dict[Path, int]) -> list[str]:
    """Reasons given in the job logs that changed since ``before``, each once."""
    reasons: dict[str, None] = {}
    for path, changed in sorted(log_states(root).items()):
        if before.get(path) == changed:
            continue
        lines = path.read_text(errors="replace").splitlines()
        told = [line for line in lines if line.startswith(ERROR_MARK)]
        if told:
            reasons.setdefault(told[-1].removeprefix(ERROR_MARK))
        elif any(line.startswith("Traceback") for line in lines):
            reasons.setdefault(f"{lines[-1]} (see {path})")
    return list(reasons)
