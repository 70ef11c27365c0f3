"""Estimates of run time and the like: medians that follow the features."""

from __future__ import annotations

import random

from distributed_grid.prediction.usage_estimate import ESTIMATE_WINDOW, UsageEstimate


def an_estimate(count: int, factor: float = 1.0) -> UsageEstimate:
    """Runs of a second for each number, within a tenth."""
    dice = random.Random(4)
    estimate = UsageEstimate(1)
    for _ in range(count):
        number = dice.uniform(1, 100)
        estimate.learn((number,), round(1000 * factor * number * dice.uniform(0.9, 1.1)))
    estimate.fit()
    return estimate


def test_the_median_follows_the_feature() -> None:
    estimate = an_estimate(40)
    for number in (5, 50, 90):
        found = estimate.quantile((number,), 0.5)
        assert found is not None
        assert 800 * number < found < 1200 * number


def test_two_values_say_nothing_and_values_that_were_not_measured_do_not_count() -> None:
    assert an_estimate(2).quantile((5,), 0.5) is None
    estimate = an_estimate(2)
    estimate.learn((5,), 0)
    estimate.fit()
    assert estimate.quantile((5,), 0.5) is None


def test_only_the_last_runs_count() -> None:
    estimate = an_estimate(20, factor=50)
    for _ in range(ESTIMATE_WINDOW):
        estimate.learn((10,), 2000)
    estimate.fit()
    assert estimate.quantile((10,), 0.5) == 2000


def test_an_estimate_stays_until_enough_more_is_known() -> None:
    estimate = an_estimate(40)
    before = estimate.quantile((10,), 0.5)
    estimate.learn((10,), 10**7)
    estimate.fit()
    assert estimate.quantile((10,), 0.5) == before
