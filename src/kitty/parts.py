"""Parts of one experiment: what is still to be made, split without overlap, joined without loss.

Several runs work on an experiment at once by way of these; each has a results folder of its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from kitty.errors import KittyError
from kitty.records import Record, read_record
from kitty.workflow import Plan

RECORDS = "records"
JOINED = ("models", "references", RECORDS, "logs")  # folders of an experiment's results

# Fields that say where and when a job ran, not what it found.
PROVENANCE = (
    "command",
    "created",
    "environment",
    "peak_memory_bytes",
    "revision",
    "wall_time_s",
)


def rounds(plan: Plan) -> list[list[str]]:
    """Files that are still to be made, in rounds: each needs only files of earlier rounds.

    What records share (a model, a 16-bit pass) comes before them, so that no two parts make it.
    Paths are relative to the experiment's folder; rounds with nothing to do are left out.
    """
    missing = [work for work in plan.work() if not (plan.root / work.record).exists()]
    depth = max((len(work.needs) for work in missing), default=0)
    found: list[list[str]] = []
    for level in range(depth):
        shared = dict.fromkeys(w.needs[level] for w in missing if len(w.needs) > level)
        found.append([path for path in shared if not (plan.root / path).exists()])
    found.append([work.record for work in missing])
    return [files for files in found if files]


def split(files: Sequence[str], parts: int) -> list[list[str]]:
    """Deal files out in turn: disjoint, complete, the same on every call, of even size.

    Neighbours in the list cost alike, so taking turns also evens out the time. Empty parts are
    left out.
    """
    return [list(files[first::parts]) for first in range(min(parts, len(files)))]


def join(sources: Iterable[Path], target: Path) -> list[Path]:
    """Bring the finished files of several results folders of one experiment into one.

    Files are hard-linked where the file system can, else copied; times are kept, so Snakemake
    sees them as up to date. A record that is in the target already stays as it is.

    Args:
        sources: folders of the experiment (``results/<experiment>``); absent ones are skipped.
        target: the joined folder of the same experiment.

    Returns:
        The records that are new in the target.

    Raises:
        KittyError: two folders hold different records of one name, or one is damaged; then
            nothing has been joined.
    """
    chosen: dict[Path, Path] = {}
    for source in sources:
        for path in _finished_files(source):
            name = path.relative_to(source)
            other = target / name if (target / name).exists() else chosen.get(name)
            if other is None or name.parts[0] == "logs":
                chosen[name] = path
            elif _is_record(name):
                _check_same(other, path)
    for name, path in chosen.items():
        link(path, target / name)
    return [target / name for name in chosen if _is_record(name)]


def _finished_files(source: Path) -> list[Path]:
    """All files but tables, figures and reports, and none that a killed job was still writing."""
    return [
        path
        for folder in JOINED
        for path in sorted((source / folder).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]


def _is_record(name: Path) -> bool:
    return name.parts[0] == RECORDS and name.suffix == ".json"


def _check_same(first: Path, second: Path) -> None:
    if first.samefile(second):
        return
    if findings(read_record(first)) != findings(read_record(second)):
        raise KittyError(
            f"The records {first} and {second} have the same name and different content: find out "
            "which one is right, delete the other, and start again."
        )


def findings(record: Record) -> str:
    """What a record found, as comparable text, without where and when it ran."""
    return json.dumps(
        {name: value for name, value in record.items() if name not in PROVENANCE}, sort_keys=True
    )


def link(path: Path, target: Path) -> None:
    """Give a file a second place, whole or not at all, with its time of change.

    Raises:
        KittyError: the place cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # another file system, or one without links
            shutil.copy2(path, temporary)
        os.replace(temporary, target)
        temporary.unlink(missing_ok=True)  # stays where both names were one file already
    except OSError as error:
        raise KittyError(
            f"The file {target} cannot be written ({error.strerror}): choose a results folder that "
            "you may write to and that has room."
        ) from error
