"""The image's run script: what it starts for snakemake, pytest and other commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kitty.driver import Driver
from kitty.experiments import known_experiments, load_experiment
from kitty.image import entry
from kitty.paths import shipped

NO_GPU = Driver(0, None, "No GPU can be used, as no NVIDIA driver is installed here.")
ONE_GPU = Driver(1, (12, 4), None)


class Started(Exception):
    """In place of becoming the program."""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Run the script in an empty folder; returns the command that it would become."""
    monkeypatch.chdir(tmp_path)

    def become(program, command):
        raise Started(command)

    def run(*words, driver=NO_GPU):
        monkeypatch.setattr(os, "execvp", become)
        monkeypatch.setattr(entry, "examine_driver", lambda: driver)
        with pytest.raises(Started) as caught:
            entry.main(words)
        return caught.value.args[0]

    return run


def option(command, name):
    return command[command.index(name) + 1]


def test_snakemake_all_gets_the_images_snakefile_profile_cores_and_experiment(started, capsys):
    command = started("snakemake", "all")
    assert command[:4] == ["python3", "-m", "kitty.snakemake", "all"]
    assert option(command, "--snakefile") == str(shipped("Snakefile"))
    assert option(command, "--workflow-profile").endswith("profiles/default")
    assert option(command, "--cores") == "all"
    assert option(command, "--config") == "experiment=smoke"
    assert "experiment 'smoke': No GPU can be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("torch", "picked"),
    [("2.4.1", "reviewer"), ("2.4.1+cu121", "reviewer"), ("2.13.0+cpu", "smoke")],
)
def test_a_gpu_that_torch_can_use_means_the_reviewers_experiment(
    started, monkeypatch, torch, picked
):
    monkeypatch.setattr(entry, "package_version", lambda name: torch)
    command = started("snakemake", "all", driver=ONE_GPU)
    assert option(command, "--config") == f"experiment={picked}"
    assert picked in known_experiments()


def test_the_reviewers_experiment_measures_on_the_gpu():
    assert load_experiment("reviewer").device == "cuda"


@pytest.mark.parametrize(
    "words", [["-c2"], ["--cores", "2"], ["--cores=2"], ["-j", "2"], ["--jobs=2"], ["-call"]]
)
def test_cores_of_the_caller_stand(started, words):
    command = started("snakemake", "all", *words)
    about_cores = [word for word in command if re.match(r"--cores|--jobs|-c|-j", word)]
    assert about_cores == words[:1]


def test_the_callers_own_config_is_joined_not_replaced(started):
    command = started("snakemake", "all", "--config", "results=out")
    assert command.count("--config") == 1
    place = command.index("--config")
    assert set(command[place + 1 : place + 3]) == {"experiment=smoke", "results=out"}
    command = started("snakemake", "all", "--config", "experiment=tiny")
    assert [word for word in command if word.startswith("experiment=")] == ["experiment=tiny"]


def test_records_that_only_the_image_has_are_found_in_it(started, tmp_path):
    words = ("snakemake", "figures", "--config", "records=results/reference")
    own = shipped("pyproject.toml").parent / "results" / "reference"
    assert f"records={own}" in started(*words)
    (tmp_path / "results" / "reference").mkdir(parents=True)
    assert "records=results/reference" in started(*words)


def test_the_callers_own_snakefile_and_profile_stand(started):
    command = started("snakemake", "-s", "mine.smk", "--workflow-profile", "mine")
    assert "--snakefile" not in command
    assert command.count("--workflow-profile") == 1


def test_help_of_snakemake_is_not_touched(started):
    assert started("snakemake", "--help") == [*entry.SNAKEMAKE, "--help"]


def test_a_named_reviewer_experiment_without_a_gpu_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "examine_driver", lambda: NO_GPU)
    with pytest.raises(SystemExit) as caught:
        entry.main(["snakemake", "all", "--config", "experiment=reviewer"])
    assert caught.value.code == 2
    assert "needs a GPU: No GPU can be used" in capsys.readouterr().err


def test_an_unknown_command_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as caught:
        entry.main(["nosuchprogram"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_another_command_of_the_image_runs_as_it_is(started):
    assert started("python3", "mine.py", "--all") == ["python3", "mine.py", "--all"]


def test_pytest_runs_the_images_fast_tests_from_any_folder(started):
    command = started("pytest", "-q")
    assert command[:3] == ["python3", "-m", "pytest"]
    assert option(command, "-m") == "pytest"
    assert command[-1] == str(shipped("tests"))
    assert "no:cacheprovider" in command
    assert entry.FAST_TESTS in command


def test_pytest_finds_a_file_of_the_image_by_its_name(started):
    command = started("pytest", "tests/unit/test_cli.py::test_x", "-m", "slow")
    assert command[-3:] == [f"{shipped('tests')}/unit/test_cli.py::test_x", "-m", "slow"]
    assert str(shipped("tests")) not in command
    assert entry.FAST_TESTS not in command


def test_without_a_command_three_are_shown(capsys, monkeypatch):
    monkeypatch.delenv("APPTAINER_CONTAINER", raising=False)  # the image's own name, inside one
    entry.main([])
    text = capsys.readouterr().out
    assert [f"apptainer run kitty.sif {name}" in text for name in ("kitty", "snakemake", "pytest")]
    assert text.count("apptainer run kitty.sif") == 4


# as `apptainer run kitty.sif snakemake all`, the process that started another and waits for it
PARENT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[2:]).returncode)"


def test_a_second_snakemake_in_the_same_folder_is_refused_while_the_first_one_lives(tmp_path):
    code = (
        "import os, sys, time\n"
        "from kitty.image import entry\n"
        "entry.snakemake_command = lambda *a: [sys.executable, '-c', sys.argv[1]]\n"
        "entry.main(['snakemake', 'all'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(entry.__file__).parents[2])}

    def start(body):
        return subprocess.Popen(
            [sys.executable, "-c", code, body],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start("print('up', flush=True); import time; time.sleep(60)")
    try:
        assert first.stdout.readline() == "up\n"
        second = start("print('up')")
        _, error = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "Another run works in this folder" in error
    finally:
        first.kill()
        first.wait()
    third = start("print('up')")
    out, error = third.communicate(timeout=60)
    assert (third.returncode, out) == (0, "up\n"), error


@pytest.mark.parametrize("parent", [[], [sys.executable, "-c", PARENT, "snakemake"]])
def test_what_a_killed_snakemake_left_is_cleared_by_the_next(tmp_path, parent):
    stale = tmp_path / ".snakemake" / "locks" / "0.output.lock"
    stale.parent.mkdir(parents=True)
    stale.touch()
    (tmp_path / "Snakefile").write_text("rule all:\n    shell: 'echo made > made'\n")
    command = [sys.executable, "-m", "kitty.image.entry", "snakemake", "all", "-s", "Snakefile"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(entry.__file__).parents[2]),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*parent, *command, "--workflow-profile", "none", "--config", "experiment=tiny"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made").read_text() == "made\n"
    assert not stale.exists()
