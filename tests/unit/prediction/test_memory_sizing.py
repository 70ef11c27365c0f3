"""Sizing of memory: what is learned from runs, from over-runs and from many of them, and what a retry gets."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.prediction.memory_sizing import MAX_BYTES, MIN_RUNS, WINDOW, MemorySizer, Run

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
    sizer.learn(runs[-1])
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
        online.learn(run)
    assert given_bytes(online, 3e9) == pytest.approx(given_bytes(a_sizer(runs), 3e9), rel=0.05)


def test_what_changed_for_good_replaces_what_was() -> None:
    sizer = a_sizer(some_runs(200))
    sizer.learn_all(Run((run.features[0],), 3 * run.used_bytes) for run in some_runs(WINDOW, seed=3))
    assert given_bytes(sizer, 1e9) > 3000 * MB


def test_a_surprising_run_counts_at_once() -> None:
    sizer = a_sizer([Run((1e9,), 100 * MB + number) for number in range(200)])
    before = sizer.distribution((1e9,))
    sizer.learn(Run((1e9,), 300 * MB))
    after = sizer.distribution((1e9,))
    assert before is not None
    assert after is not None
    assert after.probability_above(200 * MB) > before.probability_above(200 * MB)


# ---------------------------------------------------------------- over-runs


def test_a_retry_with_nothing_known_is_twice_as_large() -> None:
    assert MemorySizer().retry_allocation((1e9,), [100 * MB]) > 199 * MB


def test_a_retry_takes_what_is_known_above_the_limit() -> None:
    small, large = ([Run((1e9,), size * MB + i) for i in range(20)] for size in (100, 400))
    assert 400 * MB <= a_sizer(small + large).retry_allocation((1e9,), [150 * MB]) < 600 * MB


def test_a_second_over_run_doubles_at_least() -> None:
    sizer = a_sizer(some_runs(50))
    first = given_bytes(sizer, 1e9)
    second = sizer.retry_allocation((1e9,), [first])
    assert sizer.retry_allocation((1e9,), [first, second]) >= 2 * second


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
        sizer.learn(Run((feature,), limit, is_lower_bound=True))
    assert sizer.retry_allocation((feature,), limits) > max(limits)


def test_a_lower_bound_raises_what_the_next_run_gets() -> None:
    sizer = a_sizer(some_runs(20))
    before = given_bytes(sizer, 1e9)
    for number in range(5):
        sizer.learn(Run((1e9,), 2 * before, is_lower_bound=True, id=f"t{number}"))
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
        sizer.learn(Run((1e9,), limit, is_lower_bound=True, id="t1"))
    sizer.learn(end)
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
