"""Usage history: fixed memory, constant cost, nothing made up."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.api.answers.common import utc
from distributed_grid.api.answers.metrics import ResourceTrend
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.monitoring.usage_history import (
    FULL_RATE_ROWS,
    MINUTE_MS,
    MINUTE_ROWS,
    POINTS,
    WINDOWS,
    ClusterHistory,
    Floats,
    NodeHistory,
    theil_sen,
    trend,
)
from tests.support.builders import GB, a_capacity

BEGIN = 1_000_000 * MINUTE_MS
DAY_OF_BEATS = range(BEGIN, BEGIN + 25 * 60 * MINUTE_MS, 2_000)
LAST_HOUR = DAY_OF_BEATS[-FULL_RATE_ROWS:]


def used(cpu: int = 0, memory: int = 0, gpus: tuple[GpuUsage, ...] = ()) -> Usage:
    return Usage(cpu_busy_milli=cpu, cpu_outside_milli=cpu, memory_bytes=memory, memory_outside_bytes=memory, gpus=gpus)


def test_a_node_takes_less_than_200_kb_however_long_it_is_watched() -> None:
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        history = NodeHistory()
        usage = used(500, 2**36, (GpuUsage(0, 700, 2**33), GpuUsage(1, 300, 2**33)))
        for at_ms in (*range(BEGIN, LAST_HOUR.start, 20_000), *LAST_HOUR):
            history.add(usage, at_ms)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history.samples.since(0)) == FULL_RATE_ROWS
    assert len(history.minute_rows(0)) == MINUTE_ROWS + 1
    assert history.samples.rows.nbytes + history.minutes.rows.nbytes < after - before < 200_000


def test_an_hour_of_beats_and_a_day_of_minutes_are_kept() -> None:
    history = NodeHistory()
    for place, at_ms in enumerate(DAY_OF_BEATS):
        history.add(used(place % 1000), at_ms)
    samples = history.samples.since(0)
    assert len(samples) == FULL_RATE_ROWS
    assert samples["at_ms"].tolist() == list(DAY_OF_BEATS)[-FULL_RATE_ROWS:]
    assert samples["cpu"][-1] == (len(DAY_OF_BEATS) - 1) % 1000
    rows = history.minute_rows(0)
    assert len(rows) == MINUTE_ROWS + 1  # and the one that goes on
    assert [row.time for row in rows] == [
        utc(BEGIN + (24 * 60 + 59 - back) * MINUTE_MS) for back in range(1440, -1, -1)
    ]


def test_taking_in_takes_the_same_steps_when_the_rings_are_full() -> None:
    def steps(history: NodeHistory, begin: int) -> int:
        """The calls of an hour of heartbeats, those of numpy included."""
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for step in range(1_800):
                history.add(usage, begin + 2_000 * step)
        finally:
            sys.setprofile(None)
        return calls

    usage = used(500, 2**36)
    fresh = steps(NodeHistory(), BEGIN)
    old = NodeHistory()
    for at_ms in DAY_OF_BEATS:
        old.add(usage, at_ms)
    full = steps(old, old.last_ms + 2_000)
    assert abs(full - fresh) < fresh / 100, "no more than a minute's end differs"


def test_a_minute_has_the_means_and_the_highest_of_its_samples() -> None:
    history = NodeHistory()
    for second, (cpu, memory) in enumerate([(100, GB), (200, 2 * GB), (600, 6 * GB)]):
        history.add(used(cpu, memory), BEGIN + 2_000 * second)
    history.add(used(1), BEGIN + MINUTE_MS)
    row = history.minute_rows(0)[0]
    assert (row.time, row.samples) == (utc(BEGIN), 3)
    assert (row.cpu_percent, row.cpu_percent_max) == (30.0, 60.0)
    assert (row.memory_used_gb, row.memory_used_gb_max) == (3.0, 6.0)


def test_a_silent_minute_has_no_row_and_a_node_without_gpus_no_gpu_numbers() -> None:
    history = NodeHistory()
    history.add(used(100), BEGIN)
    history.add(used(100, gpus=(GpuUsage(0, 400, 8 * GB),)), BEGIN + 7 * MINUTE_MS)
    history.add(used(100), BEGIN + 7 * MINUTE_MS + 2_000)
    rows = history.minute_rows(0)
    assert [row.time for row in rows] == [utc(BEGIN), utc(BEGIN + 7 * MINUTE_MS)]
    assert (rows[0].gpu_percent, rows[0].gpu_memory_used_gb) == (None, None)
    assert (rows[1].gpu_percent, rows[1].gpu_percent_max, rows[1].gpu_memory_used_gb) == (40.0, 40.0, 8.0)


def test_the_same_heartbeat_counts_once_and_an_older_one_not_at_all() -> None:
    history = NodeHistory()
    assert history.add(used(100), BEGIN + 2_000)
    assert not history.add(used(900), BEGIN + 2_000)
    assert not history.add(used(900), BEGIN)
    assert history.samples.since(0)["cpu"].tolist() == [100]


def test_beats_that_come_too_fast_do_not_push_the_hour_out() -> None:
    history = NodeHistory()
    for step in range(40 * 60 * 10):
        history.add(used(step % 1000), BEGIN + 100 * step)
    assert history.samples.since(0)["at_ms"][0] == BEGIN
    assert history.minute_rows(0)[0].samples == 600


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**70), 2**70),
            st.integers(-(2**70), 2**70),
            st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70)), max_size=3),
            st.integers(1, 10 * MINUTE_MS),
        ),
        max_size=30,
    )
)
def test_nothing_an_agent_can_say_breaks_it(beats: list[tuple[int, int, list[tuple[int, int]], int]]) -> None:
    history, at_ms = NodeHistory(), BEGIN
    for cpu, memory, gpus, step in beats:
        at_ms += step
        devices = tuple(GpuUsage(index, busy, size) for index, (busy, size) in enumerate(gpus))
        assert history.add(
            Usage(
                cpu_busy_milli=cpu,
                cpu_outside_milli=cpu,
                memory_bytes=memory,
                memory_outside_bytes=memory,
                gpus=devices,
            ),
            at_ms,
        )
    times = history.samples.since(0)["at_ms"]
    assert np.all(np.diff(times) > 0)
    rows = history.minute_rows(0)
    assert sum(row.samples for row in rows) == len(beats)
    assert all(row.cpu_percent <= row.cpu_percent_max and row.memory_used_gb <= row.memory_used_gb_max for row in rows)
    assert all(row.time.endswith(":00.000Z") for row in rows)


def test_minutes_that_were_written_are_the_same_after_a_restart_and_a_minute_goes_on_where_it_was() -> None:
    before, whole = ClusterHistory(), ClusterHistory()
    gpus = (GpuUsage(0, 700, 2**33),)
    beats = range(BEGIN, BEGIN + 5 * MINUTE_MS + 30_000, 2_000)
    for at_ms in beats:
        usage = used(at_ms // 2_000 % 1000, 2**30, gpus if at_ms > BEGIN + 2 * MINUTE_MS else ())
        before.add("gpu1", usage, a_capacity(), at_ms)
        whole.add("gpu1", usage, a_capacity(), at_ms)
    after = ClusterHistory()
    after.restore((node, row) for _, node, row in before.written_rows(0))
    now = beats[-1]
    assert after.minutes("gpu1", now, 60) == whole.minutes("gpu1", now, 60)
    for at_ms in range(now + 2_000, now + 3 * MINUTE_MS, 2_000):
        for history in (after, whole):
            history.add("gpu1", used(300), a_capacity(), at_ms)
    after_rows, whole_rows = (one.minutes("gpu1", now + 3 * MINUTE_MS, 60) for one in (after, whole))
    assert [row.time for row in after_rows] == [row.time for row in whole_rows]
    for one, other in zip(after_rows, whole_rows, strict=True):
        assert one.samples == other.samples
        assert abs(one.cpu_percent - other.cpu_percent) <= 0.1, "means are kept in whole thousandths"


def test_long_trends_survive_a_restart_and_a_gap_stays_a_gap() -> None:
    history = ClusterHistory()
    for at_ms in range(BEGIN, BEGIN + 40 * MINUTE_MS, 2_000):
        history.add("gpu1", used(200 + (at_ms - BEGIN) // 6_000), a_capacity(), at_ms)
    written = [(node, row) for _, node, row in history.written_rows(0)]

    def trend_after(silence_ms: int) -> ResourceTrend:
        restarted = ClusterHistory()
        restarted.restore(written)
        begin = BEGIN + 40 * MINUTE_MS + silence_ms
        for at_ms in range(begin, begin + 20_000, 2_000):
            restarted.add("gpu1", used(200 + (at_ms - BEGIN) // 6_000), a_capacity(), at_ms)
        return restarted.trend("gpu1", "cpu", begin + 20_000)

    soon = trend_after(30_000)
    for found in (soon.fifteen_minutes, soon.one_hour):
        assert found is not None
        assert found.direction == "rising"
        assert abs(found.slope_per_minute - 0.01) < 0.001
    assert trend_after(20 * MINUTE_MS).windows == ()


def test_the_level_of_the_last_minute_is_a_mean_and_knows_gpus() -> None:
    history = ClusterHistory()
    for place in range(60):
        at_ms = BEGIN + 2_000 * place
        peak = 1000 if place == 59 else 100
        history.add("gpu1", used(peak, 4 * GB, (GpuUsage(0, 500),)), a_capacity(memory_gb=16), at_ms)
    levels = history.minute_levels("gpu1", BEGIN + 118_000)
    assert set(levels) == {"cpu", "memory", "gpu"}
    assert levels["cpu"] < 0.2, "one peak is no load"
    assert (levels["memory"], levels["gpu"]) == (0.25, 0.5)
    assert history.minute_levels("gpu1", BEGIN + 10 * MINUTE_MS) == {}
    assert history.minute_levels("gpu9", BEGIN) == {}


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


def test_samples_before_a_long_silence_do_not_count() -> None:
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
