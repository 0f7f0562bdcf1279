"""`kitty submit`: a whole experiment as one SLURM job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kitty.commands.options import RunCodeOption


def submit(
    experiment: Annotated[str, typer.Argument(help="Name, or path of an experiment file.")],
    results: Annotated[str, typer.Option(help="Folder of the results.")] = "results",
    cores: Annotated[int, typer.Option(min=1, help="Cores of the job.")] = 4,
    memory_mb: Annotated[int, typer.Option(min=1, help="Memory of the job.")] = 16000,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of the job (default: 1 if it needs one).")
    ] = None,
    minutes: Annotated[
        int, typer.Option(min=1, help="Time limit; at its end the job requeues itself.")
    ] = 240,
    run_code: RunCodeOption = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the command, submit nothing.")
    ] = False,
) -> None:
    """Submit an experiment as one SLURM job, with Snakemake inside it.

    Account, partition and image come from configs/site.yaml (or the file named in KITTY_SITE).
    Submitting again after the job was cancelled goes on where it stopped.
    """
    import shlex

    from kitty.errors import KittyError
    from kitty.launcher import ERROR_MARK, check_writable
    from kitty.site import Wanted, load_site, single_job
    from kitty.workflow import Plan

    plan = Plan.load(experiment, results)
    wanted = Wanted(cores, memory_mb, int(plan.wants_gpu()) if gpus is None else gpus, minutes)
    command = single_job(load_site(), plan, results, wanted, wait=wait, run_code=run_code)
    if show:
        print(shlex.join(command))
        return
    check_writable(Path(results))
    try:
        done = subprocess.run(command)
    except FileNotFoundError:
        raise KittyError(
            "The program sbatch is not here: submit on a machine of the SLURM cluster."
        ) from None
    if wait and not Path(plan.report()).exists():  # sbatch gives 0 for a cancelled job
        print(
            f"{ERROR_MARK}The job has ended and {plan.report()} is not there: its log is in "
            f"{results}, and what is finished stays, so submit again.",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    raise typer.Exit(done.returncode)
