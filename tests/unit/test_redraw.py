"""Committed records are drawn set by set, by rules that measure nothing."""

import csv
import json
import subprocess
import sys

import pytest
from sample_records import quality_record, task_record

from kitty.errors import KittyError
from kitty.paths import shipped
from kitty.record_sets import record_sets
from kitty.records import write_record
from kitty.redraw import Redraw

REFERENCE = shipped("configs").parent / "results" / "reference"


@pytest.fixture
def committed(tmp_path):
    """Records of two machines, and the timing record of a third."""
    for machine, kl in (("cpu", 0.15), ("gpu", 0.25)):
        for method, value in (("fp16", 0.0), ("kitty", kl)):
            path = tmp_path / "reference" / machine / "tiny" / "records" / f"{method}.json"
            write_record(path, quality_record(method, [value, value]))
    ops = (REFERENCE / "h200" / "ops.json").read_text()
    (tmp_path / "reference" / "h200").mkdir()
    (tmp_path / "reference" / "h200" / "ops.json").write_text(ops)
    (tmp_path / "reference" / "h200" / "notes.json").write_text('{"no": "record"}')
    return tmp_path


def test_sets_are_the_folders_with_records_and_the_record_files_beside_them(committed):
    found = record_sets(committed / "reference")
    assert [each.name for each in found] == ["cpu/tiny", "gpu/tiny", "h200/ops"]
    assert list(found[0].records) == ["fp16.json", "kitty.json"]
    alone = record_sets(committed / "reference" / "cpu" / "tiny" / "records")
    assert list(alone[0].records) == ["fp16.json", "kitty.json"]


def test_a_damaged_committed_record_is_named(committed):
    (committed / "reference/cpu/tiny/records/kitty.json").write_text("{")
    with pytest.raises(KittyError, match=r"kitty\.json is damaged"):
        record_sets(committed / "reference")


def test_tables_of_every_machine_hold_its_own_numbers(committed):
    redraw = Redraw.load(committed / "reference", committed / "out")
    redraw.write_tables()
    for machine, kl in (("cpu", 0.15), ("gpu", 0.25)):
        path = committed / "out/redrawn" / machine / "tiny/tables/quality.csv"
        rows = {row["method"]: row for row in csv.DictReader(path.open())}
        assert float(rows["kitty"]["kl"]) == pytest.approx(kl)
    ours, theirs = committed / "out/redrawn/h200/ops/ops.csv", REFERENCE / "h200/ops.csv"
    assert ours.read_bytes() == theirs.read_bytes()
    written = {str(p) for p in (committed / "out").rglob("*") if p.is_file()}
    assert written == set(redraw.tables())


def test_every_promised_figure_is_drawn(committed):
    redraw = Redraw.load(committed / "reference", committed / "out")
    redraw.write_figures()
    written = {str(p) for p in (committed / "out").rglob("*") if p.is_file()}
    assert written == set(redraw.figures())
    assert len([name for name in written if name.endswith(".png")]) == 2 * 3 + 1


def test_scores_of_tasks_are_drawn_and_tabulated_too(tmp_path):
    for method, score in (("fp16", 0.5), ("kivi-k2v2", 0.25), ("kitty-pro", 0.5)):
        path = tmp_path / "reference/cpu/long/records/tasks" / f"{method}.json"
        write_record(path, task_record(method, score))
    redraw = Redraw.load(tmp_path / "reference", tmp_path / "out")
    redraw.write_figures()
    redraw.write_tables()
    written = {str(p) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert written == {*redraw.figures(), *redraw.tables()}
    assert any("tasks" in name for name in redraw.figures())


def test_the_workflow_redraws_the_committed_reference_without_a_measuring_job(tmp_path):
    command = [sys.executable, "-m", "snakemake", "figures", "--dry-run", "--cores", "1"]
    command += ["--snakefile", str(shipped("Snakefile")), "--directory", str(tmp_path)]
    command += ["--config", f"records={REFERENCE}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = (done.stdout + done.stderr).splitlines()
    jobs = {line.removeprefix("rule ").rstrip(":") for line in told if line.startswith("rule ")}
    jobs |= {line.split()[1].rstrip(":") for line in told if line.startswith("localrule ")}
    assert jobs == {"figures", "redraw_figures"}


def test_the_reference_holds_a_whole_smoke_run_of_one_clean_revision():
    (smoke,) = [found for found in record_sets(REFERENCE) if found.name == "cpu/smoke"]
    from kitty.workflow import Plan

    plan = Plan.load("smoke", "results")
    assert {f"records/{name}" for name in smoke.records} >= {work.record for work in plan.work()}
    revisions = {record["revision"] for _, record in smoke.records.values()}
    assert len(revisions) == 1
    assert "dirty" not in json.dumps(sorted(revisions))
