"""The cluster that jobs are sent to: site settings, and the share of a node that a job has.

The SLURM profiles read this, so that account, partition and image stand in one small file.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kitty.config_files import load_config
from kitty.paths import configs_dir

if TYPE_CHECKING:
    from kitty.workflow import Plan

SITE_VARIABLE = "KITTY_SITE"


@dataclass(frozen=True)
class Site:
    """Settings of a cluster; configs/schemas/site.schema.json says what each means."""

    account: str | None = None
    partition: str | None = None
    image: str | None = None
    apptainer_args: str = "--nv"
    jobs: int = 50


def load_site() -> Site:
    """The site settings: of the file named in KITTY_SITE, else of configs/site.yaml.

    Raises:
        KittyError: the file is missing or breaks its schema.
    """
    named = os.environ.get(SITE_VARIABLE)
    path = Path(named).expanduser() if named else configs_dir() / "site.yaml"
    found = load_config("site", path) or {}
    if found.get("image") is not None:
        image = Path(found["image"]).expanduser()
        # a relative path counts from the site file, wherever Snakemake is started
        found["image"] = str(image if image.is_absolute() else path.absolute().parent / image)
    return Site(**found)


def allocated_cores(environ: Mapping[str, str] = os.environ) -> str:
    """Cores of the SLURM job that this runs in; ``all`` outside of one."""
    return environ.get("SLURM_CPUS_PER_TASK") or environ.get("SLURM_CPUS_ON_NODE") or "all"


def allocated_memory_mb(environ: Mapping[str, str] = os.environ) -> int | None:
    """Memory of the SLURM job that this runs in; None where it has no limit."""
    if per_node := environ.get("SLURM_MEM_PER_NODE"):
        return int(per_node)
    if per_core := environ.get("SLURM_MEM_PER_CPU"):
        cores = allocated_cores(environ)
        return int(per_core) * (int(cores) if cores.isdigit() else 1)
    return None


@dataclass(frozen=True)
class Wanted:
    """What one SLURM job is to get.

    Attributes:
        cores, memory_mb, gpus: of the job.
        minutes: time limit.
    """

    cores: int
    memory_mb: int
    gpus: int
    minutes: int


def single_job(
    site: Site, plan: Plan, results: str, wanted: Wanted, *, wait: bool, run_code: bool = False
) -> list[str]:
    """The sbatch command line that runs a whole experiment in one job."""
    inner = ["kitty", "run", plan.experiment_argument(), "--results", results]
    inner += ["--profile", "slurm-single", *(["--run-code"] if run_code else [])]
    if site.image is None:
        inner = [sys.executable, "-m", *inner]
    else:
        inner = ["apptainer", "exec", *shlex.split(site.apptainer_args), site.image, *inner]
    return [
        *("sbatch", f"--job-name=kitty-{plan.experiment.name}"),
        *([f"--account={site.account}"] if site.account else []),
        *([f"--partition={site.partition}"] if site.partition else []),
        *(f"--cpus-per-task={wanted.cores}", f"--mem={wanted.memory_mb}M"),
        *([f"--gpus={wanted.gpus}"] if wanted.gpus else []),
        *(f"--time={wanted.minutes}", f"--output={results}/slurm-%j.log"),
        *(["--wait"] if wait else []),
        *(str(configs_dir() / "profiles" / "slurm-single" / "job.sh"), *inner),
    ]
