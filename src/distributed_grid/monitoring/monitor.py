"""Monitor of the control plane: node histories, alerts and figures, fed with heartbeats.

`observe` is cheap and never waits; alerts are delivered in the background. The same heartbeat may be reported twice:
by `observe`, and by `poll` from the ledger. The minutes of the last day, or of the configured time, are kept in a file
of their own, never in the ledger's commit, and loaded after a restart; a gap stays a gap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from distributed_grid.adapters.stores.minute_store import MinuteStore
from distributed_grid.api.answers.metrics import (
    ClusterSummary,
    MinuteRow,
    RebalancingSummary,
    ResourceSnapshot,
    ResourceTrend,
    SchedulingFigures,
)
from distributed_grid.config.sections import Alerts
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import NotFound
from distributed_grid.monitoring.alerts import Alert, AlertDelivery, AlertRules, alert_thresholds
from distributed_grid.monitoring.scheduling_metrics import EventCounters, SchedulingMetrics
from distributed_grid.monitoring.snapshots import pressure_readings, snapshots, summarise
from distributed_grid.monitoring.usage_history import MINUTE_MS, ClusterHistory
from distributed_grid.ports import Store
from distributed_grid.scheduling.pressure.scan import automatic_leases
from distributed_grid.supervision import start_restarted

POLL_SECONDS = 2.0
WRITE_SECONDS = 10.0
DAY_MS = 86_400_000
T = TypeVar("T")
log = logging.getLogger(__name__)


class LedgerReader(Protocol):
    """Reads the ledger in a consistent state: `Grid.read`."""

    async def __call__(self, question: Callable[[Ledger, int], T], /) -> T: ...


class Monitor:
    """Histories, alerts and figures of all nodes of a grid. `start` and `stop` are safe to call twice."""

    def __init__(
        self,
        alerts: Alerts,
        *,
        read: LedgerReader,
        store: Store,
        offset_ms: Callable[[], int],
        on_alert: Callable[[Alert], None] | None = None,
        minutes: MinuteStore | None = None,
        write_seconds: float = WRITE_SECONDS,
        retention_ms: int = DAY_MS,
        cutoff_ms: Callable[[int], int] | None = None,
    ) -> None:
        """`offset_ms`: lead of the wall clock over the grid's time; `on_alert` is called at each change.

        The history is written to `minutes` every `write_seconds`, and kept for `retention_ms`; `cutoff_ms` turns that
        age into a time of the grid.
        """
        self.histories = ClusterHistory(retention_ms)
        self._retention_ms = retention_ms
        self._settings = alerts
        self._cutoff_ms = cutoff_ms
        self._alerts = AlertRules(alert_thresholds(alerts))
        self._delivery = AlertDelivery(alerts, offset_ms=offset_ms)
        self._read = read
        self._counters = EventCounters(store)
        self._scheduling = SchedulingMetrics(store)
        self._offset_ms = offset_ms
        self._on_alert = on_alert
        self._minutes = minutes
        self._write_seconds = write_seconds
        self._written_ms = 0
        self._tasks: list[asyncio.Task[None]] = []

    def observe(self, node: str, usage: Usage, capacity: Capacity, at_ms: int) -> None:
        """Record a heartbeat; a repeated one changes nothing."""
        if self.histories.add(node, usage, capacity, at_ms):
            self._report(self._alerts.observe(node, usage, capacity, at_ms))

    def poll(self, ledger: Ledger, now: int) -> None:
        """Record the ledger's observations since the last poll, and drop the nodes that left."""
        for name, seen in ledger.observations.items():
            node = ledger.nodes.get(name)
            if node is not None and seen.usage is not None:
                self.observe(name, seen.usage, node.capacity, seen.at_ms)
        for name in self.histories.nodes():
            if name not in ledger.nodes:
                self.histories.forget(name)
                self._report(self._alerts.forget(name, now))

    def _poll_for(self, node: str, ledger: Ledger, now: int) -> None:
        """Poll the ledger for a question about a node. Raises NotFound for an unknown one."""
        if node not in ledger.nodes:
            known = ", ".join(sorted(ledger.nodes)) or "none"
            raise NotFound(f"no node is called {node}; the nodes are: {known}")
        self.poll(ledger, now)

    def set_alerts(self, alerts: Alerts) -> None:
        """Replace thresholds and receivers: alerts are cleared, and raised again by the next measurements. The same
        alerts change nothing."""
        if alerts != self._settings:
            self._settings = alerts
            self._report(self._alerts.set_thresholds(alert_thresholds(alerts)))
            self._delivery.set_receivers(alerts)

    def send_alert(self, alert: Alert) -> None:
        """Log and deliver an alert of another source."""
        self._delivery.send(alert)

    def _report(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._delivery.send(alert)
            if self._on_alert is not None:
                self._on_alert(alert)

    async def start(self) -> None:
        """Load the history, then poll the ledger in the background."""
        await self._delivery.start()
        if self._tasks:
            return
        if self._minutes is not None:
            now = await self._read(lambda ledger, now: now)
            self.histories.restore(await asyncio.to_thread(self._minutes.load, now - self._retention_ms, now))
            self._written_ms = now - now % MINUTE_MS
            self._tasks.append(start_restarted(self._write_forever, "writing of the history"))
        self._tasks.append(start_restarted(self._poll_forever, "polling of nodes"))

    async def stop(self) -> None:
        """Stop polling, and write the history; alerts that wait to be delivered are dropped."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks and self._minutes is not None:
            await self.write_history()
            self._minutes.close()
        await self._delivery.stop()

    async def _write_forever(self) -> None:
        while True:
            await asyncio.sleep(self._write_seconds)
            await self.write_history()

    async def write_history(self) -> None:
        """Write the minutes changed since the last write, the current one included."""
        if self._minutes is None:
            return
        now, rows = await self._read(lambda ledger, now: (now, self.histories.written_rows(self._written_ms)))
        keep_ms = self._retention_ms
        before_ms = now - keep_ms if self._cutoff_ms is None else self._cutoff_ms(keep_ms)
        if await asyncio.to_thread(self._minutes.write, rows, before_ms=before_ms):
            self._written_ms = now - now % MINUTE_MS

    async def _poll_forever(self) -> None:
        while True:
            try:
                await self._read(self.poll)
            except Exception:  # the outermost loop: the next poll may well succeed
                log.exception("the nodes could not be polled")
            await asyncio.sleep(POLL_SECONDS)

    async def snapshots(self) -> list[ResourceSnapshot]:
        return await self._read(lambda ledger, now: snapshots(ledger, now, self._offset_ms()))

    async def summary(self) -> ClusterSummary:
        return await self._read(summarise)

    async def trend(self, node: str, resource: str, window: int | None = None) -> ResourceTrend:
        """Trend of a resource of a node. Raises NotFound for an unknown node."""

        def question(ledger: Ledger, now: int) -> ResourceTrend:
            self._poll_for(node, ledger, now)
            return self.histories.trend(node, resource, now, window)

        return await self._read(question)

    async def readings(self, ahead_ms: int = 0, *, only: Collection[str] | None = None) -> tuple[PressureReading, ...]:
        """The pressure on every node; unknown nodes have no numbers. `ahead_ms` adds forecasts, to the nodes in `only`
        if it is given."""
        now, measured = await self._read(lambda ledger, now: (now, self.readings_now(ledger, now)))
        if not ahead_ms:
            return measured
        readings: list[PressureReading] = []
        for reading in measured:
            if only is None or reading.node in only:
                readings.append(self.histories.with_forecasts(reading, now, ahead_ms))
                await asyncio.sleep(0)  # forecasts are slow: other tasks run in between
            else:
                readings.append(reading)
        return tuple(readings)

    def readings_now(self, ledger: Ledger, now: int) -> tuple[PressureReading, ...]:
        """The pressure on every node, within a read of the ledger."""
        self.poll(ledger, now)
        return pressure_readings(ledger, now)

    async def levels(self) -> dict[str, dict[str, float]]:
        """The mean use of each resource of each node over the last minute, as parts of the whole."""

        def question(ledger: Ledger, now: int) -> dict[str, dict[str, float]]:
            self.poll(ledger, now)
            return {name: self.histories.minute_levels(name, now) for name in ledger.nodes}

        return await self._read(question)

    async def rebalancing(self) -> RebalancingSummary:
        """Recent rebalances, and the open recommendations."""
        await asyncio.to_thread(self._counters.catch_up)
        figures, totals = await self.scheduling(), self._counters.rebalances

        def question(ledger: Ledger, now: int) -> tuple[int, int]:
            advised = sum(state.advice is not None for state in ledger.rebalance_states.values())
            return len(automatic_leases(ledger)), advised

        held, advised = await self._read(question)
        return {
            "rebalances_per_hour": figures["rebalances_per_hour"],
            "asked": totals["asked"],
            "refused": totals["refused"],
            "used": totals["used"],
            "given_back": totals["given_back"],
            "automatic_leases": held,
            "recommendations": advised,
        }

    async def scheduling(self) -> SchedulingFigures:
        now = await self._read(lambda ledger, now: now)
        return await asyncio.to_thread(self._scheduling.read, now)

    async def history(self, node: str, minutes: int) -> list[MinuteRow]:
        """The last `minutes` minutes of a node. Raises NotFound for an unknown node."""

        def question(ledger: Ledger, now: int) -> list[MinuteRow]:
            self._poll_for(node, ledger, now)
            return self.histories.minutes(node, now, minutes, self._offset_ms())

        return await self._read(question)

    async def prometheus(self) -> bytes:
        """The text of a scrape, of type `prometheus.CONTENT_TYPE`."""
        from distributed_grid.monitoring.prometheus import exposition, read_ledger  # not needed to start up

        await asyncio.to_thread(self._counters.catch_up)
        reading = await self._read(lambda ledger, now: read_ledger(ledger, now, self._alerts.raised()))
        counters, figures = self._counters, await self.scheduling()
        counted = (dict(counters.events), dict(counters.outcomes), dict(counters.rebalances))
        return await asyncio.to_thread(exposition, reading, *counted, figures, dict(counters.moves))
