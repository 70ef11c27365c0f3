"""A grid whose monitor is polled by the test, with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.config.sections import Alerts
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import HeartbeatReceived, NodeDeclared
from distributed_grid.domain.nodes import Usage
from distributed_grid.monitoring.alerts import Alert
from distributed_grid.monitoring.monitor import Monitor
from tests.support.builders import GB, a_node

START_MS = 1_700_000_040_000


class ManualClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms


class Harness:
    """A grid with one node of four cores and 16 GB, and its monitor."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        store = InMemoryStore()
        self.grid = Grid(store, self.clock)
        self.alerts: list[Alert] = []
        self.monitor = Monitor(
            Alerts(), read=self.grid.read, store=store, offset_ms=lambda: 1_000, on_alert=self.alerts.append
        )

    async def beat(self, cpu: float = 0, memory_gb: float = 0, *, seconds: float = 2, name: str = "here") -> None:
        self.clock.ms += round(1000 * seconds)
        await self.grid.handle(
            HeartbeatReceived(
                name=name,
                usage=Usage(
                    cpu_busy_milli=round(1000 * cpu),
                    cpu_outside_milli=0,
                    memory_bytes=round(memory_gb * GB),
                    memory_outside_bytes=0,
                ),
            )
        )
        await self.grid.read(self.monitor.poll)


def run(scenario: Callable[[Harness], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        harness = Harness()
        await harness.grid.start()
        await harness.grid.handle(NodeDeclared(a_node("here", cores=4, memory_gb=16)))
        try:
            await scenario(harness)
        finally:
            await harness.monitor.stop()
            await harness.grid.stop()

    asyncio.run(asyncio.wait_for(whole(), 60))
