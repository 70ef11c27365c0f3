"""What the control plane keeps about its nodes: their past, and whom to alert. One object, fed with heartbeats.

Rule 1: `observe` is cheap and never waits; telling people happens in the background.
Rule 2: the same heartbeat may be told twice, so it does not matter who tells it: `look` takes in what the ledger has
seen since the last look, whoever else calls `observe`.
Rule 3: nothing here is stored; after a restart the past begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from distributed_grid.config.sections import Alerts
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import NotFound
from distributed_grid.monitoring.alert_delivery import AlertDelivery
from distributed_grid.monitoring.alerts import Alert, AlertRules, marks_of
from distributed_grid.monitoring.event_counters import EventCounters
from distributed_grid.monitoring.history import ClusterHistory, MinuteRow
from distributed_grid.monitoring.pressure_readings import foreseen, readings
from distributed_grid.monitoring.rebalance_summary import RebalancingSummary, open_in, summary_of
from distributed_grid.monitoring.scheduling_metrics import SchedulingFigures, SchedulingMetrics
from distributed_grid.monitoring.snapshots import ResourceSnapshot, snapshots
from distributed_grid.monitoring.summary import ClusterSummary, summarise
from distributed_grid.monitoring.trends import ResourceTrend
from distributed_grid.ports import Store

LOOK_SECONDS = 2.0
T = TypeVar("T")
log = logging.getLogger(__name__)


class Reads(Protocol):
    """Asks the owner of the ledger: `Grid.read`."""

    async def __call__(self, question: Callable[[Ledger, int], T], /) -> T: ...


class Monitor:
    """Watches over all nodes of a grid. `start` and `stop` are safe to call twice."""

    def __init__(
        self,
        alerts: Alerts,
        *,
        read: Reads,
        store: Store,
        offset_ms: Callable[[], int],
        on_alert: Callable[[Alert], None] | None = None,
    ) -> None:
        """`offset_ms`: how far the wall clock is ahead of the grid's time; `on_alert` hears of each change."""
        self.past = ClusterHistory()
        self._alarms = AlertRules(marks_of(alerts))
        self._notices = AlertDelivery(alerts, offset_ms=offset_ms)
        self._read = read
        self._totals = EventCounters(store)
        self._scheduling = SchedulingMetrics(store)
        self._offset_ms = offset_ms
        self._on_alert = on_alert
        self._task: asyncio.Task[None] | None = None

    def observe(self, node: str, usage: Usage, capacity: Capacity, at_ms: int) -> None:
        """Take a heartbeat in; one that was told before changes nothing."""
        if self.past.add(node, usage, capacity, at_ms):
            self._tell(self._alarms.observe(node, usage, capacity, at_ms))

    def look(self, ledger: Ledger, now: int) -> None:
        """Take in what the ledger has seen since the last look, and let go of the nodes that left it."""
        for name, seen in ledger.sightings.items():
            node = ledger.nodes.get(name)
            if node is not None and seen.usage is not None:
                self.observe(name, seen.usage, node.capacity, seen.at_ms)
        for name in self.past.nodes():
            if name not in ledger.nodes:
                self.past.forget(name)
                self._tell(self._alarms.forget(name, now))

    def _tell(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._notices.tell(alert)
            if self._on_alert is not None:
                self._on_alert(alert)

    async def start(self) -> None:
        """Begin to watch."""
        await self._notices.start()
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching; notices that wait are dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._notices.stop()

    async def _watch(self) -> None:
        while True:
            try:
                await self._read(self.look)
            except Exception:  # the outermost loop: the next look may well succeed
                log.exception("the nodes could not be looked at")
            await asyncio.sleep(LOOK_SECONDS)

    async def snapshots(self) -> list[ResourceSnapshot]:
        """What every node does at this moment."""
        return await self._read(lambda ledger, now: snapshots(ledger, now, self._offset_ms()))

    async def summary(self) -> ClusterSummary:
        """The cluster as one."""
        return await self._read(summarise)

    async def trend(self, node: str, resource: str, window: int | None = None) -> ResourceTrend:
        """Where a resource of a node is going. NotFound where there is no such node."""

        def question(ledger: Ledger, now: int) -> ResourceTrend:
            _make_sure_of(ledger, node)
            self.look(ledger, now)
            return self.past.trend(node, resource, now, window)

        return await self._read(question)

    async def readings(self, ahead_ms: int = 0) -> tuple[PressureReading, ...]:
        """How hard every node works, and with `ahead_ms` where that leads; unknown nodes have no numbers."""

        def question(ledger: Ledger, now: int) -> tuple[int, tuple[PressureReading, ...]]:
            self.look(ledger, now)
            return now, readings(ledger, now)

        now, found = await self._read(question)
        if not ahead_ms:
            return found
        led: list[PressureReading] = []
        for one in found:
            led.append(foreseen(one, self.past, now, ahead_ms))
            await asyncio.sleep(0)  # a forecast takes its time: others go first
        return tuple(led)

    async def rebalancing(self) -> RebalancingSummary:
        """How often the grid was rebalanced of late, and what there is to recommend."""
        await asyncio.to_thread(self._totals.catch_up)
        figures = await self.scheduling()
        held, advised = await self._read(lambda ledger, now: open_in(ledger))
        return summary_of(figures["rebalances_per_hour"], self._totals.rebalances, held=held, recommended=advised)

    async def scheduling(self) -> SchedulingFigures:
        """How well requests were served over the last day."""
        now = await self._read(lambda ledger, now: now)
        return await asyncio.to_thread(self._scheduling.read, now)

    async def history(self, node: str, minutes: int) -> list[MinuteRow]:
        """The last so many minutes of a node. NotFound where there is no such node."""

        def question(ledger: Ledger, now: int) -> list[MinuteRow]:
            _make_sure_of(ledger, node)
            self.look(ledger, now)
            return self.past.minutes(node, now, minutes, self._offset_ms())

        return await self._read(question)

    async def prometheus(self) -> bytes:
        """The text of a scrape, of type `prometheus.CONTENT_TYPE`."""
        from distributed_grid.monitoring.prometheus import exposition, take_reading  # not needed to start up

        await asyncio.to_thread(self._totals.catch_up)
        reading = await self._read(lambda ledger, now: take_reading(ledger, now, self._alarms.raised()))
        totals, figures = self._totals, await self.scheduling()
        return await asyncio.to_thread(
            exposition, reading, dict(totals.events), dict(totals.outcomes), dict(totals.rebalances), figures
        )


def _make_sure_of(ledger: Ledger, node: str) -> None:
    if node not in ledger.nodes:
        known = ", ".join(sorted(ledger.nodes)) or "none"
        raise NotFound(f"no node is called {node}; the nodes are: {known}")
