"""`kitty compare`: measured records against reference records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare_records(
    mine: Annotated[Path, typer.Argument(help="Folder of results, or a record.")],
    reference: Annotated[Path, typer.Argument(help="Folder of reference results, or a record.")],
    every: Annotated[
        bool, typer.Option("--all", help="Show every value, not only what lies beyond.")
    ] = False,
) -> None:
    """Say where records differ from the reference by more than configs/tolerances.yaml allows.

    Exit status 1 where something lies beyond its tolerance or is missing, 2 where there is nothing
    to compare. What "mine" has and the reference lacks is no difference.
    """
    from kitty.cli import show_table
    from kitty.compare import compare

    found = compare(mine, reference)
    shown = found.found if every else found.beyond
    if shown:
        rows = [
            [d.record, d.metric, d.mine, d.reference, d.allowed, "beyond" if d.beyond else "within"]
            for d in shown
        ]
        columns = ["record", "metric", "mine", "reference", "allowed", "verdict"]
        show_table(columns, rows, f"{mine} against {reference}")
    print(
        f"{found.records} records, {len(found.found)} values compared, {found.skipped} not "
        f"comparable, {len(found.beyond)} beyond tolerance; {found.extra} records without a "
        "reference"
    )
    raise typer.Exit(1 if found.beyond else 0)
