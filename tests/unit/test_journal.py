"""Answers are on the disk batch by batch, and only those of the same setting come back."""

import pytest

from kitty.errors import KittyError
from kitty.evaluation.journal import Journal


def test_answers_come_back_with_their_pages(tmp_path):
    path = tmp_path / "deep" / "r0.partial.jsonl"
    Journal(path, "one").add({"a": "x\ny", "b": [1.5, True]}, 7)
    Journal(path, "one").add({"c": "z"}, 2)
    again = Journal(path, "one")
    assert again.answers == {"a": "x\ny", "b": [1.5, True], "c": "z"}
    assert (again.pages_read, again.resumed) == (9, 3)


def test_answers_of_another_setting_are_left_alone(tmp_path):
    path = tmp_path / "r0.partial.jsonl"
    Journal(path, "one").add({"a": "x"}, 7)
    other = Journal(path, "two")
    assert (other.answers, other.pages_read) == ({}, 0)
    other.add({"a": "y"}, 1)
    assert Journal(path, "one").answers == {"a": "x"}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_line_that_a_kill_cut_short_costs_no_other(tmp_path, cut):
    path = tmp_path / "r0.partial.jsonl"
    for name in "abc":
        Journal(path, "one").add({name: name}, 1)
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, "one")
    assert {"a", "b"} <= set(again.answers)
    again.add({"d": "d"}, 1)
    assert {"a", "b", "d"} <= set(Journal(path, "one").answers)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KittyError, match="cannot be kept"):
        Journal(tmp_path / "file" / "r0.partial.jsonl", "one").add({"a": "x"}, 0)
