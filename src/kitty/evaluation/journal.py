"""What a task has answered so far, on disk after every batch, so that a kill costs one batch.

One JSON line a batch. A line that a kill cut short, or of another setting, is passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kitty.errors import KittyError


def digest(value: Any) -> str:
    """Short sha256 of plain data."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Journal:
    """Answers by key.

    Args:
        path: the file; None keeps the answers in memory only.
        setting: what the answers depend on, see :func:`digest`.

    Attributes:
        answers: those of earlier runs with the same setting, and new ones.
        pages_read: quantized pages read for them.
        resumed: number of answers found.
    """

    def __init__(self, path: Path | None, setting: str) -> None:
        self.path = path
        self.setting = setting
        self.answers: dict[str, Any] = {}
        self.pages_read = 0
        for line in self._lines():
            if line.get("setting") == setting:
                self.answers.update(line["answers"])
                self.pages_read += line["pages_read"]
        self.resumed = len(self.answers)

    def _lines(self) -> list[dict[str, Any]]:
        if self.path is None or not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # a kill cut it short
        return found

    def add(self, answers: dict[str, Any], pages_read: int) -> None:
        """Keep the answers of one batch; they are on the disk when this returns.

        Raises:
            KittyError: the file cannot be written.
        """
        self.answers.update(answers)
        self.pages_read += pages_read
        if self.path is None:
            return
        line = {"setting": self.setting, "answers": answers, "pages_read": pages_read}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                if file.tell() and not self._ends_whole():
                    file.write(b"\n")  # what a kill cut short stays a line of its own
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise KittyError(
                f"The answers cannot be kept in {self.path} ({error.strerror}): choose a folder "
                "that you may write to and that has room."
            ) from error

    def _ends_whole(self) -> bool:
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def close(self) -> None:
        """Remove the file, once the record holds everything."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
