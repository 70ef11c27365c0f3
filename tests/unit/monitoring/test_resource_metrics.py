"""The collector shows what the control plane knows, and measures nothing itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from distributed_grid.monitoring.resource_metrics import (
    ClusterSummary,
    MinuteRow,
    ResourceMetricsCollector,
    ResourceSnapshot,
    ResourceTrend,
)
from tests.unit.monitoring.watched_grid import Harness, run


class Direct:
    """The monitor of a grid in the same program as a source, as a simulator has it."""

    def __init__(self, harness: Harness, loop: asyncio.AbstractEventLoop) -> None:
        self._house = harness
        self._loop = loop
        self.opened = self.closed = 0

    def _ask(self, question: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(10)

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.closed += 1

    def snapshots(self) -> list[ResourceSnapshot]:
        return self._ask(self._house.monitor.snapshots())

    def trend(self, node: str, resource: str) -> ResourceTrend:
        return self._ask(self._house.monitor.trend(node, resource))

    def summary(self) -> ClusterSummary:
        return self._ask(self._house.monitor.summary())

    def history(self, node: str, minutes: int) -> list[MinuteRow]:
        return self._ask(self._house.monitor.history(node, minutes))


def test_the_collector_shows_what_the_monitor_knows() -> None:
    async def scenario(harness: Harness) -> None:
        await harness.beat(cpu=0.5, memory_gb=4)
        source = Direct(harness, asyncio.get_running_loop())
        collector = ResourceMetricsCollector(source=source)
        await collector.start()
        shown = await asyncio.to_thread(collector.get_all_latest_snapshots)
        assert (shown["here"].cpu_percent, shown["here"].memory_percent) == (50.0, 25.0)
        summary = await asyncio.to_thread(collector.get_cluster_summary)
        assert summary["cpu"]["used"] == 2.0
        trend = await asyncio.to_thread(collector.get_resource_trend, "here", "cpu")
        assert (trend.current, trend.windows) == (0.5, ())
        (minute,) = await asyncio.to_thread(collector.get_history, "here")
        assert (minute.samples, minute.cpu_percent) == (1, 50.0)
        await collector.stop()
        await collector.stop()
        assert (source.opened, source.closed) == (1, 2)

    run(scenario)
