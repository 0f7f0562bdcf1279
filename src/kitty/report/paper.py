"""The paper's tables and every claim, read from configs/claims.yaml.

Each printed row of a table becomes a claim of its own, beside those that the file spells out.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kitty.config_files import load_config
from kitty.errors import KittyError
from kitty.methods import Method, get_method
from kitty.models import find_model
from kitty.paths import configs_dir

PRINTED = "printed"


class Cell(NamedTuple):
    """A printed accuracy in percent and the largest deviation of a repeat, where printed."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Row:
    """One method of one model in a table of the paper.

    Attributes:
        model: name of configs/models.yaml.
        method: the method that the row is about.
        title: the paper's label.
        cells: by task; empty where the paper prints none.
        average, drop: as printed, or derived from the cells; None where there is none.
    """

    model: str
    method: Method
    title: str
    cells: dict[str, Cell]
    average: float | None
    drop: float | None


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, or the points of a figure.

    Attributes:
        identifier: such as ``table-3``; also the name of the files made of it.
        layout: ``tasks-in-rows`` or ``methods-in-rows``.
        averages: ``printed``, ``derived`` (by this project) or ``none``.
        mark: where the figures come from.
        tasks: in the paper's order.
        blocks: rows by model, in the paper's order.
        model_tasks: the tasks of each model.
    """

    identifier: str
    title: str
    caption: str
    layout: str
    averages: str
    mark: str
    tasks: tuple[str, ...]
    blocks: dict[str, tuple[Row, ...]]
    model_tasks: dict[str, tuple[str, ...]]

    def row(self, model: str, method: str) -> Row:
        """The row of a model and a method by their names.

        Raises:
            KittyError: the table has no such row.
        """
        for row in self.blocks.get(model, ()):
            if row.method.name == method:
                return row
        raise KittyError(
            f"{self.title} has no row for {model}/{method}: use one that configs/claims.yaml lists."
        )


@dataclass(frozen=True)
class Task:
    """A task of the paper and the names under which records measure it."""

    name: str
    title: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        identifier: such as ``abstract/batch``.
        statement: in a sentence.
        paper: what is printed, in words; empty where nothing is.
        mark: where that comes from.
        accept: bounds ``low``, ``high``, or the ``value`` about which the tolerance makes a band.
        tolerance: its name; the claims file says why.
        hardware: what a measurement needs.
        note: what exactly is measured.
        measure: one entry, see configs/claims.yaml, or ``row`` with (table, model, method).
    """

    identifier: str
    statement: str
    paper: str
    mark: str
    accept: dict[str, float]
    tolerance: str
    hardware: str
    note: str
    measure: dict[str, Any]


@dataclass(frozen=True)
class Paper:
    """Everything that configs/claims.yaml holds."""

    tables: dict[str, PaperTable]
    tasks: dict[str, Task]
    claims: tuple[Claim, ...]
    tolerances: dict[str, str]
    conflicts: tuple[dict[str, str], ...]
    selections: dict[str, dict[str, Any]]

    def deviation(self, model: str, method: Method, task: str) -> float:
        """Largest deviation of a repeat that the paper prints for a cell, in points.

        Tables 1 and 2 print none: the same cell of another table serves, else the model's 16-bit
        cell of that task.

        Raises:
            KittyError: neither is printed anywhere.
        """
        for wanted in (method.name, "fp16"):
            for table in self.tables.values():
                for row in table.blocks.get(model, ()):
                    cell = row.cells.get(task)
                    if row.method.name == wanted and cell and cell.deviation is not None:
                        return cell.deviation
        raise KittyError(
            f"No table prints a deviation for {model} on {task}: add one to configs/claims.yaml."
        )

    def average_deviation(self, table: PaperTable, row: Row) -> float:
        """Deviation of a row's average: cells are independent, so their squares add up."""
        tasks = table.model_tasks[row.model]
        squares = [self.deviation(row.model, row.method, task) ** 2 for task in tasks]
        return math.sqrt(sum(squares)) / len(tasks)


@functools.cache
def load_paper(path: str | Path | None = None) -> Paper:
    """The claims file, checked.

    Args:
        path: default: the shipped configs/claims.yaml.

    Raises:
        KittyError: the file is missing, breaks its schema, or names what is not known.
    """
    source = Path(path or configs_dir() / "claims.yaml")
    raw = load_config("claims", source)
    tasks = {name: Task(name, t["title"], tuple(t["names"])) for name, t in raw["tasks"].items()}
    tables = {t["id"]: _table(t, tasks, source) for t in raw["tables"]}
    rows = [_row_claim(table, row) for table in tables.values() for row in _printed(table)]
    paper = Paper(
        tables,
        tasks,
        (*rows, *(_claim(c) for c in raw["claims"])),
        {name: " ".join(text.split()) for name, text in raw["tolerances"].items()},
        tuple(raw["conflicts"]),
        raw["selections"],
    )
    _check(paper, source)
    return paper


def _table(raw: dict[str, Any], tasks: dict[str, Task], source: Path) -> PaperTable:
    unknown = [name for name in raw["tasks"] if name not in tasks]
    if unknown:
        raise KittyError(
            f"The claims file {source} names task {unknown[0]!r} in {raw['title']}, but only "
            f"{', '.join(tasks)} are listed: add it to `tasks`."
        )
    blocks, model_tasks = {}, {}
    for block in raw["blocks"]:
        model = find_model(block["model"]).name
        model_tasks[model] = tuple(block.get("tasks", raw["tasks"]))
        blocks[model] = tuple(_row(r, model, model_tasks[model], source) for r in block["rows"])
    return PaperTable(
        raw["id"],
        raw["title"],
        raw["caption"],
        raw["layout"],
        raw["averages"],
        raw.get("mark", PRINTED),
        tuple(raw["tasks"]),
        blocks,
        model_tasks,
    )


def _row(raw: dict[str, Any], model: str, tasks: tuple[str, ...], source: Path) -> Row:
    cells = [Cell(*c) if isinstance(c, list) else Cell(c, None) for c in raw.get("cells", [])]
    if cells and len(cells) != len(tasks):
        raise KittyError(
            f"The claims file {source} gives {model}/{raw['method']} {len(cells)} cells, but its "
            f"table has {len(tasks)} tasks: give one cell a task."
        )
    return Row(
        model,
        get_method(raw["method"]),
        raw["title"],
        dict(zip(tasks, cells, strict=False)),
        raw.get("average"),
        raw.get("drop"),
    )


def _printed(table: PaperTable) -> list[Row]:
    return [row for rows in table.blocks.values() for row in rows if row.cells]


def _row_claim(table: PaperTable, row: Row) -> Claim:
    paper = ", ".join(
        f"{cell.mean:.2f}" if cell.deviation is None else f"{cell.mean:.2f} ± {cell.deviation:.2f}"
        for cell in row.cells.values()
    )
    return Claim(
        f"{table.identifier}/{row.model}/{row.method.name}",
        f"{table.title}: {find_model(row.model).title}, {row.title}, on {{tasks}}.",
        paper,
        table.mark,
        {},
        "max-deviation",
        "GPUs that hold the model in 16 bit, access to the hub",
        "",
        {"row": (table.identifier, row.model, row.method.name)},
    )


def _claim(raw: dict[str, Any]) -> Claim:
    mark = raw.get("mark", PRINTED)
    return Claim(
        raw["id"],
        " ".join(raw["statement"].split()),
        raw.get("paper", ""),
        mark,
        raw.get("accept", {}),
        raw["tolerance"],
        raw["hardware"],
        " ".join(raw.get("note", "").split()),
        raw["measure"],
    )


def _check(paper: Paper, source: Path) -> None:
    names = [claim.identifier for claim in paper.claims]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise KittyError(f"The claims file {source} has two claims {min(twice)!r}: rename one.")
    for claim in paper.claims:
        if claim.tolerance not in paper.tolerances:
            raise KittyError(
                f"Claim {claim.identifier!r} in {source} has tolerance {claim.tolerance!r}, but "
                f"only {', '.join(paper.tolerances)} are explained: add it to `tolerances`."
            )
        _check_measure(paper, claim, source)


def _check_measure(paper: Paper, claim: Claim, source: Path) -> None:
    """Every name that a claim's measure uses must be known."""
    measure = claim.measure
    figures = [*measure.get("ratio", []), *measure.get("difference", [])]
    for figure in [*figures, *([measure["value"]] if "value" in measure else [])]:
        if figure["from"] not in paper.selections:
            raise KittyError(
                f"Claim {claim.identifier!r} in {source} measures from {figure['from']!r}, which "
                f"is none of the selections {', '.join(paper.selections)}."
            )
    if "average" in measure:
        table = paper.tables.get(measure["average"]["table"])
        if table is None:
            raise KittyError(
                f"Claim {claim.identifier!r} in {source} needs table "
                f"{measure['average']['table']!r}, which is none of {', '.join(paper.tables)}."
            )
        for name in ("method", "minus"):
            table.row(measure["average"]["model"], measure["average"][name])
    for name in measure.get("ordering", {}).values():
        get_method(name)
    if not claim.accept and not measure.keys() & {"row", "ordering", "nothing"}:
        raise KittyError(f"Claim {claim.identifier!r} in {source} has no band: give `accept`.")
