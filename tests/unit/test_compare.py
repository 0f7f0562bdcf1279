"""Comparing records: within tolerance, beyond it, missing, of another setting, not comparable."""

import csv
import io
import subprocess
import sys

import pytest
from sample_records import quality_record

from kitty.compare import Value, alike, compare, is_within, values
from kitty.config_files import load_config
from kitty.errors import KittyError
from kitty.paths import configs_dir, shipped
from kitty.record_sets import record_sets
from kitty.records import write_record

PAGES = [0.1, 0.2]  # a KL divergence of 0.15


def store(folder, record, name="records/quality/kitty.json"):
    write_record(folder / name, record)


def changed(**metrics):
    record = quality_record("kitty", PAGES)
    record["metrics"] |= metrics
    return record


@pytest.fixture
def sides(tmp_path):
    """Folders of mine and of the reference, which holds one record."""
    store(tmp_path / "reference", quality_record("kitty", PAGES))
    return tmp_path / "mine", tmp_path / "reference"


def test_equal_records_have_no_difference(sides):
    mine, reference = sides
    store(mine, quality_record("kitty", PAGES))
    found = compare(mine, reference)
    assert (found.records, found.beyond, found.extra) == (1, [], 0)


@pytest.mark.parametrize("kl, beyond", [(0.1507, []), (0.1510, ["kl"]), (0.1490, ["kl"])])
def test_a_value_beyond_half_a_per_cent_is_told_on_like_machines(sides, kl, beyond):
    mine, reference = sides
    store(mine, changed(kl=kl))
    assert [d.metric for d in compare(mine, reference).beyond] == beyond


@pytest.mark.parametrize("kl, beyond", [(0.11, []), (0.19, []), (0.21, ["kl"]), (0.09, ["kl"])])
def test_with_another_torch_a_value_may_lie_inside_the_reference_s_interval(sides, kl, beyond):
    mine, reference = sides  # the reference's interval is 0.1 to 0.2
    record = changed(kl=kl)
    record["environment"]["torch"] = "2.4.1+cu121"
    store(mine, record)
    assert [d.metric for d in compare(mine, reference).beyond] == beyond


def test_a_figure_that_follows_from_the_method_must_be_equal(sides):
    mine, reference = sides
    store(mine, changed(effective_bits=2.3850, quantized_pages_read=8))
    found = {d.metric for d in compare(mine, reference).beyond}
    assert found == {"effective_bits", "quantized_pages_read"}


def test_another_setting_is_told_in_place_of_its_numbers(sides):
    mine, reference = sides
    record = changed(kl=9.0)
    record["method"]["window"] = 64
    record["passage"]["sha256"] = "0" * 64
    store(mine, record)
    assert [d.metric for d in compare(mine, reference).beyond] == [
        "passage.sha256",
        "method.window",
    ]


def test_a_missing_record_is_a_difference_and_an_extra_one_is_not(sides):
    mine, reference = sides
    store(reference, quality_record("kitty-pro", PAGES), "records/quality/kitty-pro.json")
    store(mine, quality_record("kitty", PAGES))
    store(mine, quality_record("fp16", [0.0, 0.0]), "records/quality/fp16.json")
    found = compare(mine, reference)
    assert [(d.record, d.mine) for d in found.beyond] == [("quality/kitty-pro.json", "missing")]
    assert found.extra == 1


def test_the_reference_of_the_machine_most_like_mine_is_taken(tmp_path):
    for machine, kl in (("a-gpu", 9.0), ("cpu", 0.15)):
        record = changed(kl=kl)
        record["environment"]["gpu"] = None if machine == "cpu" else "NVIDIA H200"
        store(tmp_path / "reference" / machine, record)
    store(tmp_path / "mine", changed())
    assert compare(tmp_path / "mine", tmp_path / "reference").beyond == []


@pytest.mark.parametrize("content", ["absent", "empty", "other experiment", "damaged"])
def test_nothing_to_compare_is_an_error(sides, content):
    mine, reference = sides
    record = quality_record("kitty", PAGES)
    if content == "empty":
        mine.mkdir()
    elif content == "other experiment":
        store(mine, {**record, "experiment": "another"})
    elif content == "damaged":
        store(mine, record)
        (mine / "records/quality/kitty.json").write_text("{")
    with pytest.raises(KittyError):
        compare(mine, reference)


def test_of_several_forms_of_a_tolerance_one_is_enough():
    small, tolerance = Value(1e-6), {"relative": 0.01, "absolute": 1e-4}
    assert is_within(Value(5e-5), small, tolerance)[0]
    assert not is_within(Value(5e-4), small, tolerance)[0]
    assert is_within(Value(101.0), Value(100.0), tolerance)[0]


def test_standard_errors_of_both_sides_count_together():
    mine, reference = Value(0.70, stderr=0.03), Value(0.60, stderr=0.04)  # together 0.05
    assert is_within(mine, reference, {"stderr": 2})[0]
    assert not is_within(mine, reference, {"stderr": 1.9})[0]
    assert not is_within(Value(0.7), Value(0.6), {"stderr": 2})[0]


def test_words_are_compared_as_they_are():
    assert not is_within(Value("ok"), Value("out_of_memory"), {"relative": 1})[0]


def test_machines_are_alike_by_release_of_torch_gpu_model_and_processor():
    def machine(torch, gpu, cpu="Xeon"):
        return {"environment": {"torch": torch, "gpu": gpu, "cpu": cpu}}

    assert alike(machine("2.7.0+cpu", None), machine("2.7.0", None))
    assert not alike(machine("2.7.0", None), machine("2.8.0", None))
    assert not alike(machine("2.7.0", "NVIDIA H200"), machine("2.7.0", "NVIDIA A100"))
    assert not alike(machine("2.7.0", None), machine("2.7.0", None, "EPYC"))


def test_every_value_of_the_committed_reference_has_a_tolerance_with_its_reason():
    from fnmatch import fnmatchcase

    tolerances = load_config("tolerances", configs_dir() / "tolerances.yaml")
    for found in record_sets(shipped("configs").parent / "results" / "reference"):
        for _, record in found.records.values():
            patterns = tolerances[record["kind"]]
            for name in values(record):
                assert any(fnmatchcase(name, pattern) for pattern in patterns), name


def test_the_committed_reference_equals_itself_set_by_set():
    reference = shipped("configs").parent / "results" / "reference"
    found = compare(reference, reference)
    assert found.records == sum(len(each.records) for each in record_sets(reference))
    assert (found.beyond, found.extra) == ([], 0)


def run(*arguments):
    command = [sys.executable, "-m", "kitty", "compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_tells_differences_in_a_table_and_by_its_exit_status(sides):
    mine, reference = sides
    store(mine, changed())
    done = run(mine, reference)
    assert done.returncode == 0, done.stderr
    assert "1 records, 6 values compared" in done.stdout
    store(mine, changed(top1=0.6))
    done = run(mine, reference)
    assert done.returncode == 1
    table = list(csv.DictReader(io.StringIO(done.stdout), delimiter="\t"))
    assert table[0] == {
        "record": "quality/kitty.json",
        "metric": "top1",
        "mine": "0.6",
        "reference": "0.5",
        "allowed": "±0.001",
        "verdict": "beyond",
    }
    done = run(mine / "nothing", reference)
    assert done.returncode == 2
    assert done.stderr.startswith("kitty: error: ")
    assert len(done.stderr.splitlines()) == 1
