"""The command line: help with examples, plain output into pipes, one sentence per mistake."""

import json
import re
import subprocess
import sys

import pytest
from sample_records import quality_record

from kitty.records import write_record


def kitty(*arguments, cwd=None):
    command = [sys.executable, "-m", "kitty", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=cwd, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(
    "command",
    [
        *("methods", "run", "eval", "analyze", "report", "doctor", "compare", "submit", "claims"),
        *("instances run", "instances status"),
    ],
)
def test_help_shows_an_example(command):
    answer = kitty(*command.split(), "--help")
    assert answer.returncode == 0
    assert f"kitty {command}" in answer.stdout.split("Example")[-1]


def test_methods_lists_all_of_them_tab_separated_into_a_pipe():
    answer = kitty("methods")
    rows = [line.split("\t") for line in answer.stdout.splitlines()]
    assert {len(row) for row in rows} == {11}
    by_name = {row[0]: row for row in rows}
    assert by_name["kitty-pro"][9] == "2.51"  # (2 + 2/4 + 32/128 + 2/128 + 2 + 32/128) / 2
    assert by_name["kivi-k4v4"][10] == "no: values have 4 bits"
    every = json.loads(kitty("methods", "--all", "--json").stdout)
    assert {"kitty-62.5-variance", "k1v2-sink", "fp16"} <= {method["name"] for method in every}


def test_the_asterisk_in_titles_is_explained():
    assert "*" in kitty("methods").stdout
    assert "An asterisk in a title marks" in kitty("methods", "--help").stdout


def test_version_names_the_package_and_the_revision():
    answer = kitty("--version")
    assert answer.returncode == 0
    assert re.fullmatch(r"kitty \S.*", answer.stdout.strip())


def test_doctor_says_what_is_here_and_what_runs_where():
    found = json.loads(kitty("doctor", "--json").stdout)
    assert found["versions"]["python"].startswith("3.")
    assert {"GPU", "free memory", "cores"} <= set(found["machine"])
    assert "packed cache" in found["what runs where"]


def test_models_list_names_the_papers_models():
    assert "Qwen/Qwen3-32B" in kitty("models", "list").stdout


TINY_E2E = ["bench", "e2e", "--model-config", "qwen3-8b", "--dummy-weights", "-i", "hf-dynamic"]
MISTAKES = [
    (["eval", "--method", "nope"], "Method 'nope' is not known"),
    (["eval", "--method", "kitty", "--boost-ratio", "1.5"], "boost_ratio is 1.5"),
    (["eval", "--method", "kitty", "--key-bits", "0"], "key_bits is 0"),
    (["eval", "--page-size", "48", "--tokens", "600"], "48 does not divide head_dim 64"),
    (["eval", "--selection", "best"], "selection is 'best'"),
    (["eval", "--text", "SHORT"], "needs 416"),
    (["eval", "--tokens", "100000"], "fewer than the 100000 asked for"),
    (["eval", "--model", "./no-such-folder"], "./no-such-folder does not exist"),
    (["eval", "--model", "nope"], "Model 'nope' is not known"),
    (["eval", "--passage", "nope"], "Passage 'nope'"),
    (["eval", "--out", "/proc/nowhere/record.json"], "/proc/nowhere cannot be written"),
    (["eval", "--out", "."], ". is a folder"),
    (["eval", "--reference", "DAMAGED", "--tokens", "420"], "damaged"),
    (["analyze", "--method", "fp16", "--tokens", "420"], "no choice to analyse"),
    (["run", "nope"], "Experiment 'nope' is not known"),
    (["run", "tiny", "--results", "/proc/nowhere"], "/proc/nowhere/tiny cannot be written"),
    (["report", "tiny", "--results", "no-such-folder"], "is missing: run the experiment first"),
    (["eval", "--key-bits", "two"], "'two' for '--key-bits'"),
    (["eval", "-n", "0"], "greater than or equal to 1; see `kitty eval --help`"),
    (["eval", "--foo"], "No such option: --foo"),
    (["eval", "--method"], "'--method' requires an argument"),
    (["evil"], "No such command 'evil', did you mean 'eval'; see `kitty --help`"),
    (["patch", "nope"], "see `kitty patch --help`"),
    (["job", "model"], "Missing option '--model' / '-m'"),
    (["job", "report", "nope", "--experiment", "tiny", "--results", "r"], "Part 'nope'"),
    (["job", "reference", "--experiment", "tiny", "-m", "a", "-p", "b", "--out", "c"], "no a/b"),
    (["job", "analysis", "--experiment", "tiny", "-m", "a", "-p", "b", "--out", "c"], "no a/b"),
    (["eval", "--device", "meta"], "Device 'meta' is not known"),
    (["eval", "--reference", "/proc/nowhere/ref.safetensors"], "/proc/nowhere cannot be written"),
    (["eval", "--reference", "."], ". is a folder"),
    (["bench", "e2e", "-i", "vllm"], "Implementation 'vllm' is not known: use one of hf-dynamic"),
    (["bench", "e2e", "--batch", "4,0"], "Batch '0' is no positive whole number"),
    (["bench", "e2e", "--new", "1"], "new_tokens of the workload is 1"),
    (["bench", "e2e", "--memory-budget", "lots"], "Memory budget 'lots' is no size"),
    (["bench", "e2e", "--model-config", "qwen3-8b"], "add --dummy-weights"),
    (["bench", "e2e", "--model-config", "gpt-9", "--dummy-weights"], "config 'gpt-9' is not"),
    (["bench", "e2e", "--device", "auto"], "Device 'auto' is none"),
    (["bench", "e2e", "--device", "cuda:99", "--out", "OUT"], "Device 'cuda:99'"),
    (["bench", "e2e", "--out", "/proc/nowhere"], "/proc/nowhere cannot be written"),
    (
        [*TINY_E2E, "--memory-budget", "1MB", "--out", "OUT"],
        "budget is 1000000 bytes, but the weights of 'qwen3-8b' alone take 32762941440",
    ),
    (
        [
            *("job", "latency", "--experiment", "tiny", "--model", "a", "--implementation", "b"),
            *("--workload", "c", "--results", "r"),
        ],
        "no latency job a/b/c",
    ),
]


@pytest.mark.parametrize(("arguments", "part"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_sentence_on_stderr_and_a_failure(tmp_path, arguments, part):
    (tmp_path / "SHORT").write_text("A short text. " * 20)
    (tmp_path / "DAMAGED").write_bytes(b"\0" * 100)
    answer = kitty(*arguments, cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert part in answer.stderr
    assert answer.stderr.startswith("kitty: error: ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["models"]])
def test_a_command_that_needs_another_shows_its_help(arguments):
    answer = kitty(*arguments)
    assert answer.returncode == 2
    assert "Usage: kitty" in answer.stdout + answer.stderr
    assert "kitty: error" not in answer.stderr


def test_eval_measures_a_users_text_and_writes_a_record(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("\n".join(f"Line {i} tells of the number {i * i}." for i in range(60)))
    common = ["eval", "--text", "mine.txt", "--reference", "r.safetensors", "--threads", "1"]
    answer = kitty(
        *common, "--method", "kitty", "--boost-ratio", "0.5", "--out", "a.json", cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""  # quiet where nobody watches
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["method"]["boost_ratio"] == 0.5
    assert record["passage"]["name"] == "mine"
    assert record["metrics"]["kl"] > 0
    assert record["model"]["weights"] == "Q4_1"
    shown = dict(line.split("\t")[:2] for line in answer.stdout.splitlines())
    assert float(shown["kl"]) == pytest.approx(record["metrics"]["kl"], rel=1e-4)

    exact = kitty(*common, "--method", "fp16", "--json", cwd=tmp_path)  # with the same reference
    assert json.loads(exact.stdout)["metrics"]["top1"] == 1


def test_claims_of_a_folder_are_printed_and_written_into_a_document(tmp_path):
    write_record(tmp_path / "records" / "a.json", quality_record("kivi-k2v2", [0.5, 0.6]))
    write_record(tmp_path / "records" / "b.json", quality_record("kivi-k2v2-sink", [0.2, 0.3]))
    document = tmp_path / "doc.md"
    document.write_text("# Doc\n<!-- claims:begin -->\n<!-- claims:end -->\n")
    answer = kitty("claims", str(tmp_path), "--write", str(document))
    assert answer.returncode == 0, answer.stderr
    head, *lines = [line.split("\t") for line in answer.stdout.splitlines()]
    rows = {row[0]: dict(zip(head, row, strict=True)) for row in lines}
    assert rows["ordering/sink"]["verdict"] == "reproduced"
    assert rows["ordering/sink"]["records"].count(".json") == 2
    assert rows["kernel/append"]["verdict"] == "not run here"
    assert "`ordering/sink`" in document.read_text()
    answer = kitty("claims", str(tmp_path / "nothing"))
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert "There is no folder" in answer.stderr
