"""Task records as accuracies in percent: mean over repeats, largest deviation, interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kitty.errors import KittyError
from kitty.evaluation.bootstrap import Pages, bootstrap
from kitty.methods import Method
from kitty.records import Record
from kitty.report.data import identity
from kitty.report.paper import Paper, Task

HUB = "hub"


class Key(NamedTuple):
    """What one accuracy is of: method by what it stores, problems by where they came from."""

    model: str
    method: tuple[Any, ...]
    task: str
    provider: str


@dataclass(frozen=True)
class Score:
    """An accuracy in percent.

    Attributes:
        mean: over repeats.
        deviation: largest distance of a repeat from the mean, as the paper gives it.
        low, high: 95% bounds of a bootstrap over problems, each problem's score averaged over the
            repeats. Where a record lacks the scores of single problems: the repeats' own bounds,
            averaged, which is wider.
        repeats: number of records.
        problems: of one repeat.
        whole: every problem of the task's own data set was asked.
        paths: of the records.
    """

    mean: float
    deviation: float
    low: float
    high: float
    repeats: int
    problems: int
    whole: bool
    paths: tuple[Path, ...]


class Scores:
    """All accuracies that records hold, by model, method, task and provider."""

    def __init__(self, records: Iterable[tuple[Path, Record]], paper: Paper) -> None:
        """Group the task records among ``records``.

        Raises:
            KittyError: a record lacks the metric of its task.
        """
        names = {name: task.name for task in paper.tasks.values() for name in task.names}
        groups: dict[Key, list[tuple[Path, Record]]] = {}
        self.methods: dict[tuple[Any, ...], Method] = {}
        self.titles: dict[str, str] = {}
        for path, record in records:
            if record["kind"] != "task":
                continue
            method = Method(**record["method"])
            name = record["task"]["name"]
            key = Key(
                record["model"]["name"],
                identity(method),
                names.get(name, name),
                record["task"]["provider"],
            )
            groups.setdefault(key, []).append((path, record))
            self.methods.setdefault(identity(method), method)
        self._scores = {key: score_of(largest_run(g)) for key, g in sorted_groups(groups)}

    def __bool__(self) -> bool:
        """Whether there is any task record."""
        return bool(self._scores)

    def get(self, model: str, method: Method, task: str, provider: str = HUB) -> Score | None:
        """The accuracy of a method on a task of the paper; None where nothing was measured."""
        return self._scores.get(Key(model, identity(method), task, provider))

    def places(self) -> list[tuple[str, str]]:
        """Every (model, provider) that was measured, in order of names."""
        return sorted({(key.model, key.provider) for key in self._scores})

    def measured(self, model: str, provider: str) -> list[tuple[Method, str]]:
        """Every (method, task) that was measured with a model and provider."""
        return [
            (self.methods[key.method], key.task)
            for key in self._scores
            if (key.model, key.provider) == (model, provider)
        ]


def run_of(path: Path) -> str:
    """The folder of the run that a record belongs to: records of two runs are never mixed."""
    parts = path.parts
    if "records" in parts:
        return str(Path(*parts[: len(parts) - 1 - parts[::-1].index("records")]))
    return str(path.parent)


def largest_run(records: list[tuple[Path, Record]]) -> list[tuple[Path, Record]]:
    """The records of the run that has most of them, the first one given if several do."""
    runs: dict[str, list[tuple[Path, Record]]] = {}
    for path, record in records:
        runs.setdefault(run_of(path), []).append((path, record))
    return max(runs.values(), key=len)


def sorted_groups(groups: dict[Key, Any]) -> list[tuple[Key, Any]]:
    """Groups in an order that does not depend on where their records were found."""
    return sorted(groups.items(), key=lambda item: str(item[0]))


def score_of(records: Sequence[tuple[Path, Record]]) -> Score:
    """Mean, spread and interval of one method's repeats on one task.

    Repeats of fewer problems than another one are left out, and so is a repeat measured twice.

    Raises:
        KittyError: a record lacks the metric that its task names.
    """
    found = [(path, record, _metric(path, record)) for path, record in records]
    most = max(metric["n"] for _, _, metric in found)
    kept: dict[tuple[int, int], tuple[Path, Record, dict[str, Any]]] = {}
    for item in sorted(found, key=lambda item: str(item[0])):
        if item[2]["n"] == most:
            kept.setdefault((item[1]["repeat"], item[1]["seed"]), item)
    values = [100 * metric["value"] for _, _, metric in kept.values()]
    mean = sum(values) / len(values)
    low, high = _interval(list(kept.values()))
    return Score(
        mean,
        max(abs(value - mean) for value in values),
        low,
        high,
        len(values),
        most,
        all(record["task"]["limit"] is None for _, record, _ in kept.values()),
        tuple(path for path, _, _ in kept.values()),
    )


def _interval(kept: Sequence[tuple[Path, Record, dict[str, Any]]]) -> tuple[float, float]:
    """95% bounds of the mean over repeats, in percent."""
    single = [record.get("problems", {}).get(_name(path, record)) for path, record, _ in kept]
    lengths = {len(scores or ()) for scores in single}
    if len(lengths) == 1 and min(lengths) > 1:
        means = [100 * sum(column) / len(column) for column in zip(*single, strict=True)]
        interval = bootstrap([Pages(means, [1] * len(means))])
        return interval.low, interval.high
    bounds = [_bounds(metric) for _, _, metric in kept]
    low, high = (100 * sum(column) / len(column) for column in zip(*bounds, strict=True))
    return low, high


def _metric(path: Path, record: Record) -> dict[str, Any]:
    """The metric that stands in tables."""
    metric: dict[str, Any] = record["metrics"][_name(path, record)]
    return metric


def _name(path: Path, record: Record) -> str:
    """Of the metric that stands in tables: the one the task names, or the only one there is."""
    metrics = record["metrics"]
    name: str = record["task"].get("metric") or (next(iter(metrics)) if len(metrics) == 1 else "")
    if name not in metrics:
        raise KittyError(
            f"The record {path} does not say which of {', '.join(metrics)} stands in tables: "
            "delete the file and run the same command again."
        )
    return name


def _bounds(metric: dict[str, Any]) -> tuple[float, float]:
    """The record's bootstrap interval; without one, two standard errors."""
    if "ci" in metric:
        return metric["ci"][0], metric["ci"][1]
    spread = 1.96 * (metric["stderr"] or 0.0)
    return metric["value"] - spread, metric["value"] + spread


def task_of(paper: Paper, name: str) -> Task:
    """A task of the paper, or one that only records know, under its own name."""
    return paper.tasks.get(name, Task(name, name, (name,)))
