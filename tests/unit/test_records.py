"""Records are written whole or not at all, and never read damaged."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from sample_records import latency_record, quality_record, task_record

from kitty.errors import KittyError
from kitty.records import find_records, format_record, read_record, read_records, write_record


@pytest.fixture
def record():
    return quality_record("kitty", [0.1, 0.2])


def test_a_written_record_reads_back_equal(tmp_path, record):
    path = write_record(tmp_path / "deep" / "r0.json", record)
    assert read_record(path) == record


def test_equal_records_give_equal_bytes_whatever_the_order_of_keys(record):
    turned = {key: record[key] for key in reversed(record)}
    assert format_record(turned) == format_record(record)
    assert json.loads(format_record(record)) == record


def test_only_the_record_is_left_in_its_folder(tmp_path, record):
    write_record(tmp_path / "r0.json", record)
    assert [p.name for p in tmp_path.iterdir()] == ["r0.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused_and_the_old_record_stays(tmp_path, record, value):
    path = write_record(tmp_path / "r0.json", record)
    before = path.read_bytes()
    record["metrics"]["kl"] = value
    with pytest.raises(KittyError, match=r"r0\.json.*not finite"):
        write_record(path, record)
    assert path.read_bytes() == before


def test_a_record_that_breaks_the_schema_is_not_written(tmp_path, record):
    del record["metrics"]["kl"]
    with pytest.raises(KittyError, match=r"metrics.*'kl' is a required property"):
        write_record(tmp_path / "r0.json", record)
    assert not list(tmp_path.iterdir())


def test_a_task_record_of_a_quantized_method_that_read_no_page_is_not_written(tmp_path):
    write_record(tmp_path / "sound.json", task_record("kitty", 0.5))
    write_record(tmp_path / "dense.json", task_record("fp16", 0.5))
    with pytest.raises(KittyError, match="quantized_pages_read: 0 for method kitty"):
        write_record(tmp_path / "r0.json", task_record("kitty", 0.5, pages_read=0))
    with pytest.raises(KittyError, match="quantized_pages_read: 3 for method fp16"):
        write_record(tmp_path / "r0.json", task_record("fp16", 0.5, pages_read=3))


def test_page_lists_of_unequal_length_are_refused(tmp_path, record):
    record["pages"]["kl"].append(0.3)
    with pytest.raises(KittyError, match="differ in length"):
        write_record(tmp_path / "r0.json", record)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_record_is_an_error_that_names_the_file_and_the_remedy(tmp_path, record, share):
    path = write_record(tmp_path / "r0.json", record)
    content = path.read_bytes().rstrip()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(KittyError, match=r"r0\.json is damaged.*delete the file"):
        read_record(path)


@pytest.mark.parametrize(
    "damage",
    [b"\xff\xfe\x00garbage", b"[1, 2]", b'{"kind": "quality"}', b"NaN", b"[" * 100_000],
)
def test_garbage_is_an_error_that_names_the_file(tmp_path, damage):
    path = tmp_path / "r7.json"
    path.write_bytes(damage)
    with pytest.raises(KittyError, match=r"r7\.json"):
        read_record(path)


def test_a_missing_record_and_a_missing_folder_are_told(tmp_path):
    with pytest.raises(KittyError, match=r"gone\.json is missing: run the experiment first"):
        read_record(tmp_path / "gone.json")
    with pytest.raises(KittyError, match="run the experiment first"):
        read_records(tmp_path / "gone")


def test_an_unwritable_folder_is_told(tmp_path, record):
    (tmp_path / "file").write_text("")
    with pytest.raises(KittyError, match="cannot be written"):
        write_record(tmp_path / "file" / "r0.json", record)


def test_records_are_found_in_path_order_by_kind_without_temporary_files(tmp_path, record):
    other = latency_record("kitty-pro", 8, 400.0)
    write_record(tmp_path / "b" / "r0.json", record)
    write_record(tmp_path / "a" / "r0.json", other)
    write_record(tmp_path / "a" / "r1.json", record)
    (tmp_path / ".r2.json.x.tmp").write_text("{")
    found = [str(path.relative_to(tmp_path)) for path, _ in find_records(tmp_path)]
    assert found == ["a/r0.json", "a/r1.json", "b/r0.json"]
    assert read_records(tmp_path, "latency") == [other]


def test_a_process_killed_while_writing_leaves_the_old_or_the_new_record(tmp_path, record):
    path = tmp_path / "r0.json"
    record["pages"] = {key: values * 500 for key, values in record["pages"].items()}
    write_record(tmp_path / "in.json", record)
    script = textwrap.dedent(f"""
        import json
        from kitty.records import write_record
        record = json.load(open({str(tmp_path / "in.json")!r}))
        print("ready", flush=True)
        while True:
            record["repeat"] += 1
            write_record({str(path)!r}, record)
    """)
    for delay in (0.0, 0.05, 0.11):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ
        )
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert read_record(path)["repeat"] >= 1


def test_a_latency_record_has_numbers_or_says_where_the_memory_ran_out(tmp_path):
    done, full = latency_record("kitty-pro", 64, 4000.0), latency_record("hf-static", 64, None)
    write_record(tmp_path / "done.json", done)
    write_record(tmp_path / "full.json", full)
    assert full["metrics"] == {}
    assert full["stage"] == "cache"
    with pytest.raises(KittyError, match="stage"):
        write_record(tmp_path / "x.json", {k: v for k, v in full.items() if k != "stage"})
    with pytest.raises(KittyError, match="prefill_s"):
        write_record(tmp_path / "x.json", done | {"metrics": {}})
    wrong = done["workload"] | {"batch": 0}
    with pytest.raises(KittyError, match="batch"):
        write_record(tmp_path / "x.json", done | {"workload": wrong})
