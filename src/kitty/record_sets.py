"""The records below a folder, set by set: a results folder, or the committed reference of machines.

A set is a folder with ``records/`` in it, or a record file that stands by itself (``ops.json``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kitty.errors import KittyError
from kitty.records import Record, find_records, read_record

RECORDS = "records"


@dataclass(frozen=True)
class RecordSet:
    """Records of one experiment on one machine.

    Attributes:
        name: place below the folder that was looked through, such as ``cpu/smoke``.
        records: by their names within the set, with their paths.
    """

    name: str
    records: dict[str, tuple[Path, Record]]

    def of_kinds(self, *kinds: str) -> list[tuple[Path, Record]]:
        """Records of some kinds with their paths, in path order."""
        return [pair for pair in self.records.values() if pair[1]["kind"] in kinds]


def record_sets(folder: str | Path) -> list[RecordSet]:
    """Every set at or below a folder, by name; a record file is a set of its own.

    Raises:
        KittyError: there is no record, or one is damaged.
    """
    folder = Path(folder)
    if folder.is_file():
        record = read_record(folder)
        return [RecordSet(folder.stem, {folder.name: (folder, record)})]
    if not folder.is_dir():
        raise KittyError(f"There is no folder {folder}: name a folder of results.")
    if folder.name == RECORDS:
        folder = folder.parent
    homes = [path for path in [folder / RECORDS, *sorted(folder.rglob(RECORDS))] if path.is_dir()]
    found = {}
    for home in dict.fromkeys(homes):
        name = str(home.parent.relative_to(folder))
        if _hidden(home.relative_to(folder)):
            continue
        found[name] = {str(p.relative_to(home)): (p, r) for p, r in find_records(home)}
    for path in _loose(folder):
        name = str(path.relative_to(folder).with_suffix(""))
        found[name] = {path.name: (path, read_record(path))}
    sets = [RecordSet(name, records) for name, records in sorted(found.items()) if records]
    if not sets:
        raise KittyError(f"There is no record in {folder}: name a folder of results.")
    return sets


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _loose(folder: Path) -> list[Path]:
    """JSON files outside ``records/`` that say that they are records."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        relative = path.relative_to(folder)
        if RECORDS in relative.parts or _hidden(relative):
            continue
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # not a record, whatever it is
        if isinstance(content, dict) and {"schema_version", "kind"} <= set(content):
            found.append(path)
    return found
