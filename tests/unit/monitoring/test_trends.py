"""Trends: what is steady stays steady, a ramp is found, and the range of a forecast is honest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.monitoring.trends import POINTS, WINDOWS, Floats, theil_sen, trend

BEAT = 1 / 30
"""Minutes between heartbeats."""


def beats(window: float, begin: float = 0.0) -> Floats:
    """The times of an unbroken window that ends now (0)."""
    return np.arange(-window + begin + BEAT, BEAT / 2, BEAT)


def noise(seed: int, count: int, size: float = 0.02, echo: float = 0.0) -> Floats:
    """Noise of that size; with `echo` each value resembles the one before."""
    fresh = np.random.default_rng(seed).normal(0, size, count)
    for place in range(1, count):
        fresh[place] = echo * fresh[place - 1] + np.sqrt(1 - echo**2) * fresh[place]
    return fresh


windows = st.sampled_from(WINDOWS)


@given(windows, st.floats(0.2, 0.8), st.floats(-0.4, 0.4))
def test_a_clean_ramp_is_recovered(window: int, middle: float, change: float) -> None:
    times = beats(window)
    found = trend(times, middle + change * (times / window + 0.5), now=0.0, window=window)
    assert found is not None
    assert found.slope_per_minute == pytest.approx(change / window, abs=2e-6)
    assert found.forecast == pytest.approx(min(max(middle + 1.5 * change, 0), 1), abs=2e-4)
    assert found.low <= found.forecast <= found.high
    if abs(change) > 0.021:
        assert found.direction == ("rising" if change > 0 else "falling")
    if abs(change) < 0.019:
        assert found.direction == "steady"


@given(windows, st.floats(0.1, 0.9), st.integers(0, 2**32), st.floats(0.05, 0.2), st.sampled_from([0.0, 1.0]))
def test_outliers_do_not_turn_a_steady_line_into_a_rise(
    window: int, level: float, seed: int, share: float, wild: float
) -> None:
    times, chance = beats(window), np.random.default_rng(seed)
    values = np.full(len(times), level)
    values[chance.random(len(times)) < share] = wild
    found = trend(times, values, now=0.0, window=window)
    assert found is not None
    assert found.direction == "steady"
    assert found.forecast == pytest.approx(level, abs=0.01)


def test_outliers_at_the_end_do_not_either() -> None:
    times = beats(15)
    values = np.full(len(times), 0.3)
    values[-len(times) // 10 :] = 1.0
    found = trend(times, values, now=0.0, window=15)
    assert found is not None
    assert found.direction == "steady"
    assert found.forecast == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("echo", "least"), [(0.0, 0.84), (0.8, 0.80)])
def test_nine_of_ten_later_measurements_lie_in_the_range(window: int, echo: float, least: float) -> None:
    chance = np.random.default_rng(window)
    times, inside, tries = beats(window), 0, 200
    for attempt in range(tries):
        slope = chance.uniform(-0.2, 0.2) / window
        values = 0.5 + slope * times + noise(attempt, len(times), echo=echo)
        found = trend(times, values, now=0.0, window=window, horizon=window / 2)
        assert found is not None
        later = 0.5 + slope * window / 2 + chance.normal(0, 0.02)
        inside += found.low <= later <= found.high
        assert found.high - found.low < 0.3
    assert least <= inside / tries <= 0.97


def test_noise_alone_is_seldom_called_a_trend() -> None:
    times = beats(5)
    called = [
        trend(times, 0.5 + noise(seed, len(times), 0.05), now=0.0, window=5).direction != "steady"
        for seed in range(200)
    ]
    assert sum(called) < 0.15 * len(called)


def test_the_range_grows_with_the_distance_and_with_the_noise() -> None:
    times = beats(15)
    values = 0.4 + noise(1, len(times))
    near, far = (trend(times, values, now=0.0, window=15, horizon=ahead) for ahead in (1, 60))
    wild = trend(times, 0.4 + noise(1, len(times), 0.08), now=0.0, window=15, horizon=1)
    assert near.high - near.low < far.high - far.low
    assert near.high - near.low < wild.high - wild.low


@pytest.mark.parametrize(
    ("times", "why"),
    [
        (np.array([]), "nothing was measured"),
        (beats(5, begin=3), "only the last two of five minutes are there"),
        (beats(5)[::20], "eight samples"),
        (beats(5) - 1.5, "the last sample is old"),
        (beats(5) - 60, "all of it is older than the window"),
        (np.concatenate((beats(5)[:90], beats(5)[-20:])), "a long silence, and little after it"),
    ],
)
def test_too_little_to_go_by_is_no_trend(times: Floats, why: str) -> None:
    assert trend(times, np.full(len(times), 0.5), now=0.0, window=5) is None, why


def test_what_came_before_a_long_silence_does_not_count() -> None:
    times = beats(60)
    kept = (times < -50) | (times > -33)
    values = np.where(times < -50, 0.9, 0.2 + 0.005 * (times + 33))
    found = trend(times[kept], values[kept], now=0.0, window=60)
    assert found is not None
    assert found.slope_per_minute == pytest.approx(0.005, abs=1e-5)
    assert found.samples == np.count_nonzero(times > -33)


def test_a_short_silence_changes_nothing_and_nothing_is_filled_in() -> None:
    times = beats(15)
    kept = (times < -9) | (times > -7)
    values = 0.3 + 0.01 * times
    found = trend(times[kept], values[kept], now=0.0, window=15)
    assert found is not None
    assert found.slope_per_minute == pytest.approx(0.01, abs=1e-5)
    assert found.samples == np.count_nonzero(kept)


@given(st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=POINTS))
def test_the_slope_lies_within_its_own_range(values: list[float]) -> None:
    line = theil_sen(np.arange(float(len(values))), np.array(values))
    assert line.slope_low <= line.slope <= line.slope_high
