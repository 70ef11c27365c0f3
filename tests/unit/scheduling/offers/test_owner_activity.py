"""Whether a node is idle: one moment decides nothing, and what lasts decides in time.

What is remembered of an owner: climbs, drift, and nothing of what is over for long.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.nodes import Node, NodeObservation, Usage
from distributed_grid.domain.statistics import Idleness, UsageTrace, UsageVolatility
from distributed_grid.scheduling.offers.owner_activity import (
    DRIFT_STEP_MS,
    HALF_LIFE_MS,
    TENTHS,
    rises_above,
    update_idleness,
    update_volatility,
)
from tests.support.builders import NOW, a_node, a_usage, thresholds

MARK, MARGIN, DWELL_S = 0.3, 0.05, 600
NODE = a_node(cores=16, memory_gb=64, gpus=1, thresholds=thresholds(cpu_busy_max=MARK, margin=MARGIN, dwell_s=DWELL_S))
IDLE, BUSY = a_usage(), a_usage(cpu_outside=0.8, memory_outside_gb=60)


class Watch:
    """A node under observation, measured every so often."""

    def __init__(self, node: Node = NODE, *, every_s: float = 2) -> None:
        self.node, self.every_s = node, every_s
        self.seen: NodeObservation | None = None
        self.now = NOW

    def measure(self, usage: Usage) -> Idleness:
        if self.seen is not None:
            self.now += round(1000 * self.every_s)
        idle = update_idleness(self.node, usage, self.seen, self.now)
        assert idle is not None
        self.seen = NodeObservation(node=self.node.name, at_ms=self.now, usage=usage, idleness=idle)
        return idle

    def cpu(self, usages: Iterable[Usage]) -> list[bool]:
        return [self.measure(usage).cpu.lent for usage in usages]

    def spend(self, seconds: float, usage: Usage) -> list[bool]:
        return self.cpu([usage] * round(seconds / self.every_s))


def flips(lent: list[bool]) -> int:
    return sum(before != after for before, after in pairwise(lent))


def test_without_thresholds_there_is_nothing_to_decide():
    assert update_idleness(a_node(), BUSY, None, NOW) is None


@pytest.mark.parametrize(("usage", "lent"), [(IDLE, True), (BUSY, False)])
def test_the_first_measurement_decides_at_once(usage, lent):
    idle = Watch().measure(usage)
    assert (idle.cpu.lent, idle.memory.lent, idle.cpu.turned) == (lent, lent, False)


def test_one_busy_moment_ends_nothing():
    watch = Watch()
    assert all(watch.cpu([IDLE, BUSY, IDLE, BUSY, BUSY, IDLE]))


def test_an_owner_who_stays_ends_the_lending_after_half_the_dwell():
    watch = Watch()
    watch.measure(IDLE)
    lent = watch.spend(DWELL_S, BUSY)
    ended_s = 2 * (lent.index(False) + 1)
    assert DWELL_S / 2 < ended_s < DWELL_S / 2 + DWELL_S / 6
    assert not watch.measure(BUSY).memory.lent


def test_an_owner_who_is_busy_in_the_mean_ends_the_lending_though_never_busy_for_long():
    watch = Watch()
    assert not watch.cpu([IDLE, BUSY] * DWELL_S)[-1]


def test_reclaimed_resource_is_lent_again_after_the_whole_dwell():
    watch = Watch()
    watch.measure(IDLE)
    watch.spend(DWELL_S, BUSY)
    lent = watch.spend(2 * DWELL_S, IDLE)
    assert DWELL_S < 2 * (lent.index(True) + 1) < DWELL_S * 1.5
    assert flips(lent) == 1


def test_a_node_that_was_busy_when_it_came_needs_half_the_dwell():
    watch = Watch()
    watch.measure(BUSY)
    lent = watch.spend(DWELL_S, IDLE)
    assert DWELL_S / 2 < 2 * (lent.index(True) + 1) < DWELL_S


def test_between_the_mark_and_the_margin_everything_stays_as_it_is():
    between = a_usage(cpu_outside=MARK + MARGIN)
    lends, keeps = Watch(), Watch()
    lends.measure(IDLE)
    keeps.measure(BUSY)
    assert all(lends.spend(3 * DWELL_S, between))
    assert not any(keeps.spend(3 * DWELL_S, between))


def test_too_little_left_counts_as_busy_whatever_the_mark_says():
    watch = Watch(a_node(cores=2, thresholds=thresholds(cpu_busy_max=0.9, cores_min=1, dwell_s=DWELL_S)))
    assert watch.measure(a_usage(cpu_outside=0.5)).cpu.lent
    assert not watch.spend(DWELL_S, a_usage(cpu_outside=0.51))[-1]


def test_a_node_without_cores_is_never_idle():
    assert not Watch(a_node(cores=0, thresholds=thresholds())).measure(IDLE).cpu.lent


def test_a_gpu_in_use_is_kept_at_once_and_lent_again_after_the_dwell():
    watch = Watch()
    assert watch.measure(a_usage(gpus={0: (0, 0)})).gpus[0][1].lent
    assert not watch.measure(a_usage(gpus={0: (0.9, 0)})).gpus[0][1].lent
    lent = [watch.measure(a_usage(gpus={0: (0, 0)})).gpus[0][1].lent for _ in range(DWELL_S)]
    assert DWELL_S <= 2 * (lent.index(True) + 1) <= DWELL_S * 1.5


def test_a_gpu_whose_memory_is_taken_is_kept_at_once():
    watch = Watch()
    watch.measure(IDLE)
    assert not watch.measure(a_usage(gpus={0: (0, 23)})).gpus[0][1].lent


def test_a_gpu_that_is_new_to_a_node_is_judged_by_its_first_measurement():
    watch = Watch(replace(NODE, capacity=replace(NODE.capacity, gpus=())))
    assert watch.measure(IDLE).gpus == ()
    watch.node = NODE
    assert watch.measure(IDLE).gpus[0][1].lent


def test_after_a_silence_longer_than_an_offer_the_first_measurement_decides_again():
    watch = Watch(replace(NODE, offer_ms=300_000))
    watch.measure(IDLE)
    watch.every_s = 300
    assert watch.measure(BUSY).cpu.lent
    watch.every_s = 300.001
    assert not watch.measure(BUSY).cpu.lent


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_without_dwell_and_margin_it_is_a_plain_threshold(loads):
    watch = Watch(a_node(cores=16, thresholds=thresholds(cpu_busy_max=MARK, margin=0, dwell_s=0, cores_min=0)))
    usages = [a_usage(cpu_outside=load) for load in loads]
    assert watch.cpu(usages) == [usage.cpu_outside_milli <= 1000 * MARK for usage in usages]


past = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([2, 30, 290])), max_size=30)


def after(history: list[tuple[float, int]]) -> Watch:
    watch = Watch()
    for load, every_s in history:
        watch.every_s = every_s
        watch.measure(a_usage(cpu_outside=load, memory_outside_gb=64 * load))
    watch.every_s = 10
    return watch


@given(past, st.floats(0, MARK))
def test_whatever_was_before_steady_idleness_ends_in_lending(history, load):
    assert after(history).spend(3 * DWELL_S, a_usage(cpu_outside=load))[-1]


@given(past, st.floats(MARK + MARGIN + 0.001, 1))
def test_whatever_was_before_steady_use_ends_in_keeping(history, load):
    assert not after(history).spend(3 * DWELL_S, a_usage(cpu_outside=load))[-1]


@given(past, st.floats(0, 1), st.floats(0, 1), st.integers(1, 3))
def test_load_that_alternates_faster_than_the_dwell_settles(history, low, high, length):
    """Whatever was under way before, after two dwells it turns no more."""
    wave = [a_usage(cpu_outside=low)] * length + [a_usage(cpu_outside=high)] * length
    lent = after(history).cpu(wave * (4 * DWELL_S // (20 * length)))
    assert flips(lent[2 * DWELL_S // 10 :]) == 0


@given(st.floats(0, 0.1), st.floats(0, 1), st.integers(1, 9))
def test_bursts_of_an_owner_who_is_idle_on_the_whole_never_end_the_lending(low, high, length):
    """Up to a minute and a half of anything, then four times as long a rest: at most 28 % in the mean."""
    wave = [a_usage(cpu_outside=high)] * length + [a_usage(cpu_outside=low)] * 4 * length
    watch = Watch(every_s=10)
    assert all(watch.cpu([IDLE, *wave * 20]))


@given(past)
def test_two_turns_are_never_closer_than_half_the_dwell(history):
    watch, turns, before = Watch(), [], None
    for load, every_s in history * 3:
        watch.every_s = every_s
        lent = watch.measure(a_usage(cpu_outside=load)).cpu.lent
        if before is not None and lent != before:
            turns.append(watch.now)
        before = lent
    assert all(later - earlier >= 1000 * DWELL_S / 2 for earlier, later in pairwise(turns))


BEAT_MS = 2_000
WATCHED_NODE = a_node("gpu1", cores=4, memory_gb=16, thresholds=thresholds(), hold_s=60)


class VolatilityWatch:
    """A node that is looked at every two seconds, or as told."""

    def __init__(self, node: Node = WATCHED_NODE) -> None:
        self.node = node
        self.seen: NodeObservation | None = None
        self.now = 1_000_000

    def sees(self, usage: Usage, *, seconds: float = 0, apart_ms: int = BEAT_MS) -> UsageVolatility:
        """The same use for so long (one look at least)."""
        for _ in range(max(round(1000 * seconds / apart_ms), 1)):
            self.now += apart_ms
            known = update_volatility(self.node, usage, self.seen, self.now)
            self.seen = NodeObservation(node=self.node.name, at_ms=self.now, usage=usage, volatility=known)
        assert known is not None
        return known

    def cpu(self, part: float, *, seconds: float = 0, apart_ms: int = BEAT_MS) -> UsageTrace:
        return self.sees(a_usage(cpu_outside=part), seconds=seconds, apart_ms=apart_ms).cpu

    def memory(self, gigabytes: float, *, seconds: float = 0) -> UsageTrace:
        return self.sees(a_usage(memory_outside_gb=gigabytes), seconds=seconds).memory


def test_a_node_that_nobody_takes_back_is_not_watched() -> None:
    assert update_volatility(a_node(), Usage(), None, 0) is None


def test_a_climb_that_lasts_is_counted_once_for_every_tenth_it_passes() -> None:
    watch = VolatilityWatch()
    watch.cpu(0.05, seconds=60)
    trail = watch.cpu(1.0, seconds=300)
    assert [round(count) for count in trail.rises] == [1] * 9 + [0]
    assert [round(count) for count in watch.cpu(1.0, seconds=3600).rises] == [1] * 9 + [0]


def test_a_climb_for_a_few_seconds_is_smoothed_away() -> None:
    watch = VolatilityWatch()
    watch.cpu(0.0, seconds=60)
    for _ in range(30):
        watch.cpu(1.0, seconds=10)
        trail = watch.cpu(0.0, seconds=110)
    assert rises_above(trail, 877, watch.now) == 0


def test_a_measurement_over_minutes_counts_as_it_is() -> None:
    watch = VolatilityWatch()
    watch.cpu(0.05, apart_ms=300_000)
    trail = watch.cpu(0.95, apart_ms=300_000)
    assert (trail.level, rises_above(trail, 900, watch.now)) == (950, 1)


def test_trembling_around_a_tenth_is_no_climb() -> None:
    watch = VolatilityWatch()
    watch.cpu(0.29, seconds=120)
    for _ in range(20):
        watch.cpu(0.31, seconds=120)
        trail = watch.cpu(0.29, seconds=120)
    assert rises_above(trail, 300, watch.now) == 0


def test_each_return_counts_and_fades() -> None:
    watch = VolatilityWatch()
    for _ in range(3):
        watch.cpu(0.0, seconds=600)
        trail = watch.cpu(1.0, seconds=600)
    assert rises_above(trail, 877, watch.now) == pytest.approx(3, abs=0.15)
    assert rises_above(trail, 877, watch.now + HALF_LIFE_MS) == pytest.approx(1.5, abs=0.1)


def test_between_tenths_a_count_is_in_proportion() -> None:
    trail = UsageTrace(
        level=0,
        trough=0,
        crest=0,
        anchor=0,
        anchored_at_ms=0,
        since_ms=0,
        counted_at_ms=0,
        drift=0,
        rises=(0.0,) * 7 + (4.0, 2.0, 0.0),
    )
    assert [rises_above(trail, mark, 0) for mark in (800, 850, 900, 950, 1000, 1200)] == [4, 3, 2, 1, 0, 0]
    assert rises_above(trail, 50, 0) == 0


def test_memory_that_wanders_has_drift_and_memory_that_stays_has_none() -> None:
    still, walking = VolatilityWatch(), VolatilityWatch()
    for step in range(40):
        still_trail = still.memory(4, seconds=DRIFT_STEP_MS / 1000)
        walking_trail = walking.memory(4 + 0.4 * (step % 2), seconds=DRIFT_STEP_MS / 1000)
    assert still_trail.drift == 0
    assert walking_trail.drift > 100


def test_one_jump_is_not_taken_for_drift() -> None:
    watch, walk = VolatilityWatch(), VolatilityWatch()
    watch.memory(2, seconds=3600)
    after = watch.memory(8, seconds=1200)
    for step in range(16):
        walked = walk.memory(2 + 0.4 * step, seconds=DRIFT_STEP_MS / 1000)
    assert after.drift < walked.drift / 3
    assert rises_above(after, 400, watch.now) == pytest.approx(1, abs=0.05)


def test_after_a_silence_everything_begins_anew() -> None:
    watch = VolatilityWatch()
    watch.cpu(0.0, seconds=60)
    watch.cpu(1.0, seconds=600)
    watch.now += WATCHED_NODE.offer_ms
    trail = watch.cpu(0.2)
    assert trail == UsageTrace(
        level=200,
        trough=200,
        crest=200,
        anchor=200,
        anchored_at_ms=watch.now,
        since_ms=watch.now,
        counted_at_ms=watch.now,
    )


def test_the_busiest_lent_gpu_counts_and_one_without_memory_is_full() -> None:
    node = a_node("gpu1", gpus=2, gpu_memory_gb=24, thresholds=thresholds())

    def seen(**gpus: tuple[float, float]) -> float:
        usage = a_usage(gpus={int(name[1:]): use for name, use in gpus.items()})
        found = update_volatility(node, usage, None, 0)
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
        known = update_volatility(node, usage, seen, now)
        assert known is not None
        trail = known.cpu
        assert 0 <= trail.trough <= trail.level <= trail.crest <= 1000
        assert len(trail.rises) in (0, TENTHS)
        assert all(0 <= count <= len(uses) for count in trail.rises)
        assert trail.drift >= 0
        seen = NodeObservation(node="gpu1", at_ms=now, usage=usage, volatility=known)
