"""Moves of jobs: room on the target is kept first, then the job is stopped; its recorded end gives it that room.

A waiting job has nothing to stop and takes the room at once. Until the job is stopped nothing has happened to it; from
then on it is the queue's if the room is lost.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.jobs import Ending, Job
from distributed_grid.domain.leases import NodeKind
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move, MoveEnd, Way
from distributed_grid.domain.states import JobState, MoveState, Step
from distributed_grid.errors import NotFound, Refused
from distributed_grid.reactor.decision import Decision
from distributed_grid.reactor.jobs import stop_job
from distributed_grid.reactor.offloading.move_transitions import (
    WAIT_FOR_TARGET_MS,
    advance_move,
    end_move,
    follow_moved_job,
    is_kept,
    place_moved_job,
    release_reservation,
    reservation_request,
    why_leaving,
    why_nothing_starts,
)
from distributed_grid.scheduling.queue.fairness import Quotas

_WAITING = frozenset({JobState.QUEUED, JobState.ASSIGNED})
_MARK = "it has marked no checkpoint; a job does so by touching the file that $GRID_CHECKPOINT names"
_DECLARE = "it was not declared restartable; submit such jobs with: grid run-shared --restartable"


def proposed_job_move(ledger: Ledger, move: Move) -> Move:
    """The move with all that follows from its job; Refused where the job cannot be moved so."""
    job = ledger.jobs.get(move.job)
    if job is None:
        raise NotFound(f"no job {move.job_id or move.job} is going on")
    if job.uid in ledger.moves_by_job:
        known = ledger.moves_by_job[job.uid]
        raise Refused(f"{job.id} is being moved already ({known}); wait for it, or type: grid offload cancel {known}")
    if job.request.use_lease:
        raise Refused(f"{job.id} runs within lease {job.request.use_lease}, and goes where that is")
    if job.request.runs_on is NodeKind.PULL or (job.attempt is not None and job.attempt.node in ledger.pull_nodes):
        raise Refused(f"{job.id} is a task of a pull worker, which asks for its work itself")
    if job.state is JobState.STOPPING:
        reason = job.stop.detail if job.stop is not None else ""
        raise Refused(f"{job.id} is being stopped already: {reason}")
    if job.request.require and move.target not in job.request.require:
        raise Refused(f"{job.id} was submitted for {', '.join(job.request.require)} only, not for {move.target}")
    if job.attempt is not None and job.attempt.node == move.target:
        raise Refused(f"{job.id} is on {move.target} already")
    if job.attempt is not None and job.attempt.node != move.source:
        raise Refused(f"{job.id} is on {job.attempt.node}, not on {move.source}")
    move = replace(move, job_id=job.id, way=_checked_way(job, move.way))
    if job.state is JobState.QUEUED and ledger.policy.quotas:
        beyond = Quotas(ledger).exceeded(job.sized_request)
        if beyond is not None:
            raise Refused(f"{job.id} waits for its quota, not for room: {beyond}", (beyond,))
    return replace(move, request=reservation_request(ledger, move, job.sized_request))


def _checked_way(job: Job, way: Way) -> Way:
    """The way by which a job may be moved; one that waits has nothing to lose."""
    if job.state in _WAITING:
        return Way.QUEUE_ELSEWHERE
    if way is Way.QUEUE_ELSEWHERE:
        raise Refused(f"{job.id} has started meanwhile; look again: grid offload scan")
    problem = _why_not_restarted(job, way)
    if problem:
        raise Refused(f"{job.id} cannot be moved: {problem}")
    return way


def _why_not_restarted(job: Job, way: Way) -> str:
    if way is Way.CHECKPOINT_RESTART:
        return "" if job.attempt is not None and job.attempt.marked_at_ms else _MARK
    if way is Way.RESTART:
        return "" if job.restartable else _DECLARE
    return f"{way} is not a way for a job"


def check_job_move(ledger: Ledger, move: Move, now: int) -> Decision:
    """Take the next step of a job's move, if something has changed for it."""
    job = ledger.jobs.get(move.job)
    if job is None:  # what ends a job ends its move in the same step
        return end_move(ledger, move, MoveEnd.NOT_NEEDED, "its job is over", now)
    if move.state is MoveState.PROPOSED:
        if not is_kept(ledger, move):
            return Decision()
        reserved, records = advance_move(move, Step.RESERVE, now=now)
        return Decision([reserved], records)
    if move.state is MoveState.RESERVED:
        return _decide(ledger, move, job, now)
    if move.state is MoveState.DECIDED:
        return _record_death(ledger, move, job, now)
    if job.attempt is not None and job.attempt.pid:
        node = job.attempt.node
        running, records = advance_move(move, Step.START, now=now, ran_on=node, ran_as=job.attempt.lease_id)
        problem = f"{move.target} could not run it: it runs on {node}" if node != move.target else ""
        decision = end_move(ledger, running, MoveEnd.DONE, problem, now)
        decision.records = records + decision.records
        return decision
    return follow_moved_job(ledger, move, job, now)


def _decide(ledger: Ledger, move: Move, job: Job, now: int) -> Decision:
    """Stop the job, or give it the room at once where nothing of it runs; the move ends where that makes no sense."""
    if move.automatic:  # room for it may have taken a while
        state = ledger.auto_offload
        disabled = f"automatic offloading was disabled by {state.set_by}" if state.enabled is False else ""
        if unwanted := disabled or state.stopped_why:
            return end_move(ledger, move, MoveEnd.CANCELLED, unwanted, now)
    unusable = why_nothing_starts(ledger, move)
    if unusable:
        is_over = bool(why_leaving(ledger, move)) or now - move.state_at_ms > WAIT_FOR_TARGET_MS
        return end_move(ledger, move, MoveEnd.FAILED, unusable, now) if is_over else Decision()
    attempt = job.attempt
    if job.state is JobState.QUEUED:
        beyond = Quotas(ledger).exceeded(job.sized_request) if ledger.policy.quotas else None
        if beyond is not None:
            return end_move(ledger, move, MoveEnd.FAILED, beyond, now)
        decided, _ = advance_move(move, Step.COMMIT, now=now)
        return _record_death(ledger, decided, job, now)
    if job.state is JobState.STOPPING or attempt is None:  # for another reason: what comes of it is seen when it ends
        return Decision()
    if attempt.node != move.source or attempt.node in ledger.pull_nodes:
        return end_move(ledger, move, MoveEnd.NOT_NEEDED, f"{job.id} went to {attempt.node} meanwhile", now)
    if move.way is Way.QUEUE_ELSEWHERE and job.state is not JobState.ASSIGNED:
        return end_move(ledger, move, MoveEnd.NOT_NEEDED, f"{job.id} has started on {attempt.node} meanwhile", now)
    problem = "" if job.state is JobState.ASSIGNED else _why_not_restarted(job, move.way)
    if problem:
        return end_move(ledger, move, MoveEnd.FAILED, problem, now)
    decision = stop_job(ledger, job, Ending.MOVED, f"moves to {move.target}: {move.reason or move.way}", now)
    decided, records = advance_move(move, Step.COMMIT, now=now)
    decision.changes.append(decided)
    decision.records += records
    decision.answer = None
    return decision


def _record_death(ledger: Ledger, move: Move, job: Job, now: int) -> Decision:
    """Give a job whose attempt has ended, and that waits, the room that is kept for it."""
    if job.state is JobState.STOPPING:
        return Decision()
    moved, kept = replace(job, moved_at_ms=now), ""
    if job.state is JobState.QUEUED:
        decision, kept = place_moved_job(ledger, move, ledger.leases[job.lease_id], moved, now)
    else:
        decision = release_reservation(ledger, move, f"{job.id} has found other room", now)
        decision.changes.append(moved)
    dead, records = advance_move(move, Step.DIE, now=now, lease_id=kept)
    decision.changes.append(dead)
    decision.records += records
    return decision


def close_job_move(ledger: Ledger, move: Move, job: Job, now: int) -> Decision:
    """End the move of a job that is over, however it ended."""
    attempt = job.attempts[-1] if job.attempts else None
    if move.state is not MoveState.DEAD:
        return end_move(ledger, move, MoveEnd.NOT_NEEDED, _job_end(job), now)
    return end_move(ledger, move, MoveEnd.DONE, "" if attempt is not None and attempt.pid else _job_end(job), now)


def _job_end(job: Job) -> str:
    outcome = job.outcome
    assert outcome is not None
    return f"{job.id} has ended ({outcome.ending})" + (f": {outcome.detail}" if outcome.detail else "")
