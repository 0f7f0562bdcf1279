"""The measuring jobs of the pipeline: load, measure, and give a record with its provenance.

The command line and the workflow both call these; each job is one process and one file.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitty.environment import environment, package_version, peak_memory_bytes, revision
from kitty.errors import KittyError
from kitty.methods import Method
from kitty.models import ModelSpec, describe_model, enough_memory, lean_imports, load_model
from kitty.records import SCHEMA_VERSION, Record, write_atomically, write_record
from kitty.tasks import FIRST_SEED, TaskSetting, seeds
from kitty.texts import Passage, check_length

if TYPE_CHECKING:
    from torch import Tensor

    from kitty.experiments import Experiment
    from kitty.task_runs import TaskRun

Progress = Callable[[int, int], None]
DEFAULT_TOKENS = 2176  # of a text where no number is asked for: sink, local window, 15 value pages


@dataclass(frozen=True)
class Setting:
    """What one job measures on.

    Attributes:
        spec: the model.
        passage: the text.
        tokens: leading tokens of the text that are used; None: DEFAULT_TOKENS, or fewer where the
            text or the model's positions end before.
        dtype: of the weights; None: the model's own.
        device: as for :func:`kitty.models.load_model`.
        experiment: name in the record.
    """

    spec: ModelSpec
    passage: Passage
    tokens: int | None = None
    dtype: str | None = None
    device: str = "cpu"
    experiment: str = "none"


def load(setting: Setting, method: Method) -> tuple[Any, Tensor]:
    """The model, and the token ids int64 ``[T]`` of the setting's text.

    Raises:
        KittyError: the model cannot be loaded, or the text is too short for the method.
    """
    lean_imports()
    model, tokenizer = load_model(source_of(setting.spec), setting.dtype, setting.device)
    return model, token_ids(tokenizer, setting, method, model.config)


def source_of(spec: ModelSpec) -> str:
    """The name under which :func:`load_model` finds a model again."""
    if spec.folder is not None:
        return str(spec.folder)
    return f"hub:{spec.hub}" if spec.hub is not None else spec.name


def token_ids(tokenizer: Any, setting: Setting, method: Method, config: Any = None) -> Tensor:
    """Leading token ids of a passage, int64 ``[T]``, without added special tokens.

    Raises:
        KittyError: the passage has fewer tokens than asked for, or too few for the method.
    """
    import torch

    ids = tokenizer(setting.passage.text, add_special_tokens=False)["input_ids"]
    check_length(len(ids), method, setting.passage.name, setting.tokens)
    positions = getattr(config, "max_position_embeddings", None) or DEFAULT_TOKENS
    ids = ids[: setting.tokens or min(DEFAULT_TOKENS, positions)]
    check_length(len(ids), method, setting.passage.name)
    return torch.tensor(ids, dtype=torch.int64)


def measure_reference(setting: Setting, method: Method, path: Path) -> None:
    """The 16-bit pass over a text, written to ``path``; ``method`` only gives the least length."""
    from kitty.evaluation import write_reference

    model, ids = load(setting, method)
    with enough_memory(setting.device, setting.spec.name):
        write_reference(model, ids, path)


def measure_quality(
    setting: Setting,
    method: Method,
    reference: Path,
    *,
    repeat: int = 0,
    progress: Progress | None = None,
) -> Record:
    """Quality of one method on one text against its reference pass, as a record."""
    from kitty.evaluation import Reference, evaluate_offline

    started = time.perf_counter()
    model, ids = load(setting, method)
    found = Reference.load(reference)
    # Bootstrap draws are the same for all methods, whatever their own seed is.
    with enough_memory(setting.device, setting.spec.name):
        result = evaluate_offline(model, ids, method, found, progress=progress)
    return finish("quality", setting, method, len(ids), result, started, repeat)


def measure_analysis(
    setting: Setting,
    method: Method,
    *,
    layer: int | None = None,
    progress: Progress | None = None,
) -> Record:
    """Channel analysis of a model on one text, as a record."""
    from kitty.analysis import analyze

    started = time.perf_counter()
    model, ids = load(setting, method)
    with enough_memory(setting.device, setting.spec.name):
        result = analyze(model, ids, method, map_layer=layer, progress=progress)
    return finish("analysis", setting, method, len(ids), result, started, 0)


@dataclass(frozen=True)
class TaskJob:
    """One run of a downstream task.

    Attributes:
        spec: the model.
        task: how the task is run.
        method: with the seed of this repeat.
        cache: ``simulate`` or ``packed``.
        repeat: 0, 1 …; its seeds are :func:`kitty.tasks.seeds` of it.
        first_seed: of repeat 0.
        batch_size: problems answered together.
        dtype: of the weights; None: the model's own.
        device: as for :func:`kitty.models.load_model`.
        run_code: whether code that the model writes may be run.
        experiment: name in the record.
    """

    spec: ModelSpec
    task: TaskSetting
    method: Method
    cache: str = "simulate"
    repeat: int = 0
    first_seed: int = FIRST_SEED
    batch_size: int = 1
    dtype: str | None = None
    device: str = "cpu"
    run_code: bool = False
    experiment: str = "none"

    def setting(self) -> dict[str, Any]:
        """What an answer depends on besides model and versions, but for the number of problems."""
        left_out = ("limit", "runs_code", "data", "title", "metric")
        task = {k: v for k, v in self.task.to_dict().items() if k not in left_out}
        return {
            "task": task,
            "method": self.method.to_dict(),
            "cache": self.cache,
            "seeds": seeds(self.repeat, self.first_seed),
        }

    def decides(self) -> dict[str, Any]:
        """All that an answer depends on: what is kept of another model or version is not used."""
        versions = {name: package_version(name) for name in ("torch", "transformers", "lm-eval")}
        return {
            "model": describe_model(self.spec, self.dtype),
            "versions": versions,
            **self.setting(),
        }


def task_job(experiment: Experiment, run: TaskRun, *, run_code: bool) -> TaskJob:
    """The job of an experiment's task run."""
    return TaskJob(
        spec=experiment.models[run.model],
        task=run.task,
        method=dataclasses.replace(run.method, seed=experiment.seed + run.repeat),
        cache=run.cache,
        repeat=run.repeat,
        first_seed=FIRST_SEED + experiment.seed,
        batch_size=run.batch_size,
        dtype=experiment.dtype,
        device=run.device(experiment.device),
        run_code=run_code,
        experiment=experiment.name,
    )


def samples_path(out: Path) -> Path:
    """Where the predictions of a task record lie: beside it."""
    return out.with_suffix(".samples.jsonl")


def measure_task(job: TaskJob, out: Path, *, progress: Progress | None = None) -> Record:
    """Run a downstream task, keep its predictions and its record.

    What is answered is kept in a file beside ``out`` batch by batch, so a run that was stopped goes
    on where it was; the file is gone when the record is there.

    Raises:
        KittyError: the task cannot be run so, see :mod:`kitty.evaluation.downstream`, or the method
            read no quantized page.
    """
    from kitty.evaluation.downstream import check_run_code
    from kitty.evaluation.journal import Journal, digest

    started = time.perf_counter()
    check_run_code(job.task, job.run_code)
    reason = job.method.packed_reason() if job.method.quantized else None
    if job.cache == "packed" and reason is not None:
        raise KittyError(
            f"The packed cache cannot hold method {job.method.name!r} ({reason}): use the cache "
            "simulate."
        )
    lean_imports()
    model, tokenizer = load_model(source_of(job.spec), job.dtype, job.device)
    journal = Journal(out.with_suffix(".partial.jsonl"), digest(job.decides()))
    measure = _measure_lm_task if job.task.recall is None else _measure_recall
    result, samples, longest = measure(job, model, tokenizer, journal, progress)
    if job.method.quantized and not journal.pages_read:
        least = job.method.sink + job.method.page_size + job.method.rollback
        raise KittyError(
            f"Method {job.method.name!r} read no quantized page in task {job.task.name!r}, whose "
            f"longest text has {longest} tokens of which {least} stay in 16 bit: use more shots, "
            "more new tokens, or a method with smaller buffers."
        )
    text = "".join(json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in samples)
    write_atomically(samples_path(out), text.encode())
    result["samples"] = {
        "file": samples_path(out).name,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "n": len(samples),
    }
    record = _task_record(job, result | {"quantized_pages_read": journal.pages_read}, started)
    write_record(out, record)
    journal.close()
    return record


def _measure_lm_task(
    job: TaskJob, model: Any, tokenizer: Any, journal: Any, progress: Progress | None
) -> tuple[dict[str, Any], list[Any], int]:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise KittyError(
            f"Task {job.task.name!r} needs lm-eval ({error}): pip install 'kitty[eval]'."
        ) from error
    from kitty.evaluation.downstream import evaluate_task
    from kitty.evaluation.lm import KittyLM

    numbers = seeds(job.repeat, job.first_seed)
    lm = KittyLM(
        model,
        tokenizer,
        job.method,
        job.cache,
        batch_size=job.batch_size,
        seed=numbers["torch"],
        journal=journal,
        progress=progress,
    )
    scores = evaluate_task(lm, job.task, numbers, job.run_code)
    task = _task_dict(job, scores.main)
    task |= {"num_fewshot": scores.fewshot, "generation": scores.generation}
    result = {"task": task, "metrics": scores.metrics, "problems": scores.problems}
    return result, scores.samples, lm.longest


def _measure_recall(
    job: TaskJob, model: Any, tokenizer: Any, journal: Any, progress: Progress | None
) -> tuple[dict[str, Any], list[Any], int]:
    from kitty.evaluation.recall import evaluate_recall
    from kitty.integrations.transformers import KittyCache, SimulatedCache

    kinds: dict[str, Any] = {"simulate": SimulatedCache, "packed": KittyCache}
    if job.cache not in kinds:
        raise KittyError(f"cache is {job.cache!r}, which is not known: use {' or '.join(kinds)}.")

    def new_cache() -> Any:
        quantized = job.method.quantized
        return kinds[job.cache](job.method, dense_prefill=False) if quantized else None

    metrics, samples = evaluate_recall(
        model,
        tokenizer,
        job.task,
        job.method,
        new_cache,
        seed=seeds(job.repeat, job.first_seed)["torch"],
        journal=journal,
        progress=progress or (lambda done, total: None),
    )
    task = _task_dict(job, job.task.metric) | {"num_fewshot": 0, "generation": None}
    problems = {
        name: [score[name] for sample in samples for score in sample["scores"]] for name in metrics
    }
    result = {"task": task, "metrics": metrics, "problems": problems}
    return result, samples, max(sample["tokens"] for sample in samples)


def _task_dict(job: TaskJob, metric: str) -> dict[str, Any]:
    told = job.task.to_dict()
    names = ("name", "title", "lm_eval", "provider", "data_sha256", "chat_template", "limit")
    task = {name: told[name] for name in names}
    if job.task.recall is not None:
        task |= {"provider": "standin", "recall": told["recall"]}
    return task | {"metric": metric, "seeds": seeds(job.repeat, job.first_seed)}


def _task_record(job: TaskJob, result: dict[str, Any], started: float) -> Record:
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "task",
        "experiment": job.experiment,
        "command": shlex.join(["kitty", *sys.argv[1:]]),
        "model": describe_model(job.spec, job.dtype),
        "method": job.method.to_dict(),
        "cache": job.cache,
        "repeat": job.repeat,
        "seed": seeds(job.repeat, job.first_seed)["torch"],
        "batch_size": job.batch_size,
        **result,
        **_provenance(started),
    }


def finish(
    kind: str,
    setting: Setting,
    method: Method,
    num_tokens: int,
    result: dict[str, Any],
    started: float,
    repeat: int,
) -> Record:
    """A record: the result together with everything that says where it comes from."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "experiment": setting.experiment,
        "command": shlex.join(["kitty", *sys.argv[1:]]),
        "model": describe_model(setting.spec, setting.dtype),
        "method": method.to_dict(),
        "passage": setting.passage.to_record(num_tokens),
        "repeat": repeat,
        "seed": method.seed,
        **result,
        **_provenance(started),
    }


def _provenance(started: float) -> dict[str, Any]:
    """Where and when a job ran."""
    return {
        "environment": environment(),
        "revision": revision(),
        "wall_time_s": round(time.perf_counter() - started, 3),
        "peak_memory_bytes": peak_memory_bytes(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
