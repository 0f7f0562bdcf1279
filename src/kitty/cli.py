"""The command line. Mistakes of the user end in one sentence on stderr and exit status 2."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kitty.commands import bench as bench_commands
from kitty.commands.claims import claims
from kitty.commands.compare import compare_records
from kitty.commands.image import image_app, overlay_app
from kitty.commands.instances import instances_app
from kitty.commands.options import ModelOption, RunCodeOption
from kitty.commands.slurm import submit
from kitty.commands.tasks import eval_app, run_task_job
from kitty.errors import KittyError
from kitty.launcher import DEFAULT_PROFILE, ERROR_MARK, TARGETS

MAIN_MODEL = "smollm2-135m-instruct"
MAIN_PASSAGE = "python-data-model"

app = typer.Typer(
    name="kitty",
    help="2-bit KV-cache quantization with dynamic channel-wise precision boost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(
    no_args_is_help=True,
    help="Models by name, and the embedded one.",
    epilog="Examples: `kitty models list`, `kitty models obtain`",
)
job_app = typer.Typer(no_args_is_help=True, help="Single jobs of an experiment, for the workflow.")
patch_app = typer.Typer(
    no_args_is_help=True,
    help="The patch series on the installed transformers 4.53.2.",
    epilog="Example: `kitty patch apply`",
)
app.add_typer(models_app, name="models")
bench_app = typer.Typer(
    no_args_is_help=True,
    help="Time and memory, against fp16 and against the hardware's limits.",
    epilog="Examples: `kitty bench ops`, `kitty bench e2e`",
)
app.add_typer(eval_app, name="eval")
app.add_typer(instances_app, name="instances")
app.add_typer(patch_app, name="patch")
app.add_typer(bench_app, name="bench")
app.add_typer(image_app, name="image")
app.add_typer(overlay_app, name="overlay")
app.add_typer(job_app, name="job", hidden=True)


def _show_version(asked: bool) -> None:
    if asked:
        from kitty.environment import package_version, revision

        found = revision()
        version = package_version("kitty") or "of a checkout"
        print(f"kitty {version}" if found == f"kitty {version}" else f"kitty {version} ({found})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """2-bit KV-cache quantization with dynamic channel-wise precision boost."""


def main() -> None:
    """Entry point of the console script."""
    try:
        # Not standalone: typer would frame a mistake in a box, and leaves exit codes to the caller.
        sys.exit(app(prog_name="kitty", standalone_mode=False))
    except typer.TyperException as error:
        if sentence := usage_sentence(error):  # empty where the help was shown in its place
            print(ERROR_MARK + sentence, file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:  # the end of standard input
        sys.exit(1)
    except KittyError as error:
        print(ERROR_MARK + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def usage_sentence(error: typer.TyperException) -> str:
    """What is wrong with the arguments and where to read on, in one sentence."""
    text = " ".join(error.format_message().split()).rstrip(".?")
    if not text:
        return ""
    if (faults := getattr(error.__cause__, "errors", None)) is not None:  # pydantic has the value
        text = text.replace("Invalid value", f"Invalid value {faults()[0]['input']!r}", 1)
    text = re.sub(r"\. ([A-Z])", lambda match: ", " + match[1].lower(), text)
    context = getattr(error, "ctx", None)
    command = "kitty" if context is None else context.command_path
    return f"{text}; see `{command} --help`."


# --- shared options and output -------------------------------------------------------------------

PassageOption = Annotated[str, typer.Option("--passage", "-p", help="A text shipped with Kitty.")]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="A UTF-8 text file in place of a passage.")
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens", "-n", min=1, help="Leading tokens of the text (default: 2176, or all if fewer)."
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="float16, bfloat16, float32, float64; default: the model's own."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, auto.")]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Write the record here.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads (default: torch's choice).")
]
BoostOption = Annotated[
    float | None, typer.Option("--boost-ratio", help="Share of key channels boosted, 0 to 1.")
]
SelectionOption = Annotated[
    str | None,
    typer.Option("--selection", help="How they are chosen: magnitude, random, variance or rotary."),
]
KeyBitsOption = Annotated[int | None, typer.Option("--key-bits", help="Of keys: 1 to 8, or 16.")]
ValueBitsOption = Annotated[
    int | None, typer.Option("--value-bits", help="Of values: 1 to 8, or 16.")
]
BoostBitsOption = Annotated[
    int | None, typer.Option("--boost-bits", help="Of boosted key channels: 1 to 8.")
]
SinkOption = Annotated[int | None, typer.Option("--sink", help="Leading tokens kept in 16 bit.")]
WindowOption = Annotated[
    int | None, typer.Option("--window", help="Most recent values kept in 16 bit.")
]
PageOption = Annotated[int | None, typer.Option("--page-size", help="Tokens of one page.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the random selection.")]


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Any]:
    """A bar on stderr as a callback (steps done, steps in all); silent when not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def spinner(title: str) -> Iterator[None]:
    """A notice that something of unknown length is going on; silent when not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(title):
        yield


def show_table(
    columns: list[str], rows: list[list[str]], title: str | None = None, note: str | None = None
) -> None:
    """Print a table: with rules, title and note on a terminal, tab-separated into a pipe."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(row))
        return
    table = Table(*columns, title=title, caption=note)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def set_threads(threads: int | None) -> None:
    """CPU threads of torch."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


# --- methods and models --------------------------------------------------------------------------


@app.command(
    "methods",
    epilog="Examples: `kitty methods`, `kitty methods --all --json`",
)
def show_methods(
    every: Annotated[bool, typer.Option("--all", help="Also every point of the sweeps.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the quantization methods.

    An asterisk in a title marks the paper's variants that keep the first 32 tokens, the sink, in 16
    bit. Bits per element count scales, zeros and channel lists of full pages.
    """
    from kitty.methods import load_methods

    methods = [m for m in load_methods().values() if every or "%" not in m.title]
    if as_json:
        print(json.dumps([method.to_dict() for method in methods], indent=2))
        return
    columns = ["name", "title", "K bits", "V bits", "boost", "selection", "sink", "window", "page"]
    columns += ["bits/element (D=128)", "packed cache"]
    rows = []
    for m in methods:
        boost = f"{m.boost_ratio:.1%} to {m.boost_bits}" if m.boost_ratio else "-"
        bits = sum(m.bits_per_element(128)) / 2
        reason = m.packed_reason()
        held = "yes" if reason is None else f"no: {reason}"
        numbers = [str(m.sink), str(m.window), str(m.page_size), f"{bits:.2f}"]
        selection = m.selection if m.boost_ratio else "-"
        rows.append(
            [m.name, m.title, str(m.key_bits), str(m.value_bits), boost, selection, *numbers, held]
        )
    show_table(columns, rows, "Methods", "* keeps the first tokens (the sink) in 16 bit")


@models_app.command("list", epilog="Example: `kitty models list`")
def list_models() -> None:
    """List the models that are known by name."""
    from kitty.models import embedded_folder, find_model, known_models

    rows = []
    for name in known_models():
        spec = find_model(name)
        where = spec.source
        if spec.embedded is not None:
            where += " (in the cache)" if embedded_folder(spec).is_dir() else " (not fetched yet)"
        rows.append([name, spec.title, spec.dtype or "", where])
    show_table(["name", "title", "dtype", "source"], rows, "Models")


@models_app.command("obtain", epilog="Example: `kitty models obtain smollm2-135m-instruct`")
def obtain_model(
    name: Annotated[str, typer.Argument(help="An embedded model.")] = MAIN_MODEL,
) -> None:
    """Fetch and convert an embedded model, or mend it where a file is damaged."""
    from kitty.models import obtain_embedded

    with spinner(f"obtaining {name}"):
        print(obtain_embedded(name, repair=True))


# --- the pipeline --------------------------------------------------------------------------------


@app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=(
        "Examples: `kitty run smoke`, `kitty run mine.yaml`, "
        "`kitty run ablation --cores 8 --results out`, "
        "`kitty run tiny --target tables`, `kitty run smoke -- --dry-run`"
    ),
)
def run_experiment(
    context: typer.Context,
    experiment: Annotated[
        str, typer.Argument(help="Name, or path of an experiment file.")
    ] = "smoke",
    results: Annotated[str, typer.Option(help="Folder of the results.")] = "results",
    target: Annotated[str, typer.Option(help="One of " + ", ".join(TARGETS) + ".")] = "all",
    cores: Annotated[str, typer.Option(help="Cores to use: a number, or all.")] = "all",
    memory_mb: Annotated[
        int | None,
        typer.Option(min=1, help="Memory of all jobs together (default: 80% of what is free)."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(help="default, slurm (each job a SLURM job) or slurm-single (inside one)."),
    ] = DEFAULT_PROFILE,
    files: Annotated[
        Path | None,
        typer.Option(
            help="Make only the files listed in this file, one a line, and what they need."
        ),
    ] = None,
    run_code: RunCodeOption = False,
) -> None:
    """Run an experiment: records, tables, figures, report. A run that was stopped goes on.

    Further arguments, after `--`, go to snakemake.
    """
    from kitty.launcher import Run, launch

    listed = () if files is None else read_list(files)
    extra = tuple(context.args)
    run = Run(experiment, results, target, cores, memory_mb, extra, listed, profile, run_code)
    status = launch(run)
    if status == 0 and target in ("all", "report") and not context.args and not listed:
        from kitty.workflow import Plan

        print(f"report: {Plan.load(experiment, results).report()}")
    raise typer.Exit(status)


def read_list(path: Path) -> tuple[str, ...]:
    """The lines of a file that names something on each of them."""
    try:
        lines = tuple(line for line in path.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise KittyError(f"The list {path} cannot be read: {error}.") from error
    if not lines:
        raise KittyError(f"The list {path} names no file: write one on each line.")
    return lines


# --- single measurements -------------------------------------------------------------------------


@eval_app.callback(
    invoke_without_command=True,
    epilog=(
        "Examples: `kitty eval --method kitty-pro`, "
        "`kitty eval --method kitty --boost-ratio 0.375 --selection variance --tokens 1024`, "
        "`kitty eval --method kivi-k2v2 --text book.txt --reference ref.safetensors --out r.json`"
    ),
)
def evaluate(
    context: typer.Context,
    method: Annotated[
        str, typer.Option("--method", help="A name that `kitty methods --all` lists.")
    ] = "kitty-pro",
    model: ModelOption = MAIN_MODEL,
    passage: PassageOption = MAIN_PASSAGE,
    text: TextOption = None,
    tokens: TokensOption = None,
    key_bits: KeyBitsOption = None,
    value_bits: ValueBitsOption = None,
    boost_ratio: BoostOption = None,
    boost_bits: BoostBitsOption = None,
    selection: SelectionOption = None,
    sink: SinkOption = None,
    window: WindowOption = None,
    page_size: PageOption = None,
    seed: SeedOption = None,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="File of the 16-bit pass; written if it is not there."),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a method's quality against the 16-bit model, teacher-forced over a text.

    For downstream tasks see `kitty eval lm --help`.

    The options from --key-bits to --seed change the chosen method.

    Numbers: nll, kl (to the 16-bit model's distribution) in nats per token; top1, the share of
    tokens with its most likely next token; effective_bits, stored per element of full pages, and
    _at_length with the 16-bit buffers, which a short text hardly leaves; quantized_pages_read, to
    show that the method was at work.
    """
    import tempfile

    if context.invoked_subcommand is not None:
        return

    from kitty.jobs import Setting, measure_quality, measure_reference
    from kitty.methods import get_method
    from kitty.models import find_model
    from kitty.texts import load_passage

    check_out(out)
    if reference is not None and not reference.is_file():
        check_out(reference)
    chosen = get_method(
        method,
        key_bits=key_bits,
        value_bits=value_bits,
        boost_ratio=boost_ratio,
        boost_bits=boost_bits,
        selection=selection,
        sink=sink,
        window=window,
        page_size=page_size,
        seed=seed,
    )
    setting = Setting(find_model(model), load_passage(text or passage), tokens, dtype, device)
    set_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        place = reference or Path(scratch) / "reference.safetensors"
        if not place.is_file():
            with spinner("16-bit pass"):
                measure_reference(setting, chosen, place)
        with progress_bar(chosen.title) as progress:
            record = measure_quality(setting, chosen, place, progress=progress)
    deliver(record, out, as_json)


@app.command(
    "analyze",
    epilog="Examples: `kitty analyze`, `kitty analyze --method kitty --layer 3 --out a.json`",
)
def analyze_channels(
    method: Annotated[
        str, typer.Option("--method", help="Whose choice of channels is examined.")
    ] = "kitty-pro",
    model: ModelOption = MAIN_MODEL,
    passage: PassageOption = MAIN_PASSAGE,
    text: TextOption = None,
    tokens: TokensOption = None,
    boost_ratio: BoostOption = None,
    selection: SelectionOption = None,
    layer: Annotated[
        int | None, typer.Option("--layer", help="Layer kept in full (default: the middle one).")
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Analyse the key channels: magnitude, sensitivity, stability (the paper's Figure 2).

    Numbers, means over layers, heads and pages: overlap, the share of the chosen channels among as
    many most sensitive ones (_query_heads: of each query head alone); captured, the share of the
    score error in the chosen channels, and at best; jaccard, the likeness of a page's choice to
    that of the page before and of the first; _chance, what a random choice would give.
    """
    from kitty.jobs import Setting, measure_analysis
    from kitty.methods import get_method
    from kitty.models import find_model
    from kitty.texts import load_passage

    check_out(out)
    chosen = get_method(method, boost_ratio=boost_ratio, selection=selection)
    setting = Setting(find_model(model), load_passage(text or passage), tokens, dtype, device)
    set_threads(threads)
    with progress_bar("channels") as progress:
        record = measure_analysis(setting, chosen, layer=layer, progress=progress)
    deliver(record, out, as_json)


def check_out(out: Path | None) -> None:
    """Refuse a file that cannot be written before the measurement, not after it."""
    from kitty.launcher import check_writable

    if out is not None:
        check_writable(out.absolute().parent)
        if out.is_dir():
            raise KittyError(f"{out} is a folder: name a file in it, such as {out / 'r.json'}.")


def deliver(record: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Write a record where asked to, and print its metrics."""
    from kitty.records import format_record, write_record

    if out is not None:
        write_record(out, record)
    if as_json:
        print(format_record(record), end="")
        return
    metrics = record["metrics"]
    rows = []
    for name, value in metrics.items():
        if name.endswith("_ci") or isinstance(value, list):
            continue
        bounds = metrics.get(f"{name}_ci")
        interval = "" if bounds is None else f"{bounds[0]:.4g} … {bounds[1]:.4g}"
        rows.append([name, f"{value:.5g}" if isinstance(value, float) else str(value), interval])
    passage = record["passage"]
    title = f"{record['method']['title']}, {record['model']['name']}, {passage['name']}"
    title += f", {passage['num_tokens']} tokens"
    show_table(["metric", "value", "95% interval"], rows, title)


@app.command(
    "report",
    epilog="Examples: `kitty report smoke`, `kitty report ablation --results out`",
)
def make_report(
    experiment: Annotated[
        str, typer.Argument(help="Name, or path of an experiment file.")
    ] = "smoke",
    results: Annotated[str, typer.Option(help="Folder of the results.")] = "results",
) -> None:
    """Make tables, figures and the HTML report of an experiment from its records."""
    from kitty.workflow import Plan

    plan = Plan.load(experiment, results)
    with spinner("tables, figures, report"):
        paths = [*plan.write_tables(), *plan.write_figures(), *plan.write_latency()]
        for path in [*paths, plan.write_report()]:
            print(path)


@bench_app.command("ops", epilog="Example: `kitty bench ops --out results/ops --quick`")
def bench_ops(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the results.")] = Path(
        "results/ops"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths only.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed graph replays.")] = 15,
) -> None:
    """Time every op of the packed cache; wrong kernels are not timed, fall-backs are an error."""
    from kitty.benchmark.ops import run

    raise typer.Exit(run(out, quick=quick, repeats=repeats))


bench_app.command("e2e", epilog=bench_commands.E2E_EXAMPLES)(bench_commands.e2e)


@patch_app.command("check", epilog="Example: `kitty patch check`")
def patch_check() -> None:
    """Say whether the patches are applied."""
    from kitty import patching

    print(f"The patches are {patching.check()}.")


@patch_app.command("apply", epilog="Example: `kitty patch apply`")
def patch_apply() -> None:
    """Apply the patches, so that generate() knows cache_implementation="kitty"."""
    from kitty import patching

    print("The patches are applied." if patching.apply() else "They were applied already.")


@patch_app.command("revert", epilog="Example: `kitty patch revert`")
def patch_revert() -> None:
    """Bring the released files back."""
    from kitty import patching

    print("The patches are reverted." if patching.revert() else "They were not applied.")


@app.command("doctor", epilog="Example: `kitty doctor`")
def doctor(as_json: JsonOption = False) -> None:
    """Show versions, GPU, memory, and what will run where."""
    from kitty.doctor import examine

    found = examine()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for title, entries in found.items():
        show_table([title, ""], [[name, str(value)] for name, value in entries.items()])


# --- commands of their own modules, listed after those above --------------------------------------

app.command(
    "submit",
    epilog="Examples: `kitty submit smoke`, `kitty submit reviewer --cores 8 --gpus 1 --wait`",
)(submit)
app.command("compare", epilog="Example: `kitty compare results/smoke results/reference/cpu/smoke`")(
    compare_records
)
app.command("claims", epilog="Examples: `kitty claims`, `kitty claims results/paper --markdown`")(
    claims
)


# --- jobs of the workflow ------------------------------------------------------------------------

ExperimentOption = Annotated[str, typer.Option("--experiment")]
JobOut = Annotated[Path, typer.Option("--out")]


def _setting(experiment: Any, model: str, passage: str) -> Any:
    from kitty.jobs import Setting
    from kitty.texts import load_passage

    if model not in experiment.models or passage not in experiment.passages:
        raise _no_such_job(experiment, model, passage)
    set_threads(experiment.threads)
    return Setting(
        experiment.models[model],
        load_passage(experiment.passages[passage]),
        experiment.tokens,
        experiment.dtype,
        experiment.device,
        experiment.name,
    )


def _no_such_job(experiment: Any, model: str, passage: str) -> KittyError:
    return KittyError(
        f"Experiment {experiment.name!r} has no {model}/{passage}: its file is {experiment.source}."
    )


@job_app.command("model")
def job_model(model: ModelOption, out: JobOut) -> None:
    """Make sure that a model can be loaded, and say where it came from."""
    from kitty.models import describe_model, find_model, obtain_embedded
    from kitty.records import write_atomically

    spec = find_model(model)
    if spec.embedded is not None:
        obtain_embedded(spec, repair=True)
    write_atomically(out, (json.dumps(describe_model(spec), indent=2) + "\n").encode())


@job_app.command("reference")
def job_reference(
    experiment: ExperimentOption, model: ModelOption, passage: PassageOption, out: JobOut
) -> None:
    """Run the 16-bit model over a text."""
    from kitty.experiments import load_experiment
    from kitty.jobs import measure_reference
    from kitty.texts import least_tokens

    loaded = load_experiment(experiment)
    longest = max(loaded.methods, key=least_tokens)
    measure_reference(_setting(loaded, model, passage), longest, out)


@job_app.command("quality")
def job_quality(
    experiment: ExperimentOption,
    model: ModelOption,
    passage: PassageOption,
    method: Annotated[str, typer.Option("--method")],
    repeat: Annotated[int, typer.Option("--repeat")],
    reference: Annotated[Path, typer.Option("--reference")],
    out: JobOut,
) -> None:
    """Measure one method."""
    from kitty.experiments import load_experiment
    from kitty.jobs import measure_quality
    from kitty.records import write_record

    loaded = load_experiment(experiment)
    job = loaded.job(model, passage, method, repeat)
    setting = _setting(loaded, model, passage)
    with progress_bar(job.method.title) as progress:
        record = measure_quality(
            setting, job.method, reference, repeat=job.repeat, progress=progress
        )
    write_record(out, record)


job_app.command("task")(run_task_job)


@job_app.command("analysis")
def job_analysis(
    experiment: ExperimentOption, model: ModelOption, passage: PassageOption, out: JobOut
) -> None:
    """Analyse the key channels of a model on a text."""
    from kitty.experiments import load_experiment
    from kitty.jobs import measure_analysis
    from kitty.records import write_record

    loaded = load_experiment(experiment)
    if loaded.analysis_method is None or (model, passage) not in loaded.analyses():
        raise _no_such_job(loaded, model, passage)
    setting = _setting(loaded, model, passage)
    write_record(
        out, measure_analysis(setting, loaded.analysis_method, layer=loaded.analysis_layer)
    )


job_app.command("latency")(bench_commands.job_latency)


@job_app.command("report")
def job_report(
    part: Annotated[str, typer.Argument(help="tables, figures, latency or report")],
    experiment: ExperimentOption,
    results: Annotated[str, typer.Option("--results")],
) -> None:
    """Make the tables, the figures, those of latency, or the report from the records."""
    from kitty.workflow import Plan

    plan = Plan.load(experiment, results)
    parts = {
        "tables": plan.write_tables,
        "figures": plan.write_figures,
        "latency": plan.write_latency,
        "report": plan.write_report,
    }
    if part not in parts:
        raise KittyError(f"Part {part!r} is not known: use one of {', '.join(parts)}.")
    parts[part]()


@job_app.command("redraw")
def job_redraw(
    part: Annotated[str, typer.Argument(help="tables or figures")],
    records: Annotated[Path, typer.Option("--records")],
    results: Annotated[Path, typer.Option("--results")],
) -> None:
    """Make the tables or the figures of committed records."""
    from kitty.redraw import Redraw

    redraw = Redraw.load(records, results)
    parts = {"tables": redraw.write_tables, "figures": redraw.write_figures}
    if part not in parts:
        raise KittyError(f"Part {part!r} is not known: use one of {', '.join(parts)}.")
    parts[part]()
