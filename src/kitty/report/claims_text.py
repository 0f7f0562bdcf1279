"""Judged claims as a table (CSV, Markdown, terminal) and inside a marked part of a document."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import pandas as pd

from kitty.errors import KittyError
from kitty.records import Record, write_atomically
from kitty.report.claims import NOT_RUN_HERE, Judgement, collect, counts, judge, reference_places
from kitty.report.files import CLAIMS
from kitty.report.paper import PRINTED, Paper, load_paper
from kitty.report.tables import pipe_table, to_csv

BEGIN = "<!-- claims:begin -->"
END = "<!-- claims:end -->"
SHOWN_PATHS = 2

SECTIONS = {
    "abstract": "Abstract",
    "table-1": "Table 1",
    "table-2": "Table 2",
    "table-3": "Table 3",
    "table-4": "Table 4",
    "figure-2": "Figure 2",
    "figure-4": "Figure 4",
    "figure-5": "Figure 5",
    "ordering": "Orderings by KL divergence",
    "selection": "Choice of channels (this project's)",
    "kernel": "Kernels (this project's floors)",
    "engine": "Engine (this project's floors)",
}


def write_claims(
    records: Sequence[tuple[Path, Record]], out_dir: str | Path, *, root: Path | None = None
) -> list[Path]:
    """Write ``claims.csv`` and ``claims.md``, of these records and the committed ones.

    Args:
        records: with their paths.
        out_dir: folder of the files.
        root: folder that paths are shown relative to, where they lie below it.

    Raises:
        KittyError: a record lacks what its kind needs, or the folder cannot be written.
    """
    judgements = judge(with_reference(records))
    texts = {"claims.csv": csv_text(judgements, root), "claims.md": markdown(judgements, root)}
    paths = []
    for name in CLAIMS:
        paths.append(Path(out_dir) / name)
        write_atomically(paths[-1], texts[name].encode())
    return paths


def with_reference(records: Sequence[tuple[Path, Record]]) -> list[tuple[Path, Record]]:
    """Records together with the committed measurements that are not among them."""
    known = {path.resolve() for path, _ in records}
    more = [item for item in collect(reference_places()) if item[0].resolve() not in known]
    return [*records, *more]


def frame(judgements: Iterable[Judgement], root: Path | None = None) -> pd.DataFrame:
    """One row a claim, with every path."""
    tolerances = load_paper().tolerances
    return pd.DataFrame(
        [
            {
                "claim": j.claim.identifier,
                "statement": j.statement,
                "paper": j.paper or "not printed",
                "mark": j.claim.mark,
                "ours": ours(j),
                "band": j.band,
                "tolerance": tolerances[j.claim.tolerance],
                "verdict": j.verdict,
                "hardware": j.claim.hardware,
                "note": j.claim.note,
                "records": " ".join(shown(path, root) for path in j.paths),
            }
            for j in in_sections(list(judgements))
        ]
    )


def ours(judgement: Judgement) -> str:
    """Our figure, or what it would take to have one."""
    if judgement.verdict == NOT_RUN_HERE and not judgement.paths:
        reason = judgement.ours.rstrip(".")
        return f"{reason}" if reason else f"needs {judgement.claim.hardware}"
    return judgement.ours


def shown(path: Path, root: Path | None) -> str:
    """A record's path, the same wherever the results and the checkout lie."""
    path = path.resolve()
    folders = [folder.parents[1] for folder in reference_places()]
    if root is not None:
        folders.insert(0, root)
    for folder in folders:
        if path.is_relative_to(folder.resolve()):
            return path.relative_to(folder.resolve()).as_posix()
    return os.path.relpath(path)


def csv_text(judgements: Iterable[Judgement], root: Path | None = None) -> str:
    """All columns."""
    return to_csv(frame(judgements, root))


def summary(judgements: Sequence[Judgement]) -> str:
    """How many claims have each verdict, in one line."""
    found = counts(judgements)
    return f"{len(judgements)} claims: " + ", ".join(f"{n} {name}" for name, n in found.items())


def markdown(judgements: Sequence[Judgement], root: Path | None = None, level: int = 2) -> str:
    """Every claim by section, then why the tolerances are what they are, and the conflicts."""
    paper, head = load_paper(), "#" * level
    parts = [
        f"{summary(judgements)}.\n",
        "Reproduced: measured, and inside the band. Contradicted: measured, and our whole interval "
        "lies outside. Not reproduced: measured, and neither. Not run here: no record tells.\n",
    ]
    for section, group in groupby(in_sections(judgements), section_of):
        parts.append(f"{head} {SECTIONS.get(section, section)}\n")
        parts.append(pipe_table(_readable(list(group), root)))
    parts.append(f"{head} Tolerances\n")
    parts.append("".join(f"* {name}: {text}\n" for name, text in paper.tolerances.items()))
    parts.append(f"{head} Where the sources disagree\n")
    parts.append(_conflicts(paper))
    return "\n".join(parts)


def section_of(judgement: Judgement) -> str:
    """The part of the paper, or of this project, that a claim belongs to."""
    return judgement.claim.identifier.split("/")[0]


def in_sections(judgements: Sequence[Judgement]) -> list[Judgement]:
    """Claims in the order of SECTIONS, unknown sections last."""
    order = {name: place for place, name in enumerate(SECTIONS)}
    return sorted(judgements, key=lambda j: order.get(section_of(j), len(order)))


def _readable(judgements: list[Judgement], root: Path | None) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "Claim": f"`{j.claim.identifier}`",
                "Statement": " ".join([j.statement, j.claim.note]).strip(),
                "Paper": _paper_text(j),
                "Ours": ours(j),
                "Band": f"{j.band} ({j.claim.tolerance})".strip(),
                "Verdict": j.verdict,
                "Records": _some_paths(j.paths, root),
            }
            for j in judgements
        ]
    )


def _paper_text(judgement: Judgement) -> str:
    text = judgement.paper or "not printed"
    mark = judgement.claim.mark
    return text if mark == PRINTED or not judgement.paper else f"{text} ({mark})"


def _some_paths(paths: Sequence[Path], root: Path | None) -> str:
    names = [f"`{shown(path, root)}`" for path in paths[:SHOWN_PATHS]]
    more = len(paths) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "") or "-"


def _conflicts(paper: Paper) -> str:
    return "".join(
        f"* {c['about']}. {' '.join(c['sources'].split())} Here: {c['choice']}\n"
        for c in paper.conflicts
    )


def write_between_markers(document: str | Path, text: str) -> Path:
    """Put ``text`` between the claims markers of a document, leaving the rest as it is.

    Raises:
        KittyError: the document is missing, or does not have each marker once, in order.
    """
    path = Path(document)
    try:
        content = path.read_text()
    except OSError as error:
        raise KittyError(
            f"The document {path} cannot be read ({error.strerror}): name an existing file."
        ) from error
    begin, end = content.find(BEGIN), content.find(END)
    if content.count(BEGIN) != 1 or content.count(END) != 1 or end < begin:
        raise KittyError(
            f"The document {path} has no place for the claims: put one line {BEGIN} and after it "
            f"one line {END} where they belong."
        )
    new = f"{content[: begin + len(BEGIN)]}\n\n{text.strip()}\n\n{content[end:]}"
    if new != content:
        write_atomically(path, new.encode())
    return path
