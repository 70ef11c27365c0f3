"""The size of a pool: it grows at once, shrinks with the recent peak, and learns how long recent is."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.errors import BadInput
from distributed_grid.prediction.pool_size import WINDOW_HOURS, PoolSizer

DAY = 144
LOADS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 50)), min_size=1, max_size=100)


def taught(loads: list[int], headroom: int = 2, wakeups_per_day: float = 1.0) -> PoolSizer:
    sizer = PoolSizer(DAY, headroom, wakeups_per_day)
    for step, running in enumerate(loads):
        sizer.observe(step, running)
    return sizer


def test_a_pool_that_is_too_small_grows_to_what_runs_and_the_headroom() -> None:
    assert taught([10]).size(9) == 12


def test_a_pool_that_is_large_enough_does_not_grow() -> None:
    assert taught([10]).size(10) == 10


def test_nothing_observed_changes_nothing() -> None:
    assert PoolSizer(DAY, 2).size(7) == 7


def test_a_pool_keeps_the_peak_of_the_last_hours() -> None:
    assert taught([10, *[3] * 23]).size(30) == 12  # four hours, as nothing is known about this load


def test_a_pool_shrinks_when_the_peak_is_over() -> None:
    assert taught([10, *[3] * 24]).size(30) == 5


def test_a_steady_load_shortens_the_window() -> None:
    assert taught([5] * 20 * DAY).window_steps() < taught([5]).window_steps()


def peaks_every_three_hours(days: int) -> list[int]:
    return ([20] + [3] * 17) * 8 * days


def test_a_load_that_comes_back_lengthens_the_window_until_its_peaks_are_kept() -> None:
    sizer = PoolSizer(DAY, 2, 0.5)
    pool = 5
    wakeups = 0
    loads = peaks_every_three_hours(20)
    for step, running in enumerate(loads):
        sizer.observe(step, running)
        wakeups += step >= len(loads) // 2 and running > pool
        pool = sizer.size(pool)
    assert wakeups == 0


def test_who_allows_more_wakeups_gets_a_shorter_window() -> None:
    dice = random.Random(2)
    loads = [round(dice.expovariate(0.2)) for _ in range(20 * DAY)]
    windows = [taught(loads, 5, wakeups).window_steps() for wakeups in (0.2, 2.0, 20.0)]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > windows[-1]


@given(LOADS, st.integers(0, 5), st.integers(0, 60))
def test_a_pool_holds_what_runs_and_grows_only_when_it_must(
    steps: list[tuple[int, int]], headroom: int, pool: int
) -> None:
    sizer = PoolSizer(DAY, headroom)
    step = 0
    for pause, running in steps:
        step += pause
        sizer.observe(step, running)
        before, pool = pool, sizer.size(pool)
        assert pool >= running
        assert pool == running + headroom if running > before else pool <= before


@given(LOADS)
def test_the_state_is_bounded_by_the_longest_window(steps: list[tuple[int, int]]) -> None:
    sizer = PoolSizer(DAY, 1)
    step = 0
    for pause, running in steps:
        step += pause
        sizer.observe(step, running)
    assert len(sizer.peaks) == len(sizer.peak_steps)
    assert all(seen > step - DAY for seen in sizer.peak_steps)
    assert len(sizer.shadows) == len(WINDOW_HOURS)


@given(LOADS, st.integers(0, 60))
def test_a_restored_sizer_decides_the_same(steps: list[tuple[int, int]], pool: int) -> None:
    sizer = PoolSizer(DAY, 1)
    step = 0
    for pause, running in steps:
        sizer = msgspec.json.decode(msgspec.json.encode(sizer), type=PoolSizer)
        step += pause
        sizer.observe(step, running)
    whole = PoolSizer(DAY, 1)
    step = 0
    for pause, running in steps:
        step += pause
        whole.observe(step, running)
    assert sizer == whole
    assert sizer.size(pool) == whole.size(pool)


def test_bad_observations_are_refused_and_change_nothing() -> None:
    sizer = taught([1, 2, 3])
    before = msgspec.json.encode(sizer)
    with pytest.raises(BadInput, match="at least 0"):
        sizer.observe(3, -1)
    with pytest.raises(BadInput, match="step 2 "):
        sizer.observe(2, 1)
    assert msgspec.json.encode(sizer) == before
