"""Time and memory of generation: the paper's Figure 5, break-even, and their tables, from records.

Apart from the other tables and figures, because no two measurements of time agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kitty.benchmark.latency import IMPLEMENTATIONS, title_of
from kitty.records import Record, write_atomically
from kitty.report.figures import INK, MARKERS, TEXT_WIDTH, drawn
from kitty.report.files import latency_files
from kitty.report.tables import to_csv, to_latex, to_markdown

OWN, PEER = "kitty-pro", "kitty-fp16"  # whose speed is compared, and the 16-bit cache beside it
GB = 1e9
LABEL_SHARE = 0.08  # of an axis that a number of sequences takes
COLORS = (  # of the palette: the strongest for Kitty-Pro and what it is held against
    "kitty-pro",
    "kitty-fp16",
    "kitty",
    "hf-dynamic",
    "hf-static",
    "hf-quanto-int4",
    "hf-dynamic-gqa",
    "hf-static-graph",
    "hf-hqq-int4",
)

TITLES = {
    "figure5": "Memory and throughput",
    "break_even": "Break-even",
    "latency": "Memory and throughput by batch",
    "latency_best": "Memory and throughput",
}
CAPTIONS = {
    "figure5": (
        "Generation with several caches (the paper's Figure 5): peak memory and new tokens per "
        "second against the number of sequences (log scale). A cross stands at the first batch "
        "that ran out of memory; the dashed line is the memory allowed. Memory: what torch "
        "allocated on the GPU, or the process's resident size on a CPU."
    ),
    "break_even": (
        "Where Kitty-Pro pays. Left: its new tokens per second over those of each other cache at "
        "the same number of sequences. Right: the time of another cache's decode step over that of "
        "Kitty-Pro's, by tokens in the cache, at the largest batch that both hold. Above the line "
        "Kitty-Pro is faster. Between its measured batches Kitty-Pro's time is interpolated."
    ),
}
NOTES = {
    "latency_best": (
        "Largest batch that fits the memory allowed, best throughput at any measured batch, and "
        "both relative to the 16-bit cache in the same engine."
    ),
    "latency": (
        "Step: median time of a decode step, and the mean at the largest length. Peak: memory "
        "that torch allocated on the GPU, or the process's resident size on a CPU. fp16 / cache: "
        "how much smaller the cache is than dense 16-bit keys and values."
    ),
}


@dataclass(frozen=True, order=True)
class Setting:
    """What the runs of one panel have in common."""

    model: str
    prompt: int
    new: int

    @property
    def title(self) -> str:
        """Above a panel."""
        return f"{self.model}, {self.workload} tokens"

    @property
    def workload(self) -> str:
        """Prompt and new tokens."""
        return f"{self.prompt} + {self.new}"


Runs = dict[Setting, dict[str, list[Record]]]  # by implementation, records by batch


def group(records: Iterable[tuple[Path, Record]]) -> Runs:
    """Latency records by model and workload, then implementation, then batch; others left out."""
    place = {name: index for index, name in enumerate(IMPLEMENTATIONS)}
    found: Runs = {}
    kept = [record for _, record in records if record["kind"] == "latency"]
    kept.sort(
        key=lambda record: (
            place.get(_plain(record["implementation"]), len(place)),
            record["implementation"],
            record["workload"]["batch"],
        )
    )
    for record in kept:
        work = record["workload"]
        setting = Setting(record["model"]["name"], work["prompt_tokens"], work["new_tokens"])
        found.setdefault(setting, {}).setdefault(record["implementation"], []).append(record)
    return dict(sorted(found.items()))


def _plain(implementation: str) -> str:
    return implementation.partition("+")[0]


def fitting(records: Sequence[Record]) -> list[Record]:
    """The records of runs for which the memory sufficed."""
    return [record for record in records if record["outcome"] == "ok"]


def peak_bytes(record: Record) -> int | None:
    """Peak memory of a run: of the GPU, else of the process."""
    peak = record["metrics"].get("peak_allocated_bytes")
    return record.get("peak_memory_bytes") if peak is None else peak


# --- tables --------------------------------------------------------------------------------------


def latency_table(runs: Runs) -> pd.DataFrame:
    """One row per measurement, those that ran out of memory among them."""
    return pd.DataFrame(
        [
            _row(setting, record)
            for setting, by_name in runs.items()
            for records in by_name.values()
            for record in records
        ]
    )


def _row(setting: Setting, record: Record) -> dict[str, Any]:
    name, metrics = record["implementation"], record["metrics"]
    fits = record["outcome"] == "ok"
    held = sum(record["cache_bytes"].values()) if fits else None
    peak = peak_bytes(record) if fits else None
    return {
        "model": setting.model,
        "implementation": name,
        "implementation_title": title_of(name),
        "workload": setting.workload,
        "prompt_tokens": setting.prompt,
        "new_tokens": setting.new,
        "batch": record["workload"]["batch"],
        "mode": record["mode"],
        "outcome": "ok" if fits else "out of memory",
        **{
            metric: _float(metrics.get(metric))
            for metric in ("tokens_per_s", "prefill_s", "decode_s")
        },
        **{
            f"step_ms_{part}": _float(metrics.get(f"step_ms_{part}"))
            for part in ("p20", "p50", "p80", "last")
        },
        "peak_gb": _float(peak, GB),
        "reserved_gb": _float(metrics.get("peak_reserved_bytes"), GB),
        "cache_gb": _float(held, GB),
        "cache_ratio": _float(record["cache_bytes_16bit"] if held else None, held or 1),
        "memory_budget_gb": _float(record["memory_budget_bytes"], GB),
        "fallback": record.get("fallback_reason") or "",
    }


def _float(value: float | None, unit: float = 1.0) -> float:
    return float("nan") if value is None else value / unit


def best_table(runs: Runs) -> pd.DataFrame:
    """One row per model, workload and implementation: largest batch and best throughput."""
    rows = []
    for setting, by_name in runs.items():
        peer = _best(by_name.get(PEER, []))
        for name, records in by_name.items():
            best = _best(records)
            rows.append(
                {
                    "model": setting.model,
                    "implementation": name,
                    "implementation_title": title_of(name),
                    "workload": setting.workload,
                    **best,
                    "batch_ratio": best["largest_batch"] / peer["largest_batch"],
                    "speed_ratio": best["best_tokens_per_s"] / peer["best_tokens_per_s"],
                }
            )
    return pd.DataFrame(rows)


def _best(records: Sequence[Record]) -> dict[str, float]:
    """NaN where nothing fits or was measured."""
    nan = float("nan")
    fits = fitting(records)
    timed = [record for record in fits if record["metrics"]["tokens_per_s"] is not None]
    fastest = max(timed, key=lambda record: record["metrics"]["tokens_per_s"], default=None)
    return {
        "largest_batch": max((r["workload"]["batch"] for r in fits), default=nan),
        "best_batch": nan if fastest is None else fastest["workload"]["batch"],
        "best_tokens_per_s": nan if fastest is None else fastest["metrics"]["tokens_per_s"],
    }


BUILDERS = {"latency": latency_table, "latency_best": best_table}


# --- figures -------------------------------------------------------------------------------------


def draw_figure5(runs: Runs) -> Figure:
    """Peak memory and throughput against the batch, one row per model and workload.

    A workload measured at one batch alone is no curve and stands in the table, unless all are so.
    """
    runs = _some(runs, {s: any(len(fitting(x)) > 1 for x in by.values()) for s, by in runs.items()})
    figure, axes = _panels(runs)
    for (setting, by_name), (left, right) in zip(runs.items(), axes, strict=True):
        budgets = {r["memory_budget_bytes"] for records in by_name.values() for r in records}
        for name, records in by_name.items():
            fits = fitting(records)
            batches = [record["workload"]["batch"] for record in fits]
            look = _look(name)
            peaks = [_float(peak_bytes(record), GB) for record in fits]
            speeds = [_float(record["metrics"]["tokens_per_s"]) for record in fits]
            left.plot(batches, peaks, **look)
            right.plot(batches, speeds, **look)
            full = [r["workload"]["batch"] for r in records if r["outcome"] != "ok"]
            if full and fits:
                for panel, values in ((left, peaks), (right, speeds)):
                    panel.plot(min(full), values[-1], "x", color=look["color"], ms=6, mew=1.6)
        if len(budgets) == 1 and None not in budgets:
            left.axhline(budgets.pop() / GB, color=INK, lw=1, ls=(0, (4, 2)))
        left.set_title(setting.title)
        left.set_ylabel("peak memory (GB)")
        right.set_ylabel("new tokens per second")
        for panel in (left, right):
            _batch_axis(panel, by_name)
            panel.set_ylim(0, 1.06 * panel.get_ylim()[1])
    _legend(figure, axes)
    return figure


def draw_break_even(runs: Runs) -> Figure:
    """Kitty-Pro against the others by batch and by length, one row per model and workload."""
    compared = {setting: _compared(by_name) for setting, by_name in runs.items()}
    runs = _some(runs, {setting: bool(pairs) for setting, pairs in compared.items()})
    figure, axes = _panels(runs)
    for (setting, by_name), (left, right) in zip(runs.items(), axes, strict=True):
        for name, pairs in compared[setting].items():
            left.plot(*_speed_ratios(pairs), **_look(name))
            right.plot(*_step_ratios(*pairs[-1]), **_look(name))
        left.set_title(setting.title)
        left.set_ylabel("throughput, Kitty-Pro / other")
        right.set_ylabel("step time, other / Kitty-Pro")
        right.set_xlabel("tokens in the cache")
        _batch_axis(left, by_name)
        for panel in (left, right):
            panel.axhline(1, color=INK, lw=1, ls=(0, (4, 2)))
            panel.grid(axis="y")
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            sns.despine(ax=panel)
    _legend(figure, axes)
    return figure


@dataclass(frozen=True)
class Pace:
    """How fast one run was.

    Attributes:
        batch: sequences.
        seconds: of the whole run, over its new tokens; NaN where it is not known.
        lengths, times: milliseconds of a step by cached tokens.
    """

    batch: float
    seconds: float
    lengths: tuple[float, ...]
    times: tuple[float, ...]

    @classmethod
    def of(cls, record: Record) -> Pace:
        """That of a record."""
        batch = record["workload"]["batch"]
        return cls(
            batch,
            batch / _float(record["metrics"]["tokens_per_s"]),
            tuple(sample["length"] for sample in record["samples"]),
            tuple(sample["mean_ms"] for sample in record["samples"]),
        )

    def mixed(self, other: Pace, batch: float) -> Pace:
        """That of a batch between two, on a straight line: time grows about evenly with it."""
        share = (batch - self.batch) / (other.batch - self.batch) if batch != self.batch else 0.0
        times = np.interp(self.lengths, other.lengths, other.times)
        return Pace(
            batch,
            (1 - share) * self.seconds + share * other.seconds,
            self.lengths,
            tuple((1 - share) * a + share * b for a, b in zip(self.times, times, strict=True)),
        )


def _compared(by_name: dict[str, list[Record]]) -> dict[str, list[tuple[Pace, Pace]]]:
    """The own pace beside that of each other implementation, where batches allow it."""
    own = [Pace.of(record) for record in fitting(by_name.get(OWN, []))]
    found = {
        name: _side_by_side(own, fitting(records))
        for name, records in by_name.items()
        if name != OWN
    }
    return {name: pairs for name, pairs in found.items() if pairs}


def _side_by_side(own: Sequence[Pace], records: Sequence[Record]) -> list[tuple[Pace, Pace]]:
    """The own pace at the batches of other records that lie within the own ones."""
    pairs = []
    for other in map(Pace.of, records):
        below = [pace for pace in own if pace.batch <= other.batch]
        above = [pace for pace in own if pace.batch >= other.batch]
        if below and above:
            pairs.append((below[-1].mixed(above[0], other.batch), other))
    return pairs


def _speed_ratios(pairs: Sequence[tuple[Pace, Pace]]) -> tuple[list[float], list[float]]:
    """Batches, and throughput of the first of each pair over that of the second."""
    return [a.batch for a, _ in pairs], [b.seconds / a.seconds for a, b in pairs]


def _step_ratios(own: Pace, other: Pace) -> tuple[list[float], list[float]]:
    """Lengths at which the other was timed, and its step time over the own one there."""
    mine = np.interp(other.lengths, own.lengths, own.times)
    ratios = [float(t / m) for t, m in zip(other.times, mine, strict=True)]
    return list(other.lengths), ratios


DRAWERS = {"figure5": draw_figure5, "break_even": draw_break_even}


def _some(runs: Runs, wanted: dict[Setting, bool]) -> Runs:
    """The wanted settings; all of them where none is."""
    return {s: by_name for s, by_name in runs.items() if wanted[s]} or runs


def _panels(runs: Runs) -> tuple[Figure, Any]:
    figure = Figure(figsize=(TEXT_WIDTH, 0.6 + 2.6 * max(1, len(runs))))
    return figure, figure.subplots(max(1, len(runs)), 2, squeeze=False)[: len(runs)]


def _look(name: str) -> dict[str, Any]:
    """Colour, marker and label of an implementation, the same in every figure."""
    index = list(IMPLEMENTATIONS).index(_plain(name))
    return {
        "color": sns.color_palette("colorblind")[COLORS.index(_plain(name))],
        "marker": MARKERS[index % len(MARKERS)],
        "ls": "--" if "+" in name else "-",
        "ms": 4.2,
        "lw": 1.8 if _plain(name) == OWN else 1.2,
        "label": title_of(name),
    }


def _batch_axis(axes: Any, by_name: dict[str, list[Record]]) -> None:
    batches = sorted({r["workload"]["batch"] for records in by_name.values() for r in records})
    axes.set_xscale("log", base=2)
    gap = LABEL_SHARE * np.log2(batches[-1] / batches[0])
    spread: list[int] = []
    for batch in reversed(batches):  # the largest is the one that matters
        if not spread or np.log2(spread[-1] / batch) > gap:
            spread.append(batch)
    axes.set_xticks(sorted(spread))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("sequences")
    axes.grid(axis="y")
    sns.despine(ax=axes)


def _legend(figure: Figure, axes: Any) -> None:
    """One legend for all panels."""
    handles = {
        label: handle
        for row in axes
        for panel in row
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(3, len(handles) or 1),
    )


# --- files and sections --------------------------------------------------------------------------


def write_latency(
    source: Iterable[tuple[Path, Record]], out_dir: str | Path, files: Sequence[str] | None = None
) -> list[Path]:
    """Write tables and figures of an experiment's latency records.

    Args:
        source: (path, record) pairs; other kinds are left out.
        out_dir: folder for the files.
        files: some of :func:`kitty.report.files.latency_files`; None: all.

    Raises:
        KittyError: the folder cannot be written.
    """
    runs = group(source)
    texts = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
    paths = []
    for file in latency_files() if files is None else files:
        name, suffix = file.rsplit(".", 1)
        if name in BUILDERS:
            content = texts[suffix](BUILDERS[name](runs)).encode()
        else:
            content = drawn(_drawn(name, runs), suffix)
        path = Path(out_dir) / file
        write_atomically(path, content)
        paths.append(path)
    return paths


def sections(source: Iterable[tuple[Path, Record]]) -> list[dict[str, Any]]:
    """What the HTML report shows: name, title, PNG bytes or None, caption, table or None, note."""
    runs = group(source)
    if not runs:
        return []
    return [
        {
            "id": name,
            "title": TITLES[name],
            "png": None if figure is None else drawn(_drawn(figure, runs), "png"),
            "caption": CAPTIONS.get(figure or ""),
            "frame": BUILDERS[name](runs) if name in BUILDERS else None,
            "note": NOTES.get(name),
        }
        for name, figure in (
            ("latency_best", "figure5"),
            ("break_even", "break_even"),
            ("latency", None),
        )
    ]


def _drawn(name: str, runs: Runs) -> Any:
    return lambda: DRAWERS[name](runs)
