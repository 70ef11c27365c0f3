"""The monitor with a real grid behind it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.adapters.stores.minute_store import MinuteStore
from distributed_grid.config.sections import Alerts
from distributed_grid.domain.events import HeartbeatReceived, JobCancelled, NodeForgotten
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.errors import BadInput, NotFound
from distributed_grid.monitoring.monitor import DAY_MS, Monitor
from distributed_grid.monitoring.resource_metrics import ResourceTrend
from distributed_grid.monitoring.usage_history import MINUTE
from tests.support.builders import GB, a_capacity, a_request, a_submission
from tests.unit.monitoring.watched_grid import START_MS, Harness, run


def test_heartbeats_of_the_ledger_become_a_trend() -> None:
    async def scenario(harness: Harness) -> None:
        for step in range(100):
            await harness.beat(cpu=0.2 + step / 250, memory_gb=8)
        cpu = await harness.monitor.trend("here", "CPU")
        assert cpu.resource_type == "cpu"
        assert cpu.current == 0.596
        assert cpu.five_minutes is not None
        assert cpu.five_minutes.direction == "rising"
        assert cpu.five_minutes.slope_per_minute == pytest.approx(0.12, abs=1e-3)
        assert (cpu.fifteen_minutes, cpu.one_hour) == (None, None)
        assert cpu.windows == (cpu.five_minutes,)
        memory = await harness.monitor.trend("here", "memory", 5)
        assert memory.five_minutes is not None
        assert (memory.five_minutes.direction, memory.five_minutes.forecast) == ("steady", 0.5)
        assert (await harness.monitor.trend("here", "gpu")).current is None

    run(scenario)


def test_a_node_that_fell_silent_has_no_trend() -> None:
    async def scenario(harness: Harness) -> None:
        for _ in range(100):
            await harness.beat(cpu=0.5)
        harness.clock.ms += 7_000
        assert await harness.monitor.trend("here", "cpu") == ResourceTrend("here", "cpu")
        assert len(await harness.monitor.history("here", 60)) == 4

    run(scenario)


def test_a_restarted_monitor_knows_the_last_day_and_writes_as_often_as_it_is_told(tmp_path: Path) -> None:
    def a_monitor(harness: Harness, seconds: float) -> Monitor:
        minutes = MinuteStore(tmp_path / "history.db", row_bytes=MINUTE.itemsize)
        store = InMemoryStore()
        return Monitor(
            Alerts(), read=harness.grid.read, store=store, offset_ms=lambda: 0, minutes=minutes, write_seconds=seconds
        )

    def rows() -> int:
        with closing(sqlite3.connect(tmp_path / "history.db")) as db:
            return int(db.execute("SELECT count(*) FROM minutes").fetchone()[0])

    async def scenario(harness: Harness) -> None:
        first = harness.monitor = a_monitor(harness, 0.01)
        await first.start()
        for _ in range(20 * 30):
            await harness.beat(cpu=0.5)
        async with asyncio.timeout(20):
            while rows() < 20:
                await asyncio.sleep(0.01)
        await first.stop()
        known = await first.history("here", 60)
        second = harness.monitor = a_monitor(harness, 3600)
        await second.start()
        assert await second.history("here", 60) == known
        before = rows()
        for _ in range(60):
            await harness.beat(cpu=0.5)
        trend = await second.trend("here", "cpu")
        assert trend.fifteen_minutes is not None
        assert trend.fifteen_minutes.forecast == 0.5
        assert rows() == before, "an hour is not over"
        await second.stop()
        assert rows() == before + 2
        harness.clock.ms += 2 * DAY_MS
        third = harness.monitor = a_monitor(harness, 3600)
        await third.start()
        assert await third.history("here", 1440) == []
        await third.write_history()
        assert rows() == 0, "a day is over"
        await third.stop()
        await third.stop()

    run(scenario)


def test_unknown_node_is_refused_by_name() -> None:
    async def scenario(harness: Harness) -> None:
        await harness.beat()
        with pytest.raises(NotFound, match="no node is called there; the nodes are: here"):
            await harness.monitor.trend("there", "cpu")
        with pytest.raises(NotFound):
            await harness.monitor.history("there", 5)
        with pytest.raises(BadInput, match="use cpu, memory or gpu"):
            await harness.monitor.trend("here", "tape")
        with pytest.raises(BadInput, match="use 5, 15 or 60"):
            await harness.monitor.trend("here", "cpu", 7)

    run(scenario)


def test_memory_above_the_mark_raises_an_alert_that_is_cleared_when_the_node_goes() -> None:
    async def scenario(harness: Harness) -> None:
        await harness.beat(memory_gb=15)
        await harness.beat(memory_gb=15)
        assert [(alert.node, alert.resource, alert.state) for alert in harness.alerts] == [("here", "memory", "raised")]
        assert b'grid_alert_raised{node="here",resource="memory"} 1.0' in await harness.monitor.prometheus()
        await harness.grid.handle(NodeForgotten("here"))
        await harness.grid.read(harness.monitor.poll)
        assert harness.alerts[-1].detail == "here left the grid"
        assert harness.monitor.histories.nodes() == []

    run(scenario)


def test_a_silent_node_raises_nothing_and_clears_nothing() -> None:
    async def scenario(harness: Harness) -> None:
        await harness.beat(memory_gb=15)
        for _ in range(100):
            harness.clock.ms += 2_000
            await harness.grid.read(harness.monitor.poll)
        assert [alert.state for alert in harness.alerts] == ["raised"]

    run(scenario)


def test_it_watches_by_itself_once_started() -> None:
    async def scenario(harness: Harness) -> None:
        await harness.monitor.start()
        await harness.monitor.start()
        harness.clock.ms += 1
        await harness.grid.handle(HeartbeatReceived(name="here", usage=Usage(memory_bytes=15 * GB)))
        async with asyncio.timeout(10):
            while not harness.alerts:
                await asyncio.sleep(0.05)
        await harness.monitor.stop()
        await harness.monitor.stop()

    run(scenario)


def test_outcomes_and_events_are_counted_from_the_start_on() -> None:
    async def scenario(harness: Harness) -> None:
        await harness.beat()
        before = (await harness.monitor.prometheus()).decode()
        assert 'grid_jobs_ended_total{outcome="cancelled"}' not in before
        for name in ("one", "two"):
            await harness.grid.handle(a_submission(a_request(name, cores=4)))
        await harness.grid.handle(JobCancelled("two", "ada"))
        for _ in range(2):  # a second scrape counts nothing twice
            after = (await harness.monitor.prometheus()).decode()
            assert 'grid_jobs_ended_total{outcome="cancelled"} 1.0' in after
            assert 'grid_events_total{type="requested"} 2.0' in after

    run(scenario)


def test_taking_in_a_heartbeat_is_cheap() -> None:
    async def scenario(harness: Harness) -> None:
        usage = Usage(
            cpu_busy_milli=500,
            cpu_outside_milli=300,
            memory_bytes=8 * GB,
            memory_outside_bytes=4 * GB,
            gpus=(GpuUsage(0, 10, GB), GpuUsage(1, 20, GB)),
        )
        capacity = a_capacity(gpus=2)
        costs = []
        for round_ in range(5):
            began = time.perf_counter()
            for step in range(1_000):
                harness.monitor.observe("there", usage, capacity, START_MS + 2_000 * (1_000 * round_ + step))
            costs.append((time.perf_counter() - began) / 1_000)
        assert min(costs) < 100e-6  # about 8 µs on an idle core

    run(scenario)
