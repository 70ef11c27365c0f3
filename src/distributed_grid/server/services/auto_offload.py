"""Requests about automatic offloading: how it stands, switching it, and what it last decided about a node or job."""

from __future__ import annotations

from collections.abc import Callable

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.offloading import AutoOffloadLook, AutoOffloadStatus, AutoOffloadView
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View, unused_borrowing
from distributed_grid.domain.events import AutoOffloadSet
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.scheduling.queue.reasons import is_stopped
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, READ, endpoint, get, post
from distributed_grid.server.offloading.auto_offload import AutoOffloader
from distributed_grid.server.services.records import event_view

NODE_EVENTS = ("node-degraded", "node-restored", "auto-offload", "move-requested", "move-ended")
MAX_EVENTS = 20
MAX_SEARCHED = 500
"""Among so many of the newest ones those of a node are searched for."""


class AutoOffloadService:
    """Answers the requests about automatic offloading."""

    def __init__(self, grid: Grid, viewer: Callable[[], Viewer], offloader: AutoOffloader) -> None:
        self._grid = grid
        self._viewer = viewer
        self._offloader = offloader

    @endpoint(ADMIN, post("/auto-offload", "moves"), act="switch automatic offloading")
    async def set(self, op: requests.SetAutoOffload, caller: Caller) -> AutoOffloadStatus:
        """Switch it on or off, or let the config decide again; the nodes are evaluated at once."""
        enabled = {"enable": True, "disable": False, "reset": None}[op.action]
        await self._grid.handle(AutoOffloadSet(enabled, caller.user))
        self._offloader.evaluate_soon()
        return await self.status(requests.GetAutoOffload(), caller)

    @endpoint(READ, get("/auto-offload", "moves"))
    async def status(self, op: requests.GetAutoOffload, caller: Caller) -> AutoOffloadStatus:
        """State of automatic offloading, and its last decision for each node."""
        viewer, offloader = self._viewer().for_reader(caller.reader), self._offloader

        def read(ledger: Ledger, now: int) -> AutoOffloadView:
            return AutoOffloadView.of(viewer, ledger, offloader.offload, shares=offloader.rules is not None)

        return AutoOffloadStatus(await self._grid.read(read))


async def job_offloading(grid: Grid, viewer: Viewer, job: Job) -> View | None:
    """Why a job was moved or left when its node was last evaluated; None where it was not considered."""

    def read(ledger: Ledger, now: int) -> View | None:
        attempt = job.attempt
        watch = ledger.offload_watches.get(attempt.node) if attempt is not None else None
        degraded = ledger.degraded.get(attempt.node) if attempt is not None else None
        reason = next((one.reason for one in watch.considered if one.job == job.uid), None) if watch else None
        if watch is None or (reason is None and degraded is None):
            return None
        return {
            "at": viewer.time(watch.looked_at_ms),
            "node_id": watch.node,
            "node_reason": watch.reason,
            "reason": reason,
            "degraded": degraded.why if degraded is not None else None,
        }

    return await grid.read(read)


async def explain_node(grid: Grid, viewer: Viewer, node: Node) -> View:
    """Whether a node is degraded, what it gave back unused, and what automatic offloading decided and did there."""

    def read(ledger: Ledger, now: int) -> View:
        watch, degraded = ledger.offload_watches.get(node.name), ledger.degraded.get(node.name)
        return {
            "look": AutoOffloadLook.of(viewer, ledger, watch) if watch is not None else None,
            "degraded": {"since": viewer.time(degraded.since_ms), "why": degraded.why} if degraded else None,
        }

    def read_node(ledger: Ledger, now: int) -> tuple[list[View], bool]:
        return unused_borrowing(ledger, node.name), is_stopped(ledger, node)

    seen = await grid.read(read)
    borrowing, stopped = await grid.read(read_node)
    newest = await grid.query(lambda store: store.events(types=NODE_EVENTS, limit=MAX_SEARCHED, newest=True))
    rows = [row for row in newest if row.node == node.name][-MAX_EVENTS:]
    return {
        "kind": "node",
        "id": node.name,
        "state": "degraded" if seen["degraded"] else "stopped" if stopped else str(node.state),
        "waiting": None,
        "placements": [],
        "machine_end": None,
        "stopping": None,
        "refusal": None,
        "end": None,
        "offloading": seen,
        "unused_borrowing": borrowing,
        "events": [event_view(row, viewer) for row in rows],
    }
