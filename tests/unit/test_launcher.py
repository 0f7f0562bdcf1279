"""The launcher: one run per folder, stale locks cleared, live ones respected, failures told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kitty import launcher
from kitty.errors import KittyError

HOLD = """
import sys, time
from pathlib import Path
from kitty.launcher import only_run
with only_run(Path(sys.argv[1]), {"experiment": "tiny"}):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".snakemake" / "locks").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def holder(here):
    """Another process that holds the folder's lock."""
    command = [sys.executable, "-c", HOLD, str(here / launcher.LOCK)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_in_the_folder_is_refused_and_names_the_first(here, holder):
    with (
        pytest.raises(KittyError, match=f"process {holder.pid} .*experiment tiny"),
        launcher.only_run(launcher.LOCK, {}),
    ):
        pass


def test_the_lock_of_a_killed_run_is_free(here, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with launcher.only_run(launcher.LOCK, {"experiment": "smoke"}):
        assert json.loads(Path(launcher.LOCK).read_text())["pid"] == os.getpid()


def test_the_lock_lives_as_long_as_the_child_that_inherited_it(here):
    with launcher.only_run(launcher.LOCK, {"experiment": "tiny"}) as handle:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(handle,))
    try:
        with pytest.raises(KittyError, match="Another run"), launcher.only_run(launcher.LOCK, {}):
            pass
    finally:
        child.kill()
        child.wait()
    with launcher.only_run(launcher.LOCK, {}):
        pass


def test_a_stale_snakemake_lock_is_removed(here):
    lock = here / ".snakemake" / "locks" / "0.output.lock"
    lock.write_text("results/tiny/report.html\n")
    launcher.clear_stale_lock()
    assert not lock.exists()


def test_the_lock_of_a_living_snakemake_stays(here):
    lock = here / ".snakemake" / "locks" / "0.output.lock"
    lock.write_text("results/tiny/report.html\n")
    program = here / "snakemake"
    program.write_text("import time\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, str(program)])
    try:
        while b"snakemake" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)  # between fork and exec
        with pytest.raises(KittyError, match=f"process {process.pid}"):
            launcher.clear_stale_lock()
        assert lock.exists()
    finally:
        process.kill()
        process.wait()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KittyError, match="cannot be written"):
        launcher.check_writable(tmp_path / "file" / "results")


def test_reasons_of_failed_jobs_come_from_the_logs_that_changed(tmp_path):
    logs = tmp_path / "logs" / "quality"
    logs.mkdir(parents=True)
    (logs / "old.log").write_text("kitty: error: an old one\n")
    before = launcher.log_states(tmp_path)
    (logs / "a.log").write_text("notice\nkitty: error: the model is damaged\n")
    (logs / "b.log").write_text("kitty: error: the model is damaged\n")
    (logs / "c.log").write_text("Traceback (most recent call last):\n  x\nIndexError: 3\n")
    (logs / "d.log").write_text("fine\n")
    assert launcher.failures(tmp_path, before) == [
        "the model is damaged",
        f"IndexError: 3 (see {logs / 'c.log'})",
    ]


INTERRUPTED = """
mkdir -p results/tiny/logs
echo 'Traceback (most recent call last):' > results/tiny/logs/a.log
echo KeyboardInterrupt >> results/tiny/logs/a.log
sleep 0.3
kill -INT $PPID
sleep 0.1
exit 1
"""


def test_an_interrupt_ends_the_run_with_130_and_no_reasons(here, monkeypatch, capfd):
    monkeypatch.setattr(launcher.Run, "command", lambda run: ["sh", "-c", INTERRUPTED])
    assert launcher.launch(launcher.Run("tiny")) == 130
    assert capfd.readouterr().err == "kitty: stopped; the same command goes on where it was\n"


@pytest.mark.parametrize("seconds", [0, 0.05, 0.5, 1.5, 3])
def test_an_interrupt_while_snakemake_starts_shows_no_traceback(tmp_path, seconds):
    process = subprocess.Popen(
        [sys.executable, "-m", "kitty", "run", "tiny"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not list(Path("/proc").glob(f"{process.pid}/task/*/children")) or not any(
        path.read_text().strip() for path in Path("/proc").glob(f"{process.pid}/task/*/children")
    ):
        assert process.poll() is None
        time.sleep(0.005)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal sends it
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"experiment": "nope"}, "not known"),
        ({"target": "nope"}, "Target 'nope'"),
        ({"cores": "0"}, "cores is '0'"),
        ({"cores": "two"}, "cores is 'two'"),
        ({"results": "/proc/nowhere"}, "cannot be written"),
    ],
)
def test_a_wrong_start_is_refused_before_snakemake(here, monkeypatch, change, part):
    monkeypatch.setattr(launcher.subprocess, "Popen", None)
    with pytest.raises(KittyError, match=part):
        launcher.launch(launcher.Run(**{"experiment": "tiny", **change}))
