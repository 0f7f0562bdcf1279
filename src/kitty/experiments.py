"""Experiments as data: an experiment file becomes the list of jobs that the pipeline runs.

The workflow, the launcher and the single jobs all read the same object, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitty.benchmark.latency import POINTS, STEPS, LatencyJob, Workload, parse_bytes
from kitty.benchmark.shapes import find_shape
from kitty.config_files import load_config
from kitty.errors import KittyError
from kitty.methods import Method, get_method, sweep_name
from kitty.models import ModelSpec, check_device_name, find_model, num_layers
from kitty.paths import configs_dir
from kitty.task_runs import TaskRun, expand_tasks
from kitty.texts import known_passages, least_tokens, load_passage


@dataclass(frozen=True)
class Job:
    """One measurement of a method's quality.

    Attributes:
        model, passage: names as in file names (:attr:`Experiment.models` has what they stand for).
        method: with the seed of this repeat.
        repeat: 0, 1 … of methods whose selection is random; 0 of the others.
    """

    model: str
    passage: str
    method: Method
    repeat: int

    @property
    def record(self) -> str:
        """Path of the job's record below the experiment's results folder."""
        return f"records/quality/{self.model}/{self.passage}/{self.method.name}/r{self.repeat}.json"


@dataclass(frozen=True)
class Experiment:
    """A checked experiment file.

    Attributes:
        name: of the file and of the results folder.
        source: the file.
        models, passages: what each name in a path stands for.
        methods: without points that equal another one.
        tokens: of each passage that are used.
        repeats: of methods whose selection is random, with seeds from ``seed`` on.
        dtype, device: of the model; None: the model's own dtype.
        threads, memory_mb, minutes: of one job; the time is what a cluster's scheduler is told.
        analysis_passages: names of the passages whose channels are analysed.
        analysis_method: whose choice of channels is examined.
        analysis_layer: layer shown in full; None: the middle one.
        task_runs: downstream tasks, model × task × method × repeat.
        latency: every end-to-end measurement.
    """

    name: str
    source: Path
    title: str
    description: str
    models: dict[str, ModelSpec]
    passages: dict[str, str]
    methods: tuple[Method, ...]
    tokens: int
    repeats: int
    seed: int
    dtype: str | None
    device: str
    threads: int
    memory_mb: int
    minutes: int
    analysis_passages: tuple[str, ...]
    analysis_method: Method | None
    analysis_layer: int | None
    task_runs: tuple[TaskRun, ...] = ()
    latency: tuple[LatencyJob, ...] = ()

    def jobs(self) -> list[Job]:
        """Every quality job, in the order of the file."""
        return [
            Job(model, passage, with_seed(method, self.seed + repeat), repeat)
            for model in self.models
            for passage in self.passages
            for method in self.methods
            for repeat in range(self.repeats if is_random(method) else 1)
        ]

    def job(self, model: str, passage: str, method: str, repeat: int) -> Job:
        """One quality job by its names.

        Raises:
            KittyError: the experiment has no such job.
        """
        for job in self.jobs():
            if (job.model, job.passage, job.method.name, job.repeat) == (
                model,
                passage,
                method,
                repeat,
            ):
                return job
        raise KittyError(
            f"Experiment {self.name!r} has no job {model}/{passage}/{method}/r{repeat}: "
            f"its file is {self.source}."
        )

    def task_run(self, model: str, task: str, method: str, repeat: int) -> TaskRun:
        """One task run by its names.

        Raises:
            KittyError: the experiment has no such run.
        """
        for run in self.task_runs:
            if run.key == (model, task, method, repeat):
                return run
        raise KittyError(
            f"Experiment {self.name!r} has no task run {model}/{task}/{method}/r{repeat}: its file "
            f"is {self.source}."
        )

    def analyses(self) -> list[tuple[str, str]]:
        """Model and passage of every channel analysis."""
        if self.analysis_method is None:
            return []
        return [(model, passage) for model in self.models for passage in self.analysis_passages]

    def latency_job(self, model: str, implementation: str, workload: str) -> LatencyJob:
        """One end-to-end measurement by its names.

        Raises:
            KittyError: the experiment has no such job.
        """
        for job in self.latency:
            if (job.label, job.implementation, job.workload.name) == (
                model,
                implementation,
                workload,
            ):
                return job
        raise KittyError(
            f"Experiment {self.name!r} has no latency job {model}/{implementation}/{workload}: its "
            f"file is {self.source}."
        )


def with_seed(method: Method, seed: int) -> Method:
    """The same method with another seed, under the same name."""
    return dataclasses.replace(method, seed=seed)


def is_random(method: Method) -> bool:
    """Whether a method's result depends on its seed."""
    return method.selection == "random" and 0 < method.boost_ratio < 1


def same_storage(method: Method) -> tuple[Any, ...]:
    """Equal for two methods that store every tensor alike, whatever they are called.

    Where no channel or every channel is boosted, there is nothing to select.
    """
    fields = {k: v for k, v in method.to_dict().items() if k not in ("name", "title")}
    if not is_random(method):
        fields["seed"] = 0
    if method.boost_ratio in (0, 1):
        fields["selection"] = "none"
    if method.boost_ratio == 0:
        fields["boost_bits"] = 0
    return tuple(sorted(fields.items()))


def known_experiments() -> list[str]:
    """Names of the shipped experiments."""
    return sorted(path.stem for path in (configs_dir() / "experiments").glob("*.yaml"))


def load_experiment(name_or_file: str | Path) -> Experiment:
    """A shipped experiment by name, or an experiment file by its path, expanded and checked.

    Raises:
        KittyError: it is not found, breaks its schema, or names what is not known.
    """
    path = _find(str(name_or_file))
    raw = load_config("experiment", path)
    return _check(_expand(raw, path))


def _find(name: str) -> Path:
    shipped = configs_dir() / "experiments" / f"{name}.yaml"
    if "/" not in name and shipped.is_file():
        return shipped
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path.absolute()
    if path.suffix in (".yaml", ".yml"):
        raise KittyError(f"There is no experiment file {path.absolute()}: give the path of one.")
    raise KittyError(
        f"Experiment {name!r} is not known: use one of {', '.join(known_experiments())}, or the "
        "path of an experiment file ending in .yaml."
    )


def _expand(raw: dict[str, Any], path: Path) -> Experiment:
    analysis = raw.get("analysis")
    passages = _by_name(raw.get("passages", []), _passage_name, path)
    analysed = passages
    if analysis is not None and "passages" in analysis:
        analysed = _by_name(analysis["passages"], _passage_name, path)
    models = {spec.name: spec for spec in map(find_model, raw["models"])}
    return Experiment(
        name=path.stem,
        source=path,
        title=raw["title"],
        description=raw.get("description", ""),
        models=models,
        passages=passages,
        methods=_methods(raw),
        tokens=raw.get("tokens", 0),
        repeats=raw.get("repeats", 1),
        seed=raw.get("seed", 0),
        dtype=raw.get("dtype"),
        device=raw.get("device", "cpu"),
        threads=raw.get("threads", 1),
        memory_mb=raw.get("memory_mb", 3000),
        minutes=raw.get("minutes", 60),
        analysis_passages=tuple(analysed),
        analysis_method=None
        if analysis is None
        else get_method(analysis.get("method", "kitty-pro")),
        analysis_layer=None if analysis is None else analysis.get("layer"),
        task_runs=expand_tasks(raw.get("tasks", {}), models, _included, same_storage, path.stem),
        latency=_latency(raw, path),
    )


def _latency(raw: dict[str, Any], path: Path) -> tuple[LatencyJob, ...]:
    """The end-to-end measurements of an experiment file, in its order."""
    settings = raw.get("latency")
    if settings is None:
        return ()
    dummy = settings.get("dummy_weights", False)
    budget = settings.get("memory_budget")
    return tuple(
        LatencyJob(
            model=model,
            label=find_shape(model).name if dummy else find_model(model).name,
            implementation=implementation,
            workload=Workload(entry["prompt_tokens"], entry["new_tokens"], batch),
            mode=settings.get("mode", "full"),
            points=settings.get("points", POINTS),
            steps=settings.get("steps", STEPS),
            memory_budget_bytes=None if budget is None else parse_bytes(budget),
            sub_batch=entry.get("sub_batch"),
            dummy_weights=dummy,
            dtype=settings.get("dtype", raw.get("dtype")),
            device=settings.get("device", raw.get("device", "cpu")),
            threads=raw.get("threads", 1),
            experiment=path.stem,
        )
        for model in settings.get("models", raw.get("models", []))
        for entry in settings["workloads"]
        for implementation in entry.get("implementations", settings["implementations"])
        for batch in entry["batches"]
    )


def _included(experiment: str) -> tuple[TaskRun, ...]:
    return load_experiment(experiment).task_runs


def _passage_name(passage: str) -> str:
    return passage if passage in known_passages() else Path(passage).stem


def _by_name(values: list[str], name_of: Any, path: Path) -> dict[str, str]:
    named = {name_of(value): value for value in values}
    if len(named) < len(values):
        raise KittyError(
            f"Two passages of the experiment file {path} have the same name: rename one file."
        )
    return named


def _methods(raw: dict[str, Any]) -> tuple[Method, ...]:
    names = list(raw.get("methods", []))
    for sweep in raw.get("sweeps", []):
        names += [
            sweep_name(sweep["prefix"], percent / 100, selection)
            for selection in sweep["selection"]
            for percent in sweep["percent"]
        ]
    kept: dict[tuple[Any, ...], Method] = {}
    for name in names:
        method = get_method(name)
        kept.setdefault(same_storage(method), method)
    return tuple(kept.values())


def _check(experiment: Experiment) -> Experiment:
    for passage in experiment.passages.values():
        if passage not in known_passages() and not Path(passage).expanduser().is_file():
            raise KittyError(
                f"Passage {passage!r} of experiment {experiment.name!r} is neither a shipped text "
                f"({', '.join(known_passages())}) nor a file."
            )
    strange = set(experiment.analysis_passages) - set(experiment.passages)
    if strange:
        raise KittyError(
            f"Experiment {experiment.name!r} analyses passage {sorted(strange)[0]!r}, which is not "
            "among its passages."
        )
    check_device_name(experiment.device)
    for job in experiment.latency:
        check_device_name(job.device)
    _check_analysis(experiment)
    longest = max(experiment.methods, key=least_tokens, default=None)
    if longest is not None and experiment.tokens < least_tokens(longest):
        raise KittyError(
            f"Experiment {experiment.name!r} uses {experiment.tokens} tokens, but method "
            f"{longest.name!r} needs {least_tokens(longest)} (its 16-bit buffers and two pages)."
        )
    _check_lengths(experiment)
    return experiment


def _check_analysis(experiment: Experiment) -> None:
    method, layer = experiment.analysis_method, experiment.analysis_layer
    if method is not None and not 0 < method.boost_ratio < 1:
        boosted = "no" if method.boost_ratio == 0 else "every"
        raise KittyError(
            f"Experiment {experiment.name!r} analyses the choice of method {method.name!r}, which "
            f"boosts {boosted} key channel: use a method such as kitty or kitty-pro."
        )
    for model, spec in experiment.models.items():
        layers = None if layer is None else num_layers(spec)
        if layer is not None and layers is not None and layer >= layers:
            raise KittyError(
                f"Experiment {experiment.name!r} analyses layer {layer}, but model {model!r} has "
                f"layers 0 to {layers - 1}: use one of these."
            )


def _check_lengths(experiment: Experiment) -> None:
    """Refuse a text that is too short whatever the tokenizer: a token has at least a byte."""
    for name, passage in experiment.passages.items():
        num_bytes = len(load_passage(passage).text.encode())
        if num_bytes < experiment.tokens:
            raise KittyError(
                f"Passage {name!r} has {num_bytes} bytes and so cannot give the "
                f"{experiment.tokens} tokens of experiment {experiment.name!r}: ask for fewer "
                "tokens, or give a longer text."
            )
