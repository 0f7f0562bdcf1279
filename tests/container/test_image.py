"""The cpu image as a reviewer meets it: one command in an empty folder, and what is odd there."""

from __future__ import annotations

import csv
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from container_image import ROOT, read_tables

pytestmark = pytest.mark.container

TINY = ("snakemake", "all", "--config", "experiment=tiny")
GENERATE = """
import sys
sys.path.insert(0, "/opt/kitty/tests/generate")
import torch, kitty
from tiny_models import greedy, make, prompt

ids, _ = prompt(180)
native = dict(cache_implementation="kitty", cache_config={"method": "kitty-pro"})
out = greedy(make("llama", torch.float32), ids, max_new_tokens=450, eos_token_id=None,
             return_dict_in_generate=True, **native)
cache = out.past_key_values
assert type(cache) is kitty.KittyCache, type(cache)
passed = kitty.KittyCache("kitty-pro")
plain = greedy(kitty.enable(make("llama", torch.float32), "kitty-pro", cache="packed"), ids,
               max_new_tokens=450, eos_token_id=None, past_key_values=passed)
assert torch.equal(out.sequences, plain)
print("tokens", out.sequences.shape[1], "flushes", (629 - 32) // 128 - (180 - 32) // 128)
print("read", cache.quantized_pages_read, passed.quantized_pages_read)
"""


def test_the_images_own_test_passes(image, tmp_path):
    done = image.run(cwd=tmp_path, action="test")
    assert done.returncode == 0, done.stderr
    assert "torch 2.13.0+cpu, CUDA None, triton 3.9.0" in done.stdout


def test_without_a_command_the_image_says_what_a_reviewer_can_do(image, tmp_path):
    done = image.run(cwd=tmp_path)
    assert done.returncode == 0
    for command in ("kitty doctor", "snakemake all", "pytest"):
        assert f"apptainer run {image.file.name} {command}" in done.stdout


def test_labels_name_flavour_revision_versions_and_lock(image, tmp_path):
    from kitty.image.apptainer import check_image_lock, labels

    found = labels(image.file)
    assert found["kitty.version.torch"] == "2.13.0+cpu"
    assert found["kitty.version.transformers"] == "4.53.2"
    assert found["org.opencontainers.image.revision"]
    assert check_image_lock(image.file)["flavour"] == "cpu"


def test_the_experiment_says_which_one_it_is_and_makes_every_result(finished):
    assert (finished.root / "report.html").is_file()
    assert len(read_tables(finished.root)) >= 3
    counts = {
        kind.name: len(list(kind.rglob("*.json"))) for kind in (finished.root / "records").iterdir()
    }
    assert counts["quality"] == 3
    assert counts["analysis"] == 1


def test_snakemake_without_a_named_experiment_picks_smoke_and_says_so(image, tmp_path):
    done = image.run("snakemake", "all", "--dry-run", "--quiet", "all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kitty: experiment 'smoke': " in done.stderr


def test_nothing_is_written_outside_the_working_directory(image, finished):
    assert list(image.home.iterdir()) == []
    mounted = {image.home, finished.folder}
    points = mounted.union(*(path.parents for path in mounted))  # Apptainer makes mount points
    for folder, place in (("tmp", "/tmp"), ("var", "/var/tmp")):
        top = finished.temporary / folder
        assert {Path(place, path.relative_to(top)) for path in top.rglob("*")} <= points
    assert {path.name for path in finished.folder.iterdir()} == {"results", ".kitty", ".snakemake"}


def test_the_image_itself_cannot_be_written(image, tmp_path):
    done = image.run("touch", "/opt/kitty/mine", cwd=tmp_path)
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr


def test_the_tables_are_those_of_a_run_outside_the_image(finished, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kitty", "run", "tiny", "--cores", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    inside, outside = finished.root / "tables", tmp_path / "results" / "tiny" / "tables"
    assert {path.name for path in inside.iterdir()} == {path.name for path in outside.iterdir()}
    compared = 0
    for path in sorted(inside.glob("*.csv")):
        with path.open() as ours, (outside / path.name).open() as theirs:
            for row, other in zip(csv.reader(ours), csv.reader(theirs), strict=True):
                for cell, wanted in zip(row, other, strict=True):
                    compared += same(cell, wanted)
    assert compared > 20


def same(cell: str, wanted: str) -> bool:
    """Compare to 3 significant digits; whether the cells hold numbers."""
    try:
        found, expected = float(cell), float(wanted)
    except ValueError:
        assert cell == wanted
        return False
    assert math.isclose(found, expected, rel_tol=5e-3, abs_tol=1e-9)
    return True


def test_generate_goes_past_three_flushes_with_the_patched_transformers(image, tmp_path):
    done = image.run("python3", "-c", GENERATE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["tokens"] == "630 flushes 3"
    native, passed = map(int, lines["read"].split())
    assert native == passed > 0


@pytest.mark.parametrize("options", [("--cleanenv",), ("--containall",), ("--no-home",)])
def test_it_runs_the_same_with_little_of_the_host(image, finished, tmp_path, options):
    place = ("--bind", str(tmp_path), "--pwd", str(tmp_path))
    command = ["apptainer", "run", *options, *place, str(image.file), *TINY]
    environment = {**os.environ, "PYTHONPATH": "/nowhere", "MPLBACKEND": "none"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert read_tables(tmp_path / "results" / "tiny") == read_tables(finished.root)


def test_settings_of_the_host_do_not_reach_the_images_python(image, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    code = "import torch, sys; print(torch.__file__, sys.flags.no_user_site)"
    script = tmp_path / "inner"
    script.mkdir()
    done = image.run("python3", "-c", code, cwd=script, env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.split() == ["/opt/venv/lib/python3.11/site-packages/torch/__init__.py", "1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_who_is_not_root_gets_the_same_tables(image, finished, tmp_path):
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    user = 65534  # nobody
    for folder in (*reversed(tmp_path.parents), tmp_path):
        if folder.stat().st_uid == 0 and folder != Path("/") and str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    work = tmp_path / "work"
    work.mkdir()
    os.chown(work, user, user)
    command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "apptainer"]
    command += ["run", "--no-home", "--bind", str(work), "--pwd", str(work), str(image.file), *TINY]
    done = subprocess.run(
        command,
        cwd=work,
        env={**os.environ, "HOME": str(work)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert read_tables(work / "results" / "tiny") == read_tables(finished.root)
    assert (work / "results" / "tiny" / "report.html").stat().st_uid == user


def test_a_folder_that_cannot_be_written_is_one_sentence(image):
    done = image.run(*TINY, cwd=ROOT, options=("--bind", f"{ROOT}:/srv:ro", "--pwd", "/srv"))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("kitty: error: The folder ")
    assert "cannot be written" in done.stderr


def test_nv_on_a_machine_without_a_gpu_is_noticed(image, tmp_path):
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    done = image.run(
        *("snakemake", "all", "--config", "experiment=reviewer"), cwd=tmp_path, options=("--nv",)
    )
    assert done.returncode == 2
    assert "needs a GPU: No GPU can be used" in done.stderr
