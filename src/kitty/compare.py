"""Where measured records differ from reference records beyond the tolerance stated for a metric.

Tolerances and their reasons are data: configs/tolerances.yaml.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitty.config_files import load_config
from kitty.errors import KittyError
from kitty.paths import configs_dir
from kitty.record_sets import RecordSet, record_sets
from kitty.records import Record

# What must be equal before two records can be compared at all: part of the record → its fields.
SETTINGS: dict[str, tuple[str, ...]] = {
    "model": ("sha256", "dtype"),
    "passage": ("sha256", "num_tokens"),
    "task": ("name", "provider", "num_fewshot", "chat_template", "limit", "generation"),
}
# of records whose metrics are rows: what names a row, and what is compared of it
ROWS = {
    "ops": (
        ("op", "implementation", "method", "dtype", "batch", "length"),
        ("median_us", "speedup_over_sdpa", "bytes"),
    ),
    "attention": (("layer", "method", "query_tokens"), ("relative_rms",)),
}


@dataclass(frozen=True)
class Value:
    """A number, or a word, that records are compared by.

    Attributes:
        value: the number or word.
        interval: its own 95% bounds, where the record has them.
        stderr: its standard error, where the record has it.
    """

    value: float | str
    interval: tuple[float, float] | None = None
    stderr: float | None = None


@dataclass(frozen=True)
class Difference:
    """One finding of a comparison.

    Attributes:
        record: name of the record.
        metric: what differs.
        mine, reference: as text.
        allowed: the tolerance as text; empty where something is missing.
        beyond: whether it lies beyond the tolerance.
    """

    record: str
    metric: str
    mine: str
    reference: str
    allowed: str
    beyond: bool


@dataclass(frozen=True)
class Comparison:
    """Outcome of :func:`compare`.

    Attributes:
        records: pairs that were compared.
        found: every value that was compared, and every record that is missing.
        skipped: values that are not comparable between the two machines.
        extra: records without a reference.
    """

    records: int
    found: list[Difference]
    skipped: int
    extra: int

    @property
    def beyond(self) -> list[Difference]:
        """What differs by more than is allowed."""
        return [difference for difference in self.found if difference.beyond]


def compare(mine: str | Path, reference: str | Path) -> Comparison:
    """Compare the records below two folders, experiment by experiment.

    Experiments that only one side has are left out; of the others, a record that the reference
    has and ``mine`` lacks is a difference. Where the reference holds an experiment several times,
    the set of a machine like that of ``mine`` is taken, then the one of the same name.

    Raises:
        KittyError: a folder holds no record or a damaged one, or they share no experiment.
    """
    tolerances = load_config("tolerances", configs_dir() / "tolerances.yaml")
    references = record_sets(reference)
    found: list[Difference] = []
    records = skipped = extra = 0
    for own in record_sets(mine):
        others = [other for other in references if _experiment(other) == _experiment(own)]
        if not others:
            extra += len(own.records)
            continue
        other = min(others, key=lambda each: (not _alike(own, each), own.name != each.name))
        extra += len(own.records.keys() - other.records.keys())
        for name, (_, expected) in other.records.items():
            if name not in own.records:
                found.append(Difference(name, "record", "missing", "there", "", True))
                continue
            records += 1
            compared, left_out = _compare_records(name, own.records[name][1], expected, tolerances)
            found += compared
            skipped += left_out
    if records == 0:
        raise KittyError(
            f"{mine} and {reference} have no record of the same experiment and name: compare the "
            "results of an experiment that the reference holds."
        )
    return Comparison(records, found, skipped, extra)


def _first(records: RecordSet) -> Record:
    return next(iter(records.records.values()))[1]


def _experiment(records: RecordSet) -> str:
    return str(_first(records)["experiment"])


def _alike(first: RecordSet, second: RecordSet) -> bool:
    return alike(_first(first), _first(second))


def alike(first: Record, second: Record) -> bool:
    """Whether two records come from the same release of torch, GPU model and processor."""
    return _machine(first) == _machine(second)


def _machine(record: Record) -> tuple[Any, ...]:
    found = record["environment"]
    return str(found["torch"]).split("+")[0], found.get("gpu"), found.get("cpu")


def _compare_records(
    name: str, mine: Record, reference: Record, tolerances: dict[str, Any]
) -> tuple[list[Difference], int]:
    """Findings of one pair, and how many values were not comparable."""
    settings = list(_setting_differences(name, mine, reference))
    if settings:
        return settings, 0  # numbers of different settings say nothing
    found, skipped = [], 0
    own, side = values(mine), "like" if alike(mine, reference) else "other"
    for metric, expected in values(reference).items():
        rule = _rule(tolerances, reference["kind"], metric)
        if rule is None or "skip" in rule[side]:
            skipped += 1
        elif metric not in own:
            found.append(Difference(name, metric, "missing", _text(expected), "", True))
        else:
            found.append(_judge(name, metric, own[metric], expected, rule[side]))
    return found, skipped


def _setting_differences(name: str, mine: Record, reference: Record) -> Iterator[Difference]:
    if mine["kind"] != reference["kind"]:
        yield Difference(name, "kind", mine["kind"], reference["kind"], "equal", True)
        return
    pairs = [
        (f"{part}.{field}", mine.get(part, {}).get(field), reference.get(part, {}).get(field))
        for part, fields in SETTINGS.items()
        for field in fields
    ]
    methods = mine.get("method", {}), reference.get("method", {})
    names = sorted((methods[0].keys() | methods[1].keys()) - {"title"})
    pairs += [(f"method.{field}", methods[0].get(field), methods[1].get(field)) for field in names]
    for field, own, expected in pairs:
        if own != expected:
            yield Difference(name, field, str(own)[:40], str(expected)[:40], "equal", True)


def values(record: Record) -> dict[str, Value]:
    """Everything in a record that is compared, by name."""
    kind, metrics = record["kind"], record["metrics"]
    if kind in ROWS:
        return _row_values(metrics, *ROWS[kind])
    if kind == "task":
        return {
            name: Value(metric["value"], metric.get("ci"), metric["stderr"])
            for name, metric in metrics.items()
        }
    found = {}
    for name, value in metrics.items():
        if isinstance(value, list) and not name.endswith("_ci"):
            value = sum(value) / len(value) if value else math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = Value(value, metrics.get(f"{name}_ci"))
    if kind == "latency":
        found["outcome"] = Value(record["outcome"])
        found["cache_bytes"] = Value(sum(filter(None, record["cache_bytes"].values())))
    return found


def _row_values(
    metrics: dict[str, Any], keys: Sequence[str], names: Sequence[str]
) -> dict[str, Value]:
    found = {"fall_backs": Value(metrics["fall_backs"])} if "fall_backs" in metrics else {}
    for row in metrics["rows"]:
        key = "/".join(str(row.get(name, "-")) for name in keys)
        for name in names:
            if isinstance(row.get(name), int | float):
                found[f"{key}/{name}"] = Value(row[name])
    return found


def _rule(tolerances: dict[str, Any], kind: str, metric: str) -> dict[str, Any] | None:
    for pattern, rule in tolerances.get(kind, {}).items():
        if fnmatch.fnmatchcase(metric, pattern):
            return dict(rule)
    return None


def _judge(
    name: str, metric: str, mine: Value, reference: Value, tolerance: dict[str, Any]
) -> Difference:
    within, allowed = is_within(mine, reference, tolerance)
    return Difference(name, metric, _text(mine), _text(reference), allowed, not within)


def is_within(mine: Value, reference: Value, tolerance: dict[str, Any]) -> tuple[bool, str]:
    """Whether a value lies within the tolerance of its reference, and the tolerance as text.

    Of several forms in one tolerance, one is enough; a form that the record has no figures for
    (an interval, a standard error) allows nothing.
    """
    if isinstance(mine.value, str) or isinstance(reference.value, str):
        return mine.value == reference.value, "equal"
    apart = abs(mine.value - reference.value)
    checks: list[tuple[bool, str]] = []
    if tolerance.get("exact"):
        checks.append((mine.value == reference.value, "equal"))
    if (share := tolerance.get("relative")) is not None:
        checks.append((apart <= share * abs(reference.value), f"±{share:.3g} of it"))
    if (most := tolerance.get("absolute")) is not None:
        checks.append((apart <= most, f"±{most:.3g}"))
    if tolerance.get("interval"):
        low, high = reference.interval or (reference.value, reference.value)
        checks.append((low <= mine.value <= high, f"{low:.5g} … {high:.5g}"))
    if (times := tolerance.get("stderr")) is not None:
        error = times * math.hypot(mine.stderr or 0.0, reference.stderr or 0.0)
        checks.append((apart <= error, f"±{error:.3g}"))
    return any(good for good, _ in checks), " or ".join(text for _, text in checks)


def _text(value: Value) -> str:
    return value.value if isinstance(value.value, str) else f"{value.value:.6g}"
