"""Reports from the ledger, the audit trail and the monitor: explanations, lending report, events, metrics.

In the lending report a lease counts from its grant to its end, with what was requested; the part before the reported
time does not count. Attempts of jobs have leases of their own, so leases are all there is. Sums are exact integers;
hours are computed last.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from datetime import UTC, datetime

from msgspec import Struct

from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.control.offload_views import IsConnected
from distributed_grid.control.views import GB, View, Viewer
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import claimed_amount
from distributed_grid.domain.resources import ResourceType
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
    """Answers the read-only requests about what is and what was."""

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
    async def explain(self, op: requests.Explain, caller: Caller) -> View:
        """Why it waits, why it is there, why it was stopped, when it will start. Only for its owner and admins."""
        viewer, is_connected = self._viewer().for_reader(caller.reader), self._is_connected
        return await self._renderer.shared(
            (op, viewer.reader),
            lambda: explain(self._grid, viewer, op.id, kind=op.kind, is_connected=is_connected),
        )

    @endpoint(READ, get("/ledger", "leases"))
    async def lending(self, op: requests.GetLendingReport, caller: Caller) -> View:
        """Who lent whom how much."""

        async def report() -> View:
            since_ms = max(self._grid.now_ms() - round(1000 * op.since_seconds), 1)
            return await lending_report(self._grid, self._viewer(), since_ms=since_ms, by=op.by)

        return await self._renderer.shared(op, report)

    @endpoint(READ, streams=True)
    def events(self, op: requests.ListEvents, caller: Caller) -> AsyncGenerator[View, None]:
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
    async def metrics(self, op: requests.GetMetrics, caller: Caller) -> View:
        return await self._renderer.shared(op, lambda: self._metrics(op))

    async def _metrics(self, op: requests.GetMetrics) -> View:
        if op.kind == "snapshots":
            return {"snapshots": await self._monitor.snapshots()}
        if op.kind == "levels":
            return {"levels": await self._monitor.levels()}
        if op.kind == "summary":
            return {"summary": await self._monitor.summary()}
        if op.kind == "rebalancing":
            return {"rebalancing": await self._monitor.rebalancing()}
        if op.kind == "scheduling":
            return {"scheduling": await self._monitor.scheduling()}
        if op.kind == "prometheus":
            return {"text": (await self._monitor.prometheus()).decode()}
        if not op.node:
            raise BadInput(f"metrics of kind {op.kind} are about one node: name it")
        if op.kind == "trend":
            if not op.resource_type:
                raise BadInput("a trend is about one resource: cpu, memory or gpu")
            return {"trend": await self._monitor.trend(op.node, op.resource_type, op.window)}
        return {"history": await self._monitor.history(op.node, 60 if op.window is None else op.window)}


class LentSum(Struct):
    """What was lent: leases, and amounts times milliseconds. Of it, what is still held: leases and amounts."""

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

    def view(self) -> View:
        return {
            "leases": self.count,
            "core_hours": self.cpu_milli_ms / 1000 / HOUR_MS,
            "gb_hours": self.memory_byte_ms / GB / HOUR_MS,
            "gpu_hours": self.gpu_milli_ms / 1000 / HOUR_MS,
            "held_leases": self.held,
            "held_cores": self.held_cpu_milli / 1000,
            "held_gb": self.held_memory_bytes / GB,
            "held_gpus": self.held_gpu_milli / 1000,
        }


class LentEntry(Struct, frozen=True):
    """What one user had from one node, for one target; the day only counts where it is asked for."""

    user: str
    node: str
    target: str
    day: int
    sum: LentSum


async def lending_report(grid: Grid, viewer: Viewer, *, since_ms: int, by: str) -> View:
    """The answer to `grid ledger`: lender by borrower, or summed up by one of them or by day."""
    now, living = await grid.read(lambda ledger, now: (now, _living(ledger, now, since_ms)))
    over = await grid.query(lambda store: store.lent(since_ms=since_ms))
    entries = [*map(_entry, over), *living]
    rows = _rows(entries, by)
    if by == "day":
        days = await grid.query(lambda store: store.lent(since_ms=since_ms, by_day=True))
        rows = _summed([*map(_entry, days), *living], lambda one: (_date(one.day),), ("day",))
    return {
        "since": viewer.time(since_ms),
        "until": viewer.time(now),
        "by": by or None,
        "rows": rows,
        "lenders": _summed(entries, lambda one: (one.node,), ("node_id",)),
        "borrowers": _summed(entries, lambda one: (one.user,), ("user",)),
        "total": _total(entries),
    }


def _rows(entries: list[LentEntry], by: str) -> list[View]:
    if by == "user":
        return _summed(entries, lambda one: (one.user,), ("user",))
    if by == "node":
        return _summed(entries, lambda one: (one.node,), ("node_id",))
    return _summed(entries, lambda one: (one.node, one.user, one.target or None), ("node_id", "user", "target_node"))


def _summed(
    entries: Iterable[LentEntry], key_of: Callable[[LentEntry], tuple[str | None, ...]], names: tuple[str, ...]
) -> list[View]:
    """One row for each key, in order."""
    sums: dict[tuple[str | None, ...], LentSum] = {}
    for one in entries:
        sums.setdefault(key_of(one), LentSum()).add(one.sum)
    ordered = sorted(sums, key=lambda key: tuple(part or "" for part in key))
    return [{**dict(zip(names, key, strict=True)), **sums[key].view()} for key in ordered]


def _total(entries: Iterable[LentEntry]) -> View:
    total = LentSum()
    for one in entries:
        total.add(one.sum)
    return total.view()


def _entry(row: LentRow) -> LentEntry:
    total = LentSum(row.count, row.cpu_milli_ms, row.memory_byte_ms, row.gpu_milli_ms)
    return LentEntry(row.user, row.node, row.target, row.day, total)


def _living(ledger: Ledger, now: int, since_ms: int) -> list[LentEntry]:
    """What is held now, up to now, as today's."""
    entries = []
    for lease in ledger.leases.values():
        if not lease.holds:
            continue
        request, ask = lease.request, lease.request.ask
        ms = max(now - max(lease.granted_at_ms, since_ms), 0)
        total = LentSum(
            1,
            ask.cpu_milli * ms,
            ask.memory_bytes * ms,
            ask.gpu_milli * ms,
            1,
            *(
                claimed_amount(lease, resource)
                for resource in (ResourceType.CPU, ResourceType.MEMORY, ResourceType.GPU)
            ),
        )
        entries.append(LentEntry(request.user, lease.node, request.target, now // DAY_MS, total))
    return entries


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MS / 1000, UTC).strftime("%Y-%m-%d")
