"""Downstream tasks as data: configs/tasks, with whatever an experiment or a user changes.

A task is one of lm-eval's, or a recall task: a generated long text scored in one pass.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kitty.config_files import load_config
from kitty.errors import KittyError
from kitty.models import file_hash
from kitty.paths import configs_dir

PROVIDERS = ("hub", "standin")
FIRST_SEED = (
    1234  # repeat i: numpy, torch and few-shot seed 1234 + i, Python's own i (authors' runner)
)


@dataclass(frozen=True)
class TaskSetting:
    """How one task is run.

    Attributes:
        name: in records and file names.
        title: label in tables.
        metric: the score that stands in tables; empty: lm-eval's first one.
        lm_eval: task or group of lm-eval; None for a recall task.
        folder: its folder below lm_eval/tasks, if known.
        num_fewshot: None: lm-eval's own number.
        chat_template: whether prompts go through the model's chat template.
        generation: arguments that replace lm-eval's own one by one.
        limit: leading problems that are used; None: all.
        runs_code: whether scoring runs code that the model wrote.
        provider: ``hub``, or ``standin`` for a local file in place of the data set.
        standin: file and, for a group, the one task that reads it.
        data: a file of the user's own in place of the stand-in.
        recall: kind, tokens and texts of a recall task.
    """

    name: str
    title: str
    metric: str = ""
    lm_eval: str | None = None
    folder: str | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    generation: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    runs_code: bool = False
    provider: str = "hub"
    standin: dict[str, str] = field(default_factory=dict)
    data: str | None = None
    recall: dict[str, Any] | None = None

    @property
    def data_file(self) -> Path | None:
        """The file in place of the data set; None where the problems come from elsewhere."""
        if self.provider != "standin" or self.recall is not None:
            return None
        if self.data is not None:
            return Path(self.data).expanduser()
        return configs_dir() / "standins" / self.standin["file"]

    def changed(self, changes: dict[str, Any]) -> TaskSetting:
        """A copy with some fields changed; ``generation`` and ``recall`` are merged.

        Raises:
            KittyError: a field cannot be changed, or a value is out of range.
        """
        changes = {key: value for key, value in changes.items() if value is not None}
        if "data" in changes:
            changes["provider"] = "standin"
        for key in ("generation", "recall"):
            if key in changes and (own := getattr(self, key)) is not None:
                changes[key] = {**own, **changes[key]}
        if self.recall is None:
            changes.pop("recall", None)
        else:  # nothing is generated, and the texts are the generator's own
            changes = {key: changes[key] for key in ("recall", "limit") if key in changes}
        return _checked(dataclasses.replace(self, **changes))

    def named(self, name: str) -> TaskSetting:
        """The same under another name, so that an experiment can have a task twice."""
        return dataclasses.replace(self, name=name)

    def to_dict(self) -> dict[str, Any]:
        """Everything that decides the score, JSON-ready."""
        fields = dataclasses.asdict(self)
        data = self.data_file
        return fields | {"data_sha256": None if data is None else file_hash(data)}


def _checked(setting: TaskSetting) -> TaskSetting:
    for name in ("limit", "num_fewshot"):
        value, least = getattr(setting, name), 1 if name == "limit" else 0
        if value is not None and value < least:
            raise KittyError(
                f"{name} of task {setting.name!r} is {value}, but it must be at least {least}."
            )
    if setting.provider not in PROVIDERS:
        raise KittyError(
            f"Provider {setting.provider!r} is not known: use {' or '.join(PROVIDERS)}."
        )
    without = setting.data is None and not setting.standin
    if setting.provider == "standin" and setting.lm_eval and without:
        raise KittyError(
            f"Task {setting.name!r} has no stand-in data: use provider hub, or one of the tasks of "
            f"configs/tasks ({', '.join(known_tasks())}) or a data file of your own."
        )
    data = setting.data_file
    if data is not None and not data.is_file():
        raise KittyError(f"The data file {data} of task {setting.name!r} does not exist.")
    return setting


@functools.cache
def known_tasks() -> tuple[str, ...]:
    """Names of the tasks in configs/tasks."""
    return tuple(sorted(path.stem for path in (configs_dir() / "tasks").glob("*.yaml")))


@functools.cache
def _shipped(name: str) -> TaskSetting:
    raw = load_config("task", configs_dir() / "tasks" / f"{name}.yaml")
    raw.pop("description", None)
    return TaskSetting(name=name, **raw)


def load_task(name: str, changes: dict[str, Any] | None = None) -> TaskSetting:
    """A task by name, with changes.

    A name that configs/tasks does not have is taken for a task of lm-eval, which is looked up when
    the task is run.

    Raises:
        KittyError: a change is unknown or out of range.
    """
    if name in known_tasks():
        return _checked(_shipped(name)).changed(changes or {})
    return TaskSetting(name=name, title=name, lm_eval=name).changed(changes or {})


def like(name: str, names: list[str] | tuple[str, ...], count: int = 3) -> str:
    """The most similar names, for an error message."""
    close = difflib.get_close_matches(name, names, n=count, cutoff=0.5)
    return ", ".join(close or list(names)[:count])


def seeds(repeat: int, first: int = FIRST_SEED) -> dict[str, int]:
    """The seeds of a repeat, as the authors' runner sets them."""
    return {
        "random": first - FIRST_SEED + repeat,
        "numpy": first + repeat,
        "torch": first + repeat,
        "fewshot": first + repeat,
    }
