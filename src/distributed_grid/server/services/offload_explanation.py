"""Explanation of automatic offloading: what its last look decided about a node, or about a job, and why."""

from __future__ import annotations

from distributed_grid.control.auto_offload_views import look_view
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View, Viewer
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.server.services.records import event_view

NODE_EVENTS = ("node-degraded", "node-restored", "auto-offload", "move-requested", "move-ended")
MAX_EVENTS = 20
MAX_SEARCHED = 500
"""Among so many of the newest ones those of a node are looked for."""


async def job_offloading(grid: Grid, viewer: Viewer, job: Job) -> View | None:
    """Why a job was moved or left by the last look at its node; None where it was not looked at."""

    def look(ledger: Ledger, now: int) -> View | None:
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

    return await grid.read(look)


async def explain_node(grid: Grid, viewer: Viewer, node: Node) -> View:
    """Whether a node is degraded, what the last look at it decided, and what left it or came to it by itself."""

    def look(ledger: Ledger, now: int) -> View:
        watch, degraded = ledger.offload_watches.get(node.name), ledger.degraded.get(node.name)
        return {
            "look": look_view(viewer, ledger, watch) if watch is not None else None,
            "degraded": {"since": viewer.time(degraded.since_ms), "why": degraded.why} if degraded else None,
        }

    seen = await grid.read(look)
    newest = await grid.query(lambda store: store.events(types=NODE_EVENTS, limit=MAX_SEARCHED, newest=True))
    rows = [row for row in newest if row.node == node.name][-MAX_EVENTS:]
    return {
        "kind": "node",
        "id": node.name,
        "state": "degraded" if seen["degraded"] else str(node.state),
        "waiting": None,
        "placements": [],
        "machine_end": None,
        "stopping": None,
        "refusal": None,
        "end": None,
        "offloading": seen,
        "events": [event_view(row, viewer) for row in rows],
    }
