"""Text passages: fixed ones shipped with the project, or a user's file.

A passage is named in every record together with its sha256, so a number can be traced to its text.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kitty.errors import KittyError
from kitty.methods import Method
from kitty.paths import configs_dir


@dataclass(frozen=True)
class Passage:
    """A text with its provenance.

    Attributes:
        name: in records and file names.
        text: the whole passage.
        sha256: of its bytes.
        licence: SPDX name, or None for a user's file.
    """

    name: str
    text: str
    sha256: str
    licence: str | None

    def to_record(self, num_tokens: int) -> dict[str, Any]:
        """The passage's part of a record: everything but the text."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "num_tokens": num_tokens,
            "licence": self.licence,
        }


@functools.cache
def known_passages() -> dict[str, dict[str, str]]:
    """The shipped passages' entries of configs/texts/passages.yaml, by name."""
    entries = yaml.safe_load((configs_dir() / "texts" / "passages.yaml").read_text())
    return dict(entries["passages"])


def load_passage(name_or_file: str | Path) -> Passage:
    """A shipped passage by name, or a UTF-8 text file by path.

    Raises:
        KittyError: neither is found, the file is no UTF-8 text, or a shipped file was changed.
    """
    name = str(name_or_file)
    if name in known_passages():
        return _shipped_passage(name, known_passages()[name])
    path = Path(name_or_file).expanduser()
    if not path.is_file():
        raise KittyError(
            f"Passage {name!r} is neither a shipped text ({', '.join(known_passages())}) nor a "
            "file: give one of these names, or the path of a text file."
        )
    content = _read(path)
    return Passage(path.stem, _decode(content, path), hashlib.sha256(content).hexdigest(), None)


def _shipped_passage(name: str, entry: dict[str, str]) -> Passage:
    path = configs_dir() / "texts" / entry["file"]
    content = _read(path)
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != entry["sha256"]:
        raise KittyError(
            f"The text {path} was changed: its sha256 is {sha256}, not {entry['sha256']}; restore "
            "it, or pass a text of your own by its path."
        )
    return Passage(name, _decode(content, path), sha256, entry["licence"])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KittyError(f"The text {path} cannot be read: {error.strerror}.") from error


def _decode(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KittyError(
            f"The text {path} is not UTF-8 (byte {error.start}): convert it first."
        ) from error


def least_tokens(method: Method) -> int:
    """Tokens that a text must have to say anything about a method: its buffers and two pages."""
    return method.sink + method.window + method.rollback + 2 * method.page_size


def check_length(num_tokens: int, method: Method, passage: str, asked: int | None = None) -> None:
    """Refuse a text that is too short for a method or for the number of tokens asked for.

    Raises:
        KittyError: the text has fewer tokens than ``asked``, or than buffers and two pages.
    """
    if asked is not None and num_tokens < asked:
        raise KittyError(
            f"Passage {passage!r} has {num_tokens} tokens, fewer than the {asked} asked for: ask "
            "for fewer tokens, or give a longer text."
        )
    least = least_tokens(method)
    if num_tokens < least:
        raise KittyError(
            f"Passage {passage!r} gives {num_tokens} tokens, but method {method.name!r} needs "
            f"{least} (sink {method.sink}, local window {method.window} and two pages of "
            f"{method.page_size}): use a longer text or a smaller page."
        )
