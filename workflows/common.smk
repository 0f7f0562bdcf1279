# What all rules share: the experiment, the places of its files, the command that a job runs.

import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from kitty.errors import KittyError
from kitty.workflow import Plan


container: config.get("container", "kitty.sif")


wildcard_constraints:
    model="[^/]+",
    passage="[^/]+",
    method="[^/]+",
    repeat=r"\d+",


try:
    PLAN = Plan.load(
        config.get("experiment", "smoke"), config.get("results", "results")
    )
except KittyError as error:
    raise WorkflowError(str(error)) from None

EXPERIMENT = PLAN.experiment
ROOT = str(PLAN.root)
QUALITY = PLAN.quality_records()
ANALYSES = PLAN.analysis_records()
TABLES = PLAN.tables()
CLAIMS = PLAN.claims()
REFERENCE = PLAN.reference_records()
FIGURES = PLAN.figures()
REPORT = PLAN.report()

# Jobs run with the interpreter that runs Snakemake, wherever the working directory is; inside a container,
# where that folder does not exist, with the container's own.
shell.prefix(f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"; ')
SOURCE = PLAN.experiment_argument()
