"""Warm workers: what recent and expected loads call for."""

from __future__ import annotations

import functools
import math

from distributed_grid.prediction.warm_pool import AHEAD_SLOTS, SLOT_MS, LoadSlot, WarmPool

DAY_SLOTS = 288


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


def test_what_the_grid_has_itself_needs_no_workers() -> None:
    noon = a_noon()
    assert size(noon) == size(noon, own=4000) + 4
    assert size(noon, own=100_000) == 0


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


def test_what_was_kept_leads_to_the_same_forecast() -> None:
    samples, again = WarmPool(), WarmPool()
    for slot in range(2 * DAY_SLOTS):
        for part in range(3):
            ended = samples.observe(slot * SLOT_MS + part * 60_000, a_day_load(slot), slot % 5)
            if ended is not None:
                again.learn(ended)
    assert again.expected_milli() == samples.expected_milli()
    assert size(again, 4) == size(samples, 4)
