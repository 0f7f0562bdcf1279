"""The run script of the container image: `snakemake`, `kitty`, `pytest`, or any command in it.

Snakemake starts in the caller's directory with the image's Snakefile and profile, on all cores,
with the experiment that fits the machine; whatever the caller says goes before that.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kitty.driver import Driver, examine_driver
from kitty.environment import package_version
from kitty.errors import KittyError
from kitty.launcher import (
    ERROR_MARK,
    GPUS_OF_A_RUN,
    LOCK,
    STATE,
    check_writable,
    clear_stale_lock,
    memory_to_use,
    only_run,
)
from kitty.paths import configs_dir, shipped

HELP = """\
Kitty {version}: a 2-bit KV cache with dynamic channel-wise precision boost (arXiv:2511.18643).

  apptainer run {image} kitty doctor     what this machine has, and what runs where
  apptainer run {image} snakemake all    the experiment: records, tables, figures, report
  apptainer run {image} pytest           the tests

snakemake runs the experiment {experiment!r} here; --config experiment=NAME names another.
{reason}
Results are written to results/, caches to .kitty/, both in the working directory.
Any other command of the image works too: apptainer run {image} python3 mine.py
"""
SNAKEMAKE = ["python3", "-m", "kitty.snakemake"]
QUIET_SNAKEMAKE = {"-h", "--help", "-v", "--version"}  # say something and end
# Options with which Snakemake measures nothing, so that a run in the same folder is no obstacle.
LOOKS_ONLY = {
    *("-n", "--dry-run", "--dryrun", "--unlock", "--report", "--lint", "--dag", "--rulegraph"),
    *("--filegraph", "--summary", "-S", "--detailed-summary", "-D", "--list", "-l", "--list-rules"),
}
FAST_TESTS = "not slow and not gpu and not container and not slurm"


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace this process by the command that was asked for."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(help_text(), end="")
            return
        if words[0] == "snakemake":
            start_snakemake(words[1:])
        elif words[0] == "pytest":
            start(["python3", "-m", "pytest", *pytest_arguments(words[1:])])
        else:
            start(words)
    except KittyError as error:
        print(ERROR_MARK + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


def start(command: Sequence[str]) -> None:
    """Become another program.

    Raises:
        KittyError: it is not there.
    """
    if shutil.which(command[0]) is None:
        raise KittyError(
            f"The command {command[0]!r} is not in the image: use snakemake, kitty, pytest, or a "
            "program that it holds."
        )
    sys.stdout.flush()
    os.execvp(command[0], list(command))


def help_text() -> str:
    """What the image says when it is started without a command."""
    experiment, reason = choose_experiment(examine_driver())
    image = Path(os.environ.get("APPTAINER_CONTAINER") or "kitty.sif").name
    return HELP.format(
        version=package_version("kitty"), image=image, experiment=experiment, reason=reason
    )


def choose_experiment(driver: Driver) -> tuple[str, str]:
    """Experiment for this machine, and why."""
    if driver.problem is not None:
        return "smoke", driver.problem
    if str(package_version("torch")).endswith("+cpu"):
        return "smoke", "This is the image's cpu flavour; the cuda flavour would use the GPU."
    return "reviewer", f"The driver shows {driver.gpus} GPU{'s' if driver.gpus > 1 else ''}."


# --- snakemake ------------------------------------------------------------------------------------


def start_snakemake(words: Sequence[str]) -> None:
    """Start Snakemake in the working directory, as the launcher does by `kitty run`.

    Raises:
        KittyError: the folder cannot be written, another run is in it, or the experiment needs a
            GPU that is not there.
    """
    if QUIET_SNAKEMAKE.intersection(words):
        start([*SNAKEMAKE, *words])
    named = config_value(words, "experiment")
    driver = examine_driver()
    experiment, reason = choose_experiment(driver)
    if named is None:
        print(f"kitty: experiment {experiment!r}: {reason}", file=sys.stderr)
    elif named == "reviewer" and driver.problem is not None:
        raise KittyError(f"Experiment 'reviewer' needs a GPU: {driver.problem}")
    command = snakemake_command(words, None if named is not None else experiment)
    if LOOKS_ONLY.intersection(words):
        start(command)
    check_writable(STATE)
    with only_run(LOCK, {"experiment": named or experiment}) as handle:
        clear_stale_lock()
        os.set_inheritable(handle, True)  # Snakemake holds the lock from now on
        start(command)


def snakemake_command(words: Sequence[str], experiment: str | None) -> list[str]:
    """The full command line for Snakemake: the caller's words and what they leave open.

    Args:
        words: arguments of the caller.
        experiment: to be run; None: the caller has named one.
    """
    words = [own_records(word) for word in words]
    if experiment is not None:
        add_config(words, f"experiment={experiment}")
    defaults = [
        (("-s", "--snakefile"), ["--snakefile", str(shipped("Snakefile"))]),
        (
            ("--workflow-profile",),
            ["--workflow-profile", str(configs_dir() / "profiles" / "default")],
        ),
        (("-c", "--cores", "-j", "--jobs"), ["--cores", "all"]),
        (
            ("--resources", "--res"),
            ["--resources", f"mem_mb={memory_to_use()}", f"gpu={GPUS_OF_A_RUN}"],
        ),
    ]
    for names, option in defaults:
        if not any(given(word, names) for word in words):
            words += option
    return [*SNAKEMAKE, *words]


def given(word: str, names: Sequence[str]) -> bool:
    """Whether an argument is one of these options, also as ``--cores=2`` or ``-c2``."""
    for name in names:
        if word == name or word.startswith(name + "="):
            return True
        if len(name) == 2 and word.startswith(name) and word[2:].replace("all", "0").isdigit():
            return True
    return False


def own_records(word: str) -> str:
    """``records=PATH`` of the caller's ``--config``, where only the image has such a folder."""
    name, _, path = word.partition("=")
    if name != "records":
        return word
    return f"{name}={inside(path, shipped('pyproject.toml').parent)}"


def config_value(words: Sequence[str], key: str) -> str | None:
    """Value that the caller's ``--config`` gives a key."""
    values = [word.removeprefix("--config=") for word in words]
    return next((v.split("=", 1)[1] for v in values if v.startswith(f"{key}=")), None)


def add_config(words: list[str], entry: str) -> None:
    """Add an entry to the caller's ``--config``, which Snakemake reads once."""
    for option in ("-C", "--config"):
        if option in words:
            words.insert(words.index(option) + 1, entry)
            return
    words += ["--config", entry]


# --- pytest ---------------------------------------------------------------------------------------


def pytest_arguments(words: Sequence[str]) -> list[str]:
    """Arguments with which pytest finds the image's tests, and writes nothing beside them."""
    root = shipped("pyproject.toml").parent
    found = [inside(word, root) for word in words]
    paths = [new for word, new in zip(words, found, strict=True) if is_path(word, root)]
    options = ["-c", str(root / "pyproject.toml"), "--rootdir", str(root), "-p", "no:cacheprovider"]
    if "-m" not in words:
        options += ["-m", FAST_TESTS]
    return [*options, *found, *([] if paths else [str(root / "tests")])]


def is_path(word: str, root: Path) -> bool:
    """Whether an argument names a file or folder, here or in the image."""
    name = word.partition("::")[0]
    return not word.startswith("-") and (Path(name).exists() or (root / name).exists())


def inside(word: str, root: Path) -> str:
    """A path as given, or the image's own file of that name."""
    name = word.partition("::")[0]
    if word.startswith("-") or Path(name).exists() or not (root / name).exists():
        return word
    return str(root / word)


if __name__ == "__main__":
    main()
