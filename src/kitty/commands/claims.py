"""`kitty claims`: every claim of the paper and of this project, held against records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def claims(
    records: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results folders or records (default: results and the committed measurements)."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Put the claims between the claims markers of this document."),
    ] = None,
) -> None:
    """Say of every claim what the paper has, what was measured here, and a verdict.

    Verdicts: reproduced (measured, inside the band), contradicted (measured, our whole interval
    outside), not reproduced (measured, neither), not run here (no record tells).
    """
    from kitty.cli import show_table
    from kitty.report import claims_text
    from kitty.report.claims import collect, judge, reference_places

    default = [path for path in (Path("results"), *reference_places()) if path.is_dir()]
    judgements = judge(collect(records or default))
    text = claims_text.markdown(judgements)
    if write is not None:
        claims_text.write_between_markers(write, claims_text.markdown(judgements, level=4))
    if markdown:
        print(text, end="")
        return
    columns = ["claim", "statement", "paper", "ours", "band", "verdict", "tolerance", "records"]
    frame = claims_text.frame(judgements)
    summary = claims_text.summary(judgements)
    show_table(columns, frame[columns].to_numpy().tolist(), summary)
    if not sys.stdout.isatty():
        print(summary, file=sys.stderr)
