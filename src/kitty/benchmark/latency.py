"""What one end-to-end measurement is: implementation, workload, settings, and the arithmetic.

Nothing here needs torch, so the command line and the workflow can check a request at once.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitty.errors import KittyError
from kitty.methods import get_method

COMPILED = "+compile"
MODES = ("full", "sampled")
PERIOD = 128  # steps after which a cache does its rare work again: one page, or HF's residual
POINTS = 5  # lengths at which a sampled run times its steps
STEPS = 16  # steps timed there, one of which writes pages
WARM_STEPS = 3  # untimed ones before them: the first captures the graph
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # settings of torch's allocator
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Implementation:
    """One way to generate.

    Attributes:
        name: on the command line and in records.
        title: in figures and tables.
        engine: ``kitty`` (Kitty's decode engine) or ``hf`` (caches of transformers).
        method: of the Kitty cache; ``fp16`` is the 16-bit cache of the same engine.
        package: what it needs beyond Kitty's own dependencies: module, distribution.
    """

    name: str
    title: str
    engine: str
    method: str | None = None
    package: tuple[str, str] | None = None


IMPLEMENTATIONS = {
    entry.name: entry
    for entry in (
        Implementation("hf-dynamic", "HF dynamic FP16", "hf"),
        Implementation("hf-dynamic-gqa", "HF dynamic FP16, KV heads not repeated", "hf"),
        Implementation("hf-static", "HF static FP16", "hf"),
        Implementation("hf-static-graph", "HF static FP16, CUDA graph", "hf"),
        Implementation(
            "hf-quanto-int4", "HF INT4 (quanto)", "hf", package=("optimum.quanto", "optimum-quanto")
        ),
        Implementation("hf-hqq-int4", "HF INT4 (HQQ)", "hf", package=("hqq", "hqq")),
        Implementation("kitty-fp16", "Kitty's engine, 16 bit", "kitty", method="fp16"),
        Implementation("kitty", "Kitty", "kitty", method="kitty"),
        Implementation("kitty-pro", "Kitty-Pro", "kitty", method="kitty-pro"),
    )
}


@dataclass(frozen=True, order=True)
class Workload:
    """Prompts of equal length, to each of which tokens are added; greedy, to the last one.

    Attributes:
        prompt_tokens: tokens of each prompt.
        new_tokens: tokens added to each: the first comes from the prefill, the others from a
            decode step each.
        batch: sequences.
    """

    prompt_tokens: int
    new_tokens: int
    batch: int

    def __post_init__(self) -> None:
        for field, least in (("prompt_tokens", 1), ("new_tokens", 2), ("batch", 1)):
            value = getattr(self, field)
            if value < least:
                raise KittyError(
                    f"{field} of the workload is {value}, but must be at least {least}."
                )

    @property
    def total(self) -> int:
        """Tokens of a finished sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def name(self) -> str:
        """As in file names."""
        return f"p{self.prompt_tokens}-n{self.new_tokens}-b{self.batch}"

    def to_record(self) -> dict[str, int]:
        """As in records."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class LatencyJob:
    """One measurement: one process, one record.

    Attributes:
        model: a name for :func:`kitty.models.find_model`, or with ``dummy_weights`` one for
            :func:`kitty.benchmark.shapes.find_shape`.
        label: the model's name in records and paths.
        implementation: a key of IMPLEMENTATIONS, with ``+compile`` behind it where the decode
            step goes through torch.compile.
        workload: what is generated.
        mode: ``full``: every token is generated; ``sampled``: the step is timed at ``points``
            lengths and its time integrated.
        points, steps: of a sampled run.
        memory_budget_bytes: what torch may reserve on the device; None: all of it.
        sub_batch: sequences that Kitty's engine prefills at a time; None: all.
        graph: whether steps are CUDA graphs; None: where possible.
        dummy_weights: random weights of a shape instead of a model's own.
        dtype: of the weights; None: the model's own, fp16 for random ones.
        device: cpu, cuda or cuda:N.
        threads: of the CPU; None: torch's choice.
        experiment, command: for the record.
    """

    model: str
    label: str
    implementation: str
    workload: Workload
    mode: str = "full"
    points: int = POINTS
    steps: int = STEPS
    memory_budget_bytes: int | None = None
    sub_batch: int | None = None
    graph: bool | None = None
    dummy_weights: bool = False
    dtype: str | None = None
    device: str = "cpu"
    threads: int | None = None
    experiment: str = "none"
    command: str = ""

    def __post_init__(self) -> None:
        entry = find_implementation(self.implementation)
        if self.compiled and entry.package is not None:
            raise KittyError(
                f"Implementation {entry.name!r} cannot be compiled, as its cache is no plain "
                "tensor: leave out --compile, or choose another implementation."
            )
        if self.mode not in MODES:
            raise KittyError(f"Mode {self.mode!r} is not known: use {' or '.join(MODES)}.")
        if not 1 <= self.steps <= PERIOD // 2:
            raise KittyError(
                f"{self.steps} steps at each length were asked for: use 1 to {PERIOD // 2}."
            )
        least = WARM_STEPS + self.steps
        if self.mode == "sampled" and (self.points < 1 or self.workload.new_tokens - 1 < least):
            raise KittyError(
                f"A sampled run at {self.points} lengths needs at least one length and "
                f"{least + 1} new tokens, not {self.workload.new_tokens}: use the full mode."
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise KittyError(
                f"Device {self.device!r} is none that one run can be measured on: use cpu, cuda, "
                "or cuda:1 …"
            )
        if self.sub_batch is not None and self.sub_batch < 1:
            raise KittyError(f"sub_batch is {self.sub_batch}, but must be at least 1.")

    @property
    def entry(self) -> Implementation:
        """The implementation's description."""
        return find_implementation(self.implementation)

    @property
    def compiled(self) -> bool:
        """Whether the decode step goes through torch.compile."""
        return self.implementation.endswith(COMPILED)

    @property
    def record(self) -> str:
        """Path of the record below the folder of results."""
        return f"records/latency/{self.label}/{self.implementation}/{self.workload.name}.json"

    def settings(self) -> dict[str, Any]:
        """What decides the result beyond implementation, workload, mode and budget."""
        engine = self.entry.engine == "kitty"
        sampled = self.mode == "sampled"
        return {
            "compile": self.compiled,
            "graph": self.graph,
            "sub_batch": self.sub_batch if engine else None,
            "points": self.points if sampled else None,
            "steps": self.steps if sampled else None,
            "device": self.device.partition(":")[0],
            "dtype": self.dtype,
            "dummy_weights": self.dummy_weights,
        }

    def difference(self, record: dict[str, Any]) -> str | None:
        """What a record of this place was measured with differently; None: nothing."""
        settings = self.settings()
        pairs = {
            "implementation": (record.get("implementation"), self.implementation),
            "workload": (record.get("workload"), self.workload.to_record()),
            "mode": (record.get("mode"), self.mode),
            "memory budget": (record.get("memory_budget_bytes"), self.memory_budget_bytes),
            "method": ((record.get("method") or {}), self.method() or {}),
            **{
                name: (record.get("settings", {}).get(name), value)
                for name, value in settings.items()
            },
        }
        return next((name for name, (was, wanted) in pairs.items() if was != wanted), None)

    def method(self) -> dict[str, Any] | None:
        """The method of the Kitty cache as in records."""
        name = self.entry.method
        return None if name is None else get_method(name).to_dict()

    def path(self, root: str | Path) -> Path:
        """The record below a folder of results."""
        return Path(root) / self.record


def find_implementation(name: str) -> Implementation:
    """An implementation by its name, with or without ``+compile``.

    Raises:
        KittyError: there is none of this name.
    """
    found = IMPLEMENTATIONS.get(name.removesuffix(COMPILED))
    if found is None:
        raise KittyError(
            f"Implementation {name!r} is not known: use one of {', '.join(IMPLEMENTATIONS)}, with "
            f"{COMPILED} behind it to compile its decode step."
        )
    return found


def title_of(name: str) -> str:
    """An implementation's title, compiled or not."""
    return find_implementation(name).title + (", compiled" if name.endswith(COMPILED) else "")


def parse_bytes(text: str | int) -> int:
    """A number of bytes: ``80GB`` is 80·10^9, ``80GiB`` 80·2^30.

    Raises:
        KittyError: it is no positive size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    unit = None if match is None else UNITS.get(match[2].upper())
    size = 0 if match is None or unit is None else round(float(match[1]) * unit)
    if size < 1:
        raise KittyError(
            f"Memory budget {text!r} is no size: give a number above 0 with a unit, such as 80GB "
            "(10^9 bytes each) or 74GiB (2^30)."
        )
    return size


def parse_counts(text: str) -> list[int]:
    """Batch sizes as ``8,16,32``, sorted, each once.

    Raises:
        KittyError: one is no positive whole number.
    """
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise KittyError(
                f"Batch {part.strip()!r} is no positive whole number: give sizes such as 8,16,32."
            )
        counts.append(int(part))
    return sorted(set(counts))


# --- arithmetic ----------------------------------------------------------------------------------


def sample_starts(
    workload: Workload, points: int, steps: int, writes_pages: Callable[[int], bool]
) -> list[int]:
    """Cached tokens before the first timed step of each sampled window, ascending.

    The windows are spread evenly from the prompt to the last step. Each is shifted, by less than a
    period, so that its middle step is one that writes pages, where there is such a step left:
    in a run of a few steps the other windows stay where they are, or where none is yet.

    Args:
        workload: of the run; steps start at prompt_tokens … total - 2 cached tokens.
        points: number of windows; one alone stands at the end.
        steps: of each window.
        writes_pages: whether the step at that many cached tokens does the cache's rare work.
    """
    first = workload.prompt_tokens + WARM_STEPS
    last = workload.total - 1 - steps
    span = (
        [last]
        if points == 1
        else [first + round(i * (last - first) / (points - 1)) for i in range(points)]
    )
    shifts = sorted(range(-PERIOD + 1, PERIOD), key=lambda shift: (abs(shift), shift))
    starts: set[int] = set()
    for start in span:
        near = (start + shift for shift in shifts if first <= start + shift <= last)
        free = (at for at in near if at not in starts and writes_pages(at + steps // 2))
        starts.add(next(free, next((at for at in (start, *span) if at not in starts), start)))
    return sorted(starts)


def mean_step(plain: Sequence[float], page: Sequence[float]) -> float:
    """Mean time of a step when one in PERIOD is of the second kind; either list may be empty."""
    if not plain or not page:
        return statistics.fmean([*plain, *page])
    return ((PERIOD - 1) * statistics.fmean(plain) + statistics.fmean(page)) / PERIOD


def step_times(workload: Workload, samples: Sequence[tuple[float, float]]) -> list[float]:
    """Time of every decode step of a run: sampled times joined by straight lines.

    Args:
        workload: of the run; its steps start at prompt_tokens … total - 2 cached tokens.
        samples: (cached tokens, time of a step) by length; beyond the first and the last the time
            stays as it is there.
    """
    import numpy as np

    lengths = np.arange(workload.prompt_tokens, workload.total - 1)
    at, times = (list(column) for column in zip(*sorted(samples), strict=True))
    return [float(value) for value in np.interp(lengths, at, times)]


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, interpolated between neighbours."""
    import numpy as np

    return float(np.percentile(values, percent))
