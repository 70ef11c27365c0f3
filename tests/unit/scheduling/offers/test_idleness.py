"""Whether a node is idle: one moment decides nothing, and what lasts decides in time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.node_statistics import Idleness
from distributed_grid.domain.nodes import Node, NodeObservation, Usage
from distributed_grid.scheduling.offers.idleness import idleness
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
        idle = idleness(self.node, usage, self.seen, self.now)
        assert idle is not None
        self.seen = NodeObservation(self.node.name, self.now, usage, idleness=idle)
        return idle

    def cpu(self, usages: Iterable[Usage]) -> list[bool]:
        return [self.measure(usage).cpu.lent for usage in usages]

    def spend(self, seconds: float, usage: Usage) -> list[bool]:
        return self.cpu([usage] * round(seconds / self.every_s))


def flips(lent: list[bool]) -> int:
    return sum(before != after for before, after in pairwise(lent))


def test_without_thresholds_there_is_nothing_to_decide():
    assert idleness(a_node(), BUSY, None, NOW) is None


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


def test_what_was_taken_back_is_lent_again_after_the_whole_dwell():
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
