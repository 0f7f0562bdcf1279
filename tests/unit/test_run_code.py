"""Programs that a model wrote run within limits, and pass only if their tests do."""

import json

import pytest

from kitty.evaluation.run_code import Limits, humaneval_program, outcome
from kitty.paths import configs_dir

SMALL = Limits(seconds=1, memory_bytes=1 << 28, file_bytes=1 << 12)


def test_a_sound_program_passes():
    assert outcome("assert 1 + 1 == 2") == "passed"


@pytest.mark.parametrize(
    "program, said",
    [
        ("assert 1 == 2", "failed: AssertionError"),
        ("def f(:", "failed: SyntaxError"),
        ("import sys; sys.exit(3)", "failed: exit status 3"),
        ("while True: pass", "timed out"),
        ("import time; time.sleep(60)", "timed out"),
        ("x = bytearray(1 << 30)", "failed: MemoryError"),
        ("open('big', 'wb').write(bytes(1 << 20))", "failed: OSError"),
        ("[open('/dev/null') for _ in range(100)]", "failed: OSError"),
        ("input()", "failed: EOFError"),
    ],
)
def test_a_program_that_fails_or_goes_too_far_is_stopped(program, said):
    assert outcome(program, SMALL).startswith(said)


def test_a_program_does_not_see_the_environment_or_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.chdir(tmp_path)
    program = f"import os; assert 'SECRET' not in os.environ and os.getcwd() != {str(tmp_path)!r}"
    assert outcome(program) == "passed"


def test_what_a_program_leaves_running_is_ended(tmp_path):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert outcome(program) == "passed"
    import time

    time.sleep(2.5)
    assert not mark.exists()


def test_the_stand_in_problems_accept_their_solution_and_refuse_a_wrong_one():
    lines = (configs_dir() / "standins" / "humaneval.jsonl").read_text().splitlines()[:4]
    for doc in map(json.loads, lines):
        right = humaneval_program(doc, doc["prompt"] + doc["canonical_solution"])
        wrong = humaneval_program(doc, doc["prompt"] + "    return None\n")
        assert outcome(right) == "passed"
        assert outcome(wrong).startswith("failed: AssertionError")
