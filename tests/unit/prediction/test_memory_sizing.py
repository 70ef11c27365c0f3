"""Sizing of memory: learning from runs, from over-runs and from many of them, and limits of retries."""

from __future__ import annotations

import math
import random
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.prediction.memory_sizing import (
    MAX_BYTES,
    MAX_OVER_RUN_PROBABILITY,
    MIN_RUNS,
    RETRY_PROBABILITY,
    WINDOW,
    MemoryDistribution,
    MemoryModels,
    MemorySizer,
    Run,
    Values,
    next_limit,
)

MB = 10**6


def some_runs(count: int, seed: int = 1) -> list[Run]:
    """Input of up to 10 GB, a byte of memory for each two of input, and 500 MB, within a few percent."""
    dice = random.Random(seed)
    sizes = [dice.uniform(1e8, 1e10) for _ in range(count)]
    return [Run((size,), int((500 * MB + size / 2) * dice.gauss(1, 0.02))) for size in sizes]


def a_sizer(runs: list[Run]) -> MemorySizer:
    sizer = MemorySizer()
    sizer.learn_all(runs)
    return sizer


def given_bytes(sizer: MemorySizer, *features: float) -> int:
    allocation = sizer.allocation(features)
    assert allocation is not None
    return allocation


def test_nothing_is_said_until_enough_runs_are_known() -> None:
    runs = some_runs(MIN_RUNS)
    sizer = a_sizer(runs[:-1])
    assert sizer.allocation((1e9,)) is None
    sizer.learn_all(runs[-1:])
    assert given_bytes(sizer, 1e9) > 0


def test_an_allocation_follows_the_input() -> None:
    sizer = a_sizer(some_runs(100))
    assert 1000 * MB < given_bytes(sizer, 1e9) < 1200 * MB
    assert 4500 * MB < given_bytes(sizer, 8e9) < 5100 * MB


def test_most_new_runs_fit_and_little_is_left_unused() -> None:
    sizer, coming = a_sizer(some_runs(100)), some_runs(200, seed=2)
    spare = [given_bytes(sizer, *run.features) / run.used_bytes for run in coming]
    assert sum(ratio < 1 for ratio in spare) <= 20
    assert sum(spare) / len(spare) < 1.12


def test_learning_one_by_one_and_all_at_once_end_alike() -> None:
    runs = some_runs(40)
    online = MemorySizer()
    for run in runs:
        online.learn_all([run])
    assert given_bytes(online, 3e9) == pytest.approx(given_bytes(a_sizer(runs), 3e9), rel=0.05)


def test_lasting_change_replaces_the_old_values() -> None:
    sizer = a_sizer(some_runs(200))
    sizer.learn_all(Run((run.features[0],), 3 * run.used_bytes) for run in some_runs(WINDOW, seed=3))
    assert given_bytes(sizer, 1e9) > 3000 * MB


def test_a_surprising_run_counts_at_once() -> None:
    sizer = a_sizer([Run((1e9,), 100 * MB + number) for number in range(200)])
    before = sizer.distribution((1e9,))
    sizer.learn_all([Run((1e9,), 300 * MB)])
    after = sizer.distribution((1e9,))
    assert before is not None
    assert after is not None
    assert after.probability_above(200 * MB) > before.probability_above(200 * MB)


# ---------------------------------------------------------------- over-runs


def test_a_retry_with_nothing_known_is_twice_as_large() -> None:
    assert next_limit(MemorySizer().distribution((1e9,)), [100 * MB]) > 199 * MB


def test_a_retry_takes_what_is_known_above_the_limit() -> None:
    small, large = ([Run((1e9,), size * MB + i) for i in range(20)] for size in (100, 400))
    assert 400 * MB <= next_limit(a_sizer(small + large).distribution((1e9,)), [150 * MB]) < 600 * MB


def test_a_second_over_run_doubles_at_least() -> None:
    sizer = a_sizer(some_runs(50))
    first = given_bytes(sizer, 1e9)
    second = next_limit(sizer.distribution((1e9,)), [first])
    assert next_limit(sizer.distribution((1e9,)), [first, second]) >= 2 * second


@given(
    st.lists(st.tuples(st.floats(), st.integers(-5, 2**62)), max_size=40),
    st.floats(),
    st.lists(st.integers(0, 2**60), min_size=1, max_size=4),
)
def test_a_retry_gets_more_than_every_limit_that_was_too_small(
    runs: list[tuple[float, int]], feature: float, limits: list[int]
) -> None:
    sizer = a_sizer([Run((x,), used) for x, used in runs])
    for limit in limits:
        sizer.learn_all([Run((feature,), limit, is_lower_bound=True)])
    assert next_limit(sizer.distribution((feature,)), limits) > max(limits)


def test_a_lower_bound_raises_what_the_next_run_gets() -> None:
    sizer = a_sizer(some_runs(20))
    before = given_bytes(sizer, 1e9)
    for number in range(5):
        sizer.learn_all([Run((1e9,), 2 * before, is_lower_bound=True, id=f"t{number}")])
    assert given_bytes(sizer, 1e9) > 2 * before


def test_a_run_that_was_cut_short_early_says_nothing() -> None:
    runs = some_runs(20)
    sizer = a_sizer(runs)
    sizer.learn_all(Run((1e9,), 10 * MB, is_lower_bound=True) for _ in range(20))
    assert sizer.allocation((1e9,)) == a_sizer(runs).allocation((1e9,))


def test_the_run_that_ends_well_replaces_its_lower_bounds() -> None:
    runs = some_runs(20)
    sizer, end = a_sizer(runs), Run((1e9,), 1300 * MB, id="t1")
    for limit in (1100 * MB, 1200 * MB):
        sizer.learn_all([Run((1e9,), limit, is_lower_bound=True, id="t1")])
    sizer.learn_all([end])
    assert sizer.allocation((1e9,)) == a_sizer([*runs, end]).allocation((1e9,))


# ---------------------------------------------------------------- whatever comes


@given(st.lists(st.tuples(st.floats(), st.integers(-5, 2**70), st.booleans()), max_size=40), st.floats())
def test_anything_can_be_learned_and_asked(runs: list[tuple[float, int, bool]], feature: float) -> None:
    sizers = [a_sizer([Run((x,), used, cut_short) for x, used, cut_short in runs]) for _ in range(2)]
    first, second = (sizer.allocation((feature,)) for sizer in sizers)
    assert first == second
    assert first is None or 0 < first <= MAX_BYTES


def test_memory_that_was_not_measured_is_no_sample() -> None:
    runs = some_runs(20)
    sizer = a_sizer([*runs, Run((1e9,), 0), Run((1e9,), -1)])
    assert sizer.allocation((1e9,)) == a_sizer(runs).allocation((1e9,))


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -1.0])
def test_an_unknown_feature_is_taken_as_usual(unknown: float) -> None:
    sizer = a_sizer(some_runs(50))
    usual = sorted(run.features[0] for run in some_runs(50))[24:26]
    assert given_bytes(sizer, unknown) == given_bytes(sizer, sum(usual) / 2) == given_bytes(sizer)


def test_features_beyond_those_counted_are_ignored() -> None:
    sizer = a_sizer(some_runs(50))
    assert given_bytes(sizer, 1e9, 7.0) == given_bytes(sizer, 1e9)


def test_several_features_are_learned_together() -> None:
    dice = random.Random(4)
    sizer = MemorySizer(feature_count=2)
    threads = [dice.randrange(1, 33) for _ in range(60)]
    sizer.learn_all(Run((dice.uniform(1e8, 1e10), n), int(100 * MB * n * dice.gauss(1, 0.02))) for n in threads)
    assert 800 * MB < given_bytes(sizer, 1e9, 8) < 1000 * MB


def test_many_runs_are_as_much_to_remember_as_the_last_ones() -> None:
    runs = some_runs(40 * WINDOW)
    sizer, last = a_sizer(runs), a_sizer(runs[-WINDOW:])
    assert sizer.allocation((2e9,)) == last.allocation((2e9,))


weighted_values = st.lists(st.tuples(st.integers(1, 10**12), st.integers(1, 100)), min_size=1, max_size=40)
GB = 1e9


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
def test_part_above_a_limit_is_a_distribution_of_larger_values(pairs: list[tuple[float, float]], limit: float) -> None:
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


def inputs(count: int = 80) -> Values:
    return np.exp(np.random.RandomState(1).uniform(np.log(1e8), np.log(1e10), count))


def noisy(memory: Values, deviation: float = 0.02) -> Values:
    return memory * np.exp(deviation * np.random.RandomState(2).standard_normal(len(memory)))


def fitted(feature: Values, memory: Values) -> MemoryModels:
    return MemoryModels(feature[:, None], memory)


def ask(models: MemoryModels, *features: float) -> MemoryDistribution:
    return models.distribution(np.array(features, dtype=float))


def test_a_straight_line_is_continued_beyond_the_largest_input() -> None:
    x = inputs()
    models = fitted(x, noisy(GB + x))
    assert ask(models, 1.5e10).quantile(0.5) == pytest.approx(16 * GB, rel=0.05)


def test_beyond_the_largest_input_memory_grows_no_faster_than_the_input() -> None:
    x = inputs()
    models = fitted(x, noisy(x**3 / 1e20))
    assert ask(models, 1e12).quantile(0.9) < 1.5 * 100 * 1e10


def test_a_power_law_is_found() -> None:
    x = inputs()
    models = fitted(x, noisy(1e5 * np.sqrt(x)))
    assert ask(models, 1e9).quantile(0.5) == pytest.approx(1e5 * np.sqrt(1e9), rel=0.03)


def test_memory_that_does_not_depend_on_the_input_is_constant() -> None:
    x = inputs()
    models = fitted(x, noisy(np.full(len(x), 4 * GB)))
    assert ask(models, 1e8).quantile(0.5) == pytest.approx(ask(models, 1e10).quantile(0.5), rel=0.02)


def test_a_plateau_is_as_narrow_as_its_own_runs() -> None:
    x = inputs(200)
    memory = np.where(
        x < 1e9, noisy(np.full(len(x), 4 * GB) * np.sqrt(x / 1e9), 0.2), noisy(np.full(len(x), 8 * GB), 1e-3)
    )
    models = fitted(x, memory)
    plateau, slope = ask(models, 5e9), ask(models, 3e8)
    assert plateau.quantile(0.95) / plateau.quantile(0.5) < 1.04
    assert slope.quantile(0.95) / slope.quantile(0.5) > 1.15


@pytest.mark.parametrize("levels_off_at", [5e8, 2e9, 5e9])
def test_where_memory_levels_off_few_first_allocations_are_too_small(levels_off_at: float) -> None:
    x = inputs(200)
    memory = noisy(GB + np.minimum(x, levels_off_at), 0.01)
    models = fitted(x[:100], memory[:100])
    too_small = [ask(models, size).least_waste_bytes() < used for size, used in zip(x[100:], memory[100:], strict=True)]
    assert np.mean(too_small) <= MAX_OVER_RUN_PROBABILITY


def test_a_step_is_followed_on_both_sides() -> None:
    x = inputs(200)
    models = fitted(x, noisy(np.where(x < 1e9, 2 * GB, 6 * GB)))
    assert ask(models, 3e8).quantile(0.5) == pytest.approx(2 * GB, rel=0.1)
    assert ask(models, 4e9).quantile(0.5) == pytest.approx(6 * GB, rel=0.1)


def test_of_several_features_the_one_that_matters_is_used() -> None:
    x, other = inputs(), np.random.RandomState(3).uniform(1, 64, 80)
    memory = noisy(GB * other)
    models = MemoryModels(np.stack([x, other], axis=1), memory)
    for of_input in (1e8, 1e10):
        assert ask(models, of_input, 8).quantile(0.5) == pytest.approx(8 * GB, rel=0.1)


def test_groups_of_runs_with_a_gap_between_them_stay_apart() -> None:
    x = inputs(100)
    memory = noisy(np.where(np.arange(100) % 2 == 0, 2 * GB, 6 * GB), 0.01)
    distribution = ask(fitted(x, memory), 1e9)
    assert distribution.probability_above(2.5 * GB) - distribution.probability_above(5 * GB) < 0.05


def test_more_than_the_largest_seen_has_a_probability() -> None:
    x = inputs(12)
    memory = noisy(np.full(12, 4 * GB))
    assert 0 < ask(fitted(x, memory), 1e9).probability_above(memory.max()) < 0.5


def test_allocations_scale_with_the_unit_of_memory() -> None:
    x, memory = inputs(), noisy(GB + inputs())
    one, thousand = fitted(x, memory), fitted(x, memory * 1024)
    expected = 1024 * ask(one, 2e9).least_waste_bytes()
    assert ask(thousand, 2e9).least_waste_bytes() == pytest.approx(expected, rel=1e-6)


finite = st.floats(0, 2**60)


@given(st.lists(st.tuples(finite, st.integers(1, 2**60)), min_size=5, max_size=30), finite)
def test_any_runs_give_a_finite_distribution(runs: list[tuple[float, int]], feature: float) -> None:
    x, memory = (np.array(column, dtype=float) for column in zip(*runs, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distribution = ask(fitted(x, memory), feature)
    assert np.isfinite(distribution.used_bytes).all()
    assert distribution.weights.sum() == pytest.approx(1)
    assert distribution.used_bytes.min() >= 1
