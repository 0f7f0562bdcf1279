"""`kitty eval lm`: downstream tasks with a quantized cache, and the workflow's task job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kitty.commands.options import ModelOption, RunCodeOption

eval_app = typer.Typer(help="Quality of a method: on a text, or in downstream tasks.")


def quiet() -> None:
    """Keep the progress bars of libraries out of logs; tqdm looks when it is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


@eval_app.command(
    "lm",
    epilog=(
        "Examples: `kitty eval lm gsm8k_cot_llama --provider standin --limit 8 --max-gen-toks 64`, "
        "`kitty eval lm key_retrieval --method kitty --tokens 2048`, "
        "`kitty eval lm aime24 -m qwen3-8b --device cuda --cache packed --batch-size 8 --repeat 2`"
    ),
)
def eval_lm(
    task: Annotated[str, typer.Argument(help="A task of configs/tasks, or of lm-eval.")],
    method: Annotated[
        str, typer.Option("--method", help="A name that `kitty methods --all` lists.")
    ] = "kitty-pro",
    model: ModelOption = "smollm2-135m-instruct",
    cache: Annotated[
        str, typer.Option("--cache", help="simulate (any bits) or packed (2-bit pages).")
    ] = "simulate",
    provider: Annotated[
        str | None, typer.Option("--provider", help="hub, or standin for the offline data set.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="JSON lines of the same columns, as the data set.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Leading problems that are used.")
    ] = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=0, help="Number of the repeat; it gives the seeds.")
    ] = 0,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Problems answered together.")
    ] = 1,
    num_fewshot: Annotated[int | None, typer.Option("--num-fewshot", min=0)] = None,
    chat_template: Annotated[
        bool | None, typer.Option("--chat-template/--no-chat-template", show_default=False)
    ] = None,
    do_sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="Decoding.", show_default=False)
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0)] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0)] = None,
    max_gen_toks: Annotated[
        int | None, typer.Option("--max-gen-toks", min=1, help="Most new tokens of an answer.")
    ] = None,
    until: Annotated[
        list[str] | None, typer.Option("--until", help="A stop string; may be given repeatedly.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=64, help="Length of a recall task's texts.")
    ] = None,
    texts: Annotated[
        int | None, typer.Option("--texts", min=1, help="Number of a recall task's texts.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of repeat 0.")] = 1234,
    run_code: RunCodeOption = False,
    dtype: Annotated[str | None, typer.Option("--dtype")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, auto.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1)] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The record; default below results/lm."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
) -> None:
    """Run a downstream task with a method's cache; what is not given is as the paper has it.

    Writes the record and, beside it, the predictions. Every finished batch is kept at once: the
    same command again goes on where a stopped one was. Questions that ask for likelihoods, and the
    recall tasks (key_retrieval, span_copy, induction), are scored in one pass in which every token
    sees what decoding would show it.
    """
    quiet()
    from kitty.cli import check_out, progress_bar, set_threads
    from kitty.jobs import TaskJob, measure_task
    from kitty.methods import get_method
    from kitty.models import find_model
    from kitty.tasks import load_task

    generation: dict[str, Any] = {
        "max_gen_toks": max_gen_toks,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "until": until or None,
    }
    setting = load_task(
        task,
        {
            "provider": provider,
            "data": None if data is None else str(data),
            "limit": limit,
            "num_fewshot": num_fewshot,
            "chat_template": chat_template,
            "generation": {k: v for k, v in generation.items() if v is not None} or None,
            "recall": {k: v for k, v in (("tokens", tokens), ("texts", texts)) if v} or None,
        },
    )
    spec, chosen = find_model(model), get_method(method)
    place = out or Path("results/lm") / spec.name / task / chosen.name / f"r{repeat}.json"
    check_out(place)
    set_threads(threads)
    job = TaskJob(
        spec=spec,
        task=setting,
        method=chosen,
        cache=cache,
        repeat=repeat,
        first_seed=seed,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        run_code=run_code,
    )
    with progress_bar(setting.title) as progress:
        record = measure_task(job, place, progress=progress)
    show(record, place, as_json)


@eval_app.command(
    "agree",
    epilog="Example: `kitty eval agree gsm8k_cot_llama --provider standin --limit 20`",
)
def eval_agree(
    task: Annotated[str, typer.Argument(help="A task of configs/tasks, or of lm-eval.")],
    method: Annotated[
        str, typer.Option("--method", help="One that both caches hold.")
    ] = "kitty-pro",
    model: ModelOption = "smollm2-135m-instruct",
    provider: Annotated[str | None, typer.Option("--provider", help="hub or standin.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Problems.")] = 20,
    num_fewshot: Annotated[int | None, typer.Option("--num-fewshot", min=0)] = None,
    max_gen_toks: Annotated[int, typer.Option("--max-gen-toks", min=1)] = 48,
    dtype: Annotated[str | None, typer.Option("--dtype")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, auto.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1)] = None,
) -> None:
    """Compare the greedy answers of the simulated and the packed cache, problem by problem.

    They may first differ only at a step whose two best logits are closer than the logits of the two
    caches differ; anything else ends with exit status 1.
    """
    quiet()
    from kitty.cli import progress_bar, set_threads, show_table
    from kitty.evaluation.agreement import check_method, compare_task
    from kitty.evaluation.downstream import load_lm_task
    from kitty.evaluation.lm import KittyLM
    from kitty.methods import get_method
    from kitty.models import find_model, load_model
    from kitty.tasks import load_task, seeds

    chosen, setting = (
        get_method(method),
        load_task(task, {"provider": provider, "num_fewshot": num_fewshot}),
    )
    check_method(chosen)
    find_model(model)
    set_threads(threads)
    loaded = load_lm_task(setting, seeds(0))
    lm = KittyLM(*load_model(model, dtype, device), chosen)
    with progress_bar(task) as progress:
        found = compare_task(
            lm, loaded, limit, max_gen_toks, progress or (lambda done, total: None)
        )
    parted = [c for c in found if c.parted is not None]
    rows = [
        ["same answers", str(len(found) - len(parted))],
        ["differ within the error of the logits", str(sum(c.explained for c in parted))],
        ["differ otherwise", str(sum(not c.explained for c in parted))],
        ["largest difference of a logit", f"{max(c.error for c in found):.3g}"],
        ["quantized pages read", str(sum(c.pages_read for c in found))],
    ]
    show_table(["problems", str(len(found))], rows, f"{chosen.title}, {task}")
    raise typer.Exit(0 if all(c.explained for c in found) else 1)


def show(record: dict[str, Any], place: Path, as_json: bool) -> None:
    """Print a task record."""
    from kitty.cli import show_table
    from kitty.records import format_record

    if as_json:
        print(format_record(record), end="")
        return
    rows = []
    for name, entry in record["metrics"].items():
        bounds = entry.get("ci")
        interval = "" if bounds is None else f"{bounds[0]:.4g} … {bounds[1]:.4g}"
        rows.append([name, f"{entry['value']:.4g}", interval, str(entry["n"])])
    rows.append(["quantized pages read", str(record["quantized_pages_read"]), "", ""])
    title = f"{record['method']['title']}, {record['model']['name']}, {record['task']['name']}"
    show_table(["metric", "value", "95% interval", "n"], rows, title)
    print(f"record: {place}")


def run_task_job(
    experiment: Annotated[str, typer.Option("--experiment")],
    model: Annotated[str, typer.Option("--model")],
    task: Annotated[str, typer.Option("--task")],
    method: Annotated[str, typer.Option("--method")],
    repeat: Annotated[int, typer.Option("--repeat")],
    out: Annotated[Path, typer.Option("--out")],
    run_code: RunCodeOption = False,
) -> None:
    """Run one downstream task of an experiment."""
    quiet()
    from kitty.cli import progress_bar, set_threads
    from kitty.experiments import load_experiment
    from kitty.jobs import measure_task, task_job

    loaded = load_experiment(experiment)
    set_threads(loaded.threads)
    job = task_job(loaded, loaded.task_run(model, task, method, repeat), run_code=run_code)
    with progress_bar(f"{task} {method}") as progress:
        measure_task(job, out, progress=progress)
