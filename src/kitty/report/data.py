"""The measurements behind tables and figures, grouped by model, passage and method.

Repeats of one method (random selections with other seeds) are averaged page by page.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kitty.errors import KittyError
from kitty.evaluation.bootstrap import Interval, Pages, bootstrap, paired_difference
from kitty.methods import Method, load_methods
from kitty.records import Record, find_records

METRICS = ("nll", "kl", "top1")
WITHOUT_TEXTS = ("task", "latency")  # kinds of records that make a report without a text
Source = str | os.PathLike[str] | Iterable[tuple[Path, Record]]


@dataclass(frozen=True)
class Cell:
    """One method on one passage with one model, repeats averaged.

    Attributes:
        method: of the first repeat.
        num_tokens: of the passage.
        repeats: number of records.
        pages: page means by metric.
        metrics: the records' metrics, averaged; ``attention_error`` per layer.
    """

    method: Method
    num_tokens: int
    repeats: int
    pages: dict[str, Pages]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Results:
    """All records of one experiment.

    Attributes:
        records: with their paths, in path order.
        models, passages: names, sorted.
        methods: by name, in the order of configs/methods.yaml; others after them by name.
        cells: by (model, passage, method name).
        analyses: analysis records by (model, passage).
    """

    records: list[tuple[Path, Record]]
    models: list[str]
    passages: list[str]
    methods: dict[str, Method]
    cells: dict[tuple[str, str, str], Cell]
    analyses: dict[tuple[str, str], Record]

    def over_passages(self, model: str, method: str, metric: str) -> list[Pages]:
        """A metric's pages, one entry per passage."""
        return [self.cells[model, passage, method].pages[metric] for passage in self.passages]

    def interval(
        self, model: str, method: str, metric: str, passage: str | None = None
    ) -> Interval:
        """Token mean with its bootstrap interval on one passage, or over all of them."""
        if passage is not None:
            return bootstrap([self.cells[model, passage, method].pages[metric]])
        return bootstrap(self.over_passages(model, method, metric))

    def difference(
        self, model: str, first: str, second: str, metric: str, passage: str | None = None
    ) -> Interval:
        """Paired difference of two methods on one passage, or over all of them."""
        if passage is None:
            pages = [self.over_passages(model, name, metric) for name in (first, second)]
        else:
            pages = [[self.cells[model, passage, name].pages[metric]] for name in (first, second)]
        return paired_difference(*pages)

    def effective_bits(self, model: str, method: str) -> float:
        """Stored bits per cached element of full pages."""
        return float(self.cells[model, self.passages[0], method].metrics["effective_bits"])

    def find(self, method: Method) -> str | None:
        """Name of a measured method that stores the same as ``method`` whatever it is called."""
        wanted = identity(method)
        same = [name for name, known in self.methods.items() if identity(known) == wanted]
        return method.name if method.name in same else next(iter(same), None)


def identity(method: Method) -> tuple[Any, ...]:
    """What a method does: names left out, and the boost where it changes nothing.

    No boosted channel, every channel boosted, and plain keys of the boosted width are told apart
    by the bits that the keys get, not by the way they are written down.
    """
    key_bits, ratio, boost_bits, selection = (
        method.key_bits,
        method.boost_ratio,
        method.boost_bits,
        method.selection,
    )
    if ratio == 1:
        key_bits = boost_bits
    if ratio in (0, 1) or boost_bits == key_bits:
        ratio, boost_bits, selection = 0.0, 0, ""
    buffers = (method.sink, method.window, method.page_size, method.rollback)
    return key_bits, method.value_bits, ratio, boost_bits, selection, *buffers


def load_results(source: Source) -> Results:
    """Group the records of a folder, or records that were read already with their paths.

    Raises:
        KittyError: the folder is missing, a record is damaged, there is neither a quality nor a
            task nor a latency record, or a model lacks a method on a passage.
    """
    if isinstance(source, str | os.PathLike):
        records, place = list(find_records(source)), str(source)
    else:
        records, place = sorted(source, key=lambda item: str(item[0])), "the records given"
    grouped: dict[tuple[str, str, str], list[Record]] = {}
    analyses = {}
    for _, record in records:
        if record["kind"] == "quality":
            grouped.setdefault((*_place(record), record["method"]["name"]), []).append(record)
        elif record["kind"] == "analysis":
            analyses[_place(record)] = record
    if not grouped and not any(record["kind"] in WITHOUT_TEXTS for _, record in records):
        raise KittyError(f"There is no quality record in {place}: run the experiment first.")
    cells = {key: _cell(key, group) for key, group in grouped.items()}
    models = sorted({model for model, _, _ in cells})
    passages = sorted({passage for _, passage, _ in cells})
    methods = _in_order({name: cell.method for (_, _, name), cell in cells.items()})
    _check_grid(models, passages, methods, cells)
    return Results(records, models, passages, methods, cells, dict(sorted(analyses.items())))


def _place(record: Record) -> tuple[str, str]:
    return record["model"]["name"], record["passage"]["name"]


def _cell(key: tuple[str, str, str], records: Sequence[Record]) -> Cell:
    records = sorted(records, key=lambda record: record["repeat"])
    counts = records[0]["pages"]["count"]
    texts = {(r["passage"]["sha256"], tuple(r["pages"]["count"])) for r in records}
    if len({r["repeat"] for r in records}) < len(records) or len(texts) > 1:
        raise KittyError(
            f"Two records of {'/'.join(key)} claim the same repeat or are of different texts: keep "
            "the records of one experiment in a folder of their own."
        )
    pages = {
        name: Pages(np.mean([r["pages"][name] for r in records], axis=0).tolist(), counts)
        for name in METRICS
    }
    metrics = {
        name: np.mean([r["metrics"][name] for r in records], axis=0).tolist()
        for name in records[0]["metrics"]
    }
    method = Method(**records[0]["method"])
    return Cell(method, records[0]["passage"]["num_tokens"], len(records), pages, metrics)


def _in_order(methods: dict[str, Method]) -> dict[str, Method]:
    known = list(load_methods())
    place = {name: index for index, name in enumerate(known)}
    order = sorted(methods, key=lambda name: (place.get(name, len(known)), name))
    return {name: methods[name] for name in order}


def _check_grid(
    models: list[str],
    passages: list[str],
    methods: dict[str, Method],
    cells: dict[tuple[str, str, str], Cell],
) -> None:
    """Every model has every method on every passage, or the means would not be comparable."""
    missing = [
        f"{model}/{passage}/{method}"
        for model in models
        for passage in passages
        for method in methods
        if (model, passage, method) not in cells
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise KittyError(
            f"Records are missing for {', '.join(missing[:3])}{more}: run the experiment again, "
            "which measures only what is missing."
        )
