"""Confidence intervals over pages of text."""

import numpy as np
import pytest

from kitty.errors import KittyError
from kitty.evaluation.bootstrap import Interval, Pages, bootstrap, paired_difference, token_mean


def test_the_mean_weighs_pages_by_their_tokens():
    assert token_mean([Pages([1.0, 4.0], [3, 1]), Pages([2.0], [4])]) == (3 + 4 + 8) / 8


def test_equal_pages_give_an_interval_of_no_width():
    assert bootstrap([Pages([0.5] * 4, [128] * 4)]) == Interval(0.5, 0.5, 0.5)


def test_two_pages_give_the_exact_quantiles_of_their_three_possible_means():
    # draws of two from (0, 1): means 0, 1/2, 1 with chances 1/4, 1/2, 1/4
    interval = bootstrap([Pages([0.0, 1.0], [1, 1])], level=0.4, resamples=4000)
    assert interval == Interval(0.5, 0.5, 0.5)
    assert bootstrap([Pages([0.0, 1.0], [1, 1])], resamples=4000) == Interval(0.5, 0.0, 1.0)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    pages = [Pages(list(np.random.default_rng(1).normal(size=16)), [128] * 16)]
    assert bootstrap(pages, seed=3) == bootstrap(pages, seed=3)
    assert bootstrap(pages, seed=3) != bootstrap(pages, seed=4)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    trials = [Pages(list(rng.normal(1.0, 1.0, size=30)), [1] * 30) for _ in range(300)]
    intervals = [bootstrap([pages], resamples=400) for pages in trials]
    coverage = np.mean([interval.low <= 1.0 <= interval.high for interval in intervals])
    # 95% asked of 30 normal pages: the percentile bootstrap is known to fall a little short
    assert 0.89 <= coverage <= 0.98


def test_the_interval_is_as_wide_as_the_standard_error_says():
    values = np.random.default_rng(2).normal(size=400)
    interval = bootstrap([Pages(list(values), [128] * 400)], resamples=4000)
    error = values.std() / np.sqrt(400)
    assert interval.high - interval.mean == pytest.approx(1.96 * error, rel=0.06)
    assert interval.mean - interval.low == pytest.approx(1.96 * error, rel=0.06)


def test_a_paired_difference_is_sharp_where_pages_vary_together():
    hard = np.random.default_rng(3).exponential(1.0, size=20)
    first = [Pages(list(hard + 0.1), [128] * 20)]
    second = [Pages(list(hard), [128] * 20)]
    difference = paired_difference(first, second)
    assert difference.mean == pytest.approx(0.1)
    assert difference.excludes_zero
    assert difference.high - difference.low < 1e-9
    assert bootstrap(second).high > bootstrap(first).low  # the separate intervals overlap


def test_no_difference_does_not_exclude_zero():
    pages = [Pages([0.1, 0.2, 0.3], [128] * 3)]
    assert not paired_difference(pages, pages).excludes_zero


def test_draws_stay_within_each_passage():
    # constant passages of different level: drawing within them changes nothing
    passages = [Pages([1.0] * 8, [128] * 8), Pages([5.0] * 8, [128] * 8)]
    assert bootstrap(passages) == Interval(3.0, 3.0, 3.0)


def test_different_pages_cannot_be_paired():
    with pytest.raises(KittyError, match="same pages"):
        paired_difference([Pages([1.0, 2.0], [128, 128])], [Pages([1.0, 2.0], [128, 100])])


def test_one_page_has_no_interval():
    with pytest.raises(KittyError, match="at least two pages"):
        bootstrap([Pages([1.0], [128])])


def test_draws_and_coverage_out_of_range_are_refused():
    pages = [Pages([1.0, 2.0], [128, 128])]
    with pytest.raises(KittyError, match="resamples is 0"):
        bootstrap(pages, resamples=0)
    with pytest.raises(KittyError, match="level is 95"):
        bootstrap(pages, level=95)
