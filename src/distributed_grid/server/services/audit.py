"""The audit trail as it is shown: what happened, and what still happens while somebody follows."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from distributed_grid.api.requests import ListEvents
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View, Viewer
from distributed_grid.errors import NotFound
from distributed_grid.ports import EventRow
from distributed_grid.server.services.lookup import find_job

PAGE = 500


async def told(grid: Grid, viewer: Viewer, op: ListEvents) -> AsyncGenerator[View, None]:
    """The newest events (or those after a number), and with `follow` what comes, until nobody asks any more."""
    store = grid.store
    if op.subject is not None:
        op = msgspec.structs.replace(op, subject=await _uid_of(grid, op.subject))
    woken = grid.watch("events")
    try:
        newest = op.after is None
        rows = store.events(after_seq=op.after or 0, subject=op.subject, types=op.types, limit=op.limit, newest=newest)
        seen = op.after or 0
        while True:
            for row in rows:
                seen = row.seq
                yield event_view(row, viewer)
            if not op.follow:
                break
            woken.clear()
            rows = store.events(after_seq=seen, subject=op.subject, types=op.types, limit=PAGE)
            if not rows:
                await woken.wait()
                rows = store.events(after_seq=seen, subject=op.subject, types=op.types, limit=PAGE)
    finally:
        grid.unwatch("events", woken)


async def _uid_of(grid: Grid, name: str) -> str:
    """What a job's events are told under; anything that is not a job stays as it is."""
    try:
        return (await find_job(grid, name)).uid
    except NotFound:
        return name


def event_view(row: EventRow, viewer: Viewer) -> View:
    """An event as it is shown."""
    record = msgspec.json.decode(row.blob)
    return {
        "seq": row.seq,
        "time": viewer.time(row.at_ms),
        "type": row.type,
        "user": row.user or None,
        "subject": row.subject,
        "job_id": record.get("data", {}).get("job_id"),
        "node_id": row.node or None,
        "reason": record.get("reason") or None,
        "data": record.get("data") or {},
    }
