"""Every claim of configs/claims.yaml held against records: our figure and a verdict.

``reproduced``: measured, and inside the claim's band. ``contradicted``: measured, and our whole
interval lies outside. ``not reproduced``: measured, and neither. ``not run here``: no record tells.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.ticker import EngFormatter

from kitty.errors import KittyError
from kitty.evaluation.bootstrap import Interval
from kitty.methods import Method, get_method
from kitty.paths import shipped
from kitty.record_sets import record_sets
from kitty.records import Record
from kitty.report.data import identity, load_results
from kitty.report.orderings import verdict as ordering_verdict
from kitty.report.paper import Claim, Paper, PaperTable, Row, load_paper
from kitty.report.scores import Score, Scores, run_of

REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
NOT_RUN_HERE = "not run here"
CONTRADICTED = "contradicted"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, CONTRADICTED, NOT_RUN_HERE)
Found = Sequence[tuple[Path, Record]]


class Band(NamedTuple):
    """What our figure may be, bounds included."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a figure lies inside."""
        return self.low <= value <= self.high

    def meets(self, low: float, high: float) -> bool:
        """Whether an interval has a point in common with the band."""
        return low <= self.high and high >= self.low


@dataclass(frozen=True)
class Judgement:
    """A claim and what the records say of it.

    Attributes:
        paper: the printed figure, in words.
        ours: our figure, or why there is none.
        band: the figures that count as reproduced, in words.
        verdict: one of VERDICTS.
        paths: of the records that were used; empty where there is none.
    """

    claim: Claim
    statement: str
    paper: str
    ours: str
    band: str
    verdict: str
    paths: tuple[Path, ...]


# --- records -------------------------------------------------------------------------------------


def collect(places: Iterable[str | Path]) -> list[tuple[Path, Record]]:
    """All records in files and below folders, each once, in path order.

    Raises:
        KittyError: a place is missing or has no record, or a record is damaged.
    """
    found: dict[Path, tuple[Path, Record]] = {}
    for place in places:
        for group in record_sets(place):
            for path, record in group.records.values():
                found.setdefault(path.resolve(), (path, record))
    return sorted(found.values(), key=lambda item: str(item[0]))


def reference_places() -> list[Path]:
    """The committed measurements, where this installation has them."""
    try:
        folder = shipped("results") / "reference"
    except KittyError:
        return []
    return [folder] if folder.is_dir() else []


# --- judging -------------------------------------------------------------------------------------


def judge(records: Found, paper: Paper | None = None) -> list[Judgement]:
    """A judgement for every claim, in the order of the claims file.

    Raises:
        KittyError: a record lacks the metric of its task.
    """
    paper = paper or load_paper()
    scores = Scores(records, paper)
    return [_judge(claim, records, scores, paper) for claim in paper.claims]


def _judge(claim: Claim, records: Found, scores: Scores, paper: Paper) -> Judgement:
    measure = claim.measure
    if "row" in measure:
        table, model, method = measure["row"]
        return _judge_row(claim, paper.tables[table], model, method, scores, paper)
    if "average" in measure:
        return _judge_average(claim, scores, paper)
    if "ordering" in measure:
        return _judge_ordering(claim, records)
    if "nothing" in measure:
        return _not_run(claim, measure["nothing"])
    return _judge_figures(claim, records, paper)


def _not_run(claim: Claim, reason: str, band: str = "", statement: str = "") -> Judgement:
    return Judgement(
        claim,
        statement or claim.statement,
        claim.paper,
        reason,
        band or _band_text(_band(claim)),
        NOT_RUN_HERE,
        (),
    )


def _band(claim: Claim, spread: float = 0.0) -> Band:
    if "value" in claim.accept:
        return Band(claim.accept["value"] - spread, claim.accept["value"] + spread)
    return Band(claim.accept.get("low", -math.inf), claim.accept.get("high", math.inf))


def _band_text(band: Band) -> str:
    if band.low == -math.inf:
        return "" if band.high == math.inf else f"≤ {number(band.high)}"
    if band.high == math.inf:
        return f"≥ {number(band.low)}"
    return f"{number(band.low)} to {number(band.high)}"


def verdict_of(value: float, low: float, high: float, band: Band, tolerance: str) -> str:
    """Where a figure and its interval lie; a direction needs the whole interval."""
    whole = band.holds(low) and band.holds(high)
    if whole or (band.holds(value) and tolerance != "direction"):
        return REPRODUCED
    return NOT_REPRODUCED if band.meets(low, high) else CONTRADICTED


def number(value: float) -> str:
    """Three significant digits or whole thousands; with M, G, … from 10^6 on."""
    if abs(value) < 1e3:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) < 1e6 else EngFormatter(places=2)(value)


# --- rows of the paper's tables ------------------------------------------------------------------


def _judge_row(
    claim: Claim, table: PaperTable, model: str, method: str, scores: Scores, paper: Paper
) -> Judgement:
    """Every cell must lie within the paper's deviation; a row counts when all were measured."""
    row = table.row(model, method)
    titles = ", ".join(paper.tasks[task].title for task in row.cells)
    statement = claim.statement.format(tasks=titles)
    spreads = {task: paper.deviation(model, row.method, task) for task in row.cells}
    band = "± " + ", ".join(f"{spread:.2f}" for spread in spreads.values())
    found = {task: scores.get(model, row.method, task) for task in row.cells}
    whole = {task: s for task, s in found.items() if s is not None and s.whole}
    texts = [_score_text(found[task]) for task in row.cells]
    if not whole:
        reason = "part of the problems only" if any(found.values()) else ""
        return _not_run(claim, reason, band, statement)
    verdicts = [
        verdict_of(
            score.mean, score.low, score.high, _around(row.cells[task].mean, spreads[task]), ""
        )
        for task, score in whole.items()
    ]
    if CONTRADICTED in verdicts:
        verdict = CONTRADICTED
    elif NOT_REPRODUCED in verdicts:
        verdict = NOT_REPRODUCED
    else:
        verdict = REPRODUCED if len(whole) == len(found) else NOT_RUN_HERE
    paths = tuple(path for score in whole.values() for path in score.paths)
    return Judgement(claim, statement, claim.paper, ", ".join(texts), band, verdict, paths)


def _around(value: float, spread: float) -> Band:
    return Band(value - spread, value + spread)


def _score_text(score: Score | None) -> str:
    if score is None:
        return "not run"
    part = "" if score.whole else f" ({score.problems} problems)"
    return f"{score.mean:.2f} ± {score.deviation:.2f}{part}"


# --- differences of averages ---------------------------------------------------------------------


def _judge_average(claim: Claim, scores: Scores, paper: Paper) -> Judgement:
    wanted = claim.measure["average"]
    table = paper.tables[wanted["table"]]
    rows = [table.row(wanted["model"], wanted[name]) for name in ("method", "minus")]
    spread = math.hypot(*(paper.average_deviation(table, row) for row in rows))
    band = _band(claim, spread)
    tasks = table.model_tasks[wanted["model"]]
    sides = [_average(row, tasks, scores) for row in rows]
    if None in sides:
        return _not_run(claim, "", _band_text(band))
    (first, first_half, paths), (second, second_half, more) = sides  # type: ignore[misc]
    value, half = first - second, math.hypot(first_half, second_half)
    text = f"{value:+.2f} [{value - half:+.2f}, {value + half:+.2f}]"
    verdict = verdict_of(value, value - half, value + half, band, claim.tolerance)
    return Judgement(
        claim, claim.statement, claim.paper, text, _band_text(band), verdict, (*paths, *more)
    )


def _average(
    row: Row, tasks: Sequence[str], scores: Scores
) -> tuple[float, float, tuple[Path, ...]] | None:
    """A method's mean over tasks, half its 95% interval, and the records; None where one lacks."""
    found = [scores.get(row.model, row.method, task) for task in tasks]
    whole = [score for score in found if score is not None and score.whole]
    if len(whole) < len(tasks):
        return None
    mean = sum(score.mean for score in whole) / len(whole)
    half = math.hypot(*((score.high - score.low) / 2 for score in whole)) / len(whole)
    return mean, half, tuple(path for score in whole for path in score.paths)


# --- orderings of methods by KL divergence -------------------------------------------------------


def _judge_ordering(claim: Claim, records: Found) -> Judgement:
    """Judged on all texts of each run and model together, and on each text by itself."""
    worse, better = (get_method(claim.measure["ordering"][k]) for k in ("worse", "better"))
    texts, verdicts, paths = [], [], []
    for (_, _, model), group in _quality_pairs(records, worse, better).items():
        results = load_results(group)
        names = [results.find(method) for method in (worse, better)]
        assert names[0] is not None
        assert names[1] is not None
        pair = names[0], names[1]
        whole = results.difference(model, *pair, "kl")
        single = [results.difference(model, *pair, "kl", p) for p in results.passages]
        verdicts.append(_direction(whole, single))
        kl = [results.interval(model, name, "kl").mean for name in pair]
        holds = sum(ordering_verdict(difference) == "holds" for difference in single)
        texts.append(
            f"KL {kl[0]:.3f} to {kl[1]:.3f} on {model}, difference {whole.mean:.3f} "
            f"[{whole.low:.3f}, {whole.high:.3f}], holds on {holds} of {len(single)} texts"
        )
        paths += [path for path, _ in group]
    if not verdicts:
        return _not_run(claim, "", "> 0")
    order = (CONTRADICTED, NOT_REPRODUCED, REPRODUCED)
    verdict = min(verdicts, key=order.index)
    text = "; ".join(texts)
    return Judgement(claim, claim.statement, claim.paper, text, "> 0", verdict, tuple(paths))


def _direction(whole: Interval, single: Sequence[Interval]) -> str:
    """Holds on all texts together, and is reversed on none of them."""
    if any(ordering_verdict(difference) == "reversed" for difference in (whole, *single)):
        return CONTRADICTED
    return REPRODUCED if ordering_verdict(whole) == "holds" else NOT_REPRODUCED


def _quality_pairs(
    records: Found, worse: Method, better: Method
) -> dict[tuple[str, str, str], list[tuple[Path, Record]]]:
    """By run, experiment and model, the quality records of two methods on texts with both."""
    wanted = [identity(worse), identity(better)]
    by_text: dict[tuple[str, str, str, str], list[tuple[Path, Record]]] = {}
    for path, record in records:
        if record["kind"] == "quality" and identity(Method(**record["method"])) in wanted:
            names = record["experiment"], record["model"]["name"], record["passage"]["name"]
            by_text.setdefault((run_of(path), *names), []).append((path, record))
    pairs: dict[tuple[str, str, str], list[tuple[Path, Record]]] = {}
    for (run, experiment, model, _), group in by_text.items():  # in the order given
        if len({identity(Method(**record["method"])) for _, record in group}) == 2:
            pairs.setdefault((run, experiment, model), []).extend(group)
    return pairs


# --- figures picked out of records ---------------------------------------------------------------


class Picked(NamedTuple):
    """A figure of one group of records."""

    value: float
    paths: tuple[Path, ...]


def _judge_figures(claim: Claim, records: Found, paper: Paper) -> Judgement:
    measure, band = claim.measure, _band(claim)
    same = ["environment.gpu", *measure.get("same", [])]  # and within one run
    figures = measure.get("ratio") or measure.get("difference") or [measure["value"]]
    sides = [_pick(figure, records, paper, same) for figure in figures]
    groups = [group for group in sides[0] if all(group in side for side in sides)]
    if not groups:
        return _not_run(claim, "")
    values, paths, machines = [], [], []
    for group in groups:
        parts = [side[group] for side in sides]
        values.append(_combine(measure, [part.value for part in parts]))
        paths += [path for part in parts for path in part.paths]
        machines.append(json.loads(group[0]) or "CPU")
    mean = sum(values) / len(values)
    verdict = verdict_of(mean, min(values), max(values), band, claim.tolerance)
    if len(values) > 1 and verdict == REPRODUCED and not all(map(band.holds, values)):
        verdict = NOT_REPRODUCED  # it holds for the mean, but not everywhere
    text = " to ".join(dict.fromkeys([number(min(values)), number(max(values))]))
    text += f" ({', '.join(dict.fromkeys(machines))})"
    unique = tuple(dict.fromkeys(paths))
    return Judgement(claim, claim.statement, claim.paper, text, _band_text(band), verdict, unique)


def _combine(measure: dict[str, Any], values: list[float]) -> float:
    if "ratio" in measure:
        return values[0] / values[1] if values[1] else math.inf
    return values[0] - values[1] if "difference" in measure else values[0]


def _pick(
    figure: dict[str, Any], records: Found, paper: Paper, same: list[str]
) -> dict[tuple[str, ...], Picked]:
    """A figure by group: by the values of the fields in ``same``, written as JSON."""
    selection = paper.selections[figure["from"]]
    conditions = [*selection.get("where", {}).items(), *figure.get("where", {}).items()]
    taken: dict[tuple[str, ...], list[tuple[Any, Path]]] = {}
    for path, view in _views(records, selection):
        value = lookup(view, figure["take"])
        if value is None or not all(_meets(lookup(view, k), v) for k, v in conditions):
            continue
        group = (*(json.dumps(lookup(view, field)) for field in same), run_of(path))
        taken.setdefault(group, []).append((value, path))
    return {
        group: Picked(_reduce([value for value, _ in items], figure), _paths(items))
        for group, items in taken.items()
        if "step" not in figure or _is_largest(items, records, figure["step"])
    }


def _is_largest(items: list[tuple[Any, Path]], records: Found, step: float) -> bool:
    """Whether the largest batch that ran is known to be the last one.

    Either a larger one of the same run and implementation ran out of memory, or ``step`` times
    the batch cannot fit: the peak and the further cache are more than the budget.
    """
    largest, path = max(items, key=lambda item: float(item[0]))
    best = next(record for place, record in records if place == path)
    budget, peak = best["memory_budget_bytes"], best["metrics"]["peak_allocated_bytes"]
    held = best["cache_bytes"].get("total") or best.get("cache_bytes_16bit", 0)
    if None not in (budget, peak) and peak + (step - 1) * held > budget:
        return True
    asked = [best["workload"][name] for name in ("prompt_tokens", "new_tokens")]
    return any(
        record["kind"] == best["kind"]
        and run_of(place) == run_of(path)
        and record["implementation"] == best["implementation"]
        and record["outcome"] == "out_of_memory"
        and record["workload"]["batch"] > largest
        and [record["workload"][n] for n in ("prompt_tokens", "new_tokens")] == asked
        for place, record in records
    )


def _paths(items: list[tuple[Any, Path]]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(path for _, path in items))


def _views(records: Found, selection: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The records of a kind, or each row of a list in them beside the rest."""
    for path, record in records:
        if record["kind"] != selection["kind"]:
            continue
        if "each" not in selection:
            yield path, record
            continue
        for row in lookup(record, selection["each"]) or []:
            yield path, {**record, "row": row}


def lookup(content: Any, path: str) -> Any:
    """What stands at a dotted path of nested dicts, ``*`` being their sum; None for nothing."""
    for part in path.split("."):
        if not isinstance(content, dict):
            return None
        content = sum(content.values()) if part == "*" else content.get(part)
    return content


def _meets(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        low, high = wanted.get("low", -math.inf), wanted.get("high", math.inf)
        return isinstance(value, int | float) and low <= value <= high
    return value in wanted if isinstance(wanted, list) else value == wanted


def _reduce(values: list[Any], figure: dict[str, Any]) -> float:
    how = figure.get("reduce", "mean")
    if how == "distinct":
        return float(len(set(values)))
    if how == "mean":
        return float(sum(values) / len(values))
    return float(max(values) if how == "max" else min(values))


def counts(judgements: Iterable[Judgement]) -> dict[str, int]:
    """How many claims have each verdict, in the order of VERDICTS."""
    found = Counter(judgement.verdict for judgement in judgements)
    return {verdict: found[verdict] for verdict in VERDICTS}
