"""Tables as CSV, Markdown and LaTeX; the same records give the same bytes.

No times and no dates, fixed order of rows, fixed number of digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from kitty.evaluation.bootstrap import Interval
from kitty.records import write_atomically
from kitty.report.data import METRICS, Results, Source, load_results
from kitty.report.files import table_files
from kitty.report.orderings import expected_orderings, verdict

ALL_PASSAGES = "all"
DIGITS = 5

SHORT_DIGITS = {
    "bits": 2,
    "kl": 4,
    "kl_difference": 4,
    "difference": 4,
    "accuracy": 2,
    "deviation": 2,
    "tokens_per_s": 1,
    "best_tokens_per_s": 1,
    "batch_ratio": 2,
}

# Column headings of Markdown and LaTeX; CSV keeps the names.
HEADINGS = {
    "task": "Task",
    "problems": "Problems",
    "title": "Method",
    "model": "Model",
    "passage": "Text",
    "bits": "Bits",
    "nll": "NLL",
    "kl": "KL",
    "top1": "Top-1",
    "attention_error": "Attention error",
    "accuracy": "Accuracy, %",
    "deviation": "Largest deviation",
    "runs": "Repeats",
    "n": "Problems asked",
    "worse_title": "Higher KL",
    "better_title": "Lower KL",
    "difference": "Difference",
    "verdict": "Verdict",
    "finding": "Finding",
    "first_title": "First",
    "second_title": "Second",
    "kl_difference": "KL difference",
    "nll_difference": "NLL difference",
    "layers": "Layers",
    "overlap": "Overlap",
    "overlap_chance": "Overlap, chance",
    "captured": "Captured",
    "captured_best": "Captured, best",
    "jaccard_consecutive": "Jaccard, next page",
    "jaccard_first": "Jaccard, first page",
    "jaccard_chance": "Jaccard, chance",
    "implementation_title": "Implementation",
    "workload": "Prompt + new",
    "batch": "Batch",
    "outcome": "Outcome",
    "tokens_per_s": "Tokens/s",
    "prefill_s": "Prefill s",
    "step_ms_p50": "Step ms",
    "step_ms_last": "Step ms at the end",
    "peak_gb": "Peak GB",
    "cache_gb": "Cache GB",
    "cache_ratio": "fp16 / cache",
    "largest_batch": "Largest batch",
    "best_batch": "Batch of best",
    "best_tokens_per_s": "Best tokens/s",
    "batch_ratio": "Batch, to 16 bit",
    "speed_ratio": "Tokens/s, to 16 bit",
}


def write_tables(source: Source, out_dir: str | Path) -> list[Path]:
    """Write every table of an experiment's records.

    Args:
        source: folder of records, or (path, record) pairs.
        out_dir: folder for the files of :func:`kitty.report.table_files`.

    Raises:
        KittyError: records are missing or damaged, or the folder cannot be written.
    """
    results = load_results(source)
    paths = []
    for file in table_files(bool(results.analyses)):
        name, suffix = file.rsplit(".", 1)
        frame = BUILDERS[name](results)
        text = {"csv": to_csv, "md": to_markdown, "tex": to_latex}[suffix](frame)
        path = Path(out_dir) / file
        write_atomically(path, text.encode())
        paths.append(path)
    return paths


def quality_table(results: Results) -> pd.DataFrame:
    """One row per model, passage and method, with 95% bounds of each metric."""
    return pd.DataFrame(
        [
            _quality_row(results, model, method, passage)
            for model in results.models
            for passage in results.passages
            for method in results.methods
        ]
    )


def summary_table(results: Results) -> pd.DataFrame:
    """One row per model and method over all passages together."""
    return pd.DataFrame(
        [
            _quality_row(results, model, method, None)
            for model in results.models
            for method in results.methods
        ]
    )


def _quality_row(results: Results, model: str, name: str, passage: str | None) -> dict[str, Any]:
    method = results.methods[name]
    cells = [results.cells[model, p, name] for p in ([passage] if passage else results.passages)]
    row: dict[str, Any] = {
        "method": name,
        "title": method.title,
        "model": model,
        "passage": passage or ALL_PASSAGES,
        "bits": cells[0].metrics["effective_bits"],
        "key_bits": method.key_bits,
        "value_bits": method.value_bits,
        "boost_ratio": method.boost_ratio,
        "boost_bits": method.boost_bits,
        "selection": method.selection,
        "sink": method.sink,
        "tokens": sum(cell.num_tokens for cell in cells),
        "repeats": cells[0].repeats,
    }
    for metric in METRICS:
        interval = results.interval(model, name, metric, passage)
        row |= _spread(metric, interval)
    if all("attention_error" in cell.metrics for cell in cells):
        errors = [e for cell in cells for e in cell.metrics["attention_error"]]
        row["attention_error"] = sum(errors) / len(errors)
    return row


def _spread(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def differences_table(results: Results) -> pd.DataFrame:
    """Paired differences of each method and the one after it in KL divergence, over all passages.

    Positive: the second method is better. The 16-bit method is left out.
    """
    rows = []
    for model in results.models:
        kl = {
            name: results.interval(model, name, "kl").mean
            for name, method in results.methods.items()
            if method.quantized
        }
        order = sorted(kl, key=lambda name: (-kl[name], name))
        for first, second in pairwise(order):
            row: dict[str, Any] = {
                "model": model,
                "first": first,
                "second": second,
                "first_title": results.methods[first].title,
                "second_title": results.methods[second].title,
            }
            for metric in ("kl", "nll"):
                difference = results.difference(model, first, second, metric)
                row |= _spread(f"{metric}_difference", difference)
                row[f"{metric}_excludes_zero"] = difference.excludes_zero
            rows.append(row)
    columns = ["model", "first", "second", "first_title", "second_title", "kl_difference"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def orderings_table(results: Results) -> pd.DataFrame:
    """The paper's expected orderings with a verdict, per passage and over all of them."""
    rows = []
    for model in results.models:
        for ordering in expected_orderings(results):
            for passage in _passages(results):
                difference = results.difference(
                    model, ordering.worse, ordering.better, "kl", passage
                )
                rows.append(
                    {
                        "model": model,
                        "passage": passage or ALL_PASSAGES,
                        "finding": ordering.finding,
                        "worse": ordering.worse,
                        "better": ordering.better,
                        "worse_title": results.methods[ordering.worse].title,
                        "better_title": results.methods[ordering.better].title,
                        "kl_worse": results.interval(model, ordering.worse, "kl", passage).mean,
                        "kl_better": results.interval(model, ordering.better, "kl", passage).mean,
                        **_spread("difference", difference),
                        "verdict": verdict(difference),
                    }
                )
    columns = ["model", "passage", "finding", "worse", "better", "difference", "verdict"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def _passages(results: Results) -> list[str | None]:
    """All passages together first; one passage alone is the same as all."""
    return [None] if len(results.passages) == 1 else [None, *results.passages]


def channels_table(results: Results) -> pd.DataFrame:
    """Overlap of magnitude and sensitivity, and stability over pages: means over layers."""
    return pd.DataFrame(
        [
            {
                "model": model,
                "passage": passage,
                "method": record["method"]["name"],
                "title": record["method"]["title"],
                "layers": len(record["analysis"]["layers"]),
                **record["metrics"],
            }
            for (model, passage), record in results.analyses.items()
        ]
    )


BUILDERS: dict[str, Callable[[Results], pd.DataFrame]] = {
    "quality": quality_table,
    "summary": summary_table,
    "differences": differences_table,
    "orderings": orderings_table,
    "channels": channels_table,
}


def to_csv(frame: pd.DataFrame) -> str:
    """All columns under their names."""
    return frame.map(_number).to_csv(index=False, lineterminator="\n")


def to_markdown(frame: pd.DataFrame) -> str:
    """The readable columns as a pipe table."""
    return pipe_table(readable(frame))


def pipe_table(shown: pd.DataFrame) -> str:
    """A frame of texts as a Markdown table with aligned columns."""
    cells = [list(shown.columns), *shown.to_numpy().tolist()]
    cells = [[str(cell).replace("|", "\\|").replace("*", "\\*") for cell in row] for row in cells]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(shown.columns))]
    rows = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([rows[0], rule, *rows[1:]]) + "\n"


def to_latex(frame: pd.DataFrame) -> str:
    """The readable columns as a booktabs tabular."""
    return booktabs(readable(frame))


def booktabs(shown: pd.DataFrame) -> str:
    """A frame of texts as a LaTeX tabular."""
    lines = [" & ".join(_tex(str(cell)) for cell in row) + r" \\" for row in shown.to_numpy()]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{tabular}{" + "l" * len(shown.columns) + "}",
            r"\toprule",
            " & ".join(_tex(str(name)) for name in shown.columns) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def readable(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns with a heading only, bounds folded into brackets, a lone model left out."""
    columns = {}
    for name, heading in HEADINGS.items():
        if name not in frame or (name == "model" and frame["model"].nunique() <= 1):
            continue
        values = [_short(name, value) for value in frame[name]]
        if f"{name}_low" in frame:
            bounds = zip(frame[f"{name}_low"], frame[f"{name}_high"], strict=True)
            values = [
                f"{value} [{_short(name, low)}, {_short(name, high)}]"
                for value, (low, high) in zip(values, bounds, strict=True)
            ]
        columns[heading] = values
    return pd.DataFrame(columns)


def _short(name: str, value: Any) -> str:
    """Two digits for bits and percent, three for shares and NLL, four for KL."""
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    return _fixed(value, SHORT_DIGITS.get(name, 3))


def _number(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else _fixed(value, DIGITS)  # NaN: no such number


def _fixed(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text  # no -0.000


def _tex(text: str) -> str:
    text = text.replace("\\", r"\textbackslash ")
    for char in "&%#_$":
        text = text.replace(char, "\\" + char)
    return text.replace("*", r"$^{*}$").replace("[", "{[}").replace("]", "{]}")
