"""The orderings of methods that the paper's findings imply, and what the records say of each.

Lower KL divergence to the 16-bit model is better; the verdict rests on a paired bootstrap.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import NamedTuple

from kitty.evaluation.bootstrap import Interval
from kitty.methods import get_method
from kitty.report.data import Results

CHAIN = ("kivi-k2v2", "kivi-k2v2-sink", "kitty", "kitty-pro", "kivi-k4v4")
FINDINGS = {
    ("kivi-k2v2", "kivi-k2v2-sink"): "Keeping the sink in 16 bit helps (Table 2)",
    ("kivi-k2v2-sink", "kitty"): "Boosting 12.5% of the key channels helps (Tables 3, 4)",
    ("kitty", "kitty-pro"): "Boosting 25% helps more than 12.5% (Table 3, Figure 4)",
    ("kitty-pro", "kivi-k4v4"): "4 bits for everything lose least (Table 1)",
}
SIDES = ("kivi-k2v4-sink", "kivi-k4v2-sink")
SIDES_FINDING = "Keys need the bits more than values (Table 2)"


class Ordering(NamedTuple):
    """One expected inequality: ``worse`` has the higher KL divergence than ``better``."""

    worse: str
    better: str
    finding: str


def expected_orderings(results: Results) -> list[Ordering]:
    """The expected inequalities between methods that were measured, names as measured."""
    found = []
    for worse, better in [*pairwise(CHAIN), SIDES]:
        names = [results.find(get_method(name)) for name in (worse, better)]
        if names[0] is not None and names[1] is not None:
            finding = FINDINGS.get((worse, better), SIDES_FINDING)
            found.append(Ordering(names[0], names[1], finding))
    for name, method in results.methods.items():
        if method.selection != "random" or method.boost_ratio in (0, 1):
            continue
        twin = results.find(dataclasses.replace(method, selection="magnitude"))
        if twin is not None:
            share = f"{method.boost_ratio * 100:g}%"
            finding = f"Magnitude beats random choice at {share} (Figure 4)"
            found.append(Ordering(name, twin, finding))
    return found


def verdict(difference: Interval) -> str:
    """In one word what the difference ``KL(worse) - KL(better)`` says of the ordering.

    ``holds``: above 0, and its interval too. ``reversed``: below 0, and its interval too.
    ``unresolved``: the interval includes 0.
    """
    if not difference.excludes_zero:
        return "unresolved"
    return "holds" if difference.mean > 0 else "reversed"
