"""Instances: GPUs given out once, killed ones go on, failed ones are told, nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample_records import quality_record

from kitty import instances
from kitty.errors import KittyError
from kitty.instances import Container, Order, give_gpus, killed_by, read_states, run_instances
from kitty.records import read_record, write_record
from kitty.workflow import Plan

# Stands in for an instance: makes the files of its list; the folder `faults` says what goes wrong.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
faults, samples = Path(sys.argv[1]), Path(sys.argv[2])
index = Path.cwd().name
if index == "join":
    sys.exit(0)
with (faults / "starts").open("a") as file:
    file.write(f"{index} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
for name in Path("files.txt").read_text().splitlines():
    path = Path(name)
    if path.exists():
        continue
    if (fault := faults / f"kill-{index}").exists() and "records" in name:
        fault.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (faults / f"fail-{index}").exists() and "records" in name:
        print("kitty: error: the model is damaged")
        sys.exit(1)
    while (faults / "wait").exists() and "records" in name:
        (faults / f"waits-{index}").touch()
        time.sleep(0.05)
    with (faults / "made").open("a") as file:
        file.write(name + "\\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(samples.read_bytes() if "records" in name else b"shared")
"""


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """An order for four instances of a stand-in worker; ``faults`` and the lines told beside it."""
    (tmp_path / "worker.py").write_text(WORKER)
    faults = tmp_path / "faults"
    faults.mkdir()
    sample = write_record(tmp_path / "sample.json", quality_record("kitty", [0.1, 0.2]))
    command = [sys.executable, str(tmp_path / "worker.py"), str(faults), str(sample)]
    monkeypatch.setattr(instances, "_inside", lambda *_, **__: command)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    results = tmp_path / "results"
    order = Order(Plan.load("tiny", results), results, jobs=4, restarts=1)
    return order, faults


def made(faults):
    return sorted((faults / "made").read_text().splitlines())


def test_every_file_is_made_once_and_joined(scene):
    order, faults = scene
    told = []
    assert run_instances(order, told.append) == 0
    names = made(faults)
    assert len(names) == len(set(names)) == 6  # a model, a 16-bit pass, three methods, an analysis
    for work in order.plan.work():
        assert read_record(order.plan.root / work.record)["kind"] == "quality"
    assert told[-1] == f"report: {order.plan.report()}"


def test_instances_at_work_at_the_same_time_see_one_gpu_each(scene):
    order, faults = scene
    run_instances(order, lambda line: None)
    starts = [line.split() for line in (faults / "starts").read_text().splitlines()]
    assert sorted(starts[-4:]) == [["0", "4"], ["1", "5"], ["2", "6"], ["3", "7"]]


def test_a_killed_instance_goes_on_and_makes_nothing_twice(scene):
    order, faults = scene
    (faults / "kill-2").touch()
    told = []
    assert run_instances(order, told.append) == 0
    assert any("instance 2: killed by SIGKILL, goes on (1 of 1" in line for line in told)
    assert len(made(faults)) == len(set(made(faults))) == 6


def test_a_failed_instance_is_told_and_the_others_records_are_joined(scene):
    order, faults = scene
    (faults / "fail-1").touch()
    told = []
    assert run_instances(order, told.append) == 1
    assert "instance 1: failed: the model is damaged" in told
    assert "1 of 4 records are missing" in told[-1]
    existing = [(order.plan.root / work.record).exists() for work in order.plan.work()]
    assert sorted(existing) == [False, True, True, True]
    (faults / "fail-1").unlink()
    before = made(faults)
    assert run_instances(order, told.append) == 0
    assert len(made(faults)) == len(before) + 1


def test_records_that_a_killed_watcher_could_not_join_are_not_made_again(scene):
    order, faults = scene
    left = order.root(7) / order.plan.work()[0].record  # of an earlier run with more instances
    write_record(left, quality_record("kitty", [0.1, 0.2]))
    assert run_instances(order, lambda line: None) == 0
    assert order.plan.work()[0].record not in "".join(made(faults))
    assert len(made(faults)) == 5


def test_contradicting_records_are_refused_before_anything_starts(scene):
    order, faults = scene
    record = order.plan.work()[0].record
    write_record(order.plan.root / record, quality_record("kitty", [0.1, 0.2]))
    write_record(order.root(0) / record, quality_record("kitty", [0.1, 0.9]))
    with pytest.raises(KittyError, match="different content"):
        run_instances(order, lambda line: None)
    assert not (faults / "starts").exists()


WATCHER = """
import sys
from pathlib import Path
from kitty import instances
from kitty.instances import Order, run_instances
from kitty.workflow import Plan
results, *command = sys.argv[1:]
instances._inside = lambda *_, **__: command
sys.exit(run_instances(Order(Plan.load("tiny", results), Path(results), jobs=2)))
"""


@pytest.fixture
def watcher(scene, tmp_path):
    """A watcher in a process of its own whose two instances wait in their first record."""
    order, faults = scene
    (faults / "wait").touch()
    command = [sys.executable, "-c", WATCHER, str(order.results), *instances._inside()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not all((faults / f"waits-{index}").exists() for index in (0, 1)):
        assert process.poll() is None
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def test_status_says_what_each_instance_does(scene, watcher):
    order, faults = scene
    state = read_states(order.results)["tiny"]
    assert state["watched"]
    assert state["pid"] == watcher.pid
    assert [instance["state"] for instance in state["instances"]] == ["running", "running"]
    assert [instance["finished"] for instance in state["instances"]] == [0, 0]
    (faults / "wait").unlink()
    assert watcher.wait(timeout=60) == 0
    state = read_states(order.results)["tiny"]
    assert [instance["finished"] for instance in state["instances"]] == [2, 2]
    assert [instance["state"] for instance in state["instances"]] == ["done", "done"]


def test_a_second_watcher_is_refused(scene, watcher):
    order, _ = scene
    with pytest.raises(KittyError, match=f"Another run.*process {watcher.pid}"):
        run_instances(order, lambda line: None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_watcher_ends_its_instances_and_loses_nothing(scene, watcher, number):
    order, faults = scene
    pids = [instance["pid"] for instance in read_states(order.results)["tiny"]["instances"]]
    watcher.send_signal(number)
    assert watcher.wait(timeout=60) == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    (faults / "wait").unlink()
    assert run_instances(order, lambda line: None) == 0


def test_instances_end_with_a_killed_watcher(scene, watcher):
    order, _ = scene
    pids = [instance["pid"] for instance in read_states(order.results)["tiny"]["instances"]]
    watcher.send_signal(signal.SIGKILL)
    watcher.wait()
    deadline = time.monotonic() + 10
    while any(_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_too_few_gpus_are_refused_where_the_jobs_need_them():
    assert give_gpus(2, ["0", "1", "2"], wanted=True) == ["0", "1"]
    assert give_gpus(4, ["0"], wanted=False) == [None] * 4
    with pytest.raises(KittyError, match=r"4 instances need a GPU each.*sees 1"):
        give_gpus(4, ["0"], wanted=True)


@pytest.mark.parametrize(
    "value, expected", [("0,2", ["0", "2"]), ("", []), ("-1", []), ("GPU-ab12", ["GPU-ab12"])]
)
def test_visible_gpus_follow_the_variable(value, expected):
    assert instances.visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == expected


@pytest.mark.parametrize(
    "status, expected",
    [(-9, "SIGKILL"), (137, "SIGKILL"), (143, "SIGTERM"), (1, None), (2, None), (255, None)],
)
def test_a_kill_is_told_from_a_failure(status, expected):
    assert killed_by(status) == expected


def test_an_instance_in_an_image_reads_the_overlay_and_works_in_its_folder(tmp_path):
    container = Container(Path("/images/kitty.sif"), Path("/images/kitty.img"))
    folder = tmp_path / "0"
    command = container.wrap(["kitty", "run"], folder, [tmp_path], gpu=True)
    assert command == [
        *("apptainer", "exec", "--pwd", str(folder), "--nv"),
        *("--overlay", "/images/kitty.img:ro", "--bind", str(tmp_path)),
        *("/images/kitty.sif", "kitty", "run"),
    ]


def test_an_image_or_overlay_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(instances.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(KittyError, match="no image"):
        Container(tmp_path / "kitty.sif").check()
    (tmp_path / "kitty.sif").touch()
    with pytest.raises(KittyError, match="no overlay"):
        Container(tmp_path / "kitty.sif", tmp_path / "kitty.img").check()
    monkeypatch.setattr(instances.shutil, "which", lambda name: None)
    with pytest.raises(KittyError, match="apptainer, which is not installed"):
        Container(tmp_path / "kitty.sif").check()


def test_status_without_instances_names_the_command_that_starts_some(tmp_path):
    with pytest.raises(KittyError, match="kitty instances run"):
        read_states(tmp_path)


def test_the_state_survives_as_plain_json(scene):
    order, _ = scene
    run_instances(order, lambda line: None)
    state = json.loads((order.folder / "state.json").read_text())
    assert state["pid"] == os.getpid()
    assert len(state["instances"]) == 4
