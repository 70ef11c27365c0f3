"""What is remembered of an owner: climbs, drift, and nothing of what is over for long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.node_statistics import UsageTrace, UsageVolatility
from distributed_grid.domain.nodes import Node, NodeObservation, Usage
from distributed_grid.scheduling.offers.volatility import HALF_LIFE_MS, STRIDE_MS, TENTHS, risen_above, unrest
from tests.support.builders import a_node, a_usage, thresholds

BEAT_MS = 2_000
NODE = a_node("gpu1", cores=4, memory_gb=16, thresholds=thresholds(), hold_s=60)


class Watch:
    """A node that is looked at every two seconds, or as told."""

    def __init__(self, node: Node = NODE) -> None:
        self.node = node
        self.seen: NodeObservation | None = None
        self.now = 1_000_000

    def sees(self, usage: Usage, *, seconds: float = 0, apart_ms: int = BEAT_MS) -> UsageVolatility:
        """The same use for so long (one look at least)."""
        for _ in range(max(round(1000 * seconds / apart_ms), 1)):
            self.now += apart_ms
            known = unrest(self.node, usage, self.seen, self.now)
            self.seen = NodeObservation(self.node.name, self.now, usage, unrest=known)
        assert known is not None
        return known

    def cpu(self, part: float, *, seconds: float = 0, apart_ms: int = BEAT_MS) -> UsageTrace:
        return self.sees(a_usage(cpu_outside=part), seconds=seconds, apart_ms=apart_ms).cpu

    def memory(self, gigabytes: float, *, seconds: float = 0) -> UsageTrace:
        return self.sees(a_usage(memory_outside_gb=gigabytes), seconds=seconds).memory


def test_a_node_that_nobody_takes_back_is_not_watched() -> None:
    assert unrest(a_node(), Usage(), None, 0) is None


def test_a_climb_that_lasts_is_counted_once_for_every_tenth_it_passes() -> None:
    watch = Watch()
    watch.cpu(0.05, seconds=60)
    trail = watch.cpu(1.0, seconds=300)
    assert [round(count) for count in trail.rises] == [1] * 9 + [0]
    assert [round(count) for count in watch.cpu(1.0, seconds=3600).rises] == [1] * 9 + [0]


def test_a_climb_for_a_few_seconds_is_smoothed_away() -> None:
    watch = Watch()
    watch.cpu(0.0, seconds=60)
    for _ in range(30):
        watch.cpu(1.0, seconds=10)
        trail = watch.cpu(0.0, seconds=110)
    assert risen_above(trail, 877, watch.now) == 0


def test_a_measurement_over_minutes_counts_as_it_is() -> None:
    watch = Watch()
    watch.cpu(0.05, apart_ms=300_000)
    trail = watch.cpu(0.95, apart_ms=300_000)
    assert (trail.level, risen_above(trail, 900, watch.now)) == (950, 1)


def test_trembling_around_a_tenth_is_no_climb() -> None:
    watch = Watch()
    watch.cpu(0.29, seconds=120)
    for _ in range(20):
        watch.cpu(0.31, seconds=120)
        trail = watch.cpu(0.29, seconds=120)
    assert risen_above(trail, 300, watch.now) == 0


def test_each_return_counts_and_fades() -> None:
    watch = Watch()
    for _ in range(3):
        watch.cpu(0.0, seconds=600)
        trail = watch.cpu(1.0, seconds=600)
    assert risen_above(trail, 877, watch.now) == pytest.approx(3, abs=0.15)
    assert risen_above(trail, 877, watch.now + HALF_LIFE_MS) == pytest.approx(1.5, abs=0.1)


def test_between_tenths_a_count_is_in_proportion() -> None:
    trail = UsageTrace(0, 0, 0, 0, 0, 0, 0, 0, (0.0,) * 7 + (4.0, 2.0, 0.0))
    assert [risen_above(trail, mark, 0) for mark in (800, 850, 900, 950, 1000, 1200)] == [4, 3, 2, 1, 0, 0]
    assert risen_above(trail, 50, 0) == 0


def test_memory_that_wanders_has_drift_and_memory_that_stays_has_none() -> None:
    still, walking = Watch(), Watch()
    for step in range(40):
        still_trail = still.memory(4, seconds=STRIDE_MS / 1000)
        walking_trail = walking.memory(4 + 0.4 * (step % 2), seconds=STRIDE_MS / 1000)
    assert still_trail.drift == 0
    assert walking_trail.drift > 100


def test_one_jump_is_not_taken_for_drift() -> None:
    watch, walk = Watch(), Watch()
    watch.memory(2, seconds=3600)
    after = watch.memory(8, seconds=1200)
    for step in range(16):
        walked = walk.memory(2 + 0.4 * step, seconds=STRIDE_MS / 1000)
    assert after.drift < walked.drift / 3
    assert risen_above(after, 400, watch.now) == pytest.approx(1, abs=0.05)


def test_after_a_silence_everything_begins_anew() -> None:
    watch = Watch()
    watch.cpu(0.0, seconds=60)
    watch.cpu(1.0, seconds=600)
    watch.now += NODE.offer_ms
    trail = watch.cpu(0.2)
    assert trail == UsageTrace(200, 200, 200, 200, watch.now, watch.now, watch.now)


def test_the_busiest_lent_gpu_counts_and_one_without_memory_is_full() -> None:
    node = a_node("gpu1", gpus=2, gpu_memory_gb=24, thresholds=thresholds())

    def seen(**gpus: tuple[float, float]) -> float:
        usage = a_usage(gpus={int(name[1:]): use for name, use in gpus.items()})
        found = unrest(node, usage, None, 0)
        assert found is not None
        assert found.gpu is not None
        return found.gpu.level

    assert seen(g0=(0.1, 1), g1=(0.6, 1)) == 600
    assert seen(g0=(0.1, 23)) == 1000
    assert seen(g7=(1.0, 23)) == 0
    assert seen() == 0


@given(
    uses=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 900_000)), min_size=1, max_size=60),
)
def test_whatever_is_measured_the_figures_stay_within_bounds(uses: list[tuple[int, int]]) -> None:
    node = a_node("gpu1", thresholds=thresholds())
    seen, now = None, 0
    for outside, passed_ms in uses:
        now += passed_ms
        usage = Usage(cpu_outside_milli=outside)
        known = unrest(node, usage, seen, now)
        assert known is not None
        trail = known.cpu
        assert 0 <= trail.trough <= trail.level <= trail.crest <= 1000
        assert len(trail.rises) in (0, TENTHS)
        assert all(0 <= count <= len(uses) for count in trail.rises)
        assert trail.drift >= 0
        seen = NodeObservation("gpu1", now, usage, unrest=known)
