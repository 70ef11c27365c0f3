"""Reports from the ledger, the audit trail and the monitor: explanations, lending report, events, metrics.

In the lending report a lease counts from its grant to its end, with what was requested; the part before the reported
time does not count. Attempts of jobs have leases of their own, so leases are all there is. Sums are exact integers;
hours are computed last.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer, utc
from distributed_grid.api.answers.explanation import Explanation
from distributed_grid.api.answers.metrics import MetricsAnswer
from distributed_grid.api.answers.offloading import IsConnected
from distributed_grid.api.answers.reports import EventRecord, LendingReport, LendingRow, LentTotals
from distributed_grid.control.grid import Grid
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import claimed_amount
from distributed_grid.domain.resources import GB, ResourceType
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.monitor import Monitor
from distributed_grid.ports import LentRow
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import AnswerRenderer
from distributed_grid.server.endpoints import READ, endpoint, get
from distributed_grid.server.services.explanation import explain
from distributed_grid.server.services.records import stream_events

HOUR_MS = 3_600_000
DAY_MS = 86_400_000


class ReportService:
    """Answers the read-only requests about the present and the past."""

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        monitor: Monitor,
        renderer: AnswerRenderer,
        is_connected: IsConnected = lambda node: True,
    ) -> None:
        self._is_connected = is_connected
        self._grid = grid
        self._viewer = viewer
        self._monitor = monitor
        self._renderer = renderer

    @endpoint(
        READ,
        get("/leases/{name}/explain", "leases", name="id", fixed={"kind": "lease"}),
        get("/jobs/{name}/explain", "jobs", name="id", fixed={"kind": "job"}),
    )
    async def explain(self, op: requests.Explain, caller: Caller) -> Explanation:
        """Why it waits, why it is there, why it was stopped, when it will start. Only for its owner and admins."""
        viewer, is_connected = self._viewer().for_reader(caller.reader), self._is_connected
        return await self._renderer.shared(
            (op, viewer.reader),
            lambda: explain(self._grid, viewer, op.id, kind=op.kind, is_connected=is_connected),
        )

    @endpoint(READ, get("/ledger", "leases"))
    async def lending(self, op: requests.GetLendingReport, caller: Caller) -> LendingReport:
        """Amounts that were lent, by lender and borrower."""

        async def report() -> LendingReport:
            since_ms = max(self._grid.now_ms() - round(1000 * op.since_seconds), 1)
            return await lending_report(self._grid, self._viewer(), since_ms=since_ms, by=op.by)

        return await self._renderer.shared(op, report)

    @endpoint(READ, streams=True)
    def events(self, op: requests.ListEvents, caller: Caller) -> AsyncGenerator[EventRecord, None]:
        """The audit trail, event by event, and with `follow` without an end."""
        return stream_events(self._grid, self._viewer().for_reader(caller.reader), op)

    @endpoint(
        READ,
        *(
            get(f"/metrics/{kind}", "metrics", fixed={"kind": kind}, hidden=("node", "resource_type", "window"))
            for kind in ("snapshots", "summary", "rebalancing", "scheduling")
        ),
        get("/metrics/trend/{name}/{resource_type}", "metrics", name="node", fixed={"kind": "trend"}),
        get("/metrics/history/{name}", "metrics", name="node", fixed={"kind": "history"}, hidden=("resource_type",)),
    )
    async def metrics(self, op: requests.GetMetrics, caller: Caller) -> MetricsAnswer:
        return await self._renderer.shared(op, lambda: self._metrics(op))

    async def _metrics(self, op: requests.GetMetrics) -> MetricsAnswer:
        monitor = self._monitor
        match op.kind:
            case "snapshots":
                return MetricsAnswer(snapshots=await monitor.snapshots())
            case "levels":
                return MetricsAnswer(levels=await monitor.levels())
            case "summary":
                return MetricsAnswer(summary=await monitor.summary())
            case "rebalancing":
                return MetricsAnswer(rebalancing=await monitor.rebalancing())
            case "scheduling":
                return MetricsAnswer(scheduling=await monitor.scheduling())
            case "prometheus":
                return MetricsAnswer(text=(await monitor.prometheus()).decode())
        if not op.node:
            raise BadInput(f"metrics of kind {op.kind} are about one node: name it")
        if op.kind == "trend":
            if not op.resource_type:
                raise BadInput("a trend is about one resource: cpu, memory or gpu")
            return MetricsAnswer(trend=await monitor.trend(op.node, op.resource_type, op.window))
        return MetricsAnswer(history=await monitor.history(op.node, 60 if op.window is None else op.window))


class LentSum(Struct):
    """Sum of loans: leases, and amounts times milliseconds; `held` is the part that is still held, without times."""

    count: int = 0
    cpu_milli_ms: int = 0
    memory_byte_ms: int = 0
    gpu_milli_ms: int = 0
    held: int = 0
    held_cpu_milli: int = 0
    held_memory_bytes: int = 0
    held_gpu_milli: int = 0

    def add(self, other: LentSum) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def totals(self) -> LentTotals:
        return LentTotals(
            leases=self.count,
            core_hours=self.cpu_milli_ms / 1000 / HOUR_MS,
            gb_hours=self.memory_byte_ms / GB / HOUR_MS,
            gpu_hours=self.gpu_milli_ms / 1000 / HOUR_MS,
            held_leases=self.held,
            held_cores=self.held_cpu_milli / 1000,
            held_gb=self.held_memory_bytes / GB,
            held_gpus=self.held_gpu_milli / 1000,
        )


class LentEntry(Struct, frozen=True):
    """Loans of one node to one user, for one target; the day is that of a report by days."""

    user: str
    node: str
    target: str
    day: int
    sum: LentSum


async def lending_report(grid: Grid, viewer: Viewer, *, since_ms: int, by: str) -> LendingReport:
    """The answer to `grid ledger`: lender by borrower, or summed up by one of them or by day."""

    def living(ledger: Ledger, now: int) -> tuple[int, list[LentEntry]]:
        """The loans that are held now, up to now, as today's."""
        entries = []
        for lease in ledger.leases.values():
            if not lease.holds:
                continue
            request, ask = lease.request, lease.request.ask
            ms = max(now - max(lease.granted_at_ms, since_ms), 0)
            total = LentSum(
                count=1,
                cpu_milli_ms=ask.cpu_milli * ms,
                memory_byte_ms=ask.memory_bytes * ms,
                gpu_milli_ms=ask.gpu_milli * ms,
                held=1,
                held_cpu_milli=claimed_amount(lease, ResourceType.CPU),
                held_memory_bytes=claimed_amount(lease, ResourceType.MEMORY),
                held_gpu_milli=claimed_amount(lease, ResourceType.GPU),
            )
            entries.append(LentEntry(request.user, lease.node, request.target, now // DAY_MS, total))
        return now, entries

    now, held = await grid.read(living)
    over = await grid.query(lambda store: store.lent(since_ms=since_ms))
    entries = [*map(_entry, over), *held]
    lenders = _summed(entries, lambda entry: (entry.node,), ("node_id",))
    borrowers = _summed(entries, lambda entry: (entry.user,), ("user",))
    if by == "day":
        days = await grid.query(lambda store: store.lent(since_ms=since_ms, by_day=True))
        rows = _summed([*map(_entry, days), *held], lambda entry: (utc(entry.day * DAY_MS)[:10],), ("day",))
    elif by:
        rows = borrowers if by == "user" else lenders
    else:
        names = ("node_id", "user", "target_node")
        rows = _summed(entries, lambda entry: (entry.node, entry.user, entry.target or None), names)
    total = LentSum()
    for entry in entries:
        total.add(entry.sum)
    return LendingReport(
        since=viewer.time(since_ms),
        until=viewer.time(now),
        by=by or None,
        rows=rows,
        lenders=lenders,
        borrowers=borrowers,
        total=total.totals(),
    )


def _summed(
    entries: Iterable[LentEntry], key_of: Callable[[LentEntry], tuple[str | None, ...]], names: tuple[str, ...]
) -> list[LendingRow]:
    """One row for each key, in order."""
    sums: dict[tuple[str | None, ...], LentSum] = {}
    for entry in entries:
        sums.setdefault(key_of(entry), LentSum()).add(entry.sum)
    rows = []
    for key in sorted(sums, key=lambda key: tuple(part or "" for part in key)):
        named: dict[str, Any] = dict(zip(names, key, strict=True))
        rows.append(LendingRow(**named, **asdict(sums[key].totals())))
    return rows


def _entry(row: LentRow) -> LentEntry:
    total = LentSum(row.count, row.cpu_milli_ms, row.memory_byte_ms, row.gpu_milli_ms)
    return LentEntry(row.user, row.node, row.target, row.day, total)
