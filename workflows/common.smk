# What all rules share: the experiment, the places of its files, the command that a job runs.

import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.settings.types import DeploymentMethod

from kitty.errors import KittyError
from kitty.site import load_site
from kitty.workflow import Plan

try:
    IMAGE = config.get("container") or load_site().image or "kitty.sif"
except KittyError as error:
    raise WorkflowError(str(error)) from None


container: IMAGE


wildcard_constraints:
    model="[^/]+",
    passage="[^/]+",
    task="[^/]+",
    method="[^/]+",
    repeat=r"\d+",
    implementation="[^/]+",
    workload="[^/]+",


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
TASKS = PLAN.task_records()
LATENCIES = PLAN.latency_records()
LATENCY_FILES = PLAN.latency_files()
FIGURE_SUFFIXES = (".pdf", ".png")
TABLES = PLAN.tables()
CLAIMS = PLAN.claims()
REFERENCE = PLAN.reference_records()
FIGURES = PLAN.figures()
REPORT = PLAN.report()

# Jobs run with the interpreter that runs Snakemake, wherever the working directory is; inside a container with the
# container's own, also where the file system of both is the same.
if DeploymentMethod.APPTAINER not in workflow.deployment_settings.deployment_method:
    shell.prefix(
        f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"; '
    )
SOURCE = PLAN.experiment_argument()


# What a measuring job asks a scheduler for; a second attempt may have been killed for too little.
def memory_mb(wildcards, attempt):
    return EXPERIMENT.memory_mb * attempt


def minutes(wildcards, attempt):
    return EXPERIMENT.minutes * attempt


GPU = 1 if EXPERIMENT.device.startswith("cuda") else 0

# Scoring some tasks means running programs that the model writes: only where the user says so.
RUN_CODE = "--run-code" if str(config.get("run_code", "")).lower() == "true" else ""

# All cores of this run, which a job may take to be alone; on a cluster the scheduler keeps others away.
ALL_CORES = workflow.resource_settings.cores or EXPERIMENT.threads
