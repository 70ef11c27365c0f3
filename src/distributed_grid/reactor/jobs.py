"""Deciders of jobs and attempts: submission, cancellation, start, pause, checkpoint, end, requeue."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptMarked,
    AttemptOutgrown,
    AttemptPaused,
    AttemptsGone,
    AttemptsListed,
    AttemptStarted,
    JobCancelled,
    JobDetached,
    JobSubmitted,
    LeaseLost,
    LeaseReleased,
    StartsExpired,
    TimePassed,
)
from distributed_grid.domain.followups import Cause, ScanQueue
from distributed_grid.domain.jobs import Attempt, Ending, Job, Outcome, StopOrder
from distributed_grid.domain.leases import FOREVER_MS, Lease, NodeKind, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import MissingAttempt, NodeObservation
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.resources import Claim
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState, MoveState, Step, advance
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor import leases
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP, Decision, JobAnswer, LeaseAnswer, Record, RecordType
from distributed_grid.reactor.lease_transitions import end_lease, grant
from distributed_grid.reactor.reruns import (
    BiggerLimit,
    after_attempt,
    after_late_report,
    is_awaiting_checkpoint,
    next_limit,
    possible_estimate,
    why_not_again,
)
from distributed_grid.scheduling.offers.pause import count_failed_start, count_reclaim, count_start, rest_left_ms
from distributed_grid.scheduling.placement import machine_limits
from distributed_grid.scheduling.placement.placement import Placement
from distributed_grid.scheduling.queue.fairness import Quotas
from distributed_grid.scheduling.queue.reasons import never_fits

DISPLACED = frozenset({Ending.PREEMPTED, Ending.RECLAIMED, Ending.MOVED})
"""Ends that are not the job's doing: it is requeued."""

NOT_RUN_AGAIN = "not run again: it has no --restartable, no --retries and no checkpoint"
CLOSED_MS = 60_000
"""How long a node without thresholds is closed to a job that it has evicted; one with thresholds is for its dwell."""

MAX_STARTS_OF_MOVED = 5
"""How often a job that was moved is tried on a node that cannot start it."""

_LEASE_ENDS = {
    Ending.PREEMPTED: LeaseEnd.PREEMPTED,
    Ending.RECLAIMED: LeaseEnd.RECLAIMED,
    Ending.MOVED: LeaseEnd.RELEASED,
    Ending.EXPIRED: LeaseEnd.EXPIRED,
    Ending.LOST: LeaseEnd.LOST,
    Ending.OVER_LIMIT: LeaseEnd.FAILED,
    Ending.NEVER_STARTED: LeaseEnd.FAILED,
}


def on_submitted(ledger: Ledger, event: JobSubmitted, now: int) -> Decision:
    """Queue or place a new job; the same request id again gets the same job."""
    uid = event.request.id
    known = ledger.jobs.get(ledger.by_request.get(uid, ""))
    if known is not None or uid in ledger.by_request:
        if known is None or (known.id, known.command, known.request, known.fetch) != (
            event.id,
            event.command,
            event.request,
            event.fetch,
        ):
            raise Conflict(f"request {uid} was used before for something else")
        return Decision(answer=JobAnswer(known, ledger.leases.get(known.lease_id)))
    if not event.command.argv and not event.command.payload:
        raise BadInput("there is no command to run")
    if not event.command.argv and event.request.runs_on is not NodeKind.PULL:
        raise BadInput("a task without a command can only run on a pull worker")
    if event.request.gang > 1:
        raise BadInput("a command runs on one node: a gang can only be asked for without one")
    if event.retries < 0:
        raise BadInput("retries must not be negative")
    if event.id in ledger.job_uids:
        raise Conflict(f"a job called {event.id} is already there; wait for it, cancel it or choose another name")
    job = Job(
        uid=uid,
        id=event.id,
        command=event.command,
        request=event.request,
        submitted_at_ms=now,
        retries_left=event.retries,
        estimate=event.estimate,
        restartable=event.restartable,
        fetch=event.fetch,
    )
    if event.request.use_lease:
        return _submit_within_lease(ledger, job, now)
    try:
        return _admit(ledger, job, now)
    except Refused:
        estimate = possible_estimate(ledger, job)
        if estimate == job.estimate:
            raise
        return _admit(ledger, replace(job, estimate=estimate), now)


def _admit(ledger: Ledger, job: Job, now: int) -> Decision:
    lease = _next_lease(job.uid, 1, job.sized_request, now)
    return leases.admit(ledger, lease, now, job=replace(job, lease_id=lease.id))


def _submit_within_lease(ledger: Ledger, job: Job, now: int) -> Decision:
    """Run a command under a lease that its user holds already; one at a time, as it uses all of it."""
    request = job.request
    lease = _next_lease(job.uid, 1, request, now)
    held = ledger.leases.get(request.use_lease)
    if request.problem() is not None:
        raise BadInput(str(request.problem()))
    if held is None or held.job:
        raise NotFound(f"no lease {request.use_lease} is held")
    automatic = is_automatic(held.request)
    if held.request.user != request.user and not automatic:
        raise Refused(f"the lease {held.id} belongs to {held.request.user}, not to {request.user}")
    if held.state is not LeaseState.ACTIVE:
        raise Refused(f"the lease {held.id} is {held.state}, not active")
    for user in ledger.dependents.get(held.id, ()):
        raise Refused(f"the lease {held.id} is in use by {ledger.jobs[ledger.leases[user].job].id}; wait for that job")
    whole = replace(request, ask=held.request.ask, use_lease="")
    beyond = Quotas(ledger).exceeded(whole) if automatic and ledger.policy.quotas else None
    if beyond is not None:
        raise Refused(beyond)
    lacking = machine_limits.shortage(ledger, ledger.nodes[held.node], held.claim.memory_bytes if held.claim else 0)
    if lacking is not None:
        raise Refused(f"{held.node}: {lacking}")
    job = replace(job, lease_id=lease.id, retries_left=0)
    decision, lease, placed = grant(ledger, lease, Placement(node=held.node, claim=Claim()), now, job=job)
    assert placed is not None
    decision.answer = JobAnswer(placed, lease, choice=decision.choice)
    return decision


def _next_lease(uid: str, number: int, request: Request, now: int) -> Lease:
    return Lease(id=f"{uid}.{number}", request=request, asked_at_ms=now, job=uid)


def on_cancelled(ledger: Ledger, event: JobCancelled, now: int) -> Decision:
    """Stop a job for good, whatever its state."""
    job = ledger.jobs.get(event.uid)
    if job is None:
        raise NotFound(f"no job {event.uid} is going on")
    return stop_job(ledger, job, Ending.CANCELLED, event.detail or f"cancelled by {event.by}", now)


def on_detached(ledger: Ledger, event: JobDetached, now: int) -> Decision:
    """Record that nobody follows the job any more; it runs or waits as before."""
    job = ledger.jobs.get(event.uid)
    if job is None:
        raise NotFound(f"no job {event.uid} is going on")
    detached = replace(job, detached_at_ms=now, detached_reason=event.reason)
    record = Record("detached", event.by, job.uid, "", event.reason, data={"job_id": job.id})
    return Decision([detached], [record], answer=JobAnswer(detached))


def on_released(ledger: Ledger, event: LeaseReleased, now: int) -> Decision:
    """Release a lease; the job that runs under it is stopped first."""
    lease = leases.held_lease(ledger, event.lease_id)
    if lease.request.block:
        block = lease.request.block
        raise Refused(f"{lease.id} is a copy of block {block}; to free it type: grid memory deallocate {block}")
    if lease.request.worker in ledger.workers:
        worker = lease.request.worker
        raise Refused(f"{lease.id} is what worker {worker} runs on; to end it type: grid workers terminate {worker}")
    if lease.id in ledger.moves and ledger.moves[lease.id].lease_id == lease.id:
        raise Refused(f"{lease.id} is kept for a move; to end that type: grid offload cancel {lease.id}")
    if not lease.job:
        return leases.on_released(ledger, event, now)
    reason = event.detail or f"its lease was released by {event.by}"
    decision = stop_job(ledger, ledger.jobs[lease.job], Ending.CANCELLED, reason, now)
    after = [row for row in decision.changes if isinstance(row, Lease) and row.id == lease.id]
    decision.answer = LeaseAnswer(after[-1] if after else lease)
    return decision


def stop_job(ledger: Ledger, job: Job, ending: Ending, detail: str, now: int) -> Decision:
    """End what has not started, stop what has."""
    lease = ledger.leases[job.lease_id]
    outcome = Outcome(ending, detail=detail)
    is_moved = ending is Ending.MOVED and job.state is not JobState.QUEUED
    if (job.state is JobState.QUEUED or lease.awaits) and not is_moved:
        return _end_unstarted(ledger, job, lease, outcome, now)
    if is_untaken(ledger, job) or lease.awaits:
        if ending in DISPLACED:
            return requeue_unstarted(ledger, job, _LEASE_ENDS[ending], detail, now, ending=ending)
        return _end_unstarted(ledger, job, lease, outcome, now)
    stop = StopOrder(ending, detail, now, requeue=ending in DISPLACED)
    if job.state is JobState.STOPPING:
        settled = job.stop is not None and not job.stop.requeue
        return Decision(answer=JobAnswer(job)) if settled else _order_stop(job, stop, [])
    if lease.state is not LeaseState.RELEASING:
        lease = replace(lease, state=advance(lease.state, Step.RELEASE), detail=detail)
    stopping = replace(job, state=advance(job.state, Step.STOP))
    return _order_stop(stopping, stop, [lease])


def is_untaken(ledger: Ledger, job: Job) -> bool:
    """Whether the job waits for a pull worker to take it: nothing of it runs, whatever became of the worker."""
    return job.state is JobState.ASSIGNED and job.attempt is not None and job.attempt.node in ledger.pull_nodes


def _order_stop(job: Job, stop: StopOrder, rows: list[Row]) -> Decision:
    stopped = replace(job, stop=stop)
    record = Record("stopping", job.request.user, job.uid, "", stop.detail, data={"job_id": job.id})
    return Decision([*rows, stopped], [record], JobAnswer(stopped))


def _end_unstarted(ledger: Ledger, job: Job, lease: Lease, outcome: Outcome, now: int) -> Decision:
    decision = end_lease(ledger, lease, LeaseEnd.WITHDRAWN, outcome.detail, now)
    attempts = job.attempts
    if job.attempt is not None:
        attempts = (*attempts[:-1], replace(job.attempt, ended_at_ms=now, outcome=outcome))
    over = replace(
        job,
        state=advance(job.state, Step.END),
        attempts=attempts,
        outcome=outcome,
        ended_at_ms=now,
        stop=None,
        checkpoint_from=0,
    )
    decision.changes.append(over)
    decision.records.append(_end_record(over, ""))
    decision.answer = JobAnswer(over)
    return decision


def on_started(ledger: Ledger, event: AttemptStarted, now: int) -> Decision:
    """Record that an attempt runs; a late, repeated or unordered report changes nothing."""
    job, attempt = reported_attempt(ledger, event)
    if job is None or attempt is None or attempt.pid or ledger.leases[attempt.lease_id].awaits:
        return Decision()
    if is_awaiting_checkpoint(job):
        return Decision()
    running = replace(attempt, started_at_ms=now, pid=event.pid, cores=event.cores, pid_start=event.pid_start)
    state = advance(job.state, Step.START) if job.state is JobState.ASSIGNED else job.state
    changes: list[Row] = [replace(job, state=state, attempts=(*job.attempts[:-1], running))]
    lease = ledger.leases[attempt.lease_id]
    if lease.state is LeaseState.RESERVING:
        changes.append(replace(lease, state=advance(lease.state, Step.BIND)))
    seen = ledger.observations.get(attempt.node)
    if seen is not None and seen.failed_starts:
        changes.append(count_start(seen))
    return Decision(changes, [_start_record(job, running)])


def _start_record(job: Job, attempt: Attempt) -> Record:
    data: dict[str, str | int | list[str]] = {"job_id": job.id, "attempt": attempt.number, "pid": attempt.pid}
    if attempt.cores:
        data["cores"] = [str(core) for core in attempt.cores]
    return Record("started", job.request.user, job.uid, attempt.node, data=data)


def on_paused(ledger: Ledger, event: AttemptPaused, now: int) -> Decision:
    """Record that an attempt is paused for its node's owner, or resumed."""
    job, attempt = reported_attempt(ledger, event)
    expected = JobState.RUNNING if event.paused else JobState.PAUSED
    if job is None or attempt is None or job.state is not expected:
        return Decision()
    changed = replace(job, state=advance(job.state, Step.PAUSE if event.paused else Step.RESUME))
    kind: RecordType = "paused" if event.paused else "resumed"
    return Decision(
        [changed], [Record(kind, job.request.user, job.uid, attempt.node, event.detail, data={"job_id": job.id})]
    )


def on_marked(ledger: Ledger, event: AttemptMarked, now: int) -> Decision:
    """Record when an attempt marked its last checkpoint, by our own clock; older marks are ignored."""
    job, attempt = reported_attempt(ledger, event)
    if job is None or attempt is None or not attempt.pid:
        return Decision()
    marked = _with_mark(attempt, event.age_ms, now)
    return Decision([replace(job, attempts=(*job.attempts[:-1], marked))] if marked is not attempt else [])


def _with_mark(attempt: Attempt, age_ms: int, now: int) -> Attempt:
    """The attempt with a mark of this age, which is neither of the future nor older than the attempt."""
    at_ms = max(now - max(age_ms, 0), attempt.started_at_ms)
    return replace(attempt, marked_at_ms=at_ms) if at_ms > attempt.marked_at_ms else attempt


def on_ended(ledger: Ledger, event: AttemptEnded, now: int) -> Decision:
    """Close an attempt that is proven over: the job ends or is requeued.

    A late report about an attempt that was given up is only recorded in the audit trail.
    """
    job, attempt = reported_attempt(ledger, event)
    if job is None or attempt is None:
        return _late_report(ledger, event)
    outcome, is_taken_back = event.outcome, job.stop is None  # by the node, and nobody here has asked for it
    if job.stop is not None and not (job.stop.ending is Ending.MOVED and outcome.ending is Ending.EXITED):
        outcome = replace(outcome, ending=job.stop.ending, detail=outcome.detail or job.stop.detail)
    lease = ledger.leases[attempt.lease_id]
    end = _LEASE_ENDS.get(outcome.ending, LeaseEnd.RELEASED)
    decision = end_lease(ledger, lease, end, outcome.detail, now)
    if event.pid and not attempt.pid:
        began = max(attempt.assigned_at_ms, now - outcome.wall_ms)
        attempt = replace(attempt, started_at_ms=began, pid=event.pid, cores=event.cores, pid_start=event.pid_start)
        decision.records.insert(0, _start_record(job, attempt))
    if event.mark_age_ms is not None and attempt.pid:
        attempt = _with_mark(attempt, event.mark_age_ms, now)
    over = replace(attempt, ended_at_ms=now, outcome=outcome)
    job = after_attempt(replace(job, attempts=(*job.attempts[:-1], over), stop=None), over, event)
    displaced = outcome.ending in DISPLACED
    is_evicted = outcome.ending is Ending.RECLAIMED and is_taken_back and attempt.node not in ledger.workers
    seen = ledger.observations.get(attempt.node)
    failed_start = event.outcome.is_failed_start and not attempt.pid
    if seen is not None and failed_start:
        seen = count_failed_start(seen, attempt.assigned_at_ms, now)
        decision.changes.append(seen)
    elif seen is not None and attempt.pid and seen.failed_starts:
        seen = count_start(seen)
        decision.changes.append(seen)
    if displaced and is_taken_back and seen is not None:
        seen = count_reclaim(seen, attempt.assigned_at_ms, now)
        decision.changes.append(seen)
    if outcome.ending is Ending.RECLAIMED or ((displaced or failed_start) and rest_left_ms(seen, now)):
        offer = ledger.offers.get(attempt.node)
        decision.changes += [] if offer is None else [replace(offer, withdrawn=True)]  # until its node is heard
    if outcome.ending is Ending.OVER_LIMIT and not outcome.is_disk_overrun and job.given_limit_bytes:
        bigger = BiggerLimit((), why_not_again(over)) if job.may_outgrow else next_limit(ledger, job)
        if bigger.limits:
            assert job.estimate is not None
            estimate = replace(job.estimate, memory_limits=bigger.limits)
            job = replace(job, overruns=job.overruns + 1, estimate=estimate)
            decision.changes += _requeue(ledger, job, now, counts=False)  # that costs none of its retries
            reason = f"{over.outcome.detail if over.outcome is not None else ''}; {bigger.why}"
            data: dict[str, str | int | list[str]] = {"job_id": job.id, "memory_limit_bytes": job.given_limit_bytes}
            decision.records.append(Record("requeued", job.request.user, job.uid, over.node, reason, data=data))
            decision.follow = [ScanQueue()]
            return decision
        outcome = replace(outcome, detail=f"{outcome.detail}; {bigger.why}")
    has_checkpoint = bool(over.marked_at_ms or job.checkpoint_from or job.checkpoint)
    if is_evicted and attempt.pid and not (job.may_run_again or has_checkpoint):
        displaced, outcome = False, replace(outcome, detail=f"{outcome.detail}; {NOT_RUN_AGAIN}".lstrip("; "))
    goes_on = displaced or (outcome.is_failed_start and failed_start) or _goes_on_elsewhere(ledger, job, outcome)
    if not job.request.use_lease and (goes_on or (outcome.may_be_retried and job.retries_left > 0)):
        evicted_by = attempt.node if is_evicted and attempt.pid else ""
        decision.changes += _requeue(ledger, job, now, counts=not goes_on, evicted_by=evicted_by)
        reason = outcome.detail or str(outcome.ending)
        record = Record("requeued", job.request.user, job.uid, attempt.node, reason, data={"job_id": job.id})
        decision.records.append(record)
        decision.follow = [ScanQueue()]
        decision.answer = JobAnswer(job)
        return decision
    job = replace(job, checkpoint_from=0, result=event.result)
    ended = replace(job, state=advance(job.state, Step.END), outcome=outcome, ended_at_ms=now)
    decision.changes.append(ended)
    decision.records.append(_end_record(ended, attempt.node))
    decision.answer = JobAnswer(ended)
    return decision


def _goes_on_elsewhere(ledger: Ledger, job: Job, outcome: Outcome) -> bool:
    """Whether a job runs again without using up a retry: its user allows that when its node is lost, and what was moved
    and has not started yet was ended by the grid, so that the grid starts it."""
    move = ledger.moves.get(ledger.moves_by_job.get(job.uid, ""))
    is_moving = move is not None and move.state in (MoveState.DECIDED, MoveState.DEAD)
    if outcome.ending is Ending.LOST:
        return job.restartable or is_moving
    return is_moving and outcome.ending is Ending.NEVER_STARTED and len(_refusing_nodes(job)) < MAX_STARTS_OF_MOVED


def _refusing_nodes(job: Job) -> list[str]:
    """Where a job that was moved could not be started since then."""
    tried = (one for one in job.attempts if job.moved_at_ms and one.assigned_at_ms >= job.moved_at_ms)
    return [one.node for one in tried if one.outcome is not None and one.outcome.ending is Ending.NEVER_STARTED]


def _late_report(ledger: Ledger, event: AttemptEnded) -> Decision:
    """Record a late report; only of a node that reports about its own attempts."""
    known = ledger.jobs.get(event.uid)
    meant = [one for one in known.attempts if one.number == event.number] if known is not None else []
    if not event.nodes or any(one.outcome is None or one.outcome.ending is not Ending.LOST for one in meant):
        return Decision()
    data: dict[str, str | int | list[str]] = {"attempt": event.number, "ending": str(event.outcome.ending)}
    record = Record("late-report", "", event.uid, event.nodes[0], event.outcome.detail, data=data)
    waiting = after_late_report(ledger, event)
    return Decision([waiting] if waiting is not None else [], [record])


def requeue_unstarted(
    ledger: Ledger, job: Job, end: LeaseEnd, detail: str, now: int, *, ending: Ending = Ending.RECLAIMED
) -> Decision:
    """Requeue a job that was placed, but never started."""
    lease, attempt = ledger.leases[job.lease_id], job.attempt
    assert attempt is not None
    decision = end_lease(ledger, lease, end, detail, now)
    over = replace(attempt, ended_at_ms=now, outcome=Outcome(ending, detail=detail))
    job = replace(job, attempts=(*job.attempts[:-1], over), stop=None)
    decision.changes += _requeue(ledger, job, now, counts=False)
    decision.records.append(
        Record("requeued", job.request.user, job.uid, attempt.node, detail, data={"job_id": job.id})
    )
    decision.follow = [ScanQueue()]
    return decision


def _requeue(ledger: Ledger, job: Job, now: int, *, counts: bool, evicted_by: str = "") -> list[Row]:
    """The requeued job with a new lease to ask for; it keeps its age and does not give up. A node that could not start
    what was moved there is avoided, where there are others, and one that has evicted it is closed to it for a while."""
    held, node = ledger.leases.get(job.lease_id), ledger.nodes.get(evicted_by)
    closures = dict(held.request.closed) if held is not None else {}
    if node is not None:
        closures[node.name] = now + (node.thresholds.dwell_ms if node.thresholds is not None else CLOSED_MS)
    closed = tuple(sorted((name, until_ms) for name, until_ms in closures.items() if until_ms > now))
    request = replace(job.sized_request, wait_ms=FOREVER_MS, deadline_ms=0, closed=closed)
    refusing = dict.fromkeys(_refusing_nodes(job))
    elsewhere = replace(request, anti_affinity=(*request.anti_affinity, *refusing)) if refusing else request
    if refusing and never_fits(ledger, elsewhere) is None:
        request = elsewhere
    lease = _next_lease(job.uid, len(job.attempts) + 1, request, job.submitted_at_ms)
    if (before := ledger.leases.get(job.lease_id)) is not None:
        lease = replace(lease, work=before.work, turn=before.turn)
    state = advance(job.state, Step.REQUEUE)
    left = job.retries_left - 1 if counts else job.retries_left
    return [lease, replace(job, state=state, lease_id=lease.id, retries_left=left)]


def on_listed(ledger: Ledger, event: AttemptsListed, now: int) -> Decision:
    """Compare the attempts that an agent lists with those of its node. A missing one proves nothing: another agent may
    run it. The attempt is lost

    - at once, when the same agent's machine was started anew, or when nothing of it is seen on this machine;
    - when the node's hold is over, as it was when this agent came: until then something may keep it running.

    An attempt that was only assigned is ordered again, unless another agent or an earlier boot may have run it; one
    that was never ordered goes to the new agent.
    """
    node, known, running = ledger.nodes.get(event.node), set(event.attempts), set(event.running)
    ordered, since_ms = set(event.ordered), event.ordered_since_ms
    changes: list[Row] = []
    seen = ledger.observations.get(event.node) or NodeObservation(node=event.node, at_ms=0)
    before = {one.lease_id: one.until_ms for one in seen.missing}
    lost: list[LeaseLost] = []
    missing: list[MissingAttempt] = []
    for job in ledger.jobs_of(event.node):
        attempt = job.attempt
        if attempt is None or attempt.lease_id in known:
            continue
        lease_id, was_started = attempt.lease_id, job.state is not JobState.ASSIGNED
        is_ordered = since_ms is None or attempt.assigned_at_ms <= since_ms or lease_id in ordered
        if is_awaiting_checkpoint(job) or not (was_started or is_ordered):
            attempt = replace(attempt, boot=event.boot, machine=event.machine)
            changes.append(replace(job, attempts=(*job.attempts[:-1], attempt)))
            continue
        has_hold = node is not None and node.hold_ms > 0
        is_same = attempt.machine == event.machine or not has_hold
        if is_same and attempt.boot and attempt.boot != event.boot:
            lost.append(LeaseLost(lease_id, _no_trace(event.node)))
        elif has_hold:
            if was_started or not (is_same or ledger.leases[lease_id].awaits):
                until = seen.held_until_ms or now
                missing.append(MissingAttempt(lease_id, min(before.get(lease_id, until), until)))
        elif lease_id in running:
            missing.append(MissingAttempt(lease_id, 0))
        elif was_started:
            lost.append(LeaseLost(lease_id, _no_trace(event.node)))
    missing += [MissingAttempt(one.lease_id, now) for one in lost[MAX_LEASES_PER_STEP:]]  # given up in the next steps
    listed = replace(seen, boot=event.boot, machine=event.machine, missing=tuple(missing))
    if listed.lost:  # from its next heartbeat on the node has a hold again; until then nothing is known of it
        listed = replace(listed, lost=False, usage=None)
    changes += [listed] if listed != seen else []
    return Decision(changes, follow=[*lost[:MAX_LEASES_PER_STEP]])


def on_gone(ledger: Ledger, event: AttemptsGone, now: int) -> Decision:
    """Give up attempts that were kept because something of them was seen, and now is not."""
    seen = ledger.observations.get(event.node)
    if seen is None:
        return Decision()
    gone = {one.lease_id for one in seen.missing if not one.until_ms} & set(event.attempts)
    left = tuple(replace(one, until_ms=now) if one.lease_id in gone else one for one in seen.missing)
    if not gone:
        return Decision()
    seen = replace(seen, missing=left)
    decision = expire_missing(ledger, seen, now)
    decision.changes = decision.changes or [seen]
    return decision


def on_starts_expired(ledger: Ledger, event: StartsExpired, now: int) -> Decision:
    """End attempts that their node has not started in time and cannot start any more: their jobs go elsewhere.

    An attempt that has started after all, or that another agent than the node's may run, is left alone.
    """
    seen = ledger.observations.get(event.node)
    missing = {one.lease_id for one in seen.missing} if seen is not None else set()
    ended: list[Cause] = []
    for lease_id in event.attempts[:MAX_LEASES_PER_STEP]:
        lease = ledger.leases.get(lease_id)
        job = ledger.jobs.get(lease.job) if lease is not None and lease_id not in missing else None
        attempt = job.attempt if job is not None else None
        if job is None or attempt is None or (attempt.lease_id, attempt.node) != (lease_id, event.node) or attempt.pid:
            continue
        outcome = Outcome(Ending.NEVER_STARTED, detail=f"{event.node} did not start it in time", node_fault=True)
        ended.append(AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=outcome))
    return Decision(follow=ended)


def expire_missing(ledger: Ledger, seen: NodeObservation, now: int) -> Decision:
    """Give up what was missing until now: the hold that it had is over, so nothing of it can still run. It is missing
    until its lease is over: an observation is never stored, and an end that could not be is decided again."""
    left = tuple(one for one in seen.missing if one.lease_id in ledger.leases)
    over = [one for one in left if 0 < one.until_ms <= now]
    lost: list[Cause] = [LeaseLost(one.lease_id, _no_trace(seen.node)) for one in over[:MAX_LEASES_PER_STEP]]
    later: list[Cause] = [TimePassed()] if over[MAX_LEASES_PER_STEP:] else []
    return Decision([replace(seen, missing=left)] if left != seen.missing else [], follow=lost, later=later)


def _no_trace(node: str) -> str:
    return f"{node} has no trace of it"


def give_up_waiting(ledger: Ledger, job: Job, detail: str, now: int) -> Decision:
    """End a job that never got what it asked for."""
    lease = ledger.leases[job.lease_id]
    return _end_unstarted(ledger, job, lease, Outcome(Ending.WAITED_TOO_LONG, detail=detail), now)


def reported_attempt(
    ledger: Ledger, event: AttemptStarted | AttemptPaused | AttemptMarked | AttemptOutgrown | AttemptEnded
) -> tuple[Job | None, Attempt | None]:
    """The job and its running attempt, if that is the one a report speaks of, and the reporter may."""
    job = ledger.jobs.get(event.uid)
    attempt = job.attempt if job is not None else None
    if attempt is None or (attempt.number, attempt.fence) != (event.number, event.fence):
        return None, None
    if event.nodes and attempt.node not in event.nodes:
        return None, None
    return job, attempt


def _end_record(job: Job, node: str) -> Record:
    outcome = job.outcome
    assert outcome is not None
    data: dict[str, str | int | list[str]] = {"job_id": job.id, "ending": str(outcome.ending)}
    if outcome.exit_code is not None:
        data["exit_code"] = outcome.exit_code
    if outcome.signal is not None:
        data["signal"] = outcome.signal
    data["cpu_ms"], data["max_memory_bytes"] = outcome.cpu_ms, outcome.max_memory_bytes
    return Record("stopped", job.request.user, job.uid, node, outcome.detail or str(outcome.ending), data=data)
