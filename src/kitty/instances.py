"""Several runs of one experiment at once: started, watched, joined.

Each instance is a process with its own folder, Snakemake state, share of the cores, and GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kitty.errors import KittyError
from kitty.launcher import (
    ERROR_MARK,
    INTERRUPTED,
    LOCK,
    check_writable,
    memory_to_use,
    only_run,
)
from kitty.parts import join, link, rounds, split
from kitty.records import write_atomically
from kitty.workflow import Plan

FOLDER = (
    ".instances"  # below the results folder: one folder an experiment, one below it an instance
)
STATE = "state.json"
POLL_S = 0.3
GRACE_S = 30  # for an interrupted instance to end its jobs, before it is killed
RUNTIME_FAILED = 255  # of apptainer, where it could not start the program at all
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Container:
    """How an instance starts inside an image.

    Attributes:
        image: the SIF file.
        overlay: an overlay that all instances read, or None.
    """

    image: Path
    overlay: Path | None = None

    def check(self) -> None:
        """Refuse what is not there before anything starts.

        Raises:
            KittyError: the program, the image or the overlay is missing.
        """
        if shutil.which("apptainer") is None:
            raise KittyError(
                f"The image {self.image} needs the program apptainer, which is not installed here: "
                "install it, or leave out --image."
            )
        for what, path in (("image", self.image), ("overlay", self.overlay)):
            if path is not None and not path.exists():
                raise KittyError(f"There is no {what} {path}: name one that exists.")

    def wrap(self, command: list[str], folder: Path, binds: list[Path], gpu: bool) -> list[str]:
        """The command line that runs ``command`` in ``folder`` inside the image."""
        return [
            *("apptainer", "exec", "--pwd", str(folder)),
            *(["--nv"] if gpu else []),
            *([] if self.overlay is None else ["--overlay", f"{self.overlay}:ro"]),
            *(word for path in binds for word in ("--bind", str(path))),
            *(str(self.image), *command),
        ]


@dataclass
class Instance:
    """One run of a part.

    Attributes:
        index: from 0 on.
        gpu: the one that it sees; None where there is none to give.
        files: of this round, below the experiment's folder.
        state: waiting, running, done, failed.
        pid: of its process, which leads a process group.
        restarts: how often it was started again in this round.
        reason: why it failed, in a sentence.
    """

    index: int
    gpu: str | None = None
    files: list[str] = field(default_factory=list)
    state: str = "waiting"
    pid: int | None = None
    restarts: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class Order:
    """What ``kitty instances run`` was asked for.

    Attributes:
        plan: the experiment and the folder that everything is joined in.
        results: the folder that has the experiment's one.
        jobs: number of instances.
        container: the image; None: plain processes.
        cores, memory_mb: of all instances together.
        restarts: how often a killed instance is started again in a round.
        run_code: let tasks run what the model writes.
    """

    plan: Plan
    results: Path
    jobs: int
    container: Container | None = None
    cores: int = 1
    memory_mb: int = 8192
    restarts: int = 2
    run_code: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the instances of this experiment."""
        return instances_folder(self.results, self.plan.experiment.name)

    def place(self, index: int) -> Path:
        """Working directory of an instance."""
        return self.folder / str(index)

    def root(self, index: int) -> Path:
        """Folder of the experiment in the results of an instance."""
        return self.place(index) / "results" / self.plan.experiment.name


def instances_folder(results: Path, experiment: str) -> Path:
    """Where the instances of an experiment work."""
    return results.absolute() / FOLDER / experiment


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """GPUs that this process may use, as values of CUDA_VISIBLE_DEVICES."""
    if (named := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


def give_gpus(jobs: int, gpus: list[str], wanted: bool) -> list[str | None]:
    """One GPU for each instance; none where the jobs can do without and there are too few.

    Raises:
        KittyError: the jobs want a GPU and there are fewer than instances.
    """
    if jobs <= len(gpus):
        return list(gpus[:jobs])
    if wanted:
        raise KittyError(
            f"{jobs} instances need a GPU each, but this process sees {len(gpus)}: ask for at most "
            f"{max(len(gpus), 1)} with --jobs, on a machine with GPUs."
        )
    return [None] * jobs


def run_instances(order: Order, tell: Tell = print) -> int:
    """Run an experiment in several instances, then make its tables, figures and report.

    A record that exists is not measured again, whichever earlier run left it, also where that run
    was killed before it could join its instances' results.

    Args:
        order: what to run.
        tell: receives one line per event.

    Returns:
        0, or 1 where an instance failed (its reason is told, what the others made is joined), or
        130 after an interrupt.

    Raises:
        KittyError: there are too few GPUs, another run works there, or records contradict.
    """
    if order.container is not None:
        order.container.check()
    gpus = give_gpus(order.jobs, visible_gpus(), order.plan.wants_gpu())
    check_writable(order.plan.root)
    check_writable(order.folder)
    note = {"experiment": order.plan.experiment.name}
    with only_run(order.folder / LOCK.name, note) as handle, _terminate_as_interrupt():
        _gather(order)
        team = [Instance(index, gpu) for index, gpu in enumerate(gpus)]
        try:
            while files := rounds(order.plan):
                if not _run_round(order, team, files[0], handle, tell):
                    return _report_missing(order, tell)
            status = _finish(order, tell)
        except KeyboardInterrupt:
            tell("interrupted: what is finished stays, the same command goes on from there")
            return INTERRUPTED
        if status == 0:
            for place in _places(order.folder):  # linked into the results; logs and state stay
                shutil.rmtree(place / "results", ignore_errors=True)
    return status


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Within it, a request to terminate ends the instances as the keyboard's interrupt does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _places(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def _gather(order: Order) -> list[Path]:
    """Join what the instances' folders hold, those of an earlier run with more of them included."""
    name = order.plan.experiment.name
    roots = [place / "results" / name for place in _places(order.folder)]
    return join(roots, order.plan.root)


def _run_round(
    order: Order, team: list[Instance], files: list[str], handle: int, tell: Tell
) -> bool:
    """Make files in parts, one an instance, and join them; False: an instance failed."""
    for instance in team:
        instance.files, instance.state, instance.restarts = [], "done", 0
    active = []
    for instance, part in zip(team, split(files, len(team)), strict=False):
        instance.files, instance.state = part, "waiting"
        _prepare(order, instance)
        active.append(instance)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for instance in active:
            processes[instance.index] = _start(order, instance, len(active), handle)
            tell(f"instance {instance.index}: {len(instance.files)} files{_on(instance)}")
        _write_state(order, team)
        while processes:
            for instance in active:
                process = processes.get(instance.index)
                if process is None or (status := process.poll()) is None:
                    continue
                del processes[instance.index]
                if _ended(order, instance, status, tell):
                    processes[instance.index] = _start(order, instance, len(active), handle)
                _write_state(order, team)
            time.sleep(POLL_S)
    finally:
        _end(list(processes.values()))
        for instance in active:
            instance.state = "stopped" if instance.state == "running" else instance.state
        _write_state(order, team)
        _gather(order)
    return all(instance.state == "done" for instance in active)


def _on(instance: Instance) -> str:
    return "" if instance.gpu is None else f", GPU {instance.gpu}"


def _prepare(order: Order, instance: Instance) -> None:
    """A clean folder for an instance, with the files that several records share."""
    place, root = order.place(instance.index), order.root(instance.index)
    shutil.rmtree(place / "results", ignore_errors=True)  # joined before
    for folder in ("models", "references"):
        for path in sorted((order.plan.root / folder).rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                link(path, root / path.relative_to(order.plan.root))
    listed = [str(Path("results") / order.plan.experiment.name / file) for file in instance.files]
    write_atomically(place / "files.txt", ("\n".join(listed) + "\n").encode())


def _start(order: Order, instance: Instance, active: int, handle: int) -> subprocess.Popen[bytes]:
    """Start an instance as the leader of a process group of its own."""
    place = order.place(instance.index)
    command = [
        *_run_command(order),
        *("--files", "files.txt"),
        *("--cores", str(max(1, order.cores // active))),
        *("--memory-mb", str(max(1, order.memory_mb // active))),
    ]
    environ = dict(os.environ)
    gpu = instance.gpu or ""
    environ["CUDA_VISIBLE_DEVICES"] = gpu
    environ["APPTAINERENV_CUDA_VISIBLE_DEVICES"] = gpu  # as the other is lost with --cleanenv
    with (place / "run.log").open("ab") as log:
        process = subprocess.Popen(
            _inside(order, command, place, gpu != ""),
            cwd=place,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            pass_fds=(handle,),
        )
    instance.pid, instance.state = process.pid, "running"
    return process


def _run_command(order: Order) -> list[str]:
    code = ["--run-code"] if order.run_code else []
    return ["kitty", "run", order.plan.experiment_argument(), *code]


def _inside(order: Order, command: list[str], folder: Path, gpu: bool) -> list[str]:
    """A kitty command line as it is started: by this Python, or in the image."""
    if order.container is None:
        return [sys.executable, "-m", *command]
    binds = [order.results.absolute(), Path.cwd()]
    source = order.plan.experiment.source
    if order.plan.experiment_argument() == str(source):
        binds.append(source.parent)
    return order.container.wrap(command, folder, list(dict.fromkeys(binds)), gpu)


def _die_with_parent() -> None:
    """In the child: be terminated when the watching process is gone, even if it was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _ended(order: Order, instance: Instance, status: int, tell: Tell) -> bool:
    """Note how an instance ended; True: it was killed and is to be started again."""
    if status == 0:
        instance.state = "done"
        tell(f"instance {instance.index}: done")
        return False
    assert instance.pid is not None
    _signal_group(instance.pid, signal.SIGKILL)  # what a killed leader left behind
    number = killed_by(status)
    if number is not None and instance.restarts < order.restarts:
        instance.restarts += 1
        tell(
            f"instance {instance.index}: killed by {number}, goes on "
            f"({instance.restarts} of {order.restarts} restarts)"
        )
        return True
    instance.state = "failed"
    instance.reason = _reason(order.place(instance.index) / "run.log", status, number)
    tell(f"instance {instance.index}: failed: {instance.reason}")
    return False


def killed_by(status: int) -> str | None:
    """Name of the signal behind an exit status, as a shell or a container reports it too."""
    number = -status if status < 0 else status - 128
    try:
        return None if status == RUNTIME_FAILED else signal.Signals(number).name
    except ValueError:
        return None


def _reason(log: Path, status: int, number: str | None) -> str:
    """Last error that an instance told, or how it ended."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    told = [line for line in lines if line.startswith((ERROR_MARK, "FATAL:"))]
    if told:
        return told[-1].removeprefix(ERROR_MARK)
    last = f": {lines[-1]}" if lines and number is None else ""
    return f"ended with {number or f'exit status {status}'}{last} (see {log})"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Interrupt instances, wait for them to end their jobs, kill what does not."""
    for process in processes:
        _signal_group(process.pid, signal.SIGINT)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _report_missing(order: Order, tell: Tell) -> int:
    work = order.plan.work()
    missing = sum(not (order.plan.root / job.record).exists() for job in work)
    tell(
        f"{missing} of {len(work)} records are missing; what is finished is joined in "
        f"{order.plan.root}, and the same command goes on from there"
    )
    return 1


def _finish(order: Order, tell: Tell) -> int:
    """Times, tables, figures and report by the usual pipeline, alone on the machine."""
    tell(f"all parts are joined in {order.plan.root}: making times, tables, figures, report")
    place = order.folder / "join"  # a Snakemake state of its own, as the instances have
    place.mkdir(exist_ok=True)
    command = [
        *_run_command(order),
        *("--results", str(order.results.absolute()), "--cores", str(order.cores)),
    ]
    with (place / "run.log").open("ab") as log:
        process = subprocess.Popen(
            _inside(order, command, place, gpu=bool(visible_gpus())),
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        status = process.wait()
    finally:
        _end([process])
    if status == 0:
        tell(f"report: {order.plan.report()}")
        return 0
    tell(f"no report: {_reason(place / 'run.log', status, killed_by(status))}")
    return 1


# --- state, for those who look on ----------------------------------------------------------------


def _write_state(order: Order, team: list[Instance]) -> None:
    state = {
        "experiment": order.plan.experiment_argument(),
        "pid": os.getpid(),
        "host": platform.node(),
        "image": None if order.container is None else str(order.container.image),
        "instances": [asdict(instance) for instance in team],
    }
    write_atomically(order.folder / STATE, (json.dumps(state, indent=2) + "\n").encode())


def read_states(results: Path) -> dict[str, dict[str, Any]]:
    """What the instances below a results folder do: experiment → state, with files counted.

    An instance gets ``finished``, the number of its files that are there; the state ``watched``,
    whether the process that started them is alive on this machine.

    Raises:
        KittyError: there are none.
    """
    found = {}
    for path in sorted((results / FOLDER).glob(f"*/{STATE}")):
        state = json.loads(path.read_text())
        name = path.parent.name
        for instance in state["instances"]:
            roots = [path.parent / str(instance["index"]) / "results" / name, results / name]
            instance["finished"] = sum(
                any((root / file).exists() for root in roots) for file in instance["files"]
            )
        state["watched"] = state["host"] == platform.node() and _alive(state["pid"])
        found[name] = state
    if not found:
        raise KittyError(
            f"No instances were started with results in {results}: start some with "
            "`kitty instances run --jobs N EXPERIMENT`."
        )
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def default_memory_mb() -> int:
    """Memory of all instances together where none is given."""
    return memory_to_use()
