"""Text passages: fixed, hashed, long enough; a user's file in their place."""

import hashlib

import pytest

from kitty import texts
from kitty.errors import KittyError
from kitty.methods import get_method
from kitty.paths import configs_dir


@pytest.mark.parametrize("name", texts.known_passages())
def test_a_shipped_passage_carries_its_hash_and_licence(name):
    passage = texts.load_passage(name)
    content = (configs_dir() / "texts" / f"{name}.txt").read_bytes()
    assert passage.sha256 == hashlib.sha256(content).hexdigest()
    assert passage.licence == "PSF-2.0"
    assert len(passage.text) > 4 * 4200
    assert passage.to_record(100) == {
        "name": name,
        "sha256": passage.sha256,
        "num_tokens": 100,
        "licence": "PSF-2.0",
    }


def test_a_changed_shipped_text_is_refused(monkeypatch):
    entry = {"file": "python-data-model.txt", "sha256": "0" * 64, "licence": "PSF-2.0"}
    with pytest.raises(KittyError, match="was changed"):
        texts._shipped_passage("python-data-model", entry)


def test_a_file_works_as_a_passage(tmp_path):
    file = tmp_path / "novel.txt"
    file.write_bytes("Œuvre".encode())
    passage = texts.load_passage(file)
    assert (passage.name, passage.text, passage.licence) == ("novel", "Œuvre", None)
    assert passage.sha256 == hashlib.sha256("Œuvre".encode()).hexdigest()


def test_what_is_neither_a_passage_nor_a_text_file_is_refused(tmp_path):
    with pytest.raises(KittyError, match="neither a shipped text"):
        texts.load_passage(tmp_path / "nothing.txt")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KittyError, match="not UTF-8"):
        texts.load_passage(binary)


def test_a_text_must_hold_the_buffers_and_two_pages():
    method = get_method("kitty-pro")
    assert texts.least_tokens(method) == 32 + 128 + 2 * 128
    texts.check_length(416, method, "p")
    with pytest.raises(KittyError, match="needs 416"):
        texts.check_length(415, method, "p")
    with pytest.raises(KittyError, match="fewer than the 500 asked for"):
        texts.check_length(499, method, "p", asked=500)
