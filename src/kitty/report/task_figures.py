"""Figures of downstream tasks: accuracy by method, and the paper's Figure 4 with our points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from kitty.methods import load_methods
from kitty.records import Record, write_atomically
from kitty.report.figures import INK, LINES, MARKERS, SELECTIONS, TEXT_WIDTH, drawn
from kitty.report.files import FIGURE_FORMATS
from kitty.report.paper import Paper, load_paper
from kitty.report.paper_tables import Line, lines_of, model_title
from kitty.report.scores import HUB, Scores, task_of

FIGURE_4 = "figure-4"

CAPTIONS = {
    "tasks": (
        "Accuracy of each method on each downstream task, mean over repeats with the 95% interval "
        "of a bootstrap over problems; the dashed line is the 16-bit cache. Chance and ceiling "
        "depend on the task, so panels are not to be compared with each other."
    ),
    FIGURE_4: (
        "Accuracy against the share of key channels in 4 bits (the paper's Figure 4). Filled: "
        "ours, with the 95% interval of a bootstrap over problems. Hollow: the paper's, where the "
        "same configuration stands in one of its tables; its other points are not printed. Dashed "
        "line: the 16-bit cache, ours where measured, else the paper's."
    ),
}


def task_figure_files() -> list[str]:
    """Files of both figures."""
    return [f"{name}.{suffix}" for name in CAPTIONS for suffix in FIGURE_FORMATS]


def write_task_figures(records: Iterable[tuple[Path, Record]], out_dir: str | Path) -> list[Path]:
    """Write the files of :func:`task_figure_files`."""
    paper = load_paper()
    scores = Scores(records, paper)
    paths = []
    for file in task_figure_files():
        name, suffix = file.rsplit(".", 1)
        paths.append(Path(out_dir) / file)
        write_atomically(paths[-1], render_tasks(name, suffix, scores, paper))
    return paths


def render_tasks(name: str, suffix: str, scores: Scores, paper: Paper) -> bytes:
    """One figure as the bytes of a file."""
    draw: Callable[[Scores, Paper], Figure] = draw_tasks if name == "tasks" else draw_figure_4
    return drawn(lambda: draw(scores, paper), suffix)


def draw_tasks(scores: Scores, paper: Paper) -> Figure:
    """One panel a model, provider and task; methods from top to bottom as in the methods file."""
    panels = [
        (model, provider, task)
        for model, provider in scores.places()
        for task in sorted({task for _, task in scores.measured(model, provider)})
    ]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    most = max(len(_methods(scores, *panel)) for panel in panels)
    figure = Figure(figsize=(TEXT_WIDTH, rows * (0.9 + 0.2 * most)))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, scores, paper, *panel)
    return figure


def _methods(scores: Scores, model: str, provider: str, task: str) -> list[Any]:
    order = {name: place for place, name in enumerate(load_methods())}
    found = [method for method, other in scores.measured(model, provider) if other == task]
    return sorted(found, key=lambda method: (order.get(method.name, len(order)), method.name))


def _draw_panel(
    axes: Any, scores: Scores, paper: Paper, model: str, provider: str, task: str
) -> None:
    methods = _methods(scores, model, provider, task)
    blue = sns.color_palette("colorblind")[0]
    for place, method in enumerate(methods):
        score = scores.get(model, method, task, provider)
        assert score is not None
        axes.plot([score.low, score.high], [place, place], color=blue, lw=1.6)
        axes.plot(score.mean, place, "o", color=blue, ms=4.8)
        if not method.quantized:
            axes.axvline(score.mean, color=INK, ls="--", lw=0.9, zorder=0)
    axes.set_yticks(range(len(methods)), [method.title for method in methods])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy (%)")
    where = "" if provider == HUB else ", stand-ins"
    axes.set_title(f"{task_of(paper, task).title}\n{model_title(model)}{where}", fontsize=7.5)
    axes.grid(axis="x")
    sns.despine(ax=axes)


def draw_figure_4(scores: Scores, paper: Paper) -> Figure:
    """A row of panels a model, a panel a task, a curve a selection."""
    table = paper.tables[FIGURE_4]
    blocks: dict[str, list[Line]] = {}
    for line in lines_of(table, scores):
        blocks.setdefault(line.model_title, []).append(line)
    figure = Figure(figsize=(TEXT_WIDTH, 2.6 * len(blocks)))
    grid = figure.subplots(len(blocks), len(table.tasks), squeeze=False)
    for row, (title, lines) in zip(grid, blocks.items(), strict=True):
        for axes, task in zip(row, table.tasks, strict=True):
            _draw_curves(axes, lines, task)
            axes.set_title(f"{task_of(paper, task).title}, {title}", fontsize=7.5)
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    return figure


def _draw_curves(axes: Any, lines: list[Line], task: str) -> None:
    """Curves of one task; a point without a figure is left out, never filled in."""
    colors = sns.color_palette("colorblind")
    for index, selection in enumerate(("magnitude", "random")):
        style: dict[str, Any] = {
            "color": colors[index],
            "marker": MARKERS[SELECTIONS.index(selection)],
            "ls": LINES[SELECTIONS.index(selection)],
            "ms": 4.2,
        }
        points = [line for line in lines if _on_curve(line, selection)]
        mine = [(line, line.scores.get(task)) for line in points]
        found = [(100 * line.row.method.boost_ratio, s) for line, s in mine if s is not None]
        if found:
            shares, values = zip(*found, strict=True)
            means = np.array([score.mean for score in values])
            spread = np.abs([means - [s.low for s in values], [s.high for s in values] - means])
            axes.errorbar(shares, means, spread, lw=1.4, label=f"{selection}, ours", **style)
        theirs = [
            (100 * line.row.method.boost_ratio, line.row.cells[task].mean)
            for line in points
            if task in line.row.cells
        ]
        if any(0 < share < 100 for share, _ in theirs):  # the ends alone are no curve
            label = f"{selection}, paper"
            axes.plot(*zip(*theirs, strict=True), mfc="white", lw=0.8, label=label, **style)
    for line in lines:
        if not line.row.method.quantized:
            score, cell = line.scores.get(task), line.row.cells.get(task)
            level = score.mean if score is not None else cell.mean if cell is not None else None
            if level is not None:
                axes.axhline(level, color=INK, ls="--", lw=0.9, zorder=0)
    axes.set_xlabel("4-bit key channels (%)")
    axes.set_ylabel("accuracy (%)")
    axes.grid(axis="y")
    sns.despine(ax=axes)


def _on_curve(line: Line, selection: str) -> bool:
    """Whether a point belongs to a curve; both ends belong to every one."""
    method = line.row.method
    return method.quantized and (method.boost_ratio in (0, 1) or method.selection == selection)
