"""The audit trail as it is shown: what happened, and what still happens while somebody follows.

The decision about a request, as its caller hears it: where it goes and why, or why nowhere yet.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from distributed_grid.api.requests import ListEvents
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View, Viewer
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import NotFound
from distributed_grid.ports import EventRow
from distributed_grid.scheduling.placement.explanation import Choice, reasoning, runners_up
from distributed_grid.scheduling.placement.placement import strategy_of
from distributed_grid.scheduling.queue.start_estimate import estimate_start
from distributed_grid.server.services.lookup import find_job

EVENTS_PER_PAGE = 500


async def stream_events(grid: Grid, viewer: Viewer, op: ListEvents) -> AsyncGenerator[View, None]:
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
            rows = store.events(after_seq=seen, subject=op.subject, types=op.types, limit=EVENTS_PER_PAGE)
            if not rows:
                await woken.wait()
                rows = store.events(after_seq=seen, subject=op.subject, types=op.types, limit=EVENTS_PER_PAGE)
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


MAX_EVENTS = 1_000


class DecisionRecord(Struct, frozen=True):
    """One event of the audit trail, and what it says."""

    row: EventRow
    reason: str
    data: dict[str, Any]

    def is_about(self, lease_id: str) -> bool:
        return self.data.get("allocation_id") == lease_id


def decode_record(row: EventRow) -> DecisionRecord:
    record = msgspec.json.decode(row.blob)
    return DecisionRecord(row, record.get("reason", ""), record.get("data") or {})


def history_of(grid: Grid, subject: str) -> list[DecisionRecord]:
    """What happened to it, in order."""
    return [decode_record(row) for row in grid.store.events(subject=subject, limit=MAX_EVENTS, newest=True)]


def grants_of(history: Iterable[DecisionRecord], lease_id: str) -> list[DecisionRecord]:
    """When this lease was granted, if it was."""
    return [one for one in history if one.row.type == "granted" and one.is_about(lease_id)]


def choice_in(grant: DecisionRecord) -> Choice | None:
    """The choice noted with a grant; None where an older build noted none."""
    noted = grant.data.get("choice")
    return None if noted is None else msgspec.convert(noted, Choice)


async def decision_on(
    grid: Grid, viewer: Viewer, lease: Lease | None, choice: Choice | None, why: Iterable[str], subject: str
) -> View:
    """Where a request goes and why, or why nowhere yet; what was decided earlier is found under its `subject`."""
    if choice is None and lease is not None and lease.state is LeaseState.ASKED:
        waits = lease

        def look(ledger: Ledger, now: int) -> tuple[str, int | None]:
            return str(strategy_of(ledger, waits.request)), estimate_start(ledger, waits, now).starts_at_ms

        strategy, starts_at_ms = await grid.read(look)
        return _undecided(strategy, list(why), viewer.time(starts_at_ms or 0))
    if choice is None:
        earlier = history_of(grid, subject)
        found = grants_of(earlier, lease.gang or lease.id) if lease is not None else []
        last = found or [one for one in earlier if one.row.type == "granted" and lease is None]
        choice = choice_in(last[-1]) if last else None
    if choice is None:
        ended = [lease.detail] if lease is not None and lease.detail else []
        return _undecided(str(grid.ledger.policy.strategy), [*why, *ended], None)
    starts = viewer.time(lease.granted_at_ms) if lease is not None and not lease.awaits else None
    return decision_view(choice, starts)


def decision_view(choice: Choice, starts: str | None) -> View:
    """A choice in words."""
    return {
        "node_id": choice.node,
        "strategy": str(choice.strategy),
        "confidence": choice.confidence / 1000,
        "reasoning": list(reasoning(choice)),
        "alternatives": [{"node_id": one.node, "score": one.score, "why": one.why} for one in runners_up(choice)],
        "estimated_start": starts,
    }


def _undecided(strategy: str, why: list[str], starts: str | None) -> View:
    return {
        "node_id": None,
        "strategy": strategy,
        "confidence": 0.0,
        "reasoning": why,
        "alternatives": [],
        "estimated_start": starts,
    }
