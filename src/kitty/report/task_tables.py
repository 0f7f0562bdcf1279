"""Every metric of the downstream-task records, and its paired difference from the 16-bit cache.

The main metrics alone, and the paper's tables, are in :mod:`kitty.report.paper_tables`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from kitty.evaluation.bootstrap import Pages, bootstrap, paired_difference
from kitty.methods import load_methods
from kitty.records import Record, write_atomically
from kitty.report.tables import booktabs, pipe_table, to_csv

NAME = "task_metrics"
FORMATS = ("csv", "md", "tex")
BASELINE = "fp16"
NOTE = (
    "Mean over repeats; ±: largest deviation of a repeat. Brackets: 95% interval of a bootstrap "
    "over the problems of all repeats. Against FP16: paired difference on the same problems."
)


def task_table_files() -> list[str]:
    """Names of the files, known before anything is measured."""
    return [f"{NAME}.{suffix}" for suffix in FORMATS]


def write_task_tables(records: Iterable[tuple[Path, Record]], out_dir: str | Path) -> list[Path]:
    """Write the files of :func:`task_table_files`.

    Raises:
        KittyError: the folder cannot be written.
    """
    frame = task_table(records)
    shown = readable_tasks(frame)
    texts = {"csv": to_csv(frame), "md": f"{NOTE}\n\n{pipe_table(shown)}", "tex": booktabs(shown)}
    paths = []
    for suffix in FORMATS:
        paths.append(Path(out_dir) / f"{NAME}.{suffix}")
        write_atomically(paths[-1], texts[suffix].encode())
    return paths


def task_table(records: Iterable[tuple[Path, Record]]) -> pd.DataFrame:
    """A row per model, task, method and metric, the task's main metric first."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for _, record in records:
        if record["kind"] == "task":
            key = record["model"]["name"], record["task"]["name"], record["method"]["name"]
            groups.setdefault(key, []).append(record)
    place = {name: index for index, name in enumerate(load_methods())}
    rows = []
    for model, task, method in sorted(
        groups, key=lambda key: (key[0], key[1], place.get(key[2], len(place)), key[2])
    ):
        repeats = sorted(groups[model, task, method], key=lambda record: record["repeat"])
        baseline = sorted(groups.get((model, task, BASELINE), []), key=lambda r: r["repeat"])
        main = repeats[0]["task"].get("metric", "")
        for metric in sorted(repeats[0]["metrics"], key=lambda name: (name != main, name)):
            rows.append(_row(repeats, baseline, metric, main))
    return pd.DataFrame(rows)


def _row(repeats: list[Record], baseline: list[Record], metric: str, main: str) -> dict[str, Any]:
    first = repeats[0]
    values = [record["metrics"][metric]["value"] for record in repeats]
    mean = sum(values) / len(values)
    row: dict[str, Any] = {
        "model": first["model"]["name"],
        "task": first["task"]["name"],
        "provider": first["task"]["provider"],
        "method": first["method"]["name"],
        "title": first["method"]["title"],
        "metric": metric,
        "main": metric == main,
        "value": mean,
        "deviation": max(abs(value - mean) for value in values),
        "repeats": len(repeats),
        "problems": first["metrics"][metric]["n"],
        "pages_read": sum(record["quantized_pages_read"] for record in repeats),
    }
    own, other = _pages(repeats, metric), _pages(baseline, metric)
    interval = bootstrap(own) if own else (mean, float("nan"), float("nan"))
    row |= {"value_low": interval[1], "value_high": interval[2]}
    same = own and [len(p.counts) for p in own] == [len(p.counts) for p in other]
    names = ("difference", "difference_low", "difference_high")
    found = paired_difference(own, other) if same else (float("nan"),) * 3
    return row | dict(zip(names, found, strict=True))


def _pages(records: list[Record], metric: str) -> list[Pages]:
    """The scores of single problems, a list for each repeat; empty where one lacks them."""
    scores = [record.get("problems", {}).get(metric) for record in records]
    if any(found is None or len(found) < 2 for found in scores):
        return []
    return [Pages(found, [1] * len(found)) for found in scores]


def readable_tasks(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns for a reader; the difference to 16 bit where there is one."""

    def bounds(row: Any, name: str) -> str:
        if pd.isna(row[name]):
            return ""
        text = f"{row[name]:.3f}"
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return text if pd.isna(low) else f"{text} [{low:.3f}, {high:.3f}]"

    rows = [
        {
            "Model": row["model"],
            "Task": row["task"] + (" (stand-in)" if row["provider"] == "standin" else ""),
            "Method": row["title"],
            "Metric": row["metric"],
            "Value": bounds(row, "value"),
            "±": f"{row['deviation']:.3f}",
            "Against FP16": "" if row["method"] == BASELINE else bounds(row, "difference"),
            "Repeats": str(row["repeats"]),
            "n": str(row["problems"]),
        }
        for row in frame.to_dict("records")
    ]
    return pd.DataFrame(rows)
