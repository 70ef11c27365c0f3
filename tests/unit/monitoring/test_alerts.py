"""Alert rules: raised once, cleared once, and never by silence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.config import ClusterConfig
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.monitoring.alerts import (
    CLEARED,
    Alert,
    AlertRules,
    AlertState,
    AlertThreshold,
    alert_thresholds,
    next_state,
)
from tests.support.builders import GB, NOW, a_capacity

MARK = AlertThreshold(0.75, margin=0.05, clear_after_ms=60_000)
SIXTEEN = a_capacity(memory_gb=16)


def alerts_of(text: str) -> AlertRules:
    return AlertRules(alert_thresholds(ClusterConfig.from_text(text).alerts))


class Watched:
    """One node's alerts, given a value every two seconds."""

    def __init__(self, text: str = "name: x", capacity: Capacity = SIXTEEN) -> None:
        self.alerts = alerts_of(text)
        self.capacity = capacity
        self.now = NOW

    def uses(self, *, memory_gb: float = 0, cpu: float = 0, gpu: float | None = None, beats: int = 1) -> list[Alert]:
        gpus = () if gpu is None else (GpuUsage(0, round(1000 * gpu)),)
        usage = Usage(round(1000 * cpu), 0, round(memory_gb * GB), 0, gpus)
        changes: list[Alert] = []
        for _ in range(beats):
            self.now += 2_000
            changes += self.alerts.observe("gpu1", usage, self.capacity, self.now)
        return changes


def test_memory_above_three_quarters_raises_by_default_and_only_once() -> None:
    node = Watched()
    assert node.uses(memory_gb=12, beats=10) == []
    (alert,) = node.uses(memory_gb=12.5, beats=10)
    assert (alert.node, alert.resource, alert.state, alert.mark) == ("gpu1", "memory", "raised", 0.75)
    assert alert.value == 0.7812
    assert alert.detail == "gpu1: memory at 78 %, above the mark of 75 %"
    assert node.alerts.raised() == [("gpu1", "memory")]


def test_it_is_cleared_only_well_below_the_mark_and_for_a_minute() -> None:
    node = Watched()
    node.uses(memory_gb=14)
    assert node.uses(memory_gb=11.5, beats=100) == []  # 72 %: below the mark, not below the margin
    assert node.uses(memory_gb=10, beats=29) == []
    assert node.uses(memory_gb=11.5) == []  # a relapse: the minute begins anew
    assert node.uses(memory_gb=10, beats=30) == []
    (alert,) = node.uses(memory_gb=10)
    assert (alert.state, alert.detail) == ("cleared", "gpu1: memory at 62 %, back below the mark of 75 %")
    assert node.alerts.raised() == []


def test_busy_cores_and_gpus_raise_only_where_a_mark_is_set_and_when_they_stay_busy() -> None:
    assert Watched().uses(cpu=1.0, gpu=1.0, beats=100) == []
    node = Watched("alerts: {cpu: 0.9, gpu: 0.9, memory: 0.75}")
    assert node.uses(cpu=1.0, gpu=0.5, beats=15) == []
    assert node.uses(cpu=0.2, gpu=1.0, beats=15) == []
    (busy,) = node.uses(cpu=0.2, gpu=1.0)
    assert (busy.resource, busy.detail) == ("gpu", "gpu1: GPU at 100 %, above the mark of 90 %")


def test_what_is_not_measured_raises_nothing() -> None:
    node = Watched("alerts: {gpu: 0.5}", Capacity())
    assert node.uses(memory_gb=1, beats=50) == []
    assert node.alerts.raised() == []


def test_a_silence_interrupts_the_minute() -> None:
    node = Watched()
    node.uses(memory_gb=14)
    assert node.uses(memory_gb=1, beats=20) == []
    node.now += 3_600_000
    assert node.uses(memory_gb=1, beats=30) == []
    (alert,) = node.uses(memory_gb=1)
    assert alert.state == "cleared"


def test_a_node_that_leaves_takes_its_alerts_with_it() -> None:
    node = Watched()
    node.uses(memory_gb=14)
    (alert,) = node.alerts.forget("gpu1", node.now)
    assert (alert.state, alert.detail) == ("cleared", "gpu1 left the grid")
    assert node.alerts.forget("gpu1", node.now) == []


values = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([2_000, 2_000, 2_000, 5_000, 30_000])), max_size=200)


@given(values, st.sampled_from([0, 10_000]))
def test_raised_and_cleared_take_turns_and_never_come_without_cause(
    changes: list[tuple[float, int]], raise_after_ms: int
) -> None:
    mark = AlertThreshold(0.75, 0.05, raise_after_ms, 20_000)
    standing, at_ms, since_change = CLEARED, NOW, list[tuple[int, float]]()
    for value, step in changes:
        at_ms += step
        since_change.append((at_ms, value))
        before, standing = standing, next_state(standing, mark, value, at_ms)
        if standing.raised is before.raised:
            continue
        dwell = raise_after_ms if standing.raised else mark.clear_after_ms
        begin = later = at_ms
        for when, seen in reversed(since_change):
            if later - when > 6_000 or not (seen > 0.75 if standing.raised else seen <= 0.75 - 0.05):
                break
            begin = later = when
        assert at_ms - begin >= dwell
        since_change = []


@given(st.lists(st.floats(0.7001, 0.75), max_size=100), st.booleans())
def test_between_the_marks_nothing_changes(changes: list[float], raised: bool) -> None:
    standing = AlertState(raised)
    for place, value in enumerate(changes):
        standing = next_state(standing, MARK, value, NOW + 2_000 * place)
    assert standing.raised is raised
