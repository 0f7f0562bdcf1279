"""One end-to-end measurement in this process: load, prefill, decode, and a record of it.

Running out of memory is a result. It is caught here, so that a record says so and where.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kitty.benchmark.implementations import (
    GQA_ATTENTION,
    Runner,
    register_gqa,
    runner_class,
)
from kitty.benchmark.latency import (
    ALLOCATOR,
    WARM_STEPS,
    LatencyJob,
    Workload,
    mean_step,
    percentile,
    sample_starts,
    step_times,
)
from kitty.benchmark.shapes import config_of, find_shape, random_model, weight_bytes
from kitty.benchmark.timing import count_launches
from kitty.environment import environment, peak_memory_bytes, revision
from kitty.errors import KittyError
from kitty.integrations.transformers.enable import kv_shape
from kitty.models import check_device, describe_model, find_model, load_model, torch_dtype
from kitty.ops import dispatch
from kitty.records import SCHEMA_VERSION, Record

SEED = 0
WARM_PROMPT, WARM_BATCH = 200, 2  # of the run that compiles and loads what the timed one needs
COUNTED_STEPS = 2  # after all that is timed, under the profiler
ROOM_MULTIPLE = 16  # a static cache of another length costs sdpa a padded copy of the mask
SEGMENTS = 8  # into which the steps of a full run are grouped in a record
DENSE_BYTES = 2  # of an element of a 16-bit cache
# What else than torch's own exception says that memory ran out.
FULL_MEMORY = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass
class Steps:
    """Timed steps around one length.

    Attributes:
        length: mean number of cached tokens before them.
        plain, page: milliseconds of ordinary steps, and of those that also quantize.
    """

    length: float
    plain: list[float]
    page: list[float]

    @property
    def mean(self) -> float:
        """Milliseconds of a step, the rare ones at their true frequency."""
        return mean_step(self.plain, self.page)

    def to_record(self) -> dict[str, Any]:
        """As in records."""
        return {
            "length": self.length,
            "mean_ms": round(self.mean, 4),
            "step_ms": [round(x, 4) for x in self.plain],
            "page_step_ms": [round(x, 4) for x in self.page],
        }


@dataclass
class Progress:
    """What is known so far, whatever ends the measurement."""

    stage: str = "weights"
    peaks: dict[str, int] = field(default_factory=dict)
    launches: int | None = None
    first_step_ms: float | None = None


def measure(job: LatencyJob) -> Record:
    """Measure one configuration.

    Returns:
        Its record; ``outcome`` is ``out_of_memory`` where the memory did not suffice.

    Raises:
        KittyError: the request cannot be served: no such device, a budget below the weights or
            above the device, an unknown model.
    """
    started = time.perf_counter()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    check_device(job.device)
    if job.device.startswith("cuda"):
        torch.cuda.set_device(_index(job))  # events and graphs belong to the current device
    enforced = limit_memory(job)
    progress = Progress()
    config = _config(job)
    check_budget(job, config)
    result: dict[str, Any] = {"outcome": "ok"}
    try:
        result |= _run(job, progress)
    except Exception as error:
        if not ran_out(error):
            raise
        result = _nothing(progress, error)
    return _record(job, config, result, enforced, started)


def _nothing(progress: Progress, error: BaseException) -> dict[str, Any]:
    """The result of a run for which the memory did not suffice."""
    return {
        "outcome": "out_of_memory",
        "stage": progress.stage,
        "metrics": {},
        "cache_bytes": {},
        "counters": {},
        "samples": [],
        "fallback_reason": None,
        "message": " ".join(str(error).split())[:300],
    }


def _record(
    job: LatencyJob, config: Any, result: dict[str, Any], enforced: bool, started: float
) -> Record:
    heads, dim = kv_shape(config)
    per_token = 2 * config.num_hidden_layers * heads * dim * DENSE_BYTES
    method = job.method()
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "latency",
        "experiment": job.experiment,
        "command": job.command,
        "model": describe(job),
        **({} if method is None else {"method": method}),
        "implementation": job.implementation,
        "workload": job.workload.to_record(),
        "mode": job.mode,
        **result,
        "cache_bytes_16bit": per_token * job.workload.total * job.workload.batch,
        "memory_budget_bytes": job.memory_budget_bytes,
        "budget_enforced": enforced,
        "allocator": {name: os.environ[name] for name in ALLOCATOR if name in os.environ},
        "settings": job.settings(),
        "environment": environment(),
        "revision": revision(),
        "wall_time_s": round(time.perf_counter() - started, 3),
        "peak_memory_bytes": peak_memory_bytes(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def ran_out(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, means that memory did not suffice."""
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in FULL_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


# --- the model and its memory --------------------------------------------------------------------


def limit_memory(job: LatencyJob) -> bool:
    """Cap what torch may reserve on the device.

    Returns:
        Whether there is a cap: a CPU has none, there the budget is only recorded.

    Raises:
        KittyError: the device has less.
    """
    budget = job.memory_budget_bytes
    if budget is None or not job.device.startswith("cuda"):
        return False
    device = _index(job)
    total = torch.cuda.get_device_properties(device).total_memory
    if budget > total:
        raise KittyError(
            f"The memory budget is {budget} bytes, but {job.device} has {total}: give a smaller "
            "one."
        )
    torch.cuda.set_per_process_memory_fraction(budget / total, device)
    return True


def _index(job: LatencyJob) -> int:
    """Number of the job's GPU; "cuda" alone means the first."""
    return torch.device(job.device).index or 0


def check_budget(job: LatencyJob, config: Any) -> None:
    """Refuse a budget that does not even hold the weights.

    Raises:
        KittyError: it does not.
    """
    if job.memory_budget_bytes is None:
        return
    needed = weight_bytes(config, _dtype(job, config))
    if job.memory_budget_bytes <= needed:
        raise KittyError(
            f"The memory budget is {job.memory_budget_bytes} bytes, but the weights of "
            f"{job.label!r} alone take {needed}: give a larger budget or a smaller model."
        )


def _config(job: LatencyJob) -> Any:
    """The text config of the model that a job names."""
    if job.dummy_weights:
        return config_of(find_shape(job.model))
    from transformers import AutoConfig

    from kitty.models import folder_of

    spec = find_model(job.model)
    folder = folder_of(spec)
    place = str(folder) if folder is not None else str(spec.hub)
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=folder is not None)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise KittyError(f"The config of model {job.label!r} cannot be read: {reason}.") from error
    return config.get_text_config()


def _dtype(job: LatencyJob, config: Any) -> torch.dtype:
    if job.dtype is not None:
        return torch_dtype(job.dtype)
    if job.dummy_weights:
        return torch.float16 if job.device.startswith("cuda") else torch.float32
    named = find_model(job.model).dtype
    found = torch_dtype(named) if named is not None else getattr(config, "torch_dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def build_model(job: LatencyJob) -> Any:
    """The model on its device, with the attention function that the implementation needs."""
    attention = runner_class(job).attention
    if attention == GQA_ATTENTION:
        register_gqa()
    if attention == "kitty":
        import kitty.integrations.transformers  # noqa: F401  (registers the attention function)
    config = _config(job)
    if job.dummy_weights:
        shape = find_shape(job.model)
        return random_model(shape, _dtype(job, config), job.device, attention, SEED)
    return load_model(job.model, job.dtype, job.device, attention)[0]


def describe(job: LatencyJob) -> dict[str, Any]:
    """The model's part of the record."""
    if not job.dummy_weights:
        return describe_model(find_model(job.model), job.dtype)
    shape = find_shape(job.model)
    dtype = str(_dtype(job, None)).removeprefix("torch.")
    return {
        "name": job.label,
        "title": job.label,
        "source": shape.source,
        "sha256": None,
        "dtype": dtype,
        "weights": "random",
    }


# --- the run -------------------------------------------------------------------------------------


def _run(job: LatencyJob, progress: Progress) -> dict[str, Any]:
    """Everything that is timed; leaves in ``progress`` how far it came."""
    dispatch.calls.clear()
    clock = Clock(torch.device(job.device))
    with torch.no_grad():
        model = build_model(job)
        progress.stage = "cache"
        room = -(-(job.workload.total + COUNTED_STEPS) // ROOM_MULTIPLE) * ROOM_MULTIPLE
        _warm_up(job, model, room)
        clock.reset_peaks()
        runner = runner_class(job)(model, job, job.workload.batch, room)
        progress.stage = "prefill"
        ids = prompts(model.config, job.workload, model.device)
        tokens, prefill_s = clock.seconds(lambda: greedy(runner.prefill(ids)))
        clock.note_peaks(progress.peaks)
        progress.stage = "decode"
        decode = _full if job.mode == "full" else _sampled
        samples, times, cache_bytes = decode(job, runner, tokens, clock, progress)
    metrics = summarize(job.workload, prefill_s, times, samples) | {
        f"peak_{name}_bytes": progress.peaks.get(name) for name in ("allocated", "reserved")
    }
    if progress.first_step_ms is not None:
        metrics["first_step_ms"] = round(progress.first_step_ms, 4)
    return {
        "metrics": metrics,
        "cache_bytes": cache_bytes,
        "counters": {
            "kernel_launches_per_step": progress.launches,
            "op_kernels": dispatch.calls["kernel"],
            "op_references": dispatch.calls["reference"],
            "dense_fallbacks": dispatch.calls["reference"] if clock.cuda else 0,
            **runner.counters(),
        },
        "samples": [sample.to_record() for sample in samples],
        "fallback_reason": runner.unexpected or runner.fallback_reason,
        "unexpected_fallback": runner.unexpected is not None,
    }


def _warm_up(job: LatencyJob, model: Any, room: int) -> None:
    """A short run of the same kind, so that compiling and loading kernels is not timed.

    In a cache as long as the timed one: Triton compiles anew for other lengths and strides.
    """
    batch = min(WARM_BATCH, job.workload.batch)
    work = Workload(min(WARM_PROMPT, job.workload.prompt_tokens), 4, batch)
    plain = dataclasses.replace(job, implementation=job.entry.name)  # compiled for no other shape
    runner = runner_class(job)(model, plain, batch, room)
    tokens = greedy(runner.prefill(prompts(model.config, work, model.device)))
    for _ in range(2):
        tokens = greedy(runner.step(tokens))


def prompts(config: Any, workload: Workload, device: torch.device) -> Tensor:
    """Random token ids int64 ``[B, T]``, the same for every implementation."""
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = config.get_text_config().vocab_size
    shape = (workload.batch, workload.prompt_tokens)
    return torch.randint(vocabulary, shape, generator=generator).to(device)


def greedy(logits: Tensor) -> Tensor:
    """Most likely tokens int64 ``[B, 1]`` of logits ``[B, V]``."""
    return logits.argmax(dim=-1, keepdim=True)


def _full(
    job: LatencyJob, runner: Runner, tokens: Tensor, clock: Clock, progress: Progress
) -> tuple[list[Steps], list[float], dict[str, int]]:
    """Generate every token."""
    first, count = job.workload.prompt_tokens, job.workload.new_tokens - 1
    times, _ = clock.steps(runner, tokens, count)
    clock.note_peaks(progress.peaks)
    if count > 1:  # the first captures or compiles: told apart, and counted as an ordinary one
        progress.first_step_ms = times[0]
        times[0] = times[1]
    cache_bytes = runner.cache_bytes()
    samples = [_grouped(runner, first + begin, times[begin:end]) for begin, end in _segments(count)]
    _count_launches(runner, tokens, clock, progress)
    return samples, times, cache_bytes


def _segments(count: int) -> Iterator[tuple[int, int]]:
    """At most SEGMENTS runs of indices, as equal as may be."""
    parts = min(SEGMENTS, count)
    for part in range(parts):
        yield part * count // parts, (part + 1) * count // parts


def _grouped(runner: Runner, length: int, times: list[float]) -> Steps:
    """Times of consecutive steps, the first at ``length`` cached tokens."""
    kinds = [runner.writes_pages(length + i) for i in range(len(times))]
    return Steps(
        length + (len(times) - 1) / 2,
        [t for t, page in zip(times, kinds, strict=True) if not page],
        [t for t, page in zip(times, kinds, strict=True) if page],
    )


def _sampled(
    job: LatencyJob, runner: Runner, tokens: Tensor, clock: Clock, progress: Progress
) -> tuple[list[Steps], list[float], dict[str, int]]:
    """Time steps at some lengths; where that can be, the largest first, which needs most memory."""
    starts = sample_starts(job.workload, job.points, job.steps, runner.writes_pages)
    samples: list[Steps] = []
    cache_bytes: dict[str, int] = {}
    for start in reversed(starts) if runner.shrinks else starts:
        runner.fill(start - WARM_STEPS)
        clock.reset_peaks()
        # in one go: behind a synchronization the device waits for the host, as in no real run
        times, tokens = clock.steps(runner, tokens, WARM_STEPS + job.steps)
        clock.note_peaks(progress.peaks)
        samples.append(_grouped(runner, start, times[WARM_STEPS:]))
        if start == starts[-1]:
            cache_bytes = runner.cache_bytes()
    _count_launches(runner, tokens, clock, progress)
    samples.sort(key=lambda sample: sample.length)
    curve = [(sample.length, sample.mean) for sample in samples]
    times = step_times(job.workload, curve) if len(curve) > 1 else []
    return samples, times, cache_bytes


def _count_launches(runner: Runner, tokens: Tensor, clock: Clock, progress: Progress) -> None:
    """Kernels of a step, after everything else: the profiler slows what comes after it."""
    if clock.cuda:
        with contextlib.suppress(RuntimeError):  # a machine may not let itself be profiled
            progress.launches = count_launches(lambda: runner.step(tokens))


def summarize(
    workload: Workload, prefill_s: float, times: list[float], samples: list[Steps]
) -> dict[str, Any]:
    """Metrics of a run.

    Args:
        workload: of the run.
        prefill_s: seconds to the first new token.
        times: milliseconds of every further step; empty where the run does not give them.
        samples: timed steps by length.
    """
    known = times or [*samples[-1].plain, *samples[-1].page]
    decode_s = sum(times) / 1e3 if times else None
    speed = None
    if decode_s is not None:
        speed = round(workload.batch * workload.new_tokens / (prefill_s + decode_s), 4)
    return {
        "prefill_s": round(prefill_s, 6),
        "decode_s": None if decode_s is None else round(decode_s, 6),
        "tokens_per_s": speed,
        **{f"step_ms_p{p}": round(percentile(known, p), 4) for p in (20, 50, 80)},
        "step_ms_last": round(samples[-1].mean, 4),
    }


class Clock:
    """Times of calls on a device, and the peaks of its memory.

    On a GPU every step is bounded by events, so nothing waits for the host between steps; the sum
    of the steps is the time that passed on the device, gaps between launches included.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """Result and seconds of one call, to the end of its work."""
        self.synchronize()
        started = time.perf_counter()
        result = call()
        self.synchronize()
        return result, time.perf_counter() - started

    def steps(self, runner: Runner, tokens: Tensor, count: int) -> tuple[list[float], Tensor]:
        """Milliseconds of ``count`` greedy steps, and the token after the last."""
        self.synchronize()
        marks = [self._mark()]
        for _ in range(count):
            tokens = greedy(runner.step(tokens))
            marks.append(self._mark())
        self.synchronize()
        if self.cuda:
            times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        else:
            times = [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
        return times, tokens

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reset_peaks(self) -> None:
        """Forget what the allocator kept, so that only what follows counts."""
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def note_peaks(self, peaks: dict[str, int]) -> None:
        """Raise ``peaks`` to those since the last reset."""
        if self.cuda:
            found = {
                "allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device),
            }
            peaks.update({name: max(peaks.get(name, 0), value) for name, value in found.items()})
