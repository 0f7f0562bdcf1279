"""Percentile bootstrap over pages of text: confidence intervals of means and of paired differences.

Tokens of one page depend on each other, so pages, not tokens, are drawn again with replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kitty.errors import KittyError

RESAMPLES = 2000
LEVEL = 0.95

Floats = npt.NDArray[np.float64]


class Pages(NamedTuple):
    """One passage's page means and the number of tokens behind each, both of length P."""

    values: Sequence[float]
    counts: Sequence[int]


class Interval(NamedTuple):
    """A mean with the bounds of its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def token_mean(passages: Sequence[Pages]) -> float:
    """Mean over all tokens of all passages: page means weighted by their token counts."""
    total = sum(float(np.dot(p.values, p.counts)) for p in passages)
    return total / sum(sum(p.counts) for p in passages)


def bootstrap(
    passages: Sequence[Pages],
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of the token mean; pages are drawn within each passage.

    The same passages, counts and seed give the same draws, whatever the values.

    Args:
        passages: at least one, of at least two pages each.
        resamples: number of draws, at least 1.
        level: coverage of the interval, in (0, 1).
        seed: of the draws.

    Raises:
        KittyError: a passage has fewer than two pages, or ``resamples`` or ``level`` is out of
            range.
    """
    if resamples < 1:
        raise KittyError(f"resamples is {resamples}, but a bootstrap needs at least 1 draw.")
    if not 0 < level < 1:
        raise KittyError(f"level is {level}, but a coverage lies between 0 and 1, such as 0.95.")
    if any(len(p.values) < 2 for p in passages) or not passages:
        raise KittyError(
            "A confidence interval over pages needs at least two pages per text: use a longer text."
        )
    rng = np.random.default_rng(seed)
    totals: Floats = np.zeros(resamples)
    tokens: Floats = np.zeros(resamples)
    for passage in passages:
        values = np.asarray(passage.values, dtype=np.float64)
        counts = np.asarray(passage.counts, dtype=np.float64)
        drawn = rng.integers(len(values), size=(resamples, len(values)))  # [resamples, P]
        totals += (values * counts)[drawn].sum(axis=1)
        tokens += counts[drawn].sum(axis=1)
    low, high = np.quantile(totals / tokens, [(1 - level) / 2, (1 + level) / 2])
    return Interval(token_mean(passages), float(low), float(high))


def paired_difference(
    first: Sequence[Pages],
    second: Sequence[Pages],
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """Bootstrap of the mean difference ``first - second`` of two methods on the same pages.

    What makes a page hard is common to both methods and cancels, so this is far sharper than
    comparing two separate intervals.

    Raises:
        KittyError: the two were not measured on the same pages.
    """
    if [list(p.counts) for p in first] != [list(p.counts) for p in second]:
        raise KittyError(
            "The two methods were not measured on the same pages of the same texts, so their "
            "difference has no paired interval: evaluate both on the same passages and lengths."
        )
    differences = [
        Pages(list(np.subtract(a.values, b.values)), a.counts)
        for a, b in zip(first, second, strict=True)
    ]
    return bootstrap(differences, resamples=resamples, level=level, seed=seed)
