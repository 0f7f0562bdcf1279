"""`kitty instances`: several runs of one experiment at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kitty.commands.options import RunCodeOption

instances_app = typer.Typer(
    no_args_is_help=True,
    help="Several runs of one experiment at once, one GPU each, joined at the end.",
    epilog="Examples: `kitty instances run --jobs 4 smoke`, `kitty instances status`",
)

OutOption = Annotated[
    Path, typer.Option("--out", "--results", "-o", help="Folder that all results are joined in.")
]


@instances_app.command(
    "run",
    epilog=(
        "Examples: `kitty instances run --jobs 4 smoke`, "
        "`kitty instances run --jobs 8 --image kitty.sif --overlay kitty.img reviewer`"
    ),
)
def run(
    experiment: Annotated[str, typer.Argument(help="Name, or path of an experiment file.")],
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Number of instances.")],
    image: Annotated[
        Path | None, typer.Option(help="Start each instance in this Apptainer image.")
    ] = None,
    overlay: Annotated[
        Path | None, typer.Option(help="Overlay that all instances read (models, kernels).")
    ] = None,
    out: OutOption = Path("results"),
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores of all instances together (default: all).")
    ] = None,
    memory_mb: Annotated[
        int | None,
        typer.Option(min=1, help="Memory of all instances together (default: 80% of the free)."),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often a killed instance is started again.")
    ] = 2,
    run_code: RunCodeOption = False,
) -> None:
    """Start instances on disjoint parts of an experiment, watch them, join their records.

    What is measured already, by any earlier run, stays and is not measured again. Exit status 1
    where an instance failed: what the others made is joined, and the same command goes on.
    """
    from kitty.errors import KittyError
    from kitty.instances import Container, Order, default_memory_mb, run_instances
    from kitty.workflow import Plan

    if overlay is not None and image is None:
        raise KittyError(f"The overlay {overlay} belongs to an image: name it with --image.")
    container = None
    if image is not None:
        container = Container(image.absolute(), None if overlay is None else overlay.absolute())
    order = Order(
        plan=Plan.load(experiment, out),
        results=out,
        jobs=jobs,
        container=container,
        cores=cores or len(os.sched_getaffinity(0)),
        memory_mb=memory_mb or default_memory_mb(),
        restarts=restarts,
        run_code=run_code,
    )
    raise typer.Exit(run_instances(order, lambda line: print(line, flush=True)))


@instances_app.command("status", epilog="Example: `kitty instances status`")
def status(out: OutOption = Path("results")) -> None:
    """Say what each instance does and how much it has finished."""
    from kitty.cli import show_table
    from kitty.instances import read_states

    for name, state in read_states(out).items():
        rows = []
        for instance in state["instances"]:
            doing = instance["state"]
            if doing in ("running", "waiting") and not state["watched"]:
                doing = "stopped"
            counted = f"{instance['finished']} of {len(instance['files'])}"
            notes = instance["reason"] or ""
            gpu = instance["gpu"] or "-"
            rows.append(
                [str(instance["index"]), doing, counted, gpu, str(instance["restarts"]), notes]
            )
        watched = f"watched by process {state['pid']}" if state["watched"] else "not running"
        columns = ["instance", "state", "files of this round", "GPU", "restarts", "reason"]
        show_table(columns, rows, f"{name} ({watched})")
