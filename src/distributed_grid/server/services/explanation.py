"""Explanation of a job, lease, move or refused request: why it waits, is placed there, was stopped, and when it starts.

Decisions are shown as they were recorded (`scheduling.placement.explanation.Choice`), not computed again; what waits is
shown as it is now.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from itertools import islice
from typing import TypeVar

from distributed_grid.api.id_prefixes import fits, not_found, prefix_hint
from distributed_grid.control.grid import Grid
from distributed_grid.control.offload_views import IsConnected, move_view
from distributed_grid.control.views import View, Viewer, ask_view
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MOVE_PREFIX, Move
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import Ambiguous, NotFound
from distributed_grid.ports import Store
from distributed_grid.reactor.workers.announced_ends import stop_at_ms
from distributed_grid.scheduling.queue import reasons
from distributed_grid.scheduling.queue.order import queue_order
from distributed_grid.scheduling.queue.start_estimate import estimate_start
from distributed_grid.scheduling.scaling.demand import why_no_worker
from distributed_grid.server.access.tokens import Forbidden
from distributed_grid.server.services.auto_offload import explain_node, job_offloading
from distributed_grid.server.services.records import (
    DecisionRecord,
    choice_in,
    decision_view,
    ended_move,
    event_view,
    find_job,
    find_lease,
    find_move,
    grants_of,
    history_of,
)
from distributed_grid.server.services.records import decode_record as read_event

MAX_REFUSALS = 2_000
"""Among so many of the newest refusals a prefix is looked for."""
MAX_AHEAD = 5
MAX_MOVES = 200
"""Among so many of its user's last moves those of a job are looked for."""
MAX_CLOSED_LISTED = 3
T = TypeVar("T", Job, Lease)


async def explain(
    grid: Grid, viewer: Viewer, name: str, *, kind: str = "", is_connected: IsConnected = lambda node: True
) -> View:
    """Explain a job, a lease, a node, a move or a refused request; with a `kind` only one of that kind. Forbidden for
    a reader who is neither its owner nor an admin."""
    if not kind and name.startswith(MOVE_PREFIX):
        move = await find_move(grid, name)
        _must_show(viewer, move.user, f"the move {move.id}")
        return await _explain_move(grid, viewer, move, is_connected)
    found = await _find(grid, name, kind)
    if isinstance(found, Job | Lease):
        _must_show(viewer, found.request.user, f"the {'job' if isinstance(found, Job) else 'lease'} {found.id}")
    elif not isinstance(found, Node):
        _must_show(viewer, found[-1].row.user, f"the request {found[-1].row.subject}")
    if isinstance(found, Job):
        return await _explain_job(grid, viewer, found)
    if isinstance(found, Lease):
        return await _explain_lease(grid, viewer, found)
    if isinstance(found, Node):
        return await explain_node(grid, viewer, found)
    return _explain_refusal(viewer, found)


def _must_show(viewer: Viewer, owner: str, what: str) -> None:
    if not viewer.shows(owner):
        raise Forbidden(f"{what} belongs to {owner}, not to {viewer.reader}")


async def _find(grid: Grid, name: str, kind: str) -> Job | Lease | Node | list[DecisionRecord]:
    """A job, a lease or a node, what is named exactly before what only begins so; else a refused request."""
    job = await _found_or_ambiguous(find_job(grid, name)) if kind != "lease" else None
    lease = await _found_or_ambiguous(find_lease(grid, name)) if kind != "job" else None
    if job is None and isinstance(lease, Ambiguous) and not kind:  # all attempts of one job?
        uids = {candidate.rpartition(".")[0] for candidate in lease.candidates}
        job = await _found_or_ambiguous(find_job(grid, uids.pop())) if len(uids) == 1 and "" not in uids else None
    found: list[Job | Lease] = [one for one in (job, lease) if isinstance(one, Job | Lease)]
    if isinstance(lease, Lease) and lease.job and kind != "lease":
        found[-1] = await find_job(grid, lease.job)
    for one in found:
        if name in _names(one):
            return one
    node = await grid.read(lambda ledger, now: ledger.nodes.get(name)) if not kind else None
    if node is not None:
        return node
    fitting = {_names(one)[0] for one in found}
    fitting |= {other for one in (job, lease) if isinstance(one, Ambiguous) for other in one.candidates}
    if isinstance(job, Job):
        fitting -= {other for other in fitting if other.startswith(f"{job.uid}.")}  # its own leases
    if len(fitting) > 1:
        raise Ambiguous(f"{name!r} fits several: {', '.join(sorted(fitting)[:5])}", sorted(fitting))
    if found:
        return found[0]
    if kind:
        raise not_found(kind, name)
    return await _refusal(grid, name)


async def _found_or_ambiguous(looking: Awaitable[T]) -> T | Ambiguous | None:
    """What was looked for, or that it fits several; None where it fits nothing."""
    try:
        return await looking
    except NotFound:
        return None
    except Ambiguous as several:
        return several


def _names(one: Job | Lease) -> tuple[str, ...]:
    return (one.id, one.uid, *(attempt.lease_id for attempt in one.attempts)) if isinstance(one, Job) else (one.id,)


async def _refusal(grid: Grid, name: str) -> list[DecisionRecord]:
    """What was refused under this request id, or the id that begins so, or the job name that was asked for."""
    exact = [one for one in await history_of(grid, name) if one.row.type == "refused"]
    if exact:
        return exact
    newest = await grid.query(lambda store: store.events(types=("refused",), limit=MAX_REFUSALS, newest=True))
    history = [read_event(row) for row in newest]
    fitting = [one for one in history if one.data.get("job_id") == name][-1:] or [
        one for one in history if fits(one.row.subject, name)
    ]
    subjects = {one.row.subject for one in fitting}
    if len(subjects) > 1:
        raise Ambiguous(f"{name!r} fits several: {', '.join(sorted(subjects)[:5])}", sorted(subjects))
    if not fitting:
        hint = prefix_hint(name)
        raise NotFound(f"nothing is called {name!r}: no job, no lease and no refused request of the last 30 days{hint}")
    return fitting


async def _explain_job(grid: Grid, viewer: Viewer, job: Job) -> View:
    history = await history_of(grid, job.uid)
    lease = await grid.read(lambda ledger, now: ledger.leases.get(job.lease_id))
    placements = []
    for attempt in job.attempts:
        grant = next(iter(grants_of(history, attempt.lease_id)), None)
        shown = viewer.attempt(attempt)
        shown |= await _placement(grid, viewer, grant, history, attempt.lease_id)
        placements.append(shown)
    shown = viewer.job(job)
    return {
        **_head("job", job.id, job.request, viewer.time(job.submitted_at_ms)),
        "state": str(job.state),
        "job": shown,
        "waiting": await _waiting(grid, viewer, lease),
        "placements": placements,
        "machine_end": await _machine_end(grid, viewer, lease),
        "stopping": job.stop.detail if job.stop is not None else None,
        "refusal": None,
        "end": _end(shown["ended_at"], shown["outcome"], shown["detail"]) if job.is_over else None,
        "offloading": await job_offloading(grid, viewer, job),
        "events": [event_view(one.row, viewer) for one in history],
        "moves": [move_view(viewer, move, lambda node: True) for move in await _moves_of(grid, job)],
    }


async def _moves_of(grid: Grid, job: Job) -> list[Move]:
    """The moves of a job, the first one first."""

    def ended(store: Store) -> list[Move]:
        rows = store.ended(Move.kind, user=job.request.user, since_ms=job.submitted_at_ms, limit=MAX_MOVES)
        return [move for move in map(ended_move, rows) if move.job == job.uid]

    current = await grid.read(lambda ledger, now: ledger.moves.get(ledger.moves_by_job.get(job.uid, "")))
    found = {move.id: move for move in reversed(await grid.query(ended))}
    return [*found.values(), *([current] if current is not None and current.id not in found else [])]


async def _explain_move(grid: Grid, viewer: Viewer, move: Move, is_connected: IsConnected) -> View:
    """A move from its request on: each state with the time and the reason, and what it waits for."""
    history = await history_of(grid, move.id)
    shown = move_view(viewer, move, is_connected)
    return {
        **_head("move", move.id, move.request, shown["requested_at"]),
        "user": move.user,
        "job_id": move.job_id or None,
        "state": str(move.state),
        "move": shown,
        "waiting": None,
        "placements": [],
        "machine_end": None,
        "stopping": None,
        "refusal": None,
        "end": _end(shown["ended_at"], shown["end"], shown["problem"]) if move.is_over else None,
        "offloading": None,
        "events": [event_view(one.row, viewer) for one in history],
    }


async def _explain_lease(grid: Grid, viewer: Viewer, lease: Lease) -> View:
    history = await history_of(grid, lease.job or lease.gang or lease.id)
    grant = next(iter(grants_of(history, lease.gang or lease.id)), None)
    shown = viewer.lease(lease)
    placements = []
    if lease.granted_at_ms:
        placements.append(
            {
                "number": 1,
                "allocation_id": lease.id,
                "node_id": lease.node,
                "assigned_at": viewer.time(lease.granted_at_ms),
                "started_at": viewer.time(lease.granted_at_ms) if not lease.awaits else None,
                "ended_at": viewer.time(lease.ended_at_ms),
                "outcome": shown["reason"],
                "detail": shown["detail"],
                **await _placement(grid, viewer, grant, history, lease.id),
            }
        )
    return {
        **_head("lease", lease.id, lease.request, viewer.time(lease.asked_at_ms)),
        "state": str(lease.state),
        "allocation": shown,
        "waiting": await _waiting(grid, viewer, lease),
        "placements": placements,
        "machine_end": await _machine_end(grid, viewer, lease),
        "stopping": lease.detail or None if lease.state is LeaseState.RELEASING else None,
        "refusal": None,
        "end": _end(viewer.time(lease.ended_at_ms), shown["reason"], shown["detail"]) if lease.is_over else None,
        "offloading": None,
        "events": [event_view(one.row, viewer) for one in history],
    }


def _explain_refusal(viewer: Viewer, history: Sequence[DecisionRecord]) -> View:
    last = history[-1]
    return {
        "kind": "request",
        "id": last.row.subject,
        "job_id": last.data.get("job_id"),
        "user": last.row.user or None,
        "state": "refused",
        "waiting": None,
        "placements": [],
        "machine_end": None,
        "stopping": None,
        "refusal": {"at": viewer.time(last.row.at_ms), "reason": last.reason},
        "end": None,
        "offloading": None,
        "events": [event_view(one.row, viewer) for one in history],
    }


def _head(kind: str, name: str, request: Request, asked_at: str | None) -> View:
    return {
        "kind": kind,
        "id": name,
        "request_id": request.id,
        "user": request.user,
        "team": request.team or None,
        "asked": reasons.describe_amounts(request.ask),
        "resources": ask_view(request.ask),
        "priority": request.priority.name.lower(),
        "requested_at": asked_at,
    }


def _end(at: str | None, reason: str | None, detail: str | None) -> View:
    return {"at": at, "reason": reason, "detail": detail}


# ------------------------------------------------------------------ waiting


async def _waiting(grid: Grid, viewer: Viewer, lease: Lease | None) -> View | None:
    """What a queued request waits for; or which leases end first, where its placement is decided."""
    if lease is None or not (lease.state is LeaseState.ASKED or lease.awaits):
        return None
    waits = lease

    def view_waiting(ledger: Ledger, now: int) -> View:
        view: View = {"since": viewer.time(waits.asked_at_ms), "waited_seconds": (now - waits.asked_at_ms) / 1000}
        if waits.awaits:
            ending = [ledger.leases[one] for one in waits.awaits if one in ledger.leases]
            return view | {"for": [_queued_request(ledger, one, now) for one in ending], **_NOT_QUEUED}
        order = queue_order(ledger, now)
        seen = estimate_start(ledger, waits, now)
        ahead = islice(order.in_order(), min(seen.position - 1, MAX_AHEAD))
        return view | {
            "for": [],
            "gives_up_at": viewer.time(waits.wait_until_ms),
            "position": seen.position,
            "of": len(order),
            "ahead": [_queued_request(ledger, one, now) for one in ahead],
            "estimated_start": viewer.time(seen.starts_at_ms or 0),
            "start_reason": _named(ledger, seen.reason),
            "reasons": [_reason(ledger, why) for why in _why_waiting(ledger, waits.request, now)],
        }

    return await grid.read(view_waiting)


_NOT_QUEUED: View = {
    "gives_up_at": None,
    "position": None,
    "of": None,
    "ahead": [],
    "estimated_start": None,
    "start_reason": "when those that make room for it are gone",
    "reasons": [],
}


def _why_waiting(ledger: Ledger, request: Request, now: int) -> list[str]:
    """What keeps each node from serving a request, and why no worker is started for it."""
    return [*reasons.why_not_now(ledger, request, now), *why_no_worker(ledger, request, now)[:MAX_CLOSED_LISTED]]


def _queued_request(ledger: Ledger, lease: Lease, now: int) -> View:
    """Another request in the queue, as far as it concerns the caller."""
    job = ledger.jobs.get(lease.job)
    return {
        "allocation_id": lease.id,
        "job_id": job.id if job is not None else None,
        "user": lease.request.user,
        "priority": lease.request.priority.name.lower(),
        "asked": reasons.describe_amounts(lease.request.ask),
        "waited_seconds": (now - lease.asked_at_ms) / 1000,
    }


def _named(ledger: Ledger, text: str) -> str:
    """A sentence with the names of jobs instead of the ids of their leases."""
    words = text.split(" ")
    jobs = (ledger.jobs.get(ledger.leases[word].job) if word in ledger.leases else None for word in words)
    return " ".join(word if job is None else job.id for word, job in zip(words, jobs, strict=True))


def _reason(ledger: Ledger, why: str) -> View:
    """What keeps one node from serving it; a quota is no node's."""
    node, _, rest = why.partition(": ")
    return {"node_id": node, "why": rest} if node in ledger.nodes else {"node_id": None, "why": why}


# ------------------------------------------------------------------ placements


async def _placement(
    grid: Grid, viewer: Viewer, grant: DecisionRecord | None, history: Sequence[DecisionRecord], lease_id: str
) -> View:
    """Why a lease was placed where it was, and which request preempted it."""
    choice = choice_in(grant) if grant is not None else None
    displaced = next((one for one in history if one.row.type == "preempted" and one.is_about(lease_id)), None)
    return {
        "waited_seconds": grant.data.get("waited_ms", 0) / 1000 if grant is not None else None,
        "decision": decision_view(choice, viewer.time(grant.row.at_ms))
        if grant is not None and choice is not None
        else None,
        "displaced": list(choice.displaced) if choice is not None else [],
        "made_room_for": await _preemptor(grid, displaced) if displaced is not None else None,
    }


async def _machine_end(grid: Grid, viewer: Viewer, lease: Lease | None) -> View | None:
    """The announced end of the machine that a lease is on, and when what runs there has to stop."""
    if lease is None or not lease.holds:
        return None
    held = lease

    def view_end(ledger: Ledger, now: int) -> View | None:
        worker = ledger.workers.get(held.node)
        notice = worker.notice if worker is not None else None
        if notice is None:
            return None
        stops_at = max(stop_at_ms(ledger, notice, held), now) if notice.ends_at_ms else 0
        return {"at": viewer.time(notice.ends_at_ms), "stops_at": viewer.time(stops_at), "reason": notice.why}

    return await grid.read(view_end)


async def _preemptor(grid: Grid, displaced: DecisionRecord) -> View:
    """The request that preempted a lease."""
    preemptor = str(displaced.data.get("preemptor", ""))
    view: View = {"allocation_id": preemptor or None, "job_id": None, "user": None, "reason": displaced.reason}
    try:
        lease = await find_lease(grid, preemptor, exact=True)
        view["user"] = lease.request.user
        view["job_id"] = (await find_job(grid, lease.job)).id if lease.job else None
    except NotFound:  # it ended before the kept history
        pass
    return view
