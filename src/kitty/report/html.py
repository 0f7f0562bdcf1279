"""One self-contained HTML file with all tables and figures of an experiment and their provenance.

Images are inlined, so that the file can be sent by itself; nothing is fetched when it is opened.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from kitty.records import Record, write_atomically
from kitty.report import latency, paper_tables
from kitty.report.claims import judge
from kitty.report.claims_text import frame as claims_frame
from kitty.report.claims_text import summary as claims_summary
from kitty.report.claims_text import with_reference
from kitty.report.data import Results, Source, load_results
from kitty.report.figures import CAPTIONS, DRAWERS, render
from kitty.report.files import OF_ANALYSIS
from kitty.report.paper import load_paper
from kitty.report.scores import Scores
from kitty.report.tables import ALL_PASSAGES, BUILDERS, orderings_table, readable
from kitty.report.task_figures import CAPTIONS as TASK_CAPTIONS
from kitty.report.task_figures import FIGURE_4, render_tasks
from kitty.report.task_tables import NOTE as TASK_NOTE
from kitty.report.task_tables import readable_tasks, task_table

TABLE_NOTES = {
    "summary": (
        "Each method over all texts together, every predicted token counted once. Brackets: 95% "
        "interval of a bootstrap over pages of 128 tokens. Bits: stored bits per cached element of "
        "full pages, scales, zeros and channel lists included. NLL and KL in nats per token. "
        "Top-1: share of tokens with the most likely next token of the 16-bit model. Attention "
        "error: relative RMS, mean over layers."
    ),
    "quality": "The same for each text.",
    "orderings": (
        "What the paper's findings lead one to expect, and what was measured: the difference in KL "
        "between the two methods on the same pages. It holds where the whole 95% interval of the "
        "paired bootstrap lies above 0, is reversed where it lies below, and else is unresolved."
    ),
    "differences": (
        "Each method against the next better one by KL, as paired differences over all texts; an "
        "interval that includes 0 means that these texts do not tell the two apart."
    ),
    "channels": (
        "How the choice of boosted channels relates to their effect on the attention scores in the "
        "16-bit model's own keys and queries: means over layers, heads and pages. Overlap: share "
        "of the chosen channels among as many most sensitive ones. Captured: share of the summed "
        "score error in the chosen channels, and at best. Jaccard: similarity of the chosen sets "
        "of two pages."
    ),
}
TITLES = {
    "summary": "Quality by method",
    "quality": "Quality by text",
    "orderings": "Expected orderings",
    "differences": "Neighbouring methods",
    "channels": "Channel analysis",
    "boost": "Share of boosted channels",
    "attention_error": "Error by layer",
    "selection": "Choice of channels by layer",
}


def write_html(
    source: Source, out: str | Path, *, title: str | None = None, description: str = ""
) -> Path:
    """Write the report of an experiment's records.

    Args:
        source: folder of records, or (path, record) pairs.
        out: the HTML file; record paths in it are relative to its folder where they lie below it.
        title: heading; default: the experiment's name.
        description: a sentence under the heading.

    Raises:
        KittyError: records are missing or damaged, or the file cannot be written.
    """
    results, out = load_results(source), Path(out)
    first = results.records[0][1]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kitty.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template("report.html.j2").render(
        title=title or f"Kitty: {first['experiment']}",
        description=description,
        results=results,
        headline=_headline(results) if results.cells else [],
        sections=[
            *(_sections(results) if results.cells else []),
            *_latency_sections(results.records),
            *_paper_sections(results.records),
            *_metric_sections(results.records),
        ],
        claims=_claims(results.records, out.parent),
        methods=[_method_row(results, name) for name in results.methods],
        environments=_environments(results.records),
        records=[_provenance(path, record, out.parent) for path, record in results.records],
    )
    write_atomically(out, text.encode())
    return out


def _headline(results: Results) -> list[dict[str, str]]:
    """One line per expected ordering, over all texts: what it says and its verdict."""
    frame = orderings_table(results)
    rows = frame[frame["passage"] == ALL_PASSAGES].to_dict("records")
    return [
        {
            "model": row["model"] if len(results.models) > 1 else "",
            "finding": row["finding"],
            "verdict": row["verdict"],
            "numbers": f"KL {row['worse_title']} {row['kl_worse']:.3f}, "
            f"{row['better_title']} {row['kl_better']:.3f}",
        }
        for row in rows
    ]


def _sections(results: Results) -> list[dict[str, Any]]:
    """Figures with their captions and tables with their notes, in reading order."""
    order = [
        ("summary", "quality"),
        ("boost", None),
        ("orderings", None),
        ("differences", None),
        ("attention_error", None),
        ("channels", "channels"),
        ("selection", None),
        ("quality", None),
    ]
    sections: list[dict[str, Any]] = []
    for name, figure in order if results.cells else ():
        if name in OF_ANALYSIS and not results.analyses:
            continue
        drawn = figure or (name if name in DRAWERS and name not in BUILDERS else None)
        frame = BUILDERS[name](results) if name in BUILDERS else None
        if drawn is None and (frame is None or frame.empty):
            continue  # such as the orderings, where the methods that they compare were not measured
        sections.append(
            {
                "id": name,
                "title": TITLES[name],
                "image": _inline(render(results, drawn, "png")) if drawn else None,
                "caption": CAPTIONS[drawn] if drawn else None,
                "table": _table(frame) if frame is not None else None,
                "note": TABLE_NOTES.get(name),
            }
        )
    return sections


def _metric_sections(records: list[tuple[Path, Record]]) -> list[dict[str, Any]]:
    """All metrics of downstream tasks, where there are any."""
    frame = task_table(records)
    if frame.empty:
        return []
    shown = readable_tasks(frame)
    return [
        {
            "id": "task_metrics",
            "title": "Downstream tasks, all metrics",
            "image": None,
            "caption": None,
            "table": {"columns": list(shown.columns), "rows": shown.to_numpy().tolist()},
            "note": TASK_NOTE,
        }
    ]


def _paper_sections(records: list[tuple[Path, Record]]) -> list[dict[str, Any]]:
    """The paper's tables with our accuracies, where downstream tasks were measured."""
    paper = load_paper()
    scores = Scores(records, paper)
    if not scores:
        return []
    sections: list[dict[str, Any]] = [
        {
            "id": "tasks",
            "title": "Downstream tasks",
            "image": _inline(render_tasks("tasks", "png", scores, paper)),
            "caption": TASK_CAPTIONS["tasks"],
            "table": _table(paper_tables.tasks_table(scores, paper)),
            "note": "Mean over repeats with the 95% interval of a bootstrap over problems.",
        }
    ]
    for table in paper.tables.values():
        drawn = table.identifier == FIGURE_4
        shown = paper_tables.in_layout(table, paper_tables.lines_of(table, scores), paper)
        sections.append(
            {
                "id": table.identifier,
                "title": f"{table.title}: {table.caption}",
                "image": _inline(render_tasks(FIGURE_4, "png", scores, paper)) if drawn else None,
                "caption": TASK_CAPTIONS[FIGURE_4] if drawn else None,
                "table": {"columns": list(shown.columns), "rows": shown.to_numpy().tolist()},
                "note": paper_tables.NOTE + ".",
            }
        )
    return sections


def _claims(records: list[tuple[Path, Record]], folder: Path) -> dict[str, Any]:
    """Every claim with its verdict; those that some record tells of come first."""
    judgements = judge(with_reference(records))
    frame = claims_frame(judgements, folder)
    rows = frame.to_dict("records")
    return {
        "summary": claims_summary(judgements),
        "measured": [row for row in rows if row["records"]],
        "open": [row for row in rows if not row["records"]],
        "conflicts": load_paper().conflicts,
    }


def _latency_sections(records: list[tuple[Path, Record]]) -> list[dict[str, Any]]:
    """Memory and throughput, where they were measured."""
    return [
        {
            "id": section["id"],
            "title": section["title"],
            "image": None if section["png"] is None else _inline(section["png"]),
            "caption": section["caption"],
            "table": None if section["frame"] is None else _table(section["frame"]),
            "note": section["note"],
        }
        for section in latency.sections(records)
    ]


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _table(frame: pd.DataFrame) -> dict[str, Any]:
    shown = readable(frame)
    return {"columns": list(shown.columns), "rows": shown.to_numpy().tolist()}


def _method_row(results: Results, name: str) -> dict[str, Any]:
    method = results.methods[name]
    key, value = f"{method.key_bits} bits", f"{method.value_bits} bits"
    if method.boost_ratio:
        key += f", {method.boost_ratio * 100:g}% with {method.boost_bits} ({method.selection})"
    bits = results.effective_bits(results.models[0], name)
    return {"method": method, "keys": key, "values": value, "bits": f"{bits:.2f}"}


def _environments(records: list[tuple[Path, Record]]) -> list[dict[str, Any]]:
    """The distinct environments with the number of records of each."""
    counted = Counter(
        tuple(sorted((k, str(v)) for k, v in record["environment"].items() if v is not None))
        for _, record in records
    )
    return [{"items": list(items), "records": n} for items, n in sorted(counted.items())]


def _provenance(path: Path, record: Record, folder: Path) -> dict[str, Any]:
    path, folder = path.resolve(), folder.resolve()
    content = path.read_bytes() if path.is_file() else b""
    seconds, peak = record.get("wall_time_s"), record.get("peak_memory_bytes")
    return {
        "path": path.relative_to(folder) if path.is_relative_to(folder) else path,
        "sha256": hashlib.sha256(content).hexdigest()[:12] if content else "",
        "revision": record["revision"],
        "created": record.get("created", ""),
        "seconds": "" if seconds is None else f"{seconds:.0f}",
        "memory": "" if peak is None else f"{peak / 2**30:.1f}",
        "command": record.get("command", ""),
    }
