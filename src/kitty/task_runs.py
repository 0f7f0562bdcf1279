"""An experiment's downstream tasks: model × task × method × repeat, with the sizes of the jobs.

Experiments may include those of others, so one file can stand for a whole paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kitty.errors import KittyError
from kitty.methods import Method, get_method, sweep_name
from kitty.tasks import TaskSetting, known_tasks, load_task

SIZES = {"gpus": 0, "batch_size": 1, "memory_mb": 3000, "runtime": 0}


@dataclass(frozen=True)
class TaskRun:
    """One task, model, method and repeat.

    Attributes:
        model: name in the experiment.
        task: how it is run.
        method: without the seed of the repeat.
        repeat: 0, 1 …
        cache: ``simulate`` or ``packed``.
        gpus: that the job needs; more than one: the model is spread over them.
        batch_size: problems answered together.
        memory_mb: of the job.
        runtime: in minutes, for a cluster; 0: not known.
    """

    model: str
    task: TaskSetting
    method: Method
    repeat: int
    cache: str
    gpus: int
    batch_size: int
    memory_mb: int
    runtime: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it from the others of an experiment."""
        return self.model, self.task.name, self.method.name, self.repeat

    @property
    def record(self) -> str:
        """Path of its record below the experiment's results folder."""
        model, task, method, repeat = self.key
        return f"records/tasks/{model}/{task}/{method}/r{repeat}.json"

    def device(self, device: str) -> str:
        """The job's device where the experiment's is ``device``."""
        return "auto" if self.gpus > 1 else device


def expand_tasks(
    raw: dict[str, Any],
    models: Iterable[str],
    included: Callable[[str], tuple[TaskRun, ...]],
    identity: Callable[[Method], Any],
    where: str,
) -> tuple[TaskRun, ...]:
    """Every task run of an experiment, each once, in the order of the file.

    Args:
        raw: the ``tasks`` part of an experiment file.
        models: names of the experiment's models.
        included: gives the runs of another experiment.
        identity: equal for two methods that store the same under two names; one is measured.
        where: the experiment's name, for errors.

    Raises:
        KittyError: a model, task or method is not known.
    """
    names = list(models)
    runs: dict[tuple[Any, ...], TaskRun] = {}

    def keep(run: TaskRun) -> None:
        runs.setdefault((run.model, run.task.name, identity(run.method), run.repeat), run)

    for other in raw.get("include", []):
        for run in included(other):
            _check_model(run.model, names, where)
            keep(run)
    for grid in raw.get("grids", []):
        for model in grid.get("models", names):
            _check_model(model, names, where)
            for task in grid["tasks"]:
                for method in _methods(grid):
                    for repeat in range(grid.get("repeats", 1)):
                        keep(_run(raw, model, _setting(raw, task, where), method, repeat))
    return tuple(runs.values())


def _check_model(model: str, names: list[str], where: str) -> None:
    if model not in names:
        raise KittyError(
            f"Experiment {where!r} runs tasks with model {model!r}, which is not among its models: "
            f"{', '.join(names)}."
        )


def _methods(grid: dict[str, Any]) -> list[Method]:
    names = list(grid.get("methods", []))
    for sweep in grid.get("sweeps", []):
        names += [
            sweep_name(sweep["prefix"], percent / 100, selection)
            for selection in sweep["selection"]
            for percent in sweep["percent"]
        ]
    return [get_method(name) for name in dict.fromkeys(names)]


def _setting(raw: dict[str, Any], name: str, where: str) -> TaskSetting:
    """A task with the experiment's changes: those for all, then those for this name."""
    own = dict(raw.get("settings", {}).get(name, {}))
    base = own.pop("like", name)
    if base not in known_tasks() and base != name:
        raise KittyError(
            f"Task {name!r} of experiment {where!r} is like {base!r}, which is not in "
            f"configs/tasks: use one of {', '.join(known_tasks())}."
        )
    common = {key: raw.get(key) for key in ("provider", "limit", "generation")}
    setting = load_task(base, common).changed(own)
    return setting if base == name else setting.named(name)


def _run(
    raw: dict[str, Any], model: str, task: TaskSetting, method: Method, repeat: int
) -> TaskRun:
    sizes = dict(SIZES)
    for entry in raw.get("resources", []):
        fits = model in entry.get("models", [model]) and task.name in entry.get(
            "tasks", [task.name]
        )
        if fits:
            sizes |= {key: entry[key] for key in SIZES if key in entry}
    return TaskRun(model, task, method, repeat, raw.get("cache", "simulate"), **sizes)
