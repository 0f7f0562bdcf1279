"""``kitty bench e2e``: runs measurements one after the other, each in a fresh process, and resumes.

The processes are forked from a server that has imported torch and transformers but never touched a
GPU, which saves the ten seconds that a start from nothing takes; each is as fresh as a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from kitty.benchmark.latency import ALLOCATOR, LatencyJob
from kitty.errors import KittyError
from kitty.records import Record, read_record, write_record

OK = "ok"
PRELOAD = "kitty.benchmark.preload"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How one measurement ended.

    Attributes:
        job: what was to be measured.
        record: what was measured, here or before; None where it failed.
        fault: why it failed; None where there is a record.
        mistake: whether the fault is one of the request, told in one sentence.
    """

    job: LatencyJob
    record: Record | None
    fault: str | None = None
    mistake: bool = False

    @property
    def fits(self) -> bool:
        """Whether the memory sufficed."""
        return self.record is not None and self.record["outcome"] == OK

    @property
    def unexpected(self) -> str | None:
        """A fall-back that should not have been."""
        record = self.record or {}
        return record.get("fallback_reason") if record.get("unexpected_fallback") else None


def run_job(job: LatencyJob, root: Path) -> Outcome:
    """One measurement, or its record where there is one already.

    Raises:
        KittyError: the record that is there is damaged, or was measured with another setting.
    """
    path = job.path(root)
    if path.exists():
        record = read_record(path)
        other = job.difference(record)
        if other is not None:
            raise KittyError(
                f"The record {path} was measured with another {other}: delete the file, or name "
                "another folder with --out."
            )
        return Outcome(job, record)
    return _in_a_process(job, path)


def _in_a_process(job: LatencyJob, path: Path, start: str = "forkserver") -> Outcome:
    # the parts of torch that are loaded must not have looked for a GPU before the fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if job.device.startswith("cuda") and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"  # else memory is lost in pieces
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload([PRELOAD])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, path, send), name=job.workload.name)
    with receive, _ended_by_sigterm():
        process.start()
        send.close()
        kind, text = "crash", ""
        try:
            with contextlib.suppress(EOFError):
                kind, text = receive.recv()
            process.join()
        except BaseException:
            process.terminate()
            process.join()
            raise
    if kind == "touched":  # the server has used the GPU, which a fork cannot share
        return _in_a_process(job, path, "spawn")
    if kind == "done":
        return Outcome(job, read_record(path))
    if kind == "mistake":
        return Outcome(job, None, text, mistake=True)
    return Outcome(job, None, text or _end(process.exitcode))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends this process by an exception, so that no measurement outlives it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(code: int | None) -> str:
    """Why a process that said nothing is gone."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when its own memory is full" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with status {code}"


def _work(job: LatencyJob, path: Path, send: Connection) -> None:
    """What the process does: measure, write, and say how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        import torch

        from kitty.benchmark.measure import measure

        if job.device.startswith("cuda") and torch.cuda._is_in_bad_fork():
            send.send(("touched", ""))
            return
        write_record(path, measure(job))
        send.send(("done", ""))
    except KittyError as error:
        send.send(("mistake", " ".join(str(error).split())))
    except Exception as error:
        traceback.print_exc()
        send.send(("crash", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
    finally:
        send.close()
        sys.stderr.flush()


# --- several -------------------------------------------------------------------------------------


def run_all(jobs: Iterable[LatencyJob], root: Path, say: Say) -> list[Outcome]:
    """Measurements in order; a larger batch of what ran out of memory is left out.

    A configuration that fails is told, and the next one goes on.

    Raises:
        KittyError: a record that is there is damaged or of another setting; or the very first
            measurement finds a mistake in the request.
    """
    outcomes: list[Outcome] = []
    full: dict[LatencyJob, int] = {}
    for job in jobs:
        kind = replace(job, workload=replace(job.workload, batch=1))
        if job.workload.batch > full.get(kind, job.workload.batch):
            say(f"{label(job)}: left out, as {full[kind]} sequences ran out of memory")
            continue
        outcome = run_job(job, root)
        if outcome.mistake and not outcomes:
            raise KittyError(outcome.fault)
        outcomes.append(outcome)
        if outcome.record is not None and not outcome.fits:
            full[kind] = job.workload.batch
        say(line(outcome))
    return outcomes


def largest_batch(
    job: LatencyJob, batches: Sequence[int], root: Path, say: Say
) -> tuple[int | None, list[Outcome]]:
    """The largest of some batch sizes that fits, by bisection; each try is a measurement.

    Args:
        job: what is measured; its batch is replaced.
        batches: sizes to choose from.
        root: folder of the results.
        say: told of each try.

    Returns:
        The size, None where even the smallest does not fit; and the tries.

    Raises:
        KittyError: a try failed for another reason than memory.
    """
    sizes = sorted(set(batches))
    low, high = -1, len(sizes)  # the largest known to fit, the smallest known not to
    outcomes = []
    while high - low > 1:
        middle = (low + high) // 2
        tried = replace(job, workload=replace(job.workload, batch=sizes[middle]))
        outcome = run_job(tried, root)
        say(line(outcome))
        if outcome.record is None:
            raise KittyError(outcome.fault if outcome.mistake else line(outcome))
        outcomes.append(outcome)
        low, high = (middle, high) if outcome.fits else (low, middle)
    return (None if low < 0 else sizes[low]), outcomes


def label(job: LatencyJob) -> str:
    """A job in a line of output."""
    work = job.workload
    return f"{job.implementation}, {work.batch} x ({work.prompt_tokens} + {work.new_tokens}) tokens"


def line(outcome: Outcome) -> str:
    """One measurement in one line."""
    name, record = label(outcome.job), outcome.record
    if record is None:
        return f"{name}: failed: {outcome.fault}"
    if not outcome.fits:
        return f"{name}: out of memory ({record['stage']})"
    metrics = record["metrics"]
    parts = [f"prefill {metrics['prefill_s']:.3g} s"]
    parts.append(f"step {metrics['step_ms_p50']:.3g} ms, at the end {metrics['step_ms_last']:.3g}")
    if metrics["tokens_per_s"] is not None:
        parts.append(f"{metrics['tokens_per_s']:.4g} tokens/s")
    peak = metrics["peak_reserved_bytes"]
    if peak is not None:
        parts.append(f"{peak / 1e9:.2f} GB reserved")
    held = sum(record["cache_bytes"].values())
    parts.append(f"cache {held / 1e9:.3g} GB, fp16/{record['cache_bytes_16bit'] / held:.2f}")
    if record["fallback_reason"] and record["environment"]["gpu"]:
        parts.append(f"fell back: {record['fallback_reason']}")
    return f"{name}: {', '.join(parts)}"


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0: all measured; 1: one failed, or fell back where it should not have."""
    return int(any(o.record is None or o.unexpected for o in outcomes))


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The records, as plain data."""
    return [outcome.record for outcome in outcomes if outcome.record is not None]
