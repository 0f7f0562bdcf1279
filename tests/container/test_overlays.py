"""Overlays and instances: one writer, many readers, a killed one resumed, a full one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from container_image import read_tables

from kitty.errors import KittyError
from kitty.image import overlay
from kitty.records import read_record

pytestmark = pytest.mark.container

TINY = ("snakemake", "all", "--config", "experiment=tiny")
QUALITY = Path("results/tiny/records/quality")


@pytest.fixture
def prepared(image, tmp_path):
    """An overlay that a writing instance has filled with a hub model, data and a kernel."""
    path = tmp_path / "kitty.img"
    overlay.create(path, "64M")
    fill = (
        "mkdir -p $HF_HUB_CACHE/models--a $HF_DATASETS_CACHE/b $TRITON_CACHE_DIR/c && "
        "echo model > $HF_HUB_CACHE/models--a/f && echo data > $HF_DATASETS_CACHE/b/f && "
        "echo kernel > $TRITON_CACHE_DIR/c/f && echo $KITTY_STATE"
    )
    work = tmp_path / "prepare"
    work.mkdir()
    done = image.run("sh", "-c", fill, cwd=work, options=("--overlay", str(path)))
    assert (done.returncode, done.stdout) == (0, "/kitty\n"), done.stderr
    assert not list(work.iterdir())
    return path


def wait_for(found, process, seconds=300):
    """Wait until ``found()`` is true of a running process."""
    limit = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, "it ended early"
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_read_only_overlay_serves_models_in_place_and_kernels_and_data_as_copies(
    image, prepared, tmp_path
):
    look = (
        "cat $HF_HUB_CACHE/models--a/f $HF_DATASETS_CACHE/b/f $TRITON_CACHE_DIR/c/f && "
        "echo new > $TRITON_CACHE_DIR/c/g && echo new > $HF_DATASETS_CACHE/b/g && "
        "echo $HF_HUB_OFFLINE $HF_HUB_CACHE"
    )
    work = tmp_path / "reader"
    work.mkdir()
    for _ in range(2):  # the second start finds the copies
        done = image.run("sh", "-c", look, cwd=work, options=("--overlay", f"{prepared}:ro"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["model", "data", "kernel", "1", "/kitty/huggingface/hub"]
    assert {path.name for path in work.iterdir()} == {".kitty"}


def test_four_read_only_instances_at_once_give_what_one_gives(image, prepared, finished, tmp_path):
    folders = [tmp_path / f"instance{i}" for i in range(4)]
    processes = []
    for folder in folders:
        folder.mkdir()
        command = image.command(*TINY, "--cores", "1", options=("--overlay", f"{prepared}:ro"))
        processes.append(
            subprocess.Popen(
                command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    wait_for(lambda: overlay.status(prepared).user == "readers", processes[0])
    with pytest.raises(KittyError, match="in use by readers"):
        overlay.require(prepared, writing=True)
    writer = image.run("true", cwd=tmp_path, options=("--overlay", str(prepared)))
    assert writer.returncode == 255  # Apptainer's own refusal
    for process in processes:
        _, error = process.communicate(timeout=1200)
        assert process.returncode == 0, error
    expected = read_tables(finished.root)
    for folder in folders:
        assert read_tables(folder / "results" / "tiny") == expected
    assert overlay.status(prepared).user == "nobody"


def test_a_second_writer_is_told_from_a_free_overlay(image, prepared, tmp_path):
    command = image.command("sleep", "60", options=("--overlay", str(prepared)))
    first = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        wait_for(lambda: overlay.status(prepared).user == "a writer", first)
        done = subprocess.run(
            [sys.executable, "-m", "kitty", "overlay", "status", str(prepared)],
            capture_output=True,
            text=True,
        )
        assert "used by\ta writer" in done.stdout
        for writing in (True, False):
            with pytest.raises(KittyError, match="in use by a writer"):
                overlay.require(prepared, writing=writing)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


def test_a_killed_instance_goes_on_where_it_stopped(image, finished, tmp_path):
    process = subprocess.Popen(
        image.command(*TINY, "--cores", "1"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def records():
        return sorted((tmp_path / QUALITY).rglob("r0.json"))

    wait_for(records, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in records()}
    done = image.run(*TINY, cwd=tmp_path)
    while "works in this folder" in done.stderr:  # a killed process is still giving back its memory
        time.sleep(0.2)
        done = image.run(*TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert read_tables(tmp_path / "results" / "tiny") == read_tables(finished.root)


FILL_IN_THE_MIDDLE = """
cd /kitty
python3 -m kitty.image.entry snakemake all --config experiment=tiny --cores 1 &
run=$!
while ! ls results/tiny/records/quality/*/*/*/r0.json > /dev/null 2>&1; do sleep 0.05; done
for size in 1M 4k 1; do dd if=/dev/zero bs=$size of=fill.$size 2> /dev/null; done
wait $run
"""


def test_an_overlay_that_fills_up_in_the_middle_loses_no_finished_record(image, finished, tmp_path):
    path = tmp_path / "small.img"
    overlay.create(path, "64M")
    mounted = ("--overlay", str(path))
    done = image.run("sh", "-c", FILL_IN_THE_MIDDLE, cwd=tmp_path, options=mounted)
    assert done.returncode not in (0, 255)
    assert "No space left on device" in done.stderr
    assert overlay.status(path).full

    def copy_out(name):
        out = tmp_path / name
        out.mkdir()
        reading = ("--overlay", f"{path}:ro", "--bind", str(out))
        copied = image.run("cp", "-a", "/kitty/results", str(out), cwd=out, options=reading)
        assert copied.returncode == 0, copied.stderr
        return out

    half = copy_out("half")
    kept = {p.relative_to(half): p.read_bytes() for p in (half / QUALITY).rglob("r0.json")}
    assert 1 <= len(kept) < 3
    for name in kept:
        assert read_record(half / name)["kind"] == "quality"

    go_on = "cd /kitty && rm -f fill.* && exec python3 -m kitty.image.entry " + " ".join(TINY)
    done = image.run("sh", "-c", go_on, cwd=tmp_path, options=mounted)
    assert done.returncode == 0, done.stderr
    whole = copy_out("whole")
    for name, content in kept.items():
        assert (whole / name).read_bytes() == content
        assert json.loads(content)["experiment"] == "tiny"
    assert read_tables(whole / "results" / "tiny") == read_tables(finished.root)
