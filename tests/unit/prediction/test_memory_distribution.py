"""Distribution of a run's memory: its tails, and the allocation with the least expected waste."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.prediction.memory_distribution import (
    MAX_OVER_RUN_PROBABILITY,
    RETRY_PROBABILITY,
    MemoryDistribution,
)

weighted_values = st.lists(st.tuples(st.integers(1, 10**12), st.integers(1, 100)), min_size=1, max_size=40)


def a_distribution(*pairs: tuple[float, float]) -> MemoryDistribution:
    used, weights = zip(*pairs, strict=True)
    return MemoryDistribution.of(np.array(used, dtype=float), np.array(weights, dtype=float))


def expected_waste(distribution: MemoryDistribution, allocation: float) -> float:
    """By the definition, value by value."""
    retry = distribution.quantile(RETRY_PROBABILITY)
    return sum(
        weight * (allocation - used if used <= allocation else allocation + max(retry - used, 0))
        for used, weight in zip(distribution.used_bytes, distribution.weights, strict=True)
    )


def test_a_run_that_may_need_one_amount_only_gets_that() -> None:
    assert a_distribution((5e9, 1)).least_waste_bytes() == 5e9


def test_a_rare_large_need_is_left_to_the_retry() -> None:
    assert a_distribution((1e9, 99), (100e9, 1)).least_waste_bytes() == 1e9


def test_a_small_surplus_is_cheaper_than_an_over_run() -> None:
    assert a_distribution((10e9, 99), (10.05e9, 1)).least_waste_bytes() == 10.05e9


def test_no_allocation_accepts_frequent_over_runs() -> None:
    distribution = a_distribution((1e9, 93), (100e9, 7))
    assert expected_waste(distribution, 1e9) < expected_waste(distribution, 100e9)
    assert distribution.least_waste_bytes() == 100e9


@given(weighted_values)
def test_no_other_value_with_as_few_over_runs_is_expected_to_waste_less(pairs: list[tuple[float, float]]) -> None:
    distribution = a_distribution(*pairs)
    chosen = distribution.least_waste_bytes()
    allowed = [
        value
        for value in distribution.used_bytes
        if distribution.probability_above(value) <= MAX_OVER_RUN_PROBABILITY - 1e-9
    ]
    least = min(expected_waste(distribution, value) for value in allowed)
    assert distribution.probability_above(chosen) <= MAX_OVER_RUN_PROBABILITY + 1e-9
    assert expected_waste(distribution, chosen) <= least * (1 + 1e-6) + 1


@given(weighted_values, st.integers(0, 10**12))
def test_what_is_above_a_limit_is_a_distribution_of_larger_values(
    pairs: list[tuple[float, float]], limit: float
) -> None:
    distribution = a_distribution(*pairs)
    rest = distribution.above(limit)
    if rest is None:
        assert distribution.probability_above(limit) == 0
    else:
        assert rest.used_bytes.min() > limit
        assert rest.weights.sum() == pytest.approx(1)


def test_quantiles_are_values_with_so_much_at_or_below_them() -> None:
    distribution = a_distribution((3.0, 1), (1.0, 1), (2.0, 2))
    assert [distribution.quantile(p) for p in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)] == [1, 1, 2, 2, 3, 3]
