"""Parts of an experiment: disjoint, complete, joined without loss, contradictions refused."""

import json
import os

import pytest
from sample_records import quality_record

from kitty.errors import KittyError
from kitty.parts import join, rounds, split
from kitty.records import read_record, write_record
from kitty.workflow import Plan

NAME = "records/quality/small/first/kitty/r0.json"


@pytest.fixture
def plan(tmp_path):
    return Plan.load("smoke", tmp_path / "results")


def make(root, file):
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("made")


def test_rounds_make_shared_files_before_the_records_that_need_them(plan):
    models, references, records = rounds(plan)
    assert models == ["models/smollm2-135m-instruct.json"]
    assert sorted(references) == [
        "references/smollm2-135m-instruct/python-compound-statements.safetensors",
        "references/smollm2-135m-instruct/python-data-model.safetensors",
    ]
    expected = {*plan.quality_records(), *plan.analysis_records()}
    assert {str(plan.root / file) for file in records} == expected
    assert len(records) == len(expected)


def test_what_exists_is_not_made_again(plan):
    models, references, records = rounds(plan)
    for file in [*models, *references, *records[1:]]:
        make(plan.root, file)
    assert rounds(plan) == [records[:1]]
    make(plan.root, records[0])
    assert rounds(plan) == []


def test_a_shared_file_is_made_only_where_a_missing_record_needs_it(plan):
    *_, records = rounds(plan)
    for file in records:
        if "python-data-model" not in file:
            make(plan.root, file)
    _, references, left = rounds(plan)
    assert references == ["references/smollm2-135m-instruct/python-data-model.safetensors"]
    assert all("python-data-model" in file for file in left)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_parts_are_disjoint_complete_even_and_the_same_on_every_call(plan, parts):
    files = rounds(plan)[-1]
    found = split(files, parts)
    assert sorted(file for part in found for file in part) == sorted(files)
    assert len(found) == min(parts, len(files))
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert found == split(list(files), parts)


def test_joining_brings_the_files_of_all_parts_together_with_their_times(tmp_path):
    for index, method in enumerate(("kitty", "kitty-pro")):
        path = tmp_path / str(index) / "records" / "quality" / f"{method}.json"
        write_record(path, quality_record(method, [0.1, 0.2]))
        os.utime(path, (1000 + index, 1000 + index))
    make(tmp_path / "0", "references/m/first.safetensors")
    make(tmp_path / "1", "logs/quality/a.log")
    make(tmp_path / "1", "tables/quality.csv")
    target = tmp_path / "joined"
    new = join([tmp_path / "0", tmp_path / "1", tmp_path / "absent"], target)
    records = target / "records" / "quality"
    assert sorted(new) == [records / "kitty-pro.json", records / "kitty.json"]
    assert read_record(records / "kitty-pro.json")["method"]["name"] == "kitty-pro"
    assert (records / "kitty-pro.json").stat().st_mtime == 1001
    assert (target / "references/m/first.safetensors").read_text() == "made"
    assert (target / "logs/quality/a.log").exists()
    assert not (target / "tables").exists()  # made anew of all the records
    assert join([tmp_path / "0", tmp_path / "1"], target) == []


def test_a_half_written_file_of_a_killed_job_is_left_out(tmp_path):
    make(tmp_path / "0", "records/quality/.r0.json.x1.tmp")
    assert join([tmp_path / "0"], tmp_path / "joined") == []
    assert not list((tmp_path / "joined").rglob("*"))


def test_the_same_finding_measured_twice_is_kept_once(tmp_path):
    first = quality_record("kitty", [0.1, 0.2])
    second = {**first, "created": "2025-02-02T00:00:00+00:00", "wall_time_s": 99.0}
    write_record(tmp_path / "0" / NAME, first)
    write_record(tmp_path / "1" / NAME, second)
    join([tmp_path / "0", tmp_path / "1"], tmp_path / "joined")
    assert read_record(tmp_path / "joined" / NAME) == first


@pytest.mark.parametrize("first_is_joined", [False, True])
def test_two_different_records_of_one_name_are_refused_before_anything_is_joined(
    tmp_path, first_is_joined
):
    write_record(tmp_path / "0" / NAME, quality_record("kitty", [0.1, 0.2]))
    write_record(tmp_path / "1" / NAME, quality_record("kitty", [0.1, 0.3]))
    write_record(tmp_path / "1" / "records/a.json", quality_record("fp16", [0.0, 0.0]))
    target = tmp_path / "joined"
    sources = [tmp_path / "0", tmp_path / "1"]
    if first_is_joined:
        join(sources[:1], target)
    with pytest.raises(KittyError, match="same name and different content") as told:
        join(sources, target)
    assert str(told.value).count(". ") == 0  # one sentence
    assert str(tmp_path / "1" / NAME) in str(told.value)
    assert not (target / "records/a.json").exists()


def test_a_damaged_record_is_named_where_it_would_be_compared(tmp_path):
    write_record(tmp_path / "0" / NAME, quality_record("kitty", [0.1, 0.2]))
    make(tmp_path / "1", NAME)
    with pytest.raises(KittyError, match="damaged"):
        join([tmp_path / "0", tmp_path / "1"], tmp_path / "joined")


def test_a_predictions_file_goes_with_its_record(tmp_path):
    write_record(tmp_path / "0" / NAME, quality_record("kitty", [0.1, 0.2]))
    samples = tmp_path / "0" / NAME.replace(".json", ".jsonl")
    samples.write_text(json.dumps({"answer": 1}))
    join([tmp_path / "0"], tmp_path / "joined")
    assert (tmp_path / "joined" / NAME.replace(".json", ".jsonl")).exists()
