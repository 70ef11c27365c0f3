"""Transitions of a move that its deciders share: the next state, the room on the target, the end and its consequences.

Room on the target is kept as a lease of the grid's until the work takes its place. Moved work belongs to the node
that it leaves, so it gets a part of that node's automatic leases where the target is their lender. Nobody but automatic
leases is displaced for a move.

Nodes rest after an automatic move, and failures in a row stop automatic offloading.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from distributed_grid.domain.followups import ScanQueue
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import AutoOffloadState, Move, MoveEnd, OffloadWatch
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState, MoveState, NodeState, Step, advance
from distributed_grid.errors import BadInput, Conflict, Refused
from distributed_grid.reactor.decision import Decision, MoveAnswer, Record, RecordType
from distributed_grid.reactor.lease_transitions import end_lease, grant, preempt_victims
from distributed_grid.scheduling.placement.machine_limits import crowded_nodes
from distributed_grid.scheduling.placement.placement import Placement
from distributed_grid.scheduling.preemption.preemption import preempt_automatic_leases
from distributed_grid.scheduling.queue import reasons
from distributed_grid.scheduling.queue.queue import place_in_automatic_lease, place_newcomer, reserved_nodes

WAIT_FOR_TARGET_MS = 60_000
"""How long work waits for a target on which nothing may start for now, before it goes elsewhere or stays."""
MAX_FAILURES = 3
"""So many moves that fail one after the other stop it."""


def move_record(type_: RecordType, move: Move, reason: str = "", **data: Any) -> Record:
    """Audit record of a move, with its work, its source, its target and its way."""
    known: dict[str, Any] = {"from": move.source, "to": move.target, "way": str(move.way), "automatic": move.automatic}
    if move.job:
        known |= {"job": move.job, "job_id": move.job_id}
    if move.process is not None:
        known["pid"] = move.process.identity.pid
    return Record(type_, move.user, move.id, move.source, reason, data=known | data)


def advance_move(move: Move, *steps: Step, now: int, **fields: Any) -> tuple[Move, list[Record]]:
    """The move after these steps, and a record of each."""
    records = []
    for step in steps:
        move = replace(move, state=advance(move.state, step), state_at_ms=now)
    moved = replace(move, **fields)
    if steps:
        reason = moved.problem or str(moved.state)
        records.append(move_record("move-advanced", moved, reason, state=str(moved.state)))
    return moved, records


def end_move(ledger: Ledger, move: Move, end: MoveEnd, problem: str, now: int) -> Decision:
    """End a move; the room that is kept for it is given back."""
    decision = release_reservation(ledger, move, f"move {move.id} has ended", now)
    frozen_ms = move.frozen_for_ms or (now - move.frozen_at_ms if move.frozen_at_ms else 0)
    over = replace(
        move,
        state=advance(move.state, Step.END),
        state_at_ms=now,
        lease_id="",
        frozen_for_ms=frozen_ms,
        ending=None,
        problem=problem,
        end=end,
        ended_at_ms=now,
    )
    data: dict[str, Any] = {"end": str(end), "state": str(move.state), "frozen_ms": frozen_ms}
    data |= {"returned": move.returned, "kept": [*move.kept]} if move.is_returned else {}
    rows, records = _count_end(ledger, over, now)
    decision.changes += [over, *rows]
    decision.records += records
    decision.records.append(move_record("move-ended", over, problem or str(end), **data))
    decision.answer = MoveAnswer(over)
    return decision


def release_reservation(ledger: Ledger, move: Move, why: str, now: int) -> Decision:
    """Give back the room that is kept for a move, where it still is."""
    lease = ledger.leases.get(move.lease_id)
    return Decision() if lease is None else end_lease(ledger, lease, LeaseEnd.RELEASED, why, now)


def reservation_request(ledger: Ledger, move: Move, wanted: Request) -> Request:
    """Request for room on the target, for work with this request."""
    simulated = all(ledger.nodes[name].simulated for name in (move.source, move.target))
    return replace(
        wanted,
        id=move.id,
        user=GRID_USER,
        team="",
        priority=min(wanted.priority, Priority.HIGH),
        prefer=(),
        require=(move.target,),
        strategy=None,
        target=move.source,
        origin="",
        wait_ms=0,
        duration_ms=0,
        deadline_ms=0,
        task="",
        limits_memory=wanted.limits_memory and not simulated,  # the memory of one machine is only used once
    )


def reserve_room(ledger: Ledger, request: Request, now: int) -> tuple[Decision, Lease]:
    """Keep room for a move; Refused with the reasons of the target where it has none."""
    if request.problem() is not None:
        raise BadInput(str(request.problem()))
    if request.id in ledger.by_request:
        raise Conflict(f"request {request.id} was used before for something else")
    lease = Lease(id=request.id, request=request, asked_at_ms=now)
    placement = place_newcomer(ledger, lease, now) or place_in_automatic_lease(ledger, lease, now, waits=True)
    leaving = Decision()
    if placement is None:
        avoid = crowded_nodes(ledger, request) | reserved_nodes(ledger, lease, now)
        plan = preempt_automatic_leases(ledger, request, avoid=avoid)
        if plan is None:
            reason = reasons.why_no_room(ledger, request, now)
            raise Refused(f"there is no room for it: {'; '.join(reason)}; choose another node with -t", reason)
        leaving, _ = preempt_victims(ledger, plan, lease, now)
        placement = Placement(node=plan.node, claim=plan.claim)
    decision, lease, _ = grant(ledger, lease, placement, now, job=None)
    decision.changes = leaving.changes + decision.changes
    decision.records += leaving.records
    decision.choice = None
    return decision, lease


def is_kept(ledger: Ledger, move: Move) -> bool:
    """Whether the room for a move is there, reserved by everybody who has to."""
    lease = ledger.leases.get(move.lease_id)
    return lease is not None and lease.state is LeaseState.ACTIVE


def why_leaving(ledger: Ledger, move: Move) -> str:
    """Why the room on the target is of no use any more; empty where it is."""
    node = ledger.nodes.get(move.target)
    if node is None or node.forgotten or node.state in (NodeState.DRAINING, NodeState.LOST, NodeState.LEFT):
        return f"{move.target} is {'gone' if node is None else 'leaving' if node.forgotten else node.state}"
    return ""


def why_nothing_starts(ledger: Ledger, move: Move) -> str:
    """Why nothing new may start on the target now, though room is kept there; empty where it may."""
    leaving = why_leaving(ledger, move)
    if leaving:
        return leaving
    node, seen = ledger.nodes[move.target], ledger.observations.get(move.target)
    if node.state is not NodeState.ALIVE or seen is None or move.target not in ledger.offers:
        return f"{move.target} is not heard or lends nothing now"
    return f"the owner of {move.target} is using it" if seen.yields else ""


def place_moved_job(ledger: Ledger, move: Move, lease: Lease, job: Job, now: int) -> tuple[Decision, str]:
    """Give a job that waits the room that is kept for its move, and say which lease still keeps it.

    While nothing may start on the target it waits for that and goes nowhere else, for a while; then, or where the room
    is lost, the queue has it. `lease` is what the job asks for.
    """
    anywhere = replace(lease, request=replace(lease.request, require=job.request.require))
    taken = _take_room(ledger, move, anywhere, job, now)
    if taken is not None:
        return taken, ""
    kept, since_ms = ledger.leases.get(move.lease_id), move.state_at_ms if move.state is MoveState.DEAD else now
    is_of_use = kept is not None and kept.request.ask == lease.request.ask and not why_leaving(ledger, move)
    if is_of_use and now - since_ms <= WAIT_FOR_TARGET_MS:
        there = replace(lease, request=replace(lease.request, require=(move.target,)))
        return Decision(_changed(ledger, there, job)), move.lease_id
    decision = release_reservation(ledger, move, f"{job.id} cannot use it", now)
    decision.changes += _changed(ledger, anywhere, job)
    decision.follow.append(ScanQueue())
    return decision, ""


def _changed(ledger: Ledger, lease: Lease, job: Job) -> list[Row]:
    rows: list[Row] = [] if ledger.leases.get(lease.id) == lease else [lease]
    return rows if ledger.jobs.get(job.uid) == job else [*rows, job]


def follow_moved_job(ledger: Ledger, move: Move, job: Job, now: int) -> Decision:
    """Go on with a job whose original is dead: while it waits for the target it is tried again, and what is kept though
    it has found room is given back."""
    lease = ledger.leases[job.lease_id]
    is_pinned = job.state is JobState.QUEUED and lease.request.require != job.request.require
    if job.state is JobState.QUEUED and (move.lease_id or is_pinned):
        decision, kept = place_moved_job(ledger, move, lease, job, now)
    elif move.lease_id:
        decision, kept = release_reservation(ledger, move, f"{job.id} has found other room", now), ""
    else:
        return Decision()
    decision.changes += [replace(move, lease_id=kept)] if kept != move.lease_id else []
    return decision


def _take_room(ledger: Ledger, move: Move, lease: Lease, job: Job, now: int) -> Decision | None:
    """The next attempt of a job in the room that is kept for its move; None where it cannot have it now."""
    kept = ledger.leases.get(move.lease_id)
    if kept is None or kept.claim is None or kept.state is not LeaseState.ACTIVE or why_nothing_starts(ledger, move):
        return None
    if kept.request.ask != lease.request.ask:
        return None
    ended = end_lease(ledger, kept, LeaseEnd.RELEASED, f"for job {job.id}", now)
    decision, _, _ = grant(ledger, lease, Placement(node=kept.node, claim=kept.claim), now, job=job)
    if kept.carved_from:
        decision.changes = [
            replace(row, carved_from=kept.carved_from) if isinstance(row, Lease) and row.id == lease.id else row
            for row in decision.changes
        ]
    decision.changes = ended.changes + decision.changes
    decision.records = ended.records + decision.records
    decision.follow += ended.follow
    decision.choice = None
    return decision


def _count_end(ledger: Ledger, move: Move, now: int) -> tuple[list[Row], list[Record]]:
    """Consequences of an automatic move: its nodes rest, and failures in a row stop automatic offloading."""
    if not move.automatic:
        return [], []
    watches = ledger.offload_watches
    ends = (name for name in (move.source, move.target) if name in ledger.nodes)
    rows: list[Row] = [replace(watches.get(name) or OffloadWatch(node=name), moved_at_ms=now) for name in ends]
    state = replace(ledger.auto_offload, moved_at_ms=now)
    if move.end is MoveEnd.DONE and move.ran_on in ("", move.target):
        return [*rows, replace(state, failures=0)], []
    if move.end not in (MoveEnd.FAILED, MoveEnd.DONE):
        return [*rows, state], []
    state, records = count_failure(state, f"{move.id} failed: {move.problem}")
    return [*rows, state], records


def count_failure(state: AutoOffloadState, why: str) -> tuple[AutoOffloadState, list[Record]]:
    """One more failure; the third in a row stops it."""
    failures = state.failures + 1
    if failures < MAX_FAILURES or state.stopped_why:
        return replace(state, failures=failures), []
    stopped = f"automatic offloading has stopped after {failures} failures in a row, the last one: {why}"
    return replace(state, failures=failures, stopped_why=stopped), [auto_record("stopped", "auto", "", stopped)]


def auto_record(action: str, subject: str, node: str, reason: str) -> Record:
    return Record("auto-offload", GRID_USER, subject, node, reason, data={"action": action})
