"""``kitty bench e2e`` and the latency job of the workflow."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kitty.commands.options import ModelOption
from kitty.errors import KittyError

E2E_EXAMPLES = (
    "Examples: `kitty bench e2e --prompt 32 --new 8 --batch 1,2`, "
    "`kitty bench e2e --model-config qwen3-8b --dummy-weights --device cuda --prompt 100 "
    "--new 8092 --batch 8,16,32,64 --mode sampled --memory-budget 80GB -i kitty-pro -i kitty-fp16`"
)


def e2e(
    implementation: Annotated[
        list[str] | None,
        typer.Option(
            "--implementation",
            "-i",
            help="One or more; default: hf-dynamic, kitty-fp16, kitty-pro.",
        ),
    ] = None,
    model: ModelOption = "smollm2-135m-instruct",
    model_config: Annotated[
        str | None,
        typer.Option("--model-config", help="With --dummy-weights: a shape, or a config.json."),
    ] = None,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Random weights, made on the device.")
    ] = False,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of each prompt.")] = 100,
    new: Annotated[int, typer.Option("--new", help="Tokens added to each.")] = 28,
    batch: Annotated[str, typer.Option("--batch", "-b", help="Sizes, such as 8,16,32.")] = "1",
    mode: Annotated[
        str, typer.Option("--mode", help="full, or sampled: time steps at some lengths.")
    ] = "full",
    points: Annotated[int, typer.Option("--points", help="Lengths of a sampled run.")] = 5,
    steps: Annotated[int, typer.Option("--steps", help="Timed steps at each.")] = 16,
    memory_budget: Annotated[
        str | None,
        typer.Option("--memory-budget", help="Most that torch may reserve, such as 80GB."),
    ] = None,
    sub_batch: Annotated[
        int | None,
        typer.Option("--sub-batch", help="Sequences that Kitty's engine prefills at a time."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile the decode step.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="CUDA graphs where possible, or not at all.")
    ] = True,
    largest: Annotated[
        bool, typer.Option("--largest", help="Find the largest of the batch sizes that fits.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float16, bfloat16, float32; default: the model's."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the results.")] = Path(
        "results/e2e"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the records.")] = False,
) -> None:
    """Generate with several caches and compare time and memory.

    Each combination of implementation and batch runs in a process of its own and leaves a record at
    once; records that are there are not measured again. Out of memory is recorded, and the larger
    batches of the same implementation are left out. The exit status is 1 where a measurement
    failed, or where Kitty fell back to something slow on a GPU.
    """
    from kitty.benchmark import e2e as bench
    from kitty.benchmark.latency import COMPILED, LatencyJob, Workload, parse_bytes, parse_counts
    from kitty.launcher import check_writable

    batches = parse_counts(batch)
    label = _label(model, model_config, dummy_weights)
    names = implementation or ["hf-dynamic", "kitty-fp16", "kitty-pro"]
    jobs = [
        LatencyJob(
            model=model_config if dummy_weights and model_config else model,
            label=label,
            implementation=name + COMPILED * (compiled and not name.endswith(COMPILED)),
            workload=Workload(prompt, new, size),
            mode=mode,
            points=points,
            steps=steps,
            memory_budget_bytes=None if memory_budget is None else parse_bytes(memory_budget),
            sub_batch=sub_batch,
            graph=None if graph else False,
            dummy_weights=dummy_weights,
            dtype=dtype,
            device=device,
            threads=threads,
            experiment="e2e",
            command=shlex.join(["kitty", *sys.argv[1:]]),
        )
        for name in names
        for size in batches
    ]
    for job in jobs:
        check_installed(job)
    check_writable(out.absolute())
    if largest:
        outcomes = []
        for name in dict.fromkeys(job.implementation for job in jobs):
            first = next(job for job in jobs if job.implementation == name)
            size, tries = bench.largest_batch(first, batches, out, _say)
            outcomes += tries
            found = f"largest batch that fits: {size}" if size else "no batch fits"
            print(f"{name}: {found}")
    else:
        outcomes = bench.run_all(jobs, out, _say)
    if as_json:
        print(json.dumps(bench.summary(outcomes), indent=2, sort_keys=True))
    if memory_budget is not None and not device.startswith("cuda"):
        _say(f"note: the memory budget is recorded but not enforced on {device}")
    for outcome in outcomes:
        if outcome.unexpected:
            _say(f"{bench.label(outcome.job)}: unexpected fall-back: {outcome.unexpected}")
    raise typer.Exit(bench.exit_code(outcomes))


def job_latency(
    experiment: Annotated[str, typer.Option("--experiment")],
    model: Annotated[str, typer.Option("--model")],
    implementation: Annotated[str, typer.Option("--implementation")],
    workload: Annotated[str, typer.Option("--workload")],
    results: Annotated[Path, typer.Option("--results")],
) -> None:
    """Measure one implementation on one workload."""
    from kitty.benchmark import e2e as bench
    from kitty.experiments import load_experiment

    loaded = load_experiment(experiment)
    job = loaded.latency_job(model, implementation, workload)
    check_installed(job)
    outcome = bench.run_job(job, results)
    if outcome.record is None:
        raise KittyError(outcome.fault)
    _say(bench.line(outcome))
    raise typer.Exit(bench.exit_code([outcome]))


def check_installed(job: object) -> None:
    """Refuse an implementation whose package is missing.

    Raises:
        KittyError: it is.
    """
    from kitty.benchmark.latency import LatencyJob

    assert isinstance(job, LatencyJob)
    if job.entry.package is None:
        return
    module, distribution = job.entry.package
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise KittyError(
            f"Implementation {job.entry.name!r} needs the package {distribution}, which is not "
            f"installed: pip install {distribution}."
        )


def _label(model: str, model_config: str | None, dummy_weights: bool) -> str:
    """The model's name in records and paths.

    Raises:
        KittyError: the model or the shape is not known, or only one of both options is given.
    """
    from kitty.benchmark.shapes import find_shape
    from kitty.models import find_model

    if model_config is not None and not dummy_weights:
        raise KittyError(
            f"--model-config {model_config} gives sizes but no weights: add --dummy-weights, or "
            "name a model with --model."
        )
    if dummy_weights:
        return find_shape(model_config or model).name
    return find_model(model).name


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
