"""Warm workers: what recent and expected loads call for, and how large a pool is kept."""

from __future__ import annotations

import functools
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.errors import BadInput
from distributed_grid.prediction.warm_pool import (
    AHEAD_SLOTS,
    HEADROOM_DIVISOR,
    SLOT_MS,
    WINDOW_HOURS,
    LoadSlot,
    PoolSizer,
    WarmPool,
)

DAY = 144
LOADS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 50)), min_size=1, max_size=100)
DAY_SLOTS = 288


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


def test_more_allowed_wakeups_give_a_shorter_window() -> None:
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
        assert (
            pool == running + max(headroom, math.ceil(running / HEADROOM_DIVISOR))
            if running > before
            else pool <= before
        )


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


def a_day_load(slot: int) -> int:
    """In thousandths of a worker: quiet at night, ten workers at noon."""
    return round(5000 - 5000 * math.cos(2 * math.pi * (slot % DAY_SLOTS) / DAY_SLOTS))


def learned(days: float, *, workers: int = 0) -> WarmPool:
    pool = WarmPool()
    for slot in range(round(days * DAY_SLOTS)):
        pool.learn(LoadSlot(slot, 30 * a_day_load(slot), 30, workers))
    return pool


@functools.cache
def a_noon() -> WarmPool:
    """Noon of the fifth day; do not write to it."""
    return learned(4.5)


def size(pool: WarmPool, workers: int = 0, *, in_use: int = 0, own: int = 0, limit: int = 100) -> int:
    return pool.size(workers, in_use, own_milli=own, target_milli=700, limit=limit)


def test_nothing_is_forecast_before_a_day_is_known() -> None:
    pool = learned(0.9)
    assert pool.expected_milli() is None
    assert size(pool) == 0


def test_workers_are_wanted_before_the_load_of_the_day_comes() -> None:
    days = 4
    morning = round(0.25 * DAY_SLOTS)
    pool = learned(days)
    for slot in range(DAY_SLOTS):
        if slot % 24 == 0:
            coming = max(a_day_load(slot + ahead) for ahead in range(AHEAD_SLOTS))
            expected = pool.expected_milli()
            assert expected is not None
            assert abs(expected - coming) < 400, slot
        if slot == morning:
            assert size(pool) >= math.ceil(a_day_load(morning) / 700)
        pool.learn(LoadSlot(days * DAY_SLOTS + slot, 30 * a_day_load(slot), 30, 0))


def test_load_within_the_grids_own_nodes_needs_no_workers() -> None:
    noon = a_noon()
    expected = noon.expected_milli()
    assert expected is not None
    assert size(noon, own=4000) == math.ceil((expected - 4000) / 700)
    assert size(noon, own=100_000) == 0


def a_steady_pool(load_milli: int, in_use: int) -> WarmPool:
    pool = WarmPool()
    for slot in range(2 * DAY_SLOTS):
        pool.learn(LoadSlot(slot, 30 * load_milli, 30, in_use))
    return pool


def test_an_expected_load_that_does_not_grow_keeps_only_the_headroom() -> None:
    assert size(a_steady_pool(100_000, 100), 143, in_use=100, limit=1000) == 107


def test_an_expected_load_above_the_pool_makes_it_grow_with_headroom() -> None:
    pool = a_steady_pool(100_000, 97)
    assert size(pool, 97, in_use=97, limit=1000) == 109, "three over 0.7, and a sixteenth"


def test_workers_that_the_queue_has_started_are_a_wakeup_and_get_their_headroom() -> None:
    pool = a_steady_pool(40_000, 40)
    assert size(pool, 43, in_use=40) == 43
    assert size(pool, 44, in_use=44) == 47
    assert size(pool, 47, in_use=45) == 47


def test_never_more_than_the_limit_and_never_fewer_than_are_in_use() -> None:
    noon = a_noon()
    assert size(noon, limit=3) == 3
    assert size(WarmPool(), 5, in_use=4) == 4


def test_workers_of_recent_hours_are_kept() -> None:
    pool = learned(2, workers=0)
    for slot in range(2 * DAY_SLOTS, 2 * DAY_SLOTS + 4):
        pool.learn(LoadSlot(slot, 0, 30, 6))
    for slot in range(2 * DAY_SLOTS + 4, 2 * DAY_SLOTS + 8):
        pool.learn(LoadSlot(slot, 0, 30, 0))
    assert size(pool, 8, own=100_000) == 7, "six were in use in the last hour, and one is the headroom"


def test_samples_make_slots_and_a_clock_that_went_back_says_nothing() -> None:
    pool = WarmPool()
    assert pool.observe(10 * SLOT_MS + 1, 100, 1) is None
    assert pool.observe(10 * SLOT_MS + 2, 300, 3) is None
    assert pool.observe(11 * SLOT_MS, 50, 0) == LoadSlot(10, 400, 2, 3)
    assert pool.observe(9 * SLOT_MS, 50, 0) is None
    assert pool.observe(12 * SLOT_MS, 50, 0) == LoadSlot(11, 100, 2, 0), "an earlier sample counts in the open slot"
    pool.learn(LoadSlot(3, 1, 1, 0))


def test_kept_slots_give_the_same_forecast() -> None:
    samples, again = WarmPool(), WarmPool()
    for slot in range(2 * DAY_SLOTS):
        for part in range(3):
            ended = samples.observe(slot * SLOT_MS + part * 60_000, a_day_load(slot), slot % 5)
            if ended is not None:
                again.learn(ended)
    assert again.expected_milli() == samples.expected_milli()
    assert size(again, 4) == size(samples, 4)
