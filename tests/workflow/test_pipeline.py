"""The pipeline on the tiny experiment: complete, resumable, and plain about what is wrong."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kitty.paths import shipped
from kitty.records import read_record
from kitty.report import CLAIMS, figure_files, latency_files, table_files

MODEL, PASSAGE = "smollm2-135m-instruct", "python-data-model"
METHODS = ["fp16", "kivi-k2v2", "kitty-pro"]


def record_path(pipeline, method):
    return pipeline.root / "records" / "quality" / MODEL / PASSAGE / method / "r0.json"


def test_everything_that_an_experiment_promises_is_there(finished):
    root = finished.root
    for method in METHODS:
        record = read_record(record_path(finished, method))
        assert record["experiment"] == "tiny"
        assert record["method"]["name"] == method
        assert record["environment"]["threads"] == 1
        assert 2**28 < record["peak_memory_bytes"] < 3 * 2**30
        assert len(record["model"]["sha256"]) == 64
    assert read_record(root / "records" / "analysis" / MODEL / f"{PASSAGE}.json")["analysis"]
    assert {path.name for path in (root / "tables").iterdir()} == {
        *table_files(analysis=True),
        *CLAIMS,
    }
    assert {path.name for path in (root / "figures").iterdir()} == set(figure_files(analysis=True))
    assert (root / "report.html").stat().st_size > 100_000
    assert {path.name for path in (root / "latency").iterdir()} == set(latency_files())
    for implementation in ("hf-dynamic", "kitty-pro"):
        place = root / "records" / "latency" / MODEL / implementation
        record = read_record(place / "p32-n8-b1.json")
        assert record["outcome"] == "ok"
        assert record["environment"]["threads"] == 1


def test_the_quality_table_has_the_promised_columns_and_what_the_records_say(finished):
    with (finished.root / "tables" / "quality.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert list(rows) == METHODS
    for method, row in rows.items():
        assert (row["model"], row["passage"]) == (MODEL, PASSAGE)
        metrics = read_record(record_path(finished, method))["metrics"]
        for name in ("nll", "kl", "top1"):
            assert float(row[name]) == pytest.approx(metrics[name], abs=1e-5)
    assert float(rows["fp16"]["kl"]) == 0
    assert float(rows["kivi-k2v2"]["kl"]) > float(rows["kitty-pro"]["kl"]) > 0


def test_a_finished_experiment_is_not_touched_by_another_start(finished):
    before = finished.changes()
    done = finished.run()
    assert done.returncode == 0
    assert finished.changes() == before


def test_a_dry_run_lists_the_jobs_and_makes_nothing(tmp_path, finished):
    pipeline = type(finished)(tmp_path)
    done = pipeline.run("--", "--dry-run")
    assert done.returncode == 0, done.stderr
    stats = dict(
        line.split() for line in (done.stdout + done.stderr).splitlines() if _is_count(line)
    )
    assert stats["quality"] == "3"
    assert stats["generation"] == "2"
    assert stats["total"] == "13"
    assert not (pipeline.root / "records").exists()


def _is_count(line):
    words = line.split()
    return len(words) == 2 and words[1].isdigit()


def test_only_what_is_missing_is_made_again(copied):
    before, tables = copied.changes(), copied.tables()
    lost = record_path(copied, "kivi-k2v2")
    lost.unlink()
    (copied.root / "figures" / "quality.png").unlink()
    done = copied.run()
    assert done.returncode == 0, done.stderr
    after = copied.changes()
    changed = {str(path.relative_to(copied.root)) for path in before if after[path] != before[path]}
    records = {name for name in changed if name.startswith("records")}
    assert records == {str(lost.relative_to(copied.root))}
    assert not any(name.startswith(("references", "models")) for name in changed)
    assert copied.tables() == tables


@pytest.mark.parametrize("damage", ["truncated", "empty", "another"])
def test_a_damaged_record_is_named_and_nothing_is_made_of_it(copied, damage):
    path = record_path(copied, "kitty-pro")
    text = path.read_text()
    path.write_text(
        {
            "truncated": text[: len(text) // 2],
            "empty": "",
            "another": record_path(copied, "kivi-k2v2").read_text(),
        }[damage]
    )
    before = copied.changes()
    done = copied.run("--target", "tables")
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("kitty: error: ")]
    assert len(told) == 1
    assert str(path.relative_to(copied.folder)) in told[0]
    assert "delete the file" in told[0]
    records = {p: t for p, t in before.items() if "records" in p.parts}
    assert {p: t for p, t in copied.changes().items() if "records" in p.parts} == records


def test_after_deleting_the_damaged_record_the_same_command_mends_all(copied):
    tables = copied.tables()
    path = record_path(copied, "kitty-pro")
    path.write_text("{")
    assert copied.run("--target", "tables").returncode != 0
    path.unlink()
    assert copied.run("--target", "tables").returncode == 0
    assert copied.tables() == tables


def test_a_changed_setting_is_measured_again(copied, finished):
    definition = (shipped("configs") / "experiments" / "tiny.yaml").read_text()
    mine = copied.folder / "tiny.yaml"
    mine.write_text(definition.replace("tokens: 576", "tokens: 448"))
    done = copied.run("--target", "tables", experiment="tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert read_record(record_path(copied, "fp16"))["passage"]["num_tokens"] == 448
    assert copied.tables() != finished.tables()


def test_a_killed_run_goes_on_and_gives_the_same_tables(finished, tmp_path):
    pipeline = type(finished)(tmp_path)
    interrupted = [pipeline.run_and_kill(seconds) for seconds in (3, 14, 11)]
    assert interrupted[0]
    assert (tmp_path / ".snakemake" / "locks").exists()
    done = pipeline.run()
    assert done.returncode == 0, done.stderr
    assert pipeline.tables() == finished.tables()
    assert not list(pipeline.root.rglob("*.tmp"))


def test_a_second_launcher_in_the_folder_is_refused_while_the_first_lives(tmp_path, finished):
    pipeline = type(finished)(tmp_path)
    first = subprocess.Popen(
        pipeline.command(),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        lock = tmp_path / ".snakemake" / "kitty-run.lock"
        while not (lock.exists() and lock.read_text()):
            time.sleep(0.05)
        second = pipeline.run()
        assert second.returncode == 2
        assert f"process {first.pid}" in second.stderr
        assert json.loads(lock.read_text())["pid"] == first.pid
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_results_are_refused_and_stay(copied):
    before = copied.changes()
    copied.root.chmod(0o555)
    try:
        done = copied.run()
    finally:
        copied.root.chmod(0o755)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert copied.changes() == before


def test_a_failed_job_leaves_the_others_work_and_says_why(copied):
    for method in METHODS:
        record_path(copied, method).unlink()
    reference = copied.root / "references" / MODEL / f"{PASSAGE}.safetensors"
    state = reference.stat()
    reference.write_bytes(reference.read_bytes()[:1000])
    os.utime(reference, ns=(state.st_atime_ns, state.st_mtime_ns))
    done = copied.run()
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("kitty: error: ")]
    assert len(told) == 1
    assert "damaged" in told[0]
    assert str(reference.relative_to(copied.folder)) in told[0]
    reference.unlink()
    assert copied.run("--target", "tables").returncode == 0


def test_snakemake_alone_runs_it_from_another_folder_and_makes_its_own_report(copied):
    snakemake = [sys.executable, "-m", "snakemake", "--snakefile", str(shipped("Snakefile"))]
    snakemake += ["--directory", str(copied.folder), "--config", "experiment=tiny"]
    options = {"cwd": "/", "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*snakemake, "--cores", "1", "--", "all"], **options)
    assert done.returncode == 0, done.stderr
    assert "Nothing to be done" in done.stderr
    report = copied.folder / "snakemake-report.html"
    done = subprocess.run([*snakemake, "--report", str(report)], **options)
    assert done.returncode == 0, done.stderr
    assert "quality" in report.read_text()


def test_snakemake_tells_an_unknown_experiment_in_one_sentence(tmp_path):
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(shipped("Snakefile"))]
    command += ["--directory", str(tmp_path), "--cores", "1", "--config", "experiment=nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Experiment 'nope' is not known" in done.stderr
    assert "Traceback" not in done.stderr
