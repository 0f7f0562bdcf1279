"""The paper's Tables 1 to 4 and Figure 4 in its layout, our accuracies beside the printed ones.

A cell that nothing was measured for says "not run", one that the paper leaves out "not printed";
neither is ever filled from the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kitty.errors import KittyError
from kitty.methods import Method, load_methods
from kitty.models import find_model
from kitty.records import Record, write_atomically
from kitty.report.paper import Cell, Paper, PaperTable, Row, load_paper
from kitty.report.scores import HUB, Score, Scores, task_of
from kitty.report.tables import booktabs, pipe_table, readable, to_csv

TASKS = "tasks"  # name of the table of everything that was measured
NOT_RUN = "not run"
NOT_PRINTED = "not printed"
FORMATS = ("csv", "md", "tex")


@dataclass(frozen=True)
class Line:
    """One method of one model with what was measured of it.

    Attributes:
        row: of the paper; of models that it does not have, a row without cells.
        model_title: with the provider where the problems are not the paper's.
        tasks: of the line, in the table's order.
        scores: by task; None where nothing was measured.
    """

    row: Row
    model_title: str
    provider: str
    tasks: tuple[str, ...]
    scores: dict[str, Score | None]

    @property
    def average(self) -> float | None:
        """Mean over the tasks; None unless all were measured."""
        found = [score.mean for score in self.scores.values() if score is not None]
        return sum(found) / len(found) if found and len(found) == len(self.tasks) else None


def paper_table_files() -> list[str]:
    """Files of all tables, known before anything is measured."""
    return [f"{name}.{suffix}" for name in (TASKS, *load_paper().tables) for suffix in FORMATS]


def write_paper_tables(records: Iterable[tuple[Path, Record]], out_dir: str | Path) -> list[Path]:
    """Write the files of :func:`paper_table_files`.

    Raises:
        KittyError: a record lacks the metric of its task, or the folder cannot be written.
    """
    paper = load_paper()
    scores = Scores(records, paper)
    frame = tasks_table(scores, paper)
    shown = readable(frame)
    texts = {"csv": to_csv(frame), "md": pipe_table(shown), "tex": booktabs(shown)}
    paths = _write(Path(out_dir), TASKS, texts)
    for table in paper.tables.values():
        lines = lines_of(table, scores)
        shown = in_layout(table, lines, paper)
        texts = {
            "csv": to_csv(cells_of(table, lines, paper)),
            "md": f"{table.title}: {table.caption}. {NOTE}\n\n{pipe_table(shown)}",
            "tex": booktabs(shown),
        }
        paths += _write(Path(out_dir), table.identifier, texts)
    return paths


def _write(folder: Path, name: str, texts: dict[str, str]) -> list[Path]:
    paths = [folder / f"{name}.{suffix}" for suffix in FORMATS]
    for path, suffix in zip(paths, FORMATS, strict=True):
        write_atomically(path, texts[suffix].encode())
    return paths


def tasks_table(scores: Scores, paper: Paper) -> pd.DataFrame:
    """One row a model, task and method that was measured, the paper's or not."""
    order = {name: place for place, name in enumerate(load_methods())}
    rows = []
    for model, provider in scores.places():
        found = scores.measured(model, provider)
        found.sort(key=lambda pair: (pair[1], order.get(pair[0].name, len(order)), pair[0].name))
        for method, task in found:
            score = scores.get(model, method, task, provider)
            assert score is not None
            rows.append(
                {
                    "model": model,
                    "task": task_of(paper, task).title,
                    "problems": provider,
                    "method": method.name,
                    "title": method.title,
                    "accuracy": score.mean,
                    "accuracy_low": score.low,
                    "accuracy_high": score.high,
                    "deviation": score.deviation,
                    "runs": str(score.repeats),
                    "n": str(score.problems),
                }
            )
    return pd.DataFrame(rows)


NOTE = (
    "Percent: ours ± largest deviation of a repeat, [95% bootstrap interval over problems], and in "
    "brackets what the paper prints"
)


def lines_of(table: PaperTable, scores: Scores) -> list[Line]:
    """The paper's lines, then those of other models and problems that were measured."""
    lines = [
        _line(table, scores, row, find_model(model).title, HUB)
        for model, rows in table.blocks.items()
        for row in rows
    ]
    for model, provider in scores.places():
        if provider == HUB and model in table.blocks:
            continue
        lines += _other_lines(table, scores, model, provider)
    return lines


def _other_lines(table: PaperTable, scores: Scores, model: str, provider: str) -> list[Line]:
    """Lines of a model or of problems that the paper does not have, where anything was measured."""
    rows = {row.method.name: row for rows in table.blocks.values() for row in rows}
    title = model_title(model) + ("" if provider == HUB else " (stand-ins)")
    found = []
    for row in rows.values():
        own = Row(model, row.method, row.title, {}, None, None)
        line = _line(table, scores, own, title, provider)
        if any(score is not None for score in line.scores.values()):
            found.append(line)
    return found


def model_title(name: str) -> str:
    """A model's title, or the name that only records know."""
    try:
        return find_model(name).title
    except KittyError:
        return name


def _line(table: PaperTable, scores: Scores, row: Row, title: str, provider: str) -> Line:
    tasks = table.model_tasks.get(row.model, table.tasks)
    found = {task: scores.get(row.model, row.method, task, provider) for task in tasks}
    return Line(row, title, provider, tasks, found)


# --- texts of cells ------------------------------------------------------------------------------


def ours(score: Score | None) -> str:
    """Our accuracy with its spread, or that it was not run."""
    if score is None:
        return NOT_RUN
    part = "" if score.whole else f", {score.problems} problems"
    return f"{score.mean:.2f} ± {score.deviation:.2f} [{score.low:.1f}, {score.high:.1f}{part}]"


def printed(cell: Cell | None) -> str:
    """The paper's accuracy, or that it prints none."""
    if cell is None:
        return NOT_PRINTED
    return (
        f"{cell.mean:.2f}" if cell.deviation is None else f"{cell.mean:.2f} ± {cell.deviation:.2f}"
    )


def _both(mine: str, theirs: str) -> str:
    return f"{mine} ({theirs})"


def _average_text(table: PaperTable, line: Line) -> str:
    theirs = NOT_PRINTED
    if line.row.average is not None:
        theirs = f"{line.row.average:.2f}" + (", derived" if table.averages == "derived" else "")
    return _both(NOT_RUN if line.average is None else f"{line.average:.2f}", theirs)


def drop_of(line: Line, lines: list[Line]) -> float | None:
    """Our average minus that of the same model in 16 bit; None where either is missing."""
    for other in lines:
        same = (other.row.model, other.provider) == (line.row.model, line.provider)
        if same and not other.row.method.quantized and line.average is not None:
            return None if other.average is None else line.average - other.average
    return None


def _drop_text(line: Line, lines: list[Line]) -> str:
    if not line.row.method.quantized:
        return "-"
    drop = drop_of(line, lines)
    theirs = NOT_PRINTED if line.row.drop is None else f"{line.row.drop:+.2f}"
    return _both(NOT_RUN if drop is None else f"{drop:+.2f}", theirs)


# --- layouts -------------------------------------------------------------------------------------


def in_layout(table: PaperTable, lines: list[Line], paper: Paper) -> pd.DataFrame:
    """A table as the paper lays it out, one text per cell."""
    if table.layout == "tasks-in-rows":
        return _tasks_in_rows(table, lines, paper)
    rows = []
    drops = any(line.row.drop is not None for line in lines)
    for line in lines:
        row = {"Model": line.model_title, "Method": line.row.title}
        for task in table.tasks:
            row[task_of(paper, task).title] = _cell_text(line, task)
        if table.averages != "none":
            row["Average"] = _average_text(table, line)
        if drops:
            row["Drop"] = _drop_text(line, lines)
        rows.append(row)
    return pd.DataFrame(rows)


def _cell_text(line: Line, task: str) -> str:
    return _both(ours(line.scores.get(task)), printed(line.row.cells.get(task)))


def _tasks_in_rows(table: PaperTable, lines: list[Line], paper: Paper) -> pd.DataFrame:
    """A block of rows a model, a column a method."""
    rows = []
    for title in dict.fromkeys(line.model_title for line in lines):
        block = [line for line in lines if line.model_title == title]
        for task in block[0].tasks:
            row = {"Model": title, "Task": task_of(paper, task).title}
            rows.append(row | {line.row.title: _cell_text(line, task) for line in block})
        if table.averages != "none":
            row = {"Model": title, "Task": f"Average of {len(block[0].tasks)}"}
            rows.append(row | {line.row.title: _average_text(table, line) for line in block})
    return pd.DataFrame(rows).fillna(_both(NOT_RUN, NOT_PRINTED))


def cells_of(table: PaperTable, lines: list[Line], paper: Paper) -> pd.DataFrame:
    """One row a cell, numbers in columns of their own; empty where there is none."""
    rows = []
    for line in lines:
        for task in line.tasks:
            rows.append(_cell_row(table, line, task, paper))
        if table.averages != "none":
            rows.append(
                _names(line, "average")
                | {"paper": line.row.average, "ours": line.average}
                | _notes(line.average, line.row.average, table.averages)
            )
        if line.row.drop is not None:
            drop = drop_of(line, lines)
            rows.append(
                _names(line, "drop")
                | {"paper": line.row.drop, "ours": drop}
                | _notes(drop, line.row.drop, "printed")
            )
    columns = ["model", "problems", "method", "title", "task", "paper", "paper_deviation", "ours"]
    columns += ["deviation", "low", "high", "repeats", "n", "paper_note", "ours_note"]
    frame = pd.DataFrame(rows)
    return frame.reindex(columns=columns)


def _cell_row(table: PaperTable, line: Line, task: str, paper: Paper) -> dict[str, object]:
    cell, score = line.row.cells.get(task), line.scores[task]
    row = _names(line, task_of(paper, task).title)
    mine = None if score is None else score.mean
    row |= _notes(mine, None if cell is None else cell.mean, table.mark)
    if cell is not None:
        row |= {"paper": cell.mean, "paper_deviation": cell.deviation}
    if score is not None:
        row |= {"ours": score.mean, "deviation": score.deviation, "low": score.low}
        row |= {"high": score.high, "repeats": str(score.repeats), "n": str(score.problems)}
        if not score.whole:
            row["ours_note"] = "part of the problems"
    return row


def _names(line: Line, task: str) -> dict[str, object]:
    method: Method = line.row.method
    names = {"model": line.row.model, "problems": line.provider, "method": method.name}
    return {**names, "title": line.row.title, "task": task}


def _notes(mine: float | None, theirs: float | None, mark: str) -> dict[str, object]:
    return {
        "paper_note": NOT_PRINTED if theirs is None else mark,
        "ours_note": NOT_RUN if mine is None else "",
    }
