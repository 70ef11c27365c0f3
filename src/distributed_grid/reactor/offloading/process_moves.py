"""Moves of processes that the grid did not start: frozen, ended by the guard on their node, started as a job.

Two rules carry their safety. The job is made in the step that records the death of the original, or a new boot id of
its machine, so nothing of it can start before. And from the moment at which the guard is asked to commit only the guard
knows: whatever happens here, the move waits for its report.

- Before the guard is asked to commit, every failure ends the move; the guard thaws the original by itself.
- Later it is thawed (the move ends) or decided. A decided one ends in a job, wherever that finds room.
- Where no report of the guard comes, because its node is not connected or was removed, the move waits without end.
  The room on the target is given back after `KEEP_ROOM_MS`; the job finds other room then.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.jobs import Job, JobEstimate
from distributed_grid.domain.leases import FOREVER_MS, Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MAX_FREEZE_MS, MIN_FREEZE_MS, MOVE_PREFIX, Move, MoveEnd, Way
from distributed_grid.domain.states import MoveState, NodeState, Step
from distributed_grid.errors import BadInput, Refused
from distributed_grid.reactor.decision import Decision, MoveAnswer
from distributed_grid.reactor.offloading.move_transitions import (
    advance_move,
    end_move,
    follow_moved_job,
    is_kept,
    move_record,
    place_moved_job,
    release_reservation,
    reservation_request,
    why_leaving,
    why_nothing_starts,
)
from distributed_grid.scheduling.queue.fairness import Quotas

JOB_PREFIX = "moved-"
"""Prefix of the uids of jobs that replaced a process."""
SHIP_LIMIT_MS = 3_600_000
"""How long the working directory may take to be shipped ahead."""
FREEZE_LIMIT_MS = 60_000
"""How long a node may take to freeze the original, and how much longer than the freeze lease its files."""
MEMORY_GROWTHS = (1, 4, 16)
"""The limits of a moved process: of its first run and of its reruns, as multiples of what it was given."""
KEEP_ROOM_MS = 600_000
"""How long room is kept for a move that waits for a report of its source."""


def job_uid(move_id: str) -> str:
    """The uid of the job that takes the place of the original."""
    return JOB_PREFIX + move_id.removeprefix(MOVE_PREFIX)


def proposed_process_move(ledger: Ledger, move: Move) -> Move:
    """The move with what is known of its source; Refused where the process cannot be moved."""
    process, command = move.process, move.command
    if process is None or command is None or not command.argv:
        raise BadInput("a move of a process needs the process and its command")
    if move.way is not Way.PROCESS_RESTART:
        raise BadInput(f"{move.way} is not a way for a process")
    if not MIN_FREEZE_MS <= move.freeze_ms <= MAX_FREEZE_MS:
        raise BadInput(f"it can stand still for {MIN_FREEZE_MS} to {MAX_FREEZE_MS} ms, not {move.freeze_ms}")
    if move.automatic:
        raise Refused("processes that the grid did not start are never moved by themselves")
    source, seen = ledger.nodes[move.source], ledger.observations.get(move.source)
    if source.state not in (NodeState.ALIVE, NodeState.DRAINING):
        raise Refused(f"{source.name} is {source.state}; its processes can be moved when it is heard again")
    boot, machine = (seen.boot, seen.machine) if seen is not None else ("", "")
    if boot and boot != process.identity.boot:
        raise Refused(f"{source.name} was started anew since; look again: grid offload scan -n {source.name}")
    for known in (ledger.moves[one] for one in ledger.moves_at.get(move.source, ())):
        if known.process is not None and known.process.identity == process.identity:
            pid, steps = process.identity.pid, f"wait for it, or type: grid offload cancel {known.id}"
            raise Refused(f"process {pid} is being moved already ({known.id}); {steps}")
    if ledger.policy.quotas:
        beyond = Quotas(ledger).exceeded(replace(move.request, user=move.user))
        if beyond is not None:
            raise Refused(beyond, (beyond,))
    request = reservation_request(ledger, move, move.request)
    return replace(move, job="", job_id=move.job_id or job_uid(move.id), machine=machine, request=request)


def is_witness(ledger: Ledger, move: Move) -> bool:
    """Whether the agent of the source is that of the machine and directory in which the move was opened: another one
    has no journal of it, so what it says of the original proves nothing."""
    seen = ledger.observations.get(move.source)
    return seen is not None and seen.machine == move.machine


def was_rebooted(ledger: Ledger, move: Move) -> bool:
    """Whether the machine of the original was started anew; another machine under its name says nothing."""
    seen, process = ledger.observations.get(move.source), move.process
    if seen is None or process is None or not seen.boot or _machine_of(seen.machine) != _machine_of(move.machine):
        return False
    return seen.boot != process.identity.boot


def _machine_of(name: str) -> str:
    """The machine in the name of a machine and its agent's directory."""
    return name.rpartition("-")[0]


def check_process_move(ledger: Ledger, move: Move, now: int) -> Decision:
    """Take the next step of a process's move, if something has changed for it."""
    if move.state in (MoveState.DEAD, MoveState.RUNNING):
        job = ledger.jobs.get(move.job)
        if job is None and move.source not in ledger.nodes:
            reason = f"{move.source} is not a node of the grid any more: its files were not returned there"
            return end_move(ledger, move, MoveEnd.DONE, reason, now)
        if job is None:
            return Decision()
        if move.state is MoveState.DEAD and job.attempt is not None and job.attempt.pid:
            place = {"ran_on": job.attempt.node, "ran_as": job.attempt.lease_id}
            running, records = advance_move(move, Step.START, now=now, **place)
            return Decision([running], records)
        return follow_moved_job(ledger, move, job, now)
    if was_rebooted(ledger, move):
        return _after_reboot(ledger, move, now)
    if move.is_decided or move.commit_asked_at_ms:
        waited = now - (move.commit_asked_at_ms or move.state_at_ms)
        if move.lease_id and (waited > KEEP_ROOM_MS or why_leaving(ledger, move)):
            decision = release_reservation(ledger, move, "the word of its source does not come", now)
            decision.changes.append(replace(move, lease_id=""))
            return decision
        return Decision()
    problem = _why_it_failed(ledger, move, now)
    if problem:
        return end_move(ledger, move, MoveEnd.FAILED, problem, now)
    if move.state is MoveState.PROPOSED and is_kept(ledger, move):
        reserved, records = advance_move(move, Step.RESERVE, now=now)
        return Decision([reserved], records)
    return Decision()


def _why_it_failed(ledger: Ledger, move: Move, now: int) -> str:
    """Why a move that is not committed cannot go on; empty where it can."""
    if move.source not in ledger.nodes:
        return f"{move.source} is not a node of the grid any more"
    seen = ledger.observations.get(move.source)
    if seen is not None and seen.boot and not is_witness(ledger, move):
        return f"{move.source} has another agent, which knows nothing of it"
    leaving = why_leaving(ledger, move)
    if leaving:
        return leaving
    waited = now - move.state_at_ms
    if move.state in (MoveState.PROPOSED, MoveState.RESERVED) and waited > SHIP_LIMIT_MS:
        return f"its files were not here after {SHIP_LIMIT_MS // 60_000} minutes"
    if move.state is MoveState.SHIPPED and waited > FREEZE_LIMIT_MS:
        return f"{move.source} did not freeze it within {FREEZE_LIMIT_MS // 1000} s"
    if move.state is MoveState.FROZEN and waited > move.freeze_ms + FREEZE_LIMIT_MS:
        return "its last changes were not here before its time to stand still was over"
    return ""


def _after_reboot(ledger: Ledger, move: Move, now: int) -> Decision:
    """Nothing of the original is left. Its work goes on where the guard may have ended it before that."""
    if move.is_decided or move.commit_asked_at_ms:
        return record_death(ledger, move, f"{move.source} was started anew", now)
    return end_move(ledger, move, MoveEnd.FAILED, "the process ended with its machine", now)


def record_shipped(move: Move, event: events.MoveShipped, now: int) -> Decision:
    """The working directory is here: the original can be frozen."""
    if move.state is not MoveState.RESERVED:
        return Decision()
    shipped, records = advance_move(
        move, Step.SHIP, now=now, shipped=event.manifest, shipped_bytes=event.bytes, left_out=event.left_out
    )
    return Decision([shipped], records)


def record_frozen(move: Move, now: int) -> Decision:
    """The original is frozen: its changed files can be shipped."""
    if move.state is not MoveState.SHIPPED:
        return Decision()
    frozen, records = advance_move(move, Step.FREEZE, now=now, frozen_at_ms=now)
    return Decision([frozen], records)


def record_settled(ledger: Ledger, move: Move, event: events.MoveFilesSettled, now: int) -> Decision:
    """All files are here as they are now: from here on only the guard knows what becomes of the original. Where nothing
    may start on the target now, the original goes on instead."""
    if move.state is not MoveState.FROZEN or move.commit_asked_at_ms:
        return Decision()
    problem = why_nothing_starts(ledger, move)
    if problem:
        return end_move(ledger, move, MoveEnd.FAILED, problem, now)
    asked = replace(
        move, final=event.manifest, final_bytes=event.bytes, commit_asked_at_ms=now, left_out=event.left_out
    )
    record = move_record("move-advanced", asked, "asked to end it", state=str(asked.state), bytes=event.bytes)
    return Decision([asked], [record])


def record_decided(move: Move, frozen_ms: int, now: int) -> Decision:
    """The guard has decided: who wanted the move to end came too late."""
    if move.state is not MoveState.FROZEN or not move.commit_asked_at_ms:
        return Decision()
    frozen_ms = frozen_ms or now - move.frozen_at_ms
    decided, records = advance_move(move, Step.COMMIT, now=now, ending=None, problem="", frozen_for_ms=frozen_ms)
    return Decision([decided], records)


def record_thawed(ledger: Ledger, move: Move, report: events.MoveReported, now: int) -> Decision:
    """The original was thawed, or ended by itself: nothing was moved."""
    if move.is_decided:
        return Decision()
    is_gone = report.state is MoveState.GONE
    move = replace(move, frozen_for_ms=report.frozen_ms or move.frozen_for_ms)
    if is_gone and was_rebooted(ledger, move):
        return _after_reboot(ledger, move, now)
    if is_gone:
        return end_move(ledger, move, MoveEnd.NOT_NEEDED, report.detail or "the process ended by itself", now)
    if move.ending is not None:
        return end_move(ledger, move, move.ending, move.problem, now)
    return end_move(ledger, move, MoveEnd.FAILED, report.detail or "it was thawed", now)


def record_death(ledger: Ledger, move: Move, detail: str, now: int) -> Decision:
    """The whole original is gone: only in this step its job begins to exist, in the room that is kept for it or in the
    queue. Where nobody has asked for its end it has ended by itself."""
    if move.state in (MoveState.DEAD, MoveState.RUNNING):
        return Decision()
    if not move.is_decided and not move.commit_asked_at_ms:
        return end_move(ledger, move, MoveEnd.NOT_NEEDED, detail or "the process ended by itself", now)
    steps = (Step.DIE,) if move.is_decided else (Step.COMMIT, Step.DIE)
    job, lease = _new_job(ledger, move, now)
    decision, kept = place_moved_job(ledger, move, lease, job, now)
    frozen_ms = move.frozen_for_ms or now - move.frozen_at_ms
    fields = {
        "ending": None,
        "problem": "",
        "lease_id": kept,
        "job": job.uid,
        "job_id": job.id,
        "frozen_for_ms": frozen_ms,
    }
    dead, records = advance_move(move, *steps, now=now, **fields)
    decision.changes.append(dead)
    decision.records += records
    return decision


def _new_job(ledger: Ledger, move: Move, now: int) -> tuple[Job, Lease]:
    assert move.command is not None
    uid = job_uid(move.id)
    wanted = replace(
        move.request, id=uid, user=move.user, require=(), wait_ms=FOREVER_MS, target="", origin=move.source
    )
    lease = Lease(id=f"{uid}.1", request=wanted, asked_at_ms=now, job=uid)
    # Nobody knows how much more than the measured memory it needs, so a job that needs more is run again with more.
    limits = tuple(wanted.ask.memory_bytes * growth for growth in MEMORY_GROWTHS)
    estimate = JobEstimate(memory_limits=limits, tier="measured") if wanted.ask.memory_bytes else None
    job = Job(
        uid=uid,
        id=uid if not move.job_id or move.job_id in ledger.job_uids else move.job_id,
        command=replace(move.command, workdir=move.final or move.command.workdir),
        request=wanted,
        submitted_at_ms=now,
        lease_id=lease.id,
        restartable=True,
        moved_at_ms=now,
        estimate=estimate,
    )
    return job, lease


def record_job_end(ledger: Ledger, move: Move, job: Job, now: int) -> Decision:
    """The job has ended, and what it has written can be returned; the move is over where it has never run."""
    attempt = next((one for one in reversed(job.attempts) if one.pid), None)
    outcome = job.outcome
    result = "over" if outcome is None else str(outcome.ending)
    if outcome is not None and outcome.exit_code is not None:
        result = f"{result} {outcome.exit_code}"
    if attempt is None:
        ended = replace(move, result=result)
        return end_move(ledger, ended, MoveEnd.DONE, f"{job.id} has ended without having run ({result})", now)
    ended = replace(move, result=result, ran_on=attempt.node, ran_as=attempt.lease_id)
    if move.state is MoveState.DEAD:
        ended, _ = advance_move(ended, Step.START, now=now)
    return Decision([ended], [move_record("move-advanced", ended, result, state=str(ended.state), result=result)])


def record_results(ledger: Ledger, move: Move, event: events.MoveResultsBrought, now: int) -> Decision:
    """The results of the job are here; without any, the move ends."""
    if not move.result or move.results:
        return Decision()
    if not event.manifest:
        return end_move(ledger, replace(move, is_returned=not event.problem), MoveEnd.DONE, event.problem, now)
    brought = replace(move, results=event.manifest, problem=event.problem)
    return Decision([brought])


def record_returned(ledger: Ledger, move: Move, report: events.MoveReported, now: int) -> Decision:
    """The files are back at the source: the move is over."""
    if not move.results:
        return Decision()
    back = replace(move, is_returned=not report.detail, returned=report.files, kept=report.kept, notes=report.notes)
    return end_move(ledger, back, MoveEnd.DONE, report.detail or move.problem, now)


def fail_process_move(ledger: Ledger, move: Move, why: str, now: int) -> Decision:
    """End a move that cannot go on, while that is known to be true; later it is a wish, or only noted."""
    if move.state in (MoveState.DEAD, MoveState.RUNNING):
        return Decision([replace(move, problem=why)] if move.result and why != move.problem else [])
    if move.is_decided:
        return Decision()
    return request_abort(ledger, move, MoveEnd.FAILED, why, now)


def request_abort(ledger: Ledger, move: Move, end: MoveEnd, why: str, now: int) -> Decision:
    """End a move that is not decided; once the guard was asked to commit its word is waited for."""
    if not move.commit_asked_at_ms:
        return end_move(ledger, move, end, why, now)
    if move.ending is not None:
        return Decision(answer=MoveAnswer(move))
    ending = replace(move, ending=end, problem=why)
    record = move_record("move-advanced", ending, why, state=str(ending.state), ending=str(end))
    return Decision([ending], [record], MoveAnswer(ending))
