"""The tiny experiment on a real SLURM node, in both profiles, also where jobs are cancelled."""

from itertools import pairwise

import pytest
from slurm_jobs import jobs_in, running, scancel, wait_for

from kitty.records import read_record
from kitty.workflow import Plan

# The defaults spare a busy scheduler; a test need not wait that long.
QUICK = [
    *("--slurm-init-seconds-before-status-checks", "3", "--seconds-between-status-checks", "3"),
    *("--latency-wait", "10"),
]
# A model, a 16-bit pass, three methods, an analysis, two times; four of tables, figures, report.
JOBS = 12
RUN = ["run", "tiny", "--profile", "slurm", "--", *QUICK]


def output_of(process):
    told, _ = process.communicate(timeout=1200)
    return told


def assert_finished(folder):
    plan = Plan.load("tiny", folder / "results")
    for work in plan.work():
        read_record(plan.root / work.record)
    assert (plan.root / "report.html").exists()


def test_every_job_gets_what_its_rule_asks_for_and_gpu_jobs_never_share_the_gpu(command, tmp_path):
    gpu = ["--set-resources", "quality:gpu=1"]  # a GPU of the node's list; the jobs compute on CPUs
    process = command(*RUN, *gpu)
    told = output_of(process)
    assert process.returncode == 0, told
    assert_finished(tmp_path)
    jobs = jobs_in(tmp_path)
    assert {job.state for job in jobs} == {"COMPLETED"}
    assert len(jobs) == JOBS
    on_gpu = [job for job in jobs if job.has_gpu]
    assert len(on_gpu) == 3
    for job in on_gpu:
        assert (job.memory, job.limit) == ("3000M", "01:00:00")
    for first, second in pairwise(sorted(on_gpu, key=lambda job: job.start)):
        assert first.end <= second.start


def test_a_cancelled_job_is_submitted_again_and_gets_more_memory(command, tmp_path):
    process = command(*RUN)
    references = tmp_path / "results" / "tiny" / "references"
    wait_for(lambda: any(references.rglob("*.safetensors")), process)
    (victim, *_) = wait_for(lambda: running(tmp_path), process)
    scancel(victim)
    told = output_of(process)
    assert process.returncode == 0, told
    assert_finished(tmp_path)
    jobs = jobs_in(tmp_path)
    cancelled = [job for job in jobs if job.state.startswith("CANCELLED")]
    assert [job.number for job in cancelled] == [victim]
    assert len(jobs) == JOBS + 1
    assert "6000M" in {job.memory for job in jobs if job.state == "COMPLETED"}


def test_one_job_runs_everything_and_a_cancelled_one_goes_on(command, tmp_path):
    submit = ["submit", "tiny", "--cores", "2", "--memory-mb", "7000", "--gpus", "1", "--wait"]
    process = command(*submit)
    records = tmp_path / "results" / "tiny" / "records"
    first = wait_for(
        lambda: [p for p in records.rglob("*.json") if not p.name.startswith(".")], process
    )
    before = {path: path.read_bytes() for path in first}  # they say when they were measured
    (victim,) = running(tmp_path)
    scancel(victim)
    told = output_of(process)
    assert process.returncode == 1
    assert "submit again" in told
    process = command(*submit)
    told = output_of(process)
    assert process.returncode == 0, told
    assert_finished(tmp_path)
    assert {path: path.read_bytes() for path in first} == before
    jobs = jobs_in(tmp_path)
    assert all(job.has_gpu for job in jobs)
    assert [job.state.split()[0] for job in jobs] == ["CANCELLED", "COMPLETED"]


def test_a_job_whose_time_is_up_goes_back_to_the_queue(command, tmp_path):
    process = command("submit", "tiny", "--cores", "2", "--memory-mb", "7000")
    told = output_of(process)
    assert process.returncode == 0, told
    root = tmp_path / "results" / "tiny"
    wait_for(lambda: (root / "models").exists())
    (number,) = running(tmp_path)
    try:
        scancel("--signal=USR1", "--batch", number)  # what SLURM sends before the limit
        log = tmp_path / "results" / f"slurm-{number}.log"
        wait_for(lambda: "goes back to the queue" in log.read_text())
        wait_for(lambda: "REQUEUED" in {job.state for job in jobs_in(tmp_path)})
    finally:
        scancel(number)


@pytest.mark.parametrize("profile", ["slurm", "slurm-single"])
def test_a_wrong_site_file_is_told_in_one_sentence(command, site, tmp_path, profile):
    text = site.read_text()
    site.write_text(text + "acount: mine\n")
    try:
        process = command("run", "tiny", "--profile", profile)
        told = output_of(process)
    finally:
        site.write_text(text)
    assert process.returncode != 0
    assert "acount" in told
    assert "Traceback" not in told
