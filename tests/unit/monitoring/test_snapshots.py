"""Snapshots, summary, pressure and readings: an unknown node is neither idle nor full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.nodes import GpuUsage, Node, Usage, pressure
from distributed_grid.domain.rebalancing import WATCHED_RESOURCES, PressureReading
from distributed_grid.monitoring.snapshots import pressure_readings, snapshots, summarise
from tests.support.builders import GB, Scenario, a_capacity, a_node, a_request


def busy(cpu: float, memory_gb: float, *gpus: float) -> Usage:
    devices = tuple(GpuUsage(index, round(1000 * part), GB) for index, part in enumerate(gpus))
    return Usage(
        cpu_busy_milli=round(1000 * cpu),
        cpu_outside_milli=round(500 * cpu),
        memory_bytes=round(memory_gb * GB),
        memory_outside_bytes=round(memory_gb * GB / 2),
        gpus=devices,
    )


@pytest.mark.parametrize(
    ("usage", "score"),
    [
        (busy(0, 0), 0.0),
        (busy(1, 16), 1.0),
        (busy(1, 0), 0.5),
        (busy(0.5, 4), 0.375),
        (busy(1, 0, 0), 0.3),
        (busy(0, 16, 0), 0.3),
        (busy(0, 0, 1), 0.4),
        (busy(0, 0, 1, 0), 0.2),
        (busy(1, 99, 1), 1.0),
    ],
)
def test_the_pressure_score_is_30_30_40_renormalised_without_gpus(usage: Usage, score: float) -> None:
    assert pressure(a_capacity(memory_gb=16), usage) == score


def test_a_node_that_is_heard_is_shown_as_it_was_measured() -> None:
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16, gpus=2))
    scenario.heartbeat("gpu1", busy(0.5, 4, 0.2, 0.6))
    scenario.ask(a_request(cores=1, memory_gb=2))
    scenario.now += 1_500
    (shown,) = snapshots(scenario.ledger, scenario.now, offset_ms=60_000)
    assert (shown.node_id, shown.state, shown.known) == ("gpu1", "alive", True)
    assert (shown.cpu_cores, shown.memory_gb, shown.gpus) == (4.0, 16.0, 2)
    assert (shown.cpu_percent, shown.cpu_outside_percent) == (50.0, 25.0)
    assert (shown.memory_percent, shown.memory_used_gb, shown.memory_outside_gb) == (25.0, 4.0, 2.0)
    assert (shown.gpu_percent, shown.gpu_memory_used_gb) == (40.0, 2.0)
    assert (shown.cpu_lent, shown.memory_lent_gb, shown.gpus_lent) == (1.0, 2.0, 0.0)
    assert shown.pressure == pytest.approx(0.3 * 0.5 + 0.3 * 0.25 + 0.4 * 0.4, abs=1e-3)
    assert shown.seconds_since_heard == 1.5
    assert shown.timestamp == "1970-01-12T13:47:40.000Z"


def test_a_node_that_is_not_heard_has_no_measurements_though_it_had_some() -> None:
    scenario = Scenario(a_node("gpu1", gpus=1))
    scenario.heartbeat("gpu1", busy(0.5, 4, 0.5))
    scenario.now += 6_001
    (shown,) = snapshots(scenario.ledger, scenario.now)
    assert (shown.known, shown.seconds_since_heard) == (False, 6.001)
    measured = (shown.cpu_percent, shown.memory_percent, shown.memory_used_gb, shown.gpu_percent, shown.pressure)
    assert measured == (None,) * 5
    assert shown.cpu_cores == 4.0


def test_the_summary_counts_what_silent_nodes_have_as_unknown() -> None:
    scenario = Scenario(a_node("busy", gpus=1), a_node("idle", gpus=1), a_node("silent", gpus=2, memory_gb=64))
    scenario.now += 10_000
    scenario.heartbeat("busy", busy(0.75, 12, 1))
    scenario.heartbeat("idle", busy(0, 0, 0))
    scenario.advance(0, heard=False)
    scenario.ask(a_request(cores=2))
    summary = summarise(scenario.ledger, scenario.now)
    assert summary["nodes"] == {"total": 3, "known": 2, "unknown": 1, "by_state": {"alive": 2, "suspect": 1}}
    assert summary["cpu"] == {"total": 12.0, "used": 3.0, "idle": 5.0, "unknown": 4.0, "lent": 2.0}
    assert summary["memory_gb"] == {"total": 96.0, "used": 12.0, "idle": 20.0, "unknown": 64.0, "lent": 0.0}
    assert summary["gpu"] == {"total": 4.0, "used": 1.0, "idle": 1.0, "unknown": 2.0, "lent": 0.0}
    assert summary["pressure"] == {"mean": 0.425, "max": 0.85, "max_node": "busy"}
    assert summary["unknown_nodes"] == [{"node_id": "silent", "state": "suspect", "seconds_since_heard": 10.0}]


def test_where_nobody_is_known_there_is_no_pressure() -> None:
    scenario = Scenario(a_node("gpu1"))
    scenario.advance(7, heard=False)
    summary = summarise(scenario.ledger, scenario.now)
    assert summary["pressure"] is None
    assert (summary["cpu"]["used"], summary["cpu"]["idle"], summary["cpu"]["unknown"]) == (0.0, 0.0, 4.0)


usages = st.builds(busy, st.floats(0, 1.5), st.floats(0, 99), st.floats(0, 1))


@given(st.lists(st.tuples(st.none() | usages, st.integers(0, 3)), max_size=6))
def test_total_is_used_and_idle_and_unknown(nodes: list[tuple[Usage | None, int]]) -> None:
    scenario = Scenario(*(a_node(f"n{place}", gpus=gpus) for place, (_, gpus) in enumerate(nodes)))
    scenario.now += 10_000
    for place, (usage, _) in enumerate(nodes):
        if usage is not None:
            scenario.heartbeat(f"n{place}", usage)
    summary = summarise(scenario.ledger, scenario.now)
    for part in (summary["cpu"], summary["memory_gb"], summary["gpu"]):
        assert part["total"] == pytest.approx(part["used"] + part["idle"] + part["unknown"], abs=0.003)
        assert min(part["used"], part["idle"], part["unknown"], part["lent"]) >= 0
    assert summary["nodes"]["unknown"] == len(summary["unknown_nodes"]) == sum(usage is None for usage, _ in nodes)


def a_known(node: Node, usage: Usage) -> PressureReading:
    scenario = Scenario(node)
    scenario.heartbeat(node.name, usage)
    return pressure_readings(scenario.ledger, scenario.now)[0]


def test_a_reading_is_in_thousandths_of_what_the_node_has() -> None:
    usage = Usage(
        cpu_busy_milli=250,
        cpu_outside_milli=0,
        memory_bytes=4 * GB,
        memory_outside_bytes=0,
        gpus=(GpuUsage(0, 900), GpuUsage(1, 100)),
    )
    found = a_known(a_node("gpu1", memory_gb=16, gpus=2), usage)
    assert [found.level(resource) for resource in WATCHED_RESOURCES] == [250, 250, 500]
    assert found.score == 350
    assert a_known(a_node("gpu1", gpus=1), Usage()).gpu is None  # nobody measured it


def test_of_a_node_nobody_hears_nothing_is_known() -> None:
    scenario = Scenario(a_node("gpu1"), a_node("gpu2"))
    scenario.now += 7_000
    scenario.heartbeat("gpu2")
    silent, heard = pressure_readings(scenario.ledger, scenario.now)
    assert silent == PressureReading(node="gpu1")
    assert heard.score == 0
