"""Four instances of the tiny experiment give what one run gives, also where one is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kitty.parts import findings
from kitty.records import read_record
from kitty.workflow import Plan

pytestmark = pytest.mark.slow


def start(folder):
    command = [sys.executable, "-m", "kitty", "instances", "run", "--jobs", "4", "tiny"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


def assert_same(finished, folder):
    """Every record and every byte of the tables are those of one run."""
    for work in Plan.load("tiny", folder / "results").work():
        one = read_record(finished.root / work.record)
        four = read_record(folder / "results" / "tiny" / work.record)
        assert findings(four) == findings(one)
    assert type(finished)(folder).tables() == finished.tables()


def test_four_instances_give_the_results_of_one(finished, tmp_path):
    process = start(tmp_path)
    told, _ = process.communicate(timeout=600)
    assert process.returncode == 0, told
    assert_same(finished, tmp_path)
    after = type(finished)(tmp_path)
    before = after.changes()
    done = after.run()  # the joined folder is an ordinary finished one
    assert done.returncode == 0, done.stderr
    assert after.changes() == before


def test_a_killed_instance_goes_on_and_the_results_are_the_same(finished, tmp_path):
    process = start(tmp_path)
    state = tmp_path / "results" / ".instances" / "tiny" / "state.json"
    victim = None
    while victim is None:
        assert process.poll() is None
        time.sleep(0.2)
        if state.exists():
            last = json.loads(state.read_text())["instances"][3]
            victim = last["pid"] if last["state"] == "running" else None
    time.sleep(4)  # into its Snakemake or its job
    os.kill(victim, signal.SIGKILL)
    told, _ = process.communicate(timeout=600)
    assert process.returncode == 0, told
    assert "instance 3: killed by SIGKILL, goes on" in told
    assert_same(finished, tmp_path)
