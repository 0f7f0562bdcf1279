"""Figures as PDF and PNG; the same records give the same bytes.

Colours are those of seaborn's colour-blind-safe palette; every series has a marker of its own too.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from kitty.methods import Method
from kitty.records import Record, write_atomically
from kitty.report.data import Results, Source, load_results
from kitty.report.files import figure_files

PNG_DPI = 200
TEXT_WIDTH = 7.2  # inches
SELECTIONS = ("magnitude", "rotary", "variance", "random")
LINES = ("-", "-.", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK = "0.15"

CAPTIONS = {
    "quality": (
        "Quality by method. Left: KL divergence from the 16-bit model's next-token distribution to "
        "the method's (log scale). Middle: negative log likelihood above that of the 16-bit model. "
        "Right: share of tokens for which both have the same most likely next token. Filled "
        "marks: all texts together, with the 95% interval of a bootstrap over pages; small hollow "
        "marks: each text. Beside each name: stored bits per cached element. Further left is "
        "better in the first two panels, further right in the last."
    ),
    "boost": (
        "Quality against the share of key channels that get the higher precision, by the rule that "
        "chooses them (the shape of the paper's Figure 4), all texts together. Bars: 95% bootstrap "
        "interval over pages. The dashed line is the 16-bit model. A rule is good where its curve "
        "falls early; a random choice is the control."
    ),
    "attention_error": (
        "Error made in each layer: relative RMS of the method's attention output against exact "
        "attention on the same queries, keys and values (log scale), mean over texts. It holds no "
        "error that came from the layers below."
    ),
    "channels": (
        "Key channels of one layer (the paper's Figure 2). Top: mean |K| of each channel, one line "
        "per page, KV heads separated by white lines. Middle: mean squared error of the attention "
        "scores when that channel alone is quantized to 2 bits, one line per query head (log). "
        "Bottom: share of pages in which the channel is boosted. Magnitude is a good rule where "
        "bright columns stand at the same places in all three."
    ),
    "selection": (
        "The choice of boosted channels by layer, mean over heads and pages. Left: share of the "
        "chosen channels that are among as many most sensitive ones. Middle: share of the summed "
        "score error that lies in the chosen channels, and the most that any choice of that size "
        "could hold. Right: Jaccard index of a page's chosen set with the page before and with the "
        "first page. Dotted: expected of a random choice."
    ),
}


def write_figures(source: Source, out_dir: str | Path) -> list[Path]:
    """Draw every figure of an experiment's records.

    Args:
        source: folder of records, or (path, record) pairs.
        out_dir: folder for the files of :func:`kitty.report.figure_files`.

    Raises:
        KittyError: records are missing or damaged, or the folder cannot be written.
    """
    results = load_results(source)
    paths = []
    for file in figure_files(bool(results.analyses)):
        name, suffix = file.rsplit(".", 1)
        path = Path(out_dir) / file
        write_atomically(path, render(results, name, suffix))
        paths.append(path)
    return paths


def render(results: Results, name: str, suffix: str) -> bytes:
    """One figure as the bytes of a PDF or PNG file, without date or version in it."""
    return drawn(lambda: DRAWERS[name](results), suffix)


def drawn(draw: Callable[[], Figure], suffix: str) -> bytes:
    """What ``draw`` draws, in the style of all figures, as the bytes of a file."""
    with _style():
        figure = draw()
        FigureCanvasAgg(figure)
        metadata = {"pdf": {"CreationDate": None, "Producer": None, "Creator": None}}.get(
            suffix, {"Software": None}
        )
        file = io.BytesIO()
        figure.savefig(file, format=suffix, dpi=PNG_DPI, metadata=metadata)
        return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    settings = {
        **sns.axes_style("ticks"),
        **sns.plotting_context("paper"),
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same on every machine
        "font.size": 8,
        "axes.labelsize": 8,
        "axes.titlesize": 8.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "legend.fontsize": 7.5,
        "legend.frameon": False,
        "axes.linewidth": 0.7,
        "xtick.major.width": 0.7,
        "ytick.major.width": 0.7,
        "xtick.minor.width": 0.5,
        "grid.color": "0.9",
        "grid.linewidth": 0.6,
        "pdf.fonttype": 42,
        "figure.constrained_layout.use": True,
    }
    with matplotlib.rc_context(settings):
        yield


def _colors() -> list[Any]:
    return list(sns.color_palette("colorblind"))


def _family(method: Method) -> str:
    """What colours a method in the quality figure."""
    if 0 < method.boost_ratio < 1:
        return _boost_label(method.selection)
    return "no boost"


def _boost_label(selection: str) -> str:
    if selection == "rotary":
        return "boost by rotary pair"
    return "boost at random" if selection == "random" else f"boost by {selection}"


def _family_colors() -> dict[str, Any]:
    blue, orange, green, red = _colors()[:4]
    return {
        "no boost": "0.4",
        "boost by magnitude": blue,
        "boost by rotary pair": red,
        "boost by variance": green,
        "boost at random": orange,
    }


def draw_quality(results: Results) -> Figure:
    """KL, likelihood and agreement by method, one row of panels per model."""
    methods = [name for name, method in results.methods.items() if method.quantized]
    rows = len(results.models)
    height = rows * (1.05 + 0.225 * max(3, len(methods)))
    figure = Figure(figsize=(TEXT_WIDTH, height))
    axes = figure.subplots(rows, 3, squeeze=False)
    for model, panels in zip(results.models, axes, strict=True):
        kl = {name: results.interval(model, name, "kl").mean for name in methods}
        order = sorted(methods, key=lambda name: (kl[name], name))
        for panel, metric in zip(panels, ("kl", "nll", "top1"), strict=True):
            _draw_metric(panel, results, model, order, metric)
        labels = [
            f"{results.methods[n].title}  ({results.effective_bits(model, n):.2f} bits)"
            for n in order
        ]
        panels[0].set_yticks(range(len(order)), labels)
        for panel in panels[1:]:
            panel.set_yticks(range(len(order)), [])
        panels[0].set_title(model if rows > 1 else "Divergence")
        panels[1].set_title("" if rows > 1 else "Likelihood")
        panels[2].set_title("" if rows > 1 else "Agreement")
    _quality_legend(figure, results, methods)
    return figure


def _draw_metric(axes: Any, results: Results, model: str, order: list[str], metric: str) -> None:
    """One panel: methods as rows, the first one at the bottom is the best."""
    reference = next((n for n, m in results.methods.items() if not m.quantized), None)
    colors = _family_colors()
    for row, name in enumerate(order):
        color = colors[_family(results.methods[name])]
        for index, passage in enumerate([None, *results.passages]):
            if passage is not None and len(results.passages) == 1:
                continue
            if metric == "nll" and reference is not None:
                value = results.difference(model, name, reference, metric, passage)
            else:
                value = results.interval(model, name, metric, passage)
            if passage is None:
                axes.plot([value.low, value.high], [row, row], color=color, lw=1.6, zorder=2)
                axes.plot(value.mean, row, "o", color=color, ms=4.8, zorder=4)
            else:
                marker = MARKERS[index % len(MARKERS)]
                axes.plot(
                    value.mean, row, marker, mfc="white", mec=color, mew=0.8, ms=3.6, zorder=3
                )
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.grid(axis="both")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    sns.despine(ax=axes, left=True)
    _metric_axis(axes, metric, above_reference=reference is not None)


def _metric_axis(axes: Any, metric: str, above_reference: bool) -> None:
    if metric == "kl":
        axes.set_xlabel("KL (nats per token)")
        _log_axis(axes.xaxis, axes.set_xscale)
    elif metric == "nll":
        axes.set_xlabel(f"{'added ' if above_reference else ''}NLL (nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(4))
    else:
        axes.set_xlabel("same most likely token")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _log_axis(
    axis: Any, set_scale: Callable[[str], None], labelled: tuple[float, ...] = (1,)
) -> None:
    """Log scale with plain numbers at the ``labelled`` multiples of each decade."""
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=labelled))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _quality_legend(figure: Figure, results: Results, methods: list[str]) -> None:
    from matplotlib.lines import Line2D

    used = {_family(results.methods[name]) for name in methods}
    handles = [
        Line2D([], [], color=color, marker="o", ms=4.8, lw=1.6, label=family)
        for family, color in _family_colors().items()
        if family in used
    ]
    if len(results.passages) > 1:
        handles += [
            Line2D([], [], color="0.4", marker=MARKERS[i + 1], mfc="white", ls="", ms=4, label=name)
            for i, name in enumerate(results.passages)
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def draw_boost(results: Results) -> Figure:
    """Quality against the boost ratio by selection, one row per model and kind of boost."""
    rows = [(model, sweep) for model in results.models for sweep in boost_sweeps(results)]
    figure = Figure(figsize=(TEXT_WIDTH, 0.35 + 2.6 * max(1, len(rows))))
    axes = figure.subplots(max(1, len(rows)), 2, squeeze=False)
    if not rows:
        for panel in axes.flat:
            panel.set_axis_off()
        axes[0, 0].text(0, 0.5, "No boosted method was measured.", va="center")
        return figure
    for (model, sweep), (left, right) in zip(rows, axes, strict=True):
        _draw_sweep(left, results, model, sweep, "kl")
        _draw_sweep(right, results, model, sweep, "nll")
        prefix = f"{model}: " if len(results.models) > 1 else ""
        left.set_title(prefix + _sweep_title(results, sweep))
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


Sweep = dict[str, list[tuple[float, str]]]  # selection: (ratio, method name) by ratio


def boost_sweeps(results: Results) -> list[Sweep]:
    """Boosted methods grouped into curves; unboosted and all-boosted ends belong to every rule."""
    families: dict[tuple[Any, ...], list[Method]] = {}
    for method in results.methods.values():
        if 0 < method.boost_ratio < 1:
            key = dataclasses.replace(
                method, name="", title="", boost_ratio=0.0, selection="magnitude", seed=0
            )
            families.setdefault(dataclasses.astuple(key), []).append(method)
    sweeps = []
    for members in families.values():
        sweep: Sweep = {}
        for selection in SELECTIONS:
            inner = {m.boost_ratio: m.name for m in members if m.selection == selection}
            if not inner:
                continue
            for end in (0.0, 1.0):
                found = results.find(dataclasses.replace(members[0], boost_ratio=end))
                if found is not None:
                    inner[end] = found
            sweep[selection] = sorted(inner.items())
        sweeps.append(sweep)
    return sorted(sweeps, key=lambda sweep: -sum(map(len, sweep.values())))


def _sweep_title(results: Results, sweep: Sweep) -> str:
    methods = [results.methods[name] for points in sweep.values() for _, name in points]
    method = next(m for m in methods if 0 < m.boost_ratio < 1)
    return f"K{method.key_bits}V{method.value_bits}, boost to {method.boost_bits} bits"


def _draw_sweep(axes: Any, results: Results, model: str, sweep: Sweep, metric: str) -> None:
    colors = _family_colors()
    apart = 0.006 if metric == "kl" else 0.0  # error bars beside each other
    for index, (selection, points) in enumerate(sweep.items()):
        values = [results.interval(model, name, metric) for _, name in points]
        means = np.array([value.mean for value in values])
        spread = [
            means - [value.low for value in values],
            [value.high for value in values] - means,
        ]
        if metric == "nll":
            spread = [np.zeros_like(means)] * 2  # its spread is that of the texts, not of methods
        axes.errorbar(
            [ratio + apart * (index - 1) for ratio, _ in points],
            means,
            yerr=spread,
            color=colors[_boost_label(selection)],
            marker=MARKERS[SELECTIONS.index(selection)],
            ms=4.2,
            lw=1.4,
            elinewidth=0.9,
            ls=LINES[SELECTIONS.index(selection)],
            label=selection,
            zorder=3 - 0.1 * index,
        )
    reference = next((n for n, m in results.methods.items() if not m.quantized), None)
    if metric == "nll":
        axes.set_ylabel("NLL (nats per token)")
        if reference is not None:
            level = results.interval(model, reference, "nll").mean
            axes.axhline(level, color=INK, lw=1, ls=(0, (4, 2)), label="16 bit")
    else:
        axes.set_ylabel("KL to 16 bit (nats per token)")
        _log_axis(axes.yaxis, axes.set_yscale, (1, 2, 5))
    axes.set_xlabel("boosted key channels")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xlim(-0.03, 1.03)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="y")
    sns.despine(ax=axes)


def draw_attention_error(results: Results) -> Figure:
    """Relative RMS error of the attention output by layer, one panel per model."""
    shown = [
        name
        for name, method in results.methods.items()
        if method.quantized and "%" not in method.title  # a sweep would be a thicket of lines
    ]
    shown.sort(key=lambda name: results.methods[name].boost_ratio == 0)  # strongest colours first
    rows = len(results.models)
    figure = Figure(figsize=(TEXT_WIDTH, 0.2 + 2.7 * rows))
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    for model, panel in zip(results.models, axes, strict=True):
        for index, name in enumerate(shown):
            cells = [results.cells[model, passage, name] for passage in results.passages]
            if not all(cell.metrics.get("attention_error") for cell in cells):
                continue
            errors = np.mean([cell.metrics["attention_error"] for cell in cells], axis=0)
            panel.plot(
                errors,
                color=_colors()[index % 10],
                marker=MARKERS[index % len(MARKERS)],
                ls="-" if index < 10 else "--",
                ms=3.2,
                lw=1.2,
                label=results.methods[name].title,
            )
        if rows > 1:
            panel.set_title(model)
        panel.set_xlabel("layer")
        panel.set_ylabel("relative RMS error")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.margins(x=0.02)
        _log_axis(panel.yaxis, panel.set_yscale, (1, 2, 5))
        panel.grid(axis="y")
        sns.despine(ax=panel)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return figure


def draw_channels(results: Results) -> Figure:
    """Magnitude, sensitivity and boosted share by channel, one column per model (Figure 2)."""
    first: dict[str, Record] = {}  # text of each model
    for (model, _), record in results.analyses.items():
        first.setdefault(model, record)
    records = sorted(first.items())
    figure = Figure(figsize=(TEXT_WIDTH, 5.6 * len(records)))
    blocks = figure.subfigures(len(records), 1, squeeze=False)[:, 0]
    for (model, record), block in zip(records, blocks, strict=True):
        _draw_channel_maps(block, model, record)
    return figure


def _draw_channel_maps(figure: Any, model: str, record: Record) -> None:
    maps = record["analysis"]["maps"]
    magnitude = np.array(maps["magnitude"])  # [H, P, D]
    sensitivity = np.array(maps["sensitivity"])  # [Hq, D]
    heads, pages, channels = magnitude.shape
    boosted = np.zeros((heads, channels))
    for head, lists in enumerate(maps["boosted"]):
        for chosen in lists:
            boosted[head, chosen] += 1 / pages
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[2.6, 2.0, 1.0])
    passage = record["passage"]["name"]
    figure.suptitle(f"{model}, layer {maps['layer']}, {passage}", fontsize=8.5, weight="bold")
    _heatmap(
        panels[0],
        magnitude.reshape(heads * pages, channels),
        heads,
        "mean |K|",
        "Magnitude of key channels, page by page",
        "KV head",
    )
    positive = sensitivity[sensitivity > 0]
    _heatmap(
        panels[1],
        sensitivity,
        heads,
        "MSE of scores",
        "Sensitivity: score error when one channel has 2 bits",
        "query heads of KV head",
        norm=LogNorm(float(np.quantile(positive, 0.02)), float(positive.max())),
    )
    _heatmap(
        panels[2],
        boosted,
        heads,
        "share of pages",
        f"Channels boosted by {record['method']['title']}",
        "KV head",
        norm=matplotlib.colors.Normalize(0, 1),
    )
    panels[2].set_xlabel("channel")


def _heatmap(
    axes: Any,
    values: Any,
    groups: int,
    bar_label: str,
    title: str,
    ylabel: str,
    norm: Any = None,
) -> None:
    """Rows of channels in ``groups`` equal groups with a white line between them."""
    rows = len(values)
    image = axes.imshow(values, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
    for group in range(1, groups):
        axes.axhline(group * rows / groups - 0.5, color="white", lw=1.2)
    axes.set_yticks([(g + 0.5) * rows / groups - 0.5 for g in range(groups)], range(groups))
    axes.tick_params(axis="y", length=0)
    axes.set_title(title)
    axes.set_ylabel(ylabel)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.figure.colorbar(image, ax=axes, label=bar_label, pad=0.015, aspect=14)


def draw_selection(results: Results) -> Figure:
    """Overlap, captured share and stability by layer, one row per model."""
    models = sorted({model for model, _ in results.analyses})
    figure = Figure(figsize=(TEXT_WIDTH, 0.5 + 2.2 * len(models)))
    axes = figure.subplots(len(models), 3, squeeze=False, sharey=True)
    series = (
        ("Overlap with the most sensitive", ("overlap",), "overlap_chance"),
        ("Score error captured", ("captured", "captured_best"), "overlap_chance"),
        ("Stability over pages", ("jaccard_consecutive", "jaccard_first"), "jaccard_chance"),
    )
    names = {
        "overlap": "chosen",
        "captured": "chosen",
        "captured_best": "best possible",
        "jaccard_consecutive": "with the page before",
        "jaccard_first": "with the first page",
    }
    colors = {"captured_best": _colors()[1], "jaccard_first": _colors()[1]}
    for model, panels in zip(models, axes, strict=True):
        records = [record for (m, _), record in results.analyses.items() if m == model]
        for panel, (title, fields, chance) in zip(panels, series, strict=True):
            for field in fields:
                layers = [
                    [layer[field] for layer in record["analysis"]["layers"]] for record in records
                ]
                color = colors.get(field, _colors()[0])
                panel.plot(np.mean(layers, axis=0), color=color, lw=1.5, label=names[field])
                if len(layers) > 1:
                    low, high = np.min(layers, axis=0), np.max(layers, axis=0)
                    panel.fill_between(range(len(low)), low, high, color=color, alpha=0.2, lw=0)
            level = records[0]["analysis"]["layers"][0][chance]
            panel.axhline(level, color=INK, lw=1, ls=":", label="by chance")
            panel.set_title(title)
            panel.set_xlabel("layer")
            panel.set_ylim(0, 1.42)  # room for the legend above the curves
            panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            panel.grid(axis="y")
            panel.legend(loc="upper left", borderaxespad=0.1)
            sns.despine(ax=panel)
        panels[0].set_ylabel("share" if len(models) == 1 else f"{model}\nshare")
    return figure


DRAWERS: dict[str, Callable[[Results], Figure]] = {
    "quality": draw_quality,
    "boost": draw_boost,
    "attention_error": draw_attention_error,
    "channels": draw_channels,
    "selection": draw_selection,
}
