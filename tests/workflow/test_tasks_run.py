"""Task jobs in the pipeline: a kill costs a batch at most, a failure none of the other jobs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import tiny_lm

from kitty.records import find_records

EXPERIMENT = """\
title: Mine
models: [{model}]
tasks:
  provider: standin
  limit: 3
  generation: {{max_gen_toks: 30, do_sample: false}}
  settings:
    gsm8k_cot_llama: {{num_fewshot: 1}}
    induction: {{recall: {{tokens: 1200, texts: 1}}}}
    gone: {{like: aime24, data: {gone}}}
  grids: [{{tasks: [{tasks}], methods: [fp16, kitty-pro]}}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("tiny-model"))


def kitty(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "kitty", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )


def test_a_failed_task_leaves_the_others_and_a_second_run_makes_the_tables(model, tmp_path):
    data = tmp_path / "broken.jsonl"
    data.write_text("no JSON\n")
    mine = tmp_path / "mine.yaml"
    tasks = "gsm8k_cot_llama, induction"
    mine.write_text(EXPERIMENT.format(model=model, gone=data, tasks=f"{tasks}, gone"))
    done = kitty(tmp_path, "run", "mine.yaml", "--cores", "2")
    assert done.returncode != 0
    assert re.search(r"kitty: error: The data file .*broken.jsonl holds no JSON lines", done.stderr)
    root = tmp_path / "results" / "mine"
    records = [record for _, record in find_records(root / "records", "task")]
    assert {r["task"]["name"] for r in records} == {"gsm8k_cot_llama", "induction"}
    before = {path: path.stat().st_mtime_ns for path in root.rglob("r0.json")}
    assert len(before) == 4

    mine.write_text(EXPERIMENT.format(model=model, gone=data, tasks=tasks).replace("    gone", "#"))
    done = kitty(tmp_path, "run", "mine.yaml", "--cores", "2")
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in root.rglob("r0.json")} == before
    table = (root / "tables" / "task_metrics.csv").read_text()
    assert table.count("kitty-pro") == table.count("fp16") > 0
    assert (root / "report.html").is_file()


def test_a_kill_during_a_task_costs_the_running_batch_at_most(model, tmp_path):
    command = [
        *(sys.executable, "-m", "kitty", "eval", "lm", "gsm8k_cot_llama", "-m", str(model)),
        *("--provider", "standin", "--limit", "12", "--num-fewshot", "1", "--max-gen-toks", "60"),
        *("--threads", "1", "--out", "r0.json"),
    ]
    kept = tmp_path / "r0.partial.jsonl"
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if kept.exists() and kept.read_bytes().count(b"\n") >= 3:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    process.wait()
    assert not (tmp_path / "r0.json").exists()
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(lines) >= 3  # every finished batch, of one problem each
    for line in lines:
        line["answers"] = dict.fromkeys(line["answers"], "kept")
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    samples = (tmp_path / "r0.samples.jsonl").read_text().splitlines()
    answers = [json.loads(sample)["responses"][0][0] for sample in samples]
    assert len(answers) == 12
    assert answers.count("kept") == len(lines)
    assert not kept.exists()


def test_the_whole_paper_is_listed_without_model_or_data(tmp_path):
    done = kitty(tmp_path, "run", "paper", "--", "--dry-run", "--quiet", "rules")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    jobs = {name: int(n) for name, n in re.findall(r"^(\w+)\s+(\d+)$", said, re.M)}
    assert jobs["task"] > 900
    assert jobs["obtain_model"] == 5


def test_tasks_that_run_code_are_refused_before_anything_is_measured(tmp_path):
    done = kitty(tmp_path, "run", "paper")
    assert done.returncode == 2
    assert "humaneval_instruct): add --run-code" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
