"""Measurement records: one JSON file per job, written whole or not at all, checked when read.

Tables and figures are made of records only, so a record that reads back is a finished job.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from kitty.errors import KittyError
from kitty.methods import UNQUANTIZED_BITS
from kitty.paths import configs_dir

SCHEMA_VERSION = 1
Record = dict[str, Any]


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = json.loads((configs_dir() / "schemas" / "record.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema)


def fault_of(record: object) -> str | None:
    """What breaks the record schema, as ``place: reason``; None for a sound record."""
    fault = jsonschema.exceptions.best_match(_validator().iter_errors(record))
    if fault is None:
        return _uneven_pages(record) or _unread_cache(record)
    place = "/".join(str(part) for part in fault.absolute_path) or "top level"
    reason = fault.message if len(fault.message) <= 200 else fault.message[:200] + " …"
    return f"{place}: {reason}"


def _uneven_pages(record: Any) -> str | None:
    """Page lists must run side by side, which JSON Schema cannot say."""
    if record["kind"] != "quality":
        return None
    lengths = {name: len(values) for name, values in record["pages"].items()}
    return None if len(set(lengths.values())) == 1 else f"pages: lists differ in length, {lengths}"


def _unread_cache(record: Any) -> str | None:
    """A task's score counts for its method only where the quantized cache was read."""
    if record["kind"] != "task":
        return None
    bits = {record["method"]["key_bits"], record["method"]["value_bits"]}
    quantized, read = bits != {UNQUANTIZED_BITS}, record["quantized_pages_read"]
    if quantized == (read > 0):
        return None
    return f"quantized_pages_read: {read} for method {record['method']['name']}"


def write_record(path: str | os.PathLike[str], record: Record) -> Path:
    """Check a record and write it atomically: the file appears complete or not at all.

    The text is the same for equal records whatever the order of their keys.

    Args:
        path: the JSON file; missing folders are made.
        record: plain JSON data as configs/schemas/record.schema.json describes it.

    Returns:
        The path written.

    Raises:
        KittyError: the record breaks the schema or holds NaN or infinity, or the folder cannot
            be written.
    """
    path = Path(path)
    text = format_record(record, path)
    if (fault := fault_of(record)) is not None:
        raise KittyError(f"The record for {path} was not written, it breaks the schema at {fault}.")
    write_atomically(path, text.encode())
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by way of a synced temporary file in the same folder and a rename.

    Raises:
        KittyError: the folder cannot be made or written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's 0600 would hide results from a group
        os.replace(temporary, path)
    except OSError as error:
        raise KittyError(
            f"The file {path} cannot be written ({error.strerror}): choose a results folder that "
            "you may write to and that has room."
        ) from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read a record and check it against the schema.

    Raises:
        KittyError: the file is missing, truncated, no JSON, or breaks the schema.
    """
    path = Path(path)
    try:
        record = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise KittyError(
            f"The record {path} is missing: run the experiment first (`kitty run`), which measures "
            "only what is missing."
        ) from None
    except OSError as error:
        raise KittyError(f"The record {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise KittyError(
            f"The record {path} is damaged ({error}): delete the file and run the same command "
            "again, which measures only what is missing."
        ) from error
    if (fault := fault_of(record)) is not None:
        raise KittyError(
            f"The record {path} breaks the record schema at {fault}: delete the file and run the "
            "same command again, which measures only what is missing."
        )
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number a record may hold")


def find_records(
    folder: str | os.PathLike[str], kind: str | None = None
) -> Iterator[tuple[Path, Record]]:
    """Each record below a folder with its path, in path order; other kinds are left out.

    Raises:
        KittyError: the folder is missing, or a record in it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise KittyError(f"There is no records folder {folder}: run the experiment first.")
    for path in sorted(folder.rglob("*.json")):
        if path.name.startswith("."):
            continue
        record = read_record(path)
        if kind is None or record["kind"] == kind:
            yield path, record


def read_records(folder: str | os.PathLike[str], kind: str | None = None) -> list[Record]:
    """All records below a folder, in path order; see :func:`find_records`."""
    return [record for _, record in find_records(folder, kind)]


def format_record(record: Record, path: Path | None = None) -> str:
    """A record as JSON text: keys sorted, one line per key, lists of plain values on one line.

    Raises:
        KittyError: a value is NaN or infinite.
    """
    try:
        return _format(record, 0) + "\n"
    except ValueError as error:
        raise KittyError(
            f"The record for {path or 'this job'} was not written, since a value in it is not "
            "finite: the model or the method overflowed, so try another dtype."
        ) from error


def _format(value: Any, depth: int) -> str:
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        items = (
            f"{inner}{json.dumps(key)}: {_format(value[key], depth + 1)}" for key in sorted(value)
        )
        return "{\n" + ",\n".join(items) + f"\n{outer}}}"
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        lines = [inner + _format(item, depth + 1) for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{outer}]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
