"""Explanation of a job, lease, node, move or refused request: why it waits, is placed there, was stopped, and when it
starts.

Decisions are shown as they were recorded (`scheduling.placement.explanation.Choice`), not computed again; a waiting
request is shown as it is now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Sequence
from itertools import islice
from typing import TypeVar

from msgspec.structs import asdict, replace

from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.explanation import (
    DegradedRow,
    EndRow,
    Explanation,
    MachineEndRow,
    OffloadingRow,
    PlacementRow,
    PreemptorRow,
    QueuedRequest,
    RefusalRow,
    WaitingRow,
    WaitReason,
)
from distributed_grid.api.answers.jobs import AttemptRow, JobRow
from distributed_grid.api.answers.leases import AllocationRow, DecisionRow
from distributed_grid.api.answers.nodes import UnusedBorrowing
from distributed_grid.api.answers.offloading import AutoOffloadLook, IsConnected, MoveRow
from distributed_grid.api.id_prefixes import fits, not_found, prefix_hint
from distributed_grid.control.grid import Grid
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MOVE_PREFIX, Move
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rows import decode_as
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import Ambiguous, NotFound
from distributed_grid.ports import Store
from distributed_grid.reactor.workers.announced_ends import stop_at_ms
from distributed_grid.scheduling.queue import reasons
from distributed_grid.scheduling.queue.order import queue_order
from distributed_grid.scheduling.queue.start_estimate import estimate_start
from distributed_grid.scheduling.scaling.demand import why_no_worker
from distributed_grid.server.access.tokens import Forbidden
from distributed_grid.server.services.records import (
    DecisionRecord,
    choice_in,
    decode_record,
    event_record,
    find_job,
    find_lease,
    find_move,
    grants_of,
    history_of,
)

MAX_REFUSALS = 2_000
"""Newest refusals among which a prefix is looked for."""
MAX_AHEAD = 5
MAX_MOVES = 200
"""Last moves of a user among which those of a job are looked for."""
MAX_CLOSED_LISTED = 3
NODE_EVENTS = ("node-degraded", "node-restored", "auto-offload", "move-requested", "move-ended")
MAX_NODE_EVENTS = 20
MAX_SEARCHED_EVENTS = 500
"""Newest ones among which those of a node are looked for."""
T = TypeVar("T", Job, Lease)


async def explain(
    grid: Grid, viewer: Viewer, name: str, *, kind: str = "", is_connected: IsConnected = lambda node: True
) -> Explanation:
    """Explain a job, a lease, a node, a move or a refused request; with a `kind` only one of that kind. Forbidden for
    a reader who is neither its owner nor an admin."""

    def check_reader(owner: str, subject: str) -> None:
        if not viewer.shows(owner):
            raise Forbidden(f"{subject} belongs to {owner}, not to {viewer.reader}")

    if not kind and name.startswith(MOVE_PREFIX):
        move = await find_move(grid, name)
        check_reader(move.user, f"the move {move.id}")
        return await _explain_move(grid, viewer, move, is_connected)
    match await _find(grid, name, kind):
        case Job() as job:
            check_reader(job.request.user, f"the job {job.id}")
            return await _explain_job(grid, viewer, job)
        case Lease() as lease:
            check_reader(lease.request.user, f"the lease {lease.id}")
            return await _explain_lease(grid, viewer, lease)
        case Node() as node:
            return await _explain_node(grid, viewer, node)
        case refusals:
            last = refusals[-1]
            check_reader(last.row.user, f"the request {last.row.subject}")
            return Explanation(
                kind="request",
                id=last.row.subject,
                state="refused",
                job_id=last.data.get("job_id"),
                user=last.row.user or None,
                refusal=RefusalRow(viewer.time(last.row.at_ms), last.reason),
                events=[event_record(record.row, viewer) for record in refusals],
            )


async def _find(grid: Grid, name: str, kind: str) -> Job | Lease | Node | list[DecisionRecord]:
    """A job, a lease or a node, exact names before prefixes; else the records of a refused request."""
    job = await _match(find_job(grid, name)) if kind != "lease" else None
    lease = await _match(find_lease(grid, name)) if kind != "job" else None
    if job is None and isinstance(lease, Ambiguous) and not kind:  # all attempts of one job?
        uids = {candidate.rpartition(".")[0] for candidate in lease.candidates}
        job = await _match(find_job(grid, uids.pop())) if len(uids) == 1 and "" not in uids else None
    matches: list[Job | Lease] = [match for match in (job, lease) if isinstance(match, Job | Lease)]
    if isinstance(lease, Lease) and lease.job and kind != "lease":
        matches[-1] = await find_job(grid, lease.job)
    for match in matches:
        uids = {match.uid, *(attempt.lease_id for attempt in match.attempts)} if isinstance(match, Job) else set()
        if name == match.id or name in uids:
            return match
    node = await grid.read(lambda ledger, now: ledger.nodes.get(name)) if not kind else None
    if node is not None:
        return node
    candidates = {match.id for match in matches}
    candidates |= {other for match in (job, lease) if isinstance(match, Ambiguous) for other in match.candidates}
    if isinstance(job, Job):
        candidates -= {other for other in candidates if other.startswith(f"{job.uid}.")}  # its own leases
    if len(candidates) > 1:
        raise Ambiguous(f"{name!r} fits several: {', '.join(sorted(candidates)[:5])}", sorted(candidates))
    if matches:
        return matches[0]
    if kind:
        raise not_found(kind, name)
    refusals = [record for record in await history_of(grid, name) if record.row.type == "refused"]
    return refusals or await _refusal_like(grid, name)


async def _match(search: Awaitable[T]) -> T | Ambiguous | None:
    """The only match of a search, or that there are several; None where there is none."""
    try:
        return await search
    except NotFound:
        return None
    except Ambiguous as several:
        return several


async def _refusal_like(grid: Grid, name: str) -> list[DecisionRecord]:
    """The refusals of the request whose id begins so, or of the job name that was asked for."""
    newest = await grid.query(lambda store: store.events(types=("refused",), limit=MAX_REFUSALS, newest=True))
    history = [decode_record(row) for row in newest]
    matches = [record for record in history if record.data.get("job_id") == name][-1:] or [
        record for record in history if fits(record.row.subject, name)
    ]
    subjects = {record.row.subject for record in matches}
    if len(subjects) > 1:
        raise Ambiguous(f"{name!r} fits several: {', '.join(sorted(subjects)[:5])}", sorted(subjects))
    if not matches:
        hint = prefix_hint(name)
        raise NotFound(f"nothing is called {name!r}: no job, no lease and no refused request of the last 30 days{hint}")
    return matches


async def _explain_job(grid: Grid, viewer: Viewer, job: Job) -> Explanation:
    history = await history_of(grid, job.uid)
    lease = await grid.read(lambda ledger, now: ledger.leases.get(job.lease_id))
    placements = []
    for attempt in job.attempts:
        placement = PlacementRow(**asdict(AttemptRow.of(viewer, attempt)))
        placements.append(await _placed(grid, viewer, placement, history, attempt.lease_id))
    row = JobRow.of(viewer, job)
    return Explanation.of_request(
        job.request,
        kind="job",
        id=job.id,
        state=str(job.state),
        user=job.request.user,
        requested_at=row.submitted_at,
        job=row,
        waiting=await _waiting(grid, viewer, lease),
        placements=placements,
        machine_end=await _machine_end(grid, viewer, lease),
        stopping=job.stop.detail if job.stop is not None else None,
        end=EndRow(row.ended_at, row.outcome, row.detail) if job.is_over else None,
        offloading=await _offloading(grid, viewer, job),
        events=[event_record(record.row, viewer) for record in history],
        moves=[MoveRow.of(viewer, move, lambda node: True) for move in await _moves_of(grid, job)],
    )


async def _offloading(grid: Grid, viewer: Viewer, job: Job) -> OffloadingRow | None:
    """Why a job was moved or left when its node was last evaluated; None where it was not considered."""

    def read(ledger: Ledger, now: int) -> OffloadingRow | None:
        attempt = job.attempt
        watch = ledger.offload_watches.get(attempt.node) if attempt is not None else None
        degraded = ledger.degraded.get(attempt.node) if attempt is not None else None
        reason = next((one.reason for one in watch.considered if one.job == job.uid), None) if watch else None
        if watch is None or (reason is None and degraded is None):
            return None
        return OffloadingRow(
            at=viewer.time(watch.looked_at_ms),
            node_id=watch.node,
            node_reason=watch.reason,
            reason=reason,
            degraded=degraded.why if degraded is not None else None,
        )

    return await grid.read(read)


async def _moves_of(grid: Grid, job: Job) -> list[Move]:
    """The moves of a job, the first one first."""

    def ended(store: Store) -> list[Move]:
        rows = store.ended(Move.kind, user=job.request.user, since_ms=job.submitted_at_ms, limit=MAX_MOVES)
        return [move for row in rows if (move := decode_as(Move, row.blob)).job == job.uid]

    current = await grid.read(lambda ledger, now: ledger.moves.get(ledger.moves_by_job.get(job.uid, "")))
    found = {move.id: move for move in reversed(await grid.query(ended))}
    return [*found.values(), *([current] if current is not None and current.id not in found else [])]


async def _explain_move(grid: Grid, viewer: Viewer, move: Move, is_connected: IsConnected) -> Explanation:
    """A move from its request on: each state with the time and the reason, and the condition that it waits for."""
    history = await history_of(grid, move.id)
    row = MoveRow.of(viewer, move, is_connected)
    return Explanation.of_request(
        move.request,
        kind="move",
        id=move.id,
        state=str(move.state),
        user=move.user,
        requested_at=row.requested_at,
        job_id=move.job_id or None,
        move=row,
        end=EndRow(row.ended_at, row.end, row.problem) if move.is_over else None,
        events=[event_record(record.row, viewer) for record in history],
    )


async def _explain_lease(grid: Grid, viewer: Viewer, lease: Lease) -> Explanation:
    history = await history_of(grid, lease.job or lease.gang or lease.id)
    row = AllocationRow.of(viewer, lease)
    placements = []
    if lease.granted_at_ms:
        placement = PlacementRow(
            number=1,
            allocation_id=lease.id,
            node_id=lease.node,
            assigned_at=row.allocated_at,
            started_at=row.allocated_at if not lease.awaits else None,
            ended_at=viewer.time(lease.ended_at_ms),
            outcome=row.reason,
            detail=row.detail,
        )
        placements.append(await _placed(grid, viewer, placement, history, lease.id, lease.gang))
    return Explanation.of_request(
        lease.request,
        kind="lease",
        id=lease.id,
        state=str(lease.state),
        user=lease.request.user,
        requested_at=row.requested_at,
        allocation=row,
        waiting=await _waiting(grid, viewer, lease),
        placements=placements,
        machine_end=await _machine_end(grid, viewer, lease),
        stopping=lease.detail or None if lease.state is LeaseState.RELEASING else None,
        end=EndRow(viewer.time(lease.ended_at_ms), row.reason, row.detail) if lease.is_over else None,
        events=[event_record(record.row, viewer) for record in history],
    )


async def _explain_node(grid: Grid, viewer: Viewer, node: Node) -> Explanation:
    """State of a node, the resources it gave back unused, and the decisions of automatic offloading there."""
    newest = await grid.query(lambda store: store.events(types=NODE_EVENTS, limit=MAX_SEARCHED_EVENTS, newest=True))
    rows = [row for row in newest if row.node == node.name][-MAX_NODE_EVENTS:]

    def read(ledger: Ledger, now: int) -> Explanation:
        watch, degraded = ledger.offload_watches.get(node.name), ledger.degraded.get(node.name)
        stopped = reasons.is_stopped(ledger, node)
        return Explanation(
            kind="node",
            id=node.name,
            state="degraded" if degraded is not None else "stopped" if stopped else str(node.state),
            offloading=OffloadingRow(
                look=AutoOffloadLook.of(viewer, ledger, watch) if watch is not None else None,
                degraded=DegradedRow(viewer.time(degraded.since_ms), degraded.why) if degraded is not None else None,
            ),
            unused_borrowing=UnusedBorrowing.of_node(ledger, node.name),
            events=[event_record(row, viewer) for row in rows],
        )

    return await grid.read(read)


# ------------------------------------------------------------------ waiting


async def _waiting(grid: Grid, viewer: Viewer, lease: Lease | None) -> WaitingRow | None:
    """Position and reasons of a queued request; or the leases that end first, where its placement is decided."""
    if lease is None or not (lease.state is LeaseState.ASKED or lease.awaits):
        return None
    waits = lease

    def read(ledger: Ledger, now: int) -> WaitingRow:
        since, waited_seconds = viewer.time(waits.asked_at_ms), (now - waits.asked_at_ms) / 1000
        if waits.awaits:
            ending = [ledger.leases[lease_id] for lease_id in waits.awaits if lease_id in ledger.leases]
            return WaitingRow(
                since=since,
                waited_seconds=waited_seconds,
                for_=[QueuedRequest.of(ledger, lease, now) for lease in ending],
                start_reason="when those that make room for it are gone",
            )
        order, estimate = queue_order(ledger, now), estimate_start(ledger, waits, now)
        closed = why_no_worker(ledger, waits.request, now)[:MAX_CLOSED_LISTED]
        ahead = islice(order.in_order(), min(estimate.position - 1, MAX_AHEAD))
        return WaitingRow(
            since=since,
            waited_seconds=waited_seconds,
            for_=[],
            gives_up_at=viewer.time(waits.wait_until_ms),
            position=estimate.position,
            of=len(order),
            ahead=[QueuedRequest.of(ledger, lease, now) for lease in ahead],
            estimated_start=viewer.time(estimate.starts_at_ms or 0),
            start_reason=estimate.reason,
            reasons=[
                *(WaitReason(reason.node, reason.text) for reason in reasons.why_not_now(ledger, waits.request, now)),
                *(WaitReason(None, text) for text in closed),
            ],
        )

    return await grid.read(read)


# ------------------------------------------------------------------ placements


async def _placed(
    grid: Grid,
    viewer: Viewer,
    placement: PlacementRow,
    history: Sequence[DecisionRecord],
    lease_id: str,
    gang: str = "",
) -> PlacementRow:
    """A placement with its recorded decision, and the request that preempted the lease."""
    grant = next(iter(grants_of(history, gang or lease_id)), None)
    displaced = next(
        (record for record in history if record.row.type == "preempted" and record.is_about(lease_id)), None
    )
    preemptor = await _preemptor(grid, displaced) if displaced is not None else None
    if grant is None:
        return replace(placement, made_room_for=preemptor)
    choice = choice_in(grant)
    return replace(
        placement,
        waited_seconds=grant.data.get("waited_ms", 0) / 1000,
        decision=DecisionRow.of(choice, viewer.time(grant.row.at_ms)) if choice is not None else None,
        displaced=list(choice.displaced) if choice is not None else [],
        made_room_for=preemptor,
    )


async def _preemptor(grid: Grid, displaced: DecisionRecord) -> PreemptorRow:
    """The request that preempted a lease."""
    lease_id = str(displaced.data.get("preemptor", ""))
    user: str | None = None
    job_id: str | None = None
    with contextlib.suppress(NotFound):  # it ended before the kept history
        lease = await find_lease(grid, lease_id, exact=True)
        user = lease.request.user
        job_id = (await find_job(grid, lease.job)).id if lease.job else None
    return PreemptorRow(lease_id or None, job_id, user, displaced.reason)


async def _machine_end(grid: Grid, viewer: Viewer, lease: Lease | None) -> MachineEndRow | None:
    """The announced end of the machine that a lease is on, and the time until which work there has to stop."""
    if lease is None or not lease.holds:
        return None
    held = lease

    def read(ledger: Ledger, now: int) -> MachineEndRow | None:
        worker = ledger.workers.get(held.node)
        notice = worker.notice if worker is not None else None
        if notice is None:
            return None
        stops_at = max(stop_at_ms(ledger, notice, held), now) if notice.ends_at_ms else 0
        return MachineEndRow(viewer.time(notice.ends_at_ms), viewer.time(stops_at), notice.why)

    return await grid.read(read)
