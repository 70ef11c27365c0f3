"""Deciders of moves: the request, the reports of the source, what follows from other changes; and consents of users.

A report counts only where its reporter serves the node that the work leaves. Reports that come late or twice change
nothing, and so does a request that is repeated.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.followups import CheckMove
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MOVE_PREFIX, Move, MoveEnd
from distributed_grid.domain.states import MoveState, NodeState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor.decision import Decision, MoveAnswer, Record
from distributed_grid.reactor.offloading import job_moves, process_moves
from distributed_grid.reactor.offloading.move_transitions import end_move, move_record, reserve_room
from distributed_grid.scheduling.queue.reasons import is_stopped

MAX_CHECKED_PER_STEP = 100
"""Moves that one tick advances, so that it does not take long; the next one follows."""


def on_requested(ledger: Ledger, event: events.MoveRequested, now: int) -> Decision:
    """Keep room for work that is to leave its node; Refused where it cannot leave, or finds no room."""
    asked = event.move
    known = ledger.moves.get(asked.id)
    if known is not None:
        if _identity(known) != _identity(asked):
            raise Conflict(f"move {asked.id} was used before for something else")
        return Decision(answer=MoveAnswer(known))
    if not asked.id.startswith(MOVE_PREFIX) or asked.id == MOVE_PREFIX:
        raise BadInput(f"the id of a move begins with {MOVE_PREFIX}: {asked.id!r}")
    for name in (asked.source, asked.target):
        if name not in ledger.nodes:
            known_nodes = ", ".join(sorted(ledger.nodes)) or "none"
            raise Refused(f"no node is called {name}; the nodes are: {known_nodes}")
    if asked.source == asked.target:
        raise Refused(f"it is on {asked.target} already; choose another node with -t")
    target = ledger.nodes[asked.target]
    if target.state is not NodeState.ALIVE:
        state = "stopped" if is_stopped(ledger, target) else target.state
        raise Refused(f"{target.name} is {state}; choose another node with -t")
    if target.is_pull:
        raise Refused(f"{target.name} is a pull worker, which asks for its work itself; choose another node with -t")
    move = Move(
        id=asked.id,
        user=asked.user,
        source=asked.source,
        target=asked.target,
        way=asked.way,
        request=asked.request,
        requested_at_ms=now,
        state_at_ms=now,
        reason=asked.reason,
        automatic=asked.automatic,
        job=asked.job,
        job_id=asked.job_id,
        process=asked.process,
        command=asked.command,
        freeze_ms=asked.freeze_ms,
    )
    if move.process is None:
        move = job_moves.proposed_job_move(ledger, move)
    else:
        move = process_moves.proposed_process_move(ledger, move)
    decision, lease = reserve_room(ledger, move.request, now)
    move = replace(move, lease_id=lease.id)
    decision.changes.append(move)
    decision.records.insert(0, move_record("move-requested", move, move.reason))
    decision.answer = MoveAnswer(move)
    decision.follow.insert(0, CheckMove(move.id))
    return decision


def _identity(move: Move) -> tuple[object, ...]:
    """Fields that are equal in a repeated request; the way of a waiting job is chosen here."""
    what = (move.process.identity, move.command) if move.process is not None else (move.job,)
    return (move.user, move.source, move.target, *what)


def check_move(ledger: Ledger, check: CheckMove, now: int) -> Decision:
    """Take the next step of a move, if there is one; then check again."""
    move = ledger.moves.get(check.move_id)
    if move is None:
        return Decision()
    decision = _check(ledger, move, now)
    if decision.changes:
        decision.follow.insert(0, check)
    return decision


def _check(ledger: Ledger, move: Move, now: int) -> Decision:
    if move.process is None:
        return job_moves.check_job_move(ledger, move, now)
    return process_moves.check_process_move(ledger, move, now)


def due_moves(ledger: Ledger, now: int) -> list[CheckMove]:
    """The checks of moves that time, a node or a boot id has something to say to."""
    due = (move for move in ledger.moves.values() if _check(ledger, move, now).changes)
    return [CheckMove(move.id) for move, _ in zip(due, range(MAX_CHECKED_PER_STEP), strict=False)]


def follow_changes(ledger: Ledger, decision: Decision, now: int) -> Decision:
    """The decision, with what its jobs and leases mean for their moves: the end of a job and the loss of kept room are
    recorded at once, everything else is a check that follows first."""
    if not ledger.moves:
        return decision
    jobs: dict[str, Job] = {}
    lost: dict[str, Lease] = {}
    checks: dict[str, None] = {}
    changed = {row.id for row in decision.changes if isinstance(row, Move)}
    for row in decision.changes:
        move_id = ""  # of the job, or of the lease that reserves its room
        if isinstance(row, Job):
            move_id = ledger.moves_by_job.get(row.uid, "")
        elif isinstance(row, Lease) and row.id in ledger.moves and ledger.moves[row.id].lease_id == row.id:
            move_id = row.id
        if not move_id or move_id in changed:
            continue
        if isinstance(row, Job) and row.is_over:
            jobs[move_id] = row
        elif isinstance(row, Lease) and row.is_over:
            lost[move_id] = row
        else:
            checks[move_id] = None
    for move_id in dict.fromkeys((*jobs, *lost)):
        after = _after_end(ledger, ledger.moves[move_id], jobs.get(move_id), lost.get(move_id), now)
        decision.changes += after.changes
        decision.records += after.records
        decision.follow += after.follow
    decision.follow[:0] = [CheckMove(move_id) for move_id in checks if move_id not in jobs]
    return decision


def _after_end(ledger: Ledger, move: Move, job: Job | None, lost: Lease | None, now: int) -> Decision:
    if lost is not None:
        move = replace(move, lease_id="")
    if job is not None and move.process is None:
        return job_moves.close_job_move(ledger, move, job, now)
    if job is not None:
        return process_moves.record_job_end(ledger, move, job, now)
    assert lost is not None
    if move.is_decided or move.commit_asked_at_ms:
        return Decision([move], follow=[CheckMove(move.id)])
    reason = f"the room on {move.target} was lost: {lost.detail or lost.end}"
    return end_move(ledger, move, MoveEnd.FAILED, reason, now)


def _process_move(ledger: Ledger, move_id: str, nodes: tuple[str, ...] = ()) -> Move | None:
    """The living move of a process that a report is about, if its reporter may say so: it serves the source, on the
    machine and from the directory in which the move was opened. Who returns files need not have seen that."""
    move = ledger.moves.get(move_id)
    if move is None or move.process is None:
        return None
    if nodes and (move.source not in nodes or not (move.result or process_moves.is_witness(ledger, move))):
        return None
    return move


def on_shipped(ledger: Ledger, event: events.MoveShipped, now: int) -> Decision:
    """Record that the working directory of the original was shipped ahead."""
    move = _process_move(ledger, event.move_id)
    return Decision() if move is None else process_moves.record_shipped(move, event, now)


def on_reported(ledger: Ledger, report: events.MoveReported, now: int) -> Decision:
    """Advance the move of a process to the state that its source reported."""
    move = _process_move(ledger, report.move_id, report.nodes)
    if move is None:
        return Decision()
    match report.state:
        case MoveState.FROZEN:
            return process_moves.record_frozen(move, now)
        case MoveState.DECIDED:
            return process_moves.record_decided(move, report.frozen_ms, now)
        case MoveState.DEAD:
            return process_moves.record_death(ledger, move, report.detail, now)
        case MoveState.THAWED | MoveState.GONE:
            return process_moves.record_thawed(ledger, move, report, now)
        case MoveState.RETURNED:
            return process_moves.record_returned(ledger, move, report, now)
        case MoveState.FAILED:
            reason = report.detail or f"{move.source} could not carry out an order"
            return process_moves.fail_process_move(ledger, move, reason, now)
    return Decision()


def on_files_settled(ledger: Ledger, event: events.MoveFilesSettled, now: int) -> Decision:
    """Record that all files are here, and ask the guard to commit."""
    move = _process_move(ledger, event.move_id)
    return Decision() if move is None else process_moves.record_settled(ledger, move, event, now)


def on_failed(ledger: Ledger, event: events.MoveFailed, now: int) -> Decision:
    """End a move whose files cannot be shipped, unless that is too late."""
    move = ledger.moves.get(event.move_id)
    if move is None:
        return Decision()
    if move.process is not None:
        return process_moves.fail_process_move(ledger, move, event.why, now)
    return Decision() if move.is_decided else end_move(ledger, move, MoveEnd.FAILED, event.why, now)


def on_cancelled(ledger: Ledger, event: events.MoveCancelled, now: int) -> Decision:
    """End a move that its user does not want any more. Refused once it is decided: then its job can be cancelled."""
    move = ledger.moves.get(event.move_id)
    if move is None:
        raise NotFound(f"no move {event.move_id} is going on")
    reason = f"cancelled by {event.by}"
    if move.process is not None and move.result:
        return end_move(ledger, move, MoveEnd.DONE, f"its files were not returned: {reason}", now)
    if move.is_decided:
        when = "when the original is recorded dead, " if move.state is MoveState.DECIDED and not move.job else ""
        raise Refused(
            f"move {move.id} is {move.state}: the original does not go on; to end the work {when}"
            f"type: grid jobs cancel {move.job_id}"
        )
    return process_moves.request_abort(ledger, move, MoveEnd.CANCELLED, reason, now)


def on_results_brought(ledger: Ledger, event: events.MoveResultsBrought, now: int) -> Decision:
    """Record that what the job of a moved process has written is here."""
    move = _process_move(ledger, event.move_id)
    return Decision() if move is None else process_moves.record_results(ledger, move, event, now)


def on_consent_given(ledger: Ledger, event: events.ConsentGiven, now: int) -> Decision:
    """Remember a consent; given again, its variables are replaced."""
    consent = replace(event.consent, given_at_ms=now)
    known = ledger.consents.get(consent.key)
    if known is not None and known.variables == consent.variables:
        return Decision()
    details = {"variables": [*consent.variables], "directory": consent.cwd}
    record = Record("move-consent", consent.user, consent.shape, "", "given", data=details)
    return Decision([consent], [record])


def on_consent_withdrawn(ledger: Ledger, event: events.ConsentWithdrawn, now: int) -> Decision:
    """Forget the consents for a shape, whatever their directories; a second time is harmless."""
    known = [one for one in ledger.consents.values() if (one.user, one.shape) == (event.user, event.shape)]
    if not known:
        return Decision()
    record = Record("move-consent", event.user, event.shape, "", "withdrawn")
    return Decision([replace(consent, withdrawn=True) for consent in known], [record])
