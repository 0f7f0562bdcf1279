"""Stock lm-eval on a KittyLM: loads a task as its setting says, runs it, gives scores and samples.

Nothing of lm-eval is changed: settings are overrides of its own configuration, stand-in data comes
in through its ``custom_dataset``, and generated code is run by a filter and metric of this project.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kitty.errors import KittyError
from kitty.evaluation.bootstrap import Pages, bootstrap
from kitty.tasks import TaskSetting, known_tasks, like

WRAPPER = "kitty"  # an inline group, lm-eval's public way to override a registered task
STDERR_DRAWS = 1000


class Scores(NamedTuple):
    """Of one task.

    Attributes:
        metrics: by ``metric,filter``: value, stderr, n, and where it can be formed ci.
        samples: one a problem: prompt hash, response, target, what the filters left, scores.
        main: the metric that stands in tables.
        fewshot: shots that were used.
        generation: arguments that were used; None where nothing was generated.
        problems: scores of the single problems, by metric.
    """

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]
    main: str
    fewshot: int | None
    generation: dict[str, Any] | None
    problems: dict[str, list[float]]


def evaluate_task(lm: Any, setting: TaskSetting, seeds: dict[str, int], run_code: bool) -> Scores:
    """Run a task of lm-eval.

    Args:
        lm: a :class:`kitty.evaluation.lm.KittyLM`.
        setting: the task.
        seeds: ``random``, ``numpy``, ``torch`` and ``fewshot``.
        run_code: whether code that the model wrote may be run.

    Raises:
        KittyError: the task is unknown, its data set cannot be had, it runs code without leave, or
            its kind of question is not supported.
    """
    from lm_eval.evaluator import evaluate

    check_run_code(setting, run_code)
    _check_template(lm, setting)
    loaded = load_lm_task(setting, seeds)
    kinds = {task.OUTPUT_TYPE for task in loaded["tasks"].values()}
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=seeds["fewshot"])
    set_seeds(seeds)
    results = evaluate(
        lm=lm,
        task_dict=loaded,
        limit=setting.limit,
        bootstrap_iters=STDERR_DRAWS,
        apply_chat_template=setting.chat_template,
        fewshot_as_multiturn=False,
        confirm_run_unsafe_code=run_code,
    )
    samples = _samples(results["samples"])
    metrics = _metrics(results["results"], samples, setting)
    first = next(iter(loaded["tasks"].values()))
    generation = first.config.generation_kwargs if "generate_until" in kinds else None
    main = setting.metric or next(iter(metrics))
    if main not in metrics:
        raise KittyError(
            f"Task {setting.name!r} has no metric {main!r}: it gives {', '.join(metrics)}."
        )
    problems = {
        name: [float(s["scores"][name]) for s in samples]
        for name in metrics
        if "ci" in metrics[name]
    }
    return Scores(metrics, samples, main, first.config.num_fewshot, generation, problems)


def check_run_code(setting: TaskSetting, run_code: bool) -> None:
    """Refuse to score by running code that the model wrote unless that was allowed.

    Raises:
        KittyError: it was not.
    """
    if setting.runs_code and not run_code:
        raise KittyError(
            f"Task {setting.name!r} is scored by running code that the model writes: pass "
            "--run-code if you want that on this machine (a process with limits, no jail)."
        )


def _check_template(lm: Any, setting: TaskSetting) -> None:
    if setting.chat_template and not getattr(lm.tokenizer, "chat_template", None):
        raise KittyError(
            f"Task {setting.name!r} uses the chat template, but the model's tokenizer has none: "
            "use an instruct model, or --no-chat-template."
        )


def set_seeds(seeds: dict[str, int]) -> None:
    """Seed every generator that lm-eval and torch draw from."""
    import torch

    random.seed(seeds["random"])
    np.random.seed(seeds["numpy"])
    torch.manual_seed(seeds["torch"])


# --- loading -------------------------------------------------------------------------------------


def load_lm_task(setting: TaskSetting, seeds: dict[str, int]) -> dict[str, Any]:
    """The task's objects as lm-eval's ``evaluate`` takes them; its data are loaded here.

    Raises:
        KittyError: the task is unknown, or its data set cannot be had.
    """
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # what it warns of is meant here
    set_seeds(seeds)  # a task may shuffle as it loads
    datasets.disable_progress_bars()
    datasets.disable_caching()  # a shuffle of another seed must not come from a cache
    overrides = _overrides(setting)
    try:
        if setting.runs_code:
            loaded = _load_code_task(setting, overrides)
        else:
            loaded = _load_registered(setting, overrides)
    except KittyError:
        raise
    except Exception as error:  # datasets, the hub and the task's own code raise what they like
        raise KittyError(_no_data(setting, error)) from error
    for task in loaded["tasks"].values():
        if task.OUTPUT_TYPE == "generate_until" and setting.generation:
            task.set_config("generation_kwargs", dict(setting.generation), update=True)
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
    return loaded


def _overrides(setting: TaskSetting) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if setting.num_fewshot is not None:
        overrides["num_fewshot"] = setting.num_fewshot
    if (data := setting.data_file) is not None:
        overrides["custom_dataset"] = local_data(data)
    return overrides


def local_data(path: Path) -> Callable[..., Any]:
    """A loader for lm-eval's ``custom_dataset``: a file of JSON lines as every split."""

    def load(**ignored: Any) -> Any:
        import datasets

        try:
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            table = datasets.Dataset.from_list(rows)
        except (OSError, ValueError, TypeError) as error:
            raise KittyError(f"The data file {path} holds no JSON lines: {error}.") from error
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), table))

    return load


def _manager(setting: TaskSetting) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    if setting.folder is None:
        return TaskManager()
    folder = Path(lm_eval.__file__).parent / "tasks" / setting.folder
    return TaskManager(include_path=str(folder), include_defaults=False)


def _load_registered(setting: TaskSetting, overrides: dict[str, Any]) -> dict[str, Any]:
    name = _lm_name(setting)
    manager = _manager(setting)
    if name not in manager.all_tasks:
        raise KittyError(
            f"Task {name!r} is known neither to configs/tasks ({', '.join(known_tasks())}) nor to "
            f"lm-eval, whose nearest names are {like(name, manager.all_tasks)}."
        )
    key = "group" if name in manager.all_groups else "task"
    loaded = manager.load([{"group": WRAPPER, "task": [{key: name, **overrides}]}])
    groups = {k: group for k, group in loaded["groups"].items() if k != WRAPPER}
    return {"tasks": loaded["tasks"], "groups": groups, "group_map": {}}


def _lm_name(setting: TaskSetting) -> str:
    only = setting.standin.get("lm_eval") if setting.provider == "standin" else None
    return only or str(setting.lm_eval)


def _load_code_task(setting: TaskSetting, overrides: dict[str, Any]) -> dict[str, Any]:
    """A task whose own metric fetches and runs code: its prompts, with this project's scoring."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = _manager(setting).task_index[_lm_name(setting)]
    config = load_yaml(entry.yaml_path, resolve_func=False) | overrides
    (kept,) = config["filter_list"]
    config["filter_list"] = [
        {"name": kept["name"], "filter": [{"function": "custom", "filter_fn": complete_functions}]}
    ]
    config["metric_list"] = [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}]
    config["process_results"] = score_program
    return {"tasks": {config["task"]: ConfigurableTask(config=config)}, "groups": {}}


def complete_functions(resps: list[list[str]], docs: list[dict[str, str]]) -> list[list[str]]:
    """The program of each answer: the problem's head, and the answer up to its closing fence."""
    return [
        [doc["prompt"] + answer.split("```")[0] for answer in answers]
        for answers, doc in zip(resps, docs, strict=True)
    ]


def score_program(doc: dict[str, str], results: list[Any]) -> dict[str, float]:
    """1 where the completed function passes the problem's tests, else 0."""
    from kitty.evaluation.run_code import humaneval_program, outcome

    program = results[0][0] if isinstance(results[0], list) else results[0]
    return {"pass@1": float(outcome(humaneval_program(doc, program)) == "passed")}


def _no_data(setting: TaskSetting, error: Exception) -> str:
    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text[:160]}".rstrip(".")
    if isinstance(error, ImportError) or "math_verify" in text:
        return (
            f"Task {setting.name!r} needs a package that is missing ({reason}): install the "
            "packages of lm-eval's extra that it names, such as `pip install lm-eval[math]`."
        )
    gated = any(word in text.lower() for word in ("gated", "401", "403", "authenticated"))
    login = " accept its terms and log in with `hf auth login`," if gated else ""
    standin = " or use its stand-in with --provider standin" if setting.standin else ""
    return (
        f"The data set of task {setting.name!r} cannot be loaded ({reason}):{login} check the "
        f"network, or point HF_HOME to a cache that has it{standin}."
    )


# --- results -------------------------------------------------------------------------------------


def _samples(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """lm-eval's samples, one a problem: scores of all filters side by side."""
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for task, samples in found.items():
        for sample in samples:
            key = task, sample["doc_id"]
            entry = merged.setdefault(
                key,
                {
                    "task": task,
                    "doc_id": sample["doc_id"],
                    "prompt_hash": sample["prompt_hash"],
                    "target": sample["target"],
                    "responses": sample["resps"],
                    "filtered": {},
                    "scores": {},
                },
            )
            entry["filtered"][sample["filter"]] = sample["filtered_resps"]
            for metric in sample["metrics"]:
                entry["scores"][f"{metric},{sample['filter']}"] = sample[metric]
    return [merged[key] for key in sorted(merged)]


def _metrics(
    results: dict[str, dict[str, Any]], samples: list[dict[str, Any]], setting: TaskSetting
) -> dict[str, Any]:
    table = results[_lm_name(setting)] if _lm_name(setting) in results else _only(results)
    metrics = {}
    for name, value in table.items():
        metric, _, kept = name.partition(",")
        if not kept or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = table.get(f"{metric}_stderr,{kept}")
        metrics[name] = with_interval(
            float(value),
            float(stderr) if isinstance(stderr, int | float) else None,
            [sample["scores"].get(name) for sample in samples],
        )
    return metrics


def _only(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if len(results) != 1:
        raise KittyError(
            f"A tag of {len(results)} tasks ({', '.join(list(results)[:3])} …) has no score of its "
            "own: name one of them."
        )
    return next(iter(results.values()))


def with_interval(value: float, stderr: float | None, scores: list[Any]) -> dict[str, Any]:
    """One metric of a record; its interval is a bootstrap over problems where they have scores."""
    entry: dict[str, Any] = {"value": value, "stderr": stderr, "n": len(scores)}
    plain = [float(score) for score in scores if isinstance(score, int | float | np.number)]
    if len(plain) == len(scores) >= 2:
        interval = bootstrap([Pages(plain, [1] * len(plain))])
        entry["ci"] = [interval.low, interval.high]
    return entry
