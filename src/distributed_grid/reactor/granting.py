"""The steps of a lease that several deciders share: granting, displacing, ending."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.changes import Counter, Row
from distributed_grid.domain.events import QueueLooked
from distributed_grid.domain.jobs import Attempt, Ending, Job, Stop
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.lives import LeaseEnd, LeaseState, Step, advance_job, advance_lease
from distributed_grid.domain.resources import Claim, Priority
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.scheduling import reasons
from distributed_grid.scheduling.preemption import Displacement

FENCE = "fence"


def grant(
    ledger: Ledger,
    lease: Lease,
    node: str,
    claim: Claim,
    now: int,
    *,
    job: Job | None,
    awaits: tuple[str, ...] = (),
) -> tuple[Decision, Lease, Job | None]:
    """Give an asked lease its place; a job gets its next attempt with it."""
    fence = ledger.counters.get(FENCE, 0) + 1
    state = advance_lease(lease.state, Step.GRANT)
    if job is None and not awaits:
        state = advance_lease(state, Step.BIND)
    duration = lease.request.duration_ms
    seen = ledger.sightings.get(node)
    granted = replace(
        lease,
        state=state,
        node=node,
        claim=claim,
        fence=fence,
        granted_at_ms=now,
        ends_at_ms=now + duration if duration else 0,
        generation=seen.generation if seen is not None else 0,
        awaits=awaits,
    )
    decision = Decision(changes=[granted, Counter(FENCE, fence)])
    record = record_of("granted", granted, job)
    record.data["asked"] = reasons.amounts(lease.request.ask)
    record.data["priority"] = lease.request.priority.name.lower()
    record.data["waited_ms"] = now - lease.asked_at_ms
    if claim.gpus:
        record.data["gpus"] = [str(share.index) for share in claim.gpus]
    decision.records.append(record)
    if job is None:
        return decision, granted, None
    boot = seen.boot if seen is not None else ""
    attempt = Attempt(len(job.attempts) + 1, lease.id, node, fence, now, boot=boot)
    assigned = replace(job, state=advance_job(job.state, Step.ASSIGN), attempts=(*job.attempts, attempt))
    decision.changes.append(assigned)
    return decision, granted, assigned


def record_of(type_: str, lease: Lease, job: Job | None, reason: str = "") -> Record:
    """A line about a lease; what happens to a job's lease is told under the job."""
    data: dict[str, str | int | list[str]] = {"allocation_id": lease.id}
    if job is not None:
        data["job_id"] = job.id
    return Record(type_, lease.request.user, lease.job or lease.id, lease.node, reason, data)


def yield_to(ledger: Ledger, way: Displacement, preemptor: Lease, now: int) -> tuple[Decision, tuple[str, ...]]:
    """Ask the victims to go; the second value is who must be waited for."""
    decision = Decision()
    gone = set()
    for lease_id in way.victims:
        victim = ledger.leases[lease_id]
        why = f"made room for {preemptor.request.priority.name.lower()} request {preemptor.id}"
        decision.records.append(record_of("preempted", victim, ledger.jobs.get(victim.job), why))
        leaving = replace(victim, state=advance_lease(victim.state, Step.RELEASE), yields_to=preemptor.id, detail=why)
        if not victim.job:
            decision.changes.append(_ended(leaving, LeaseEnd.PREEMPTED, why, now))
            gone.add(lease_id)
            continue
        job = ledger.jobs[victim.job]
        stop = Stop(Ending.PREEMPTED, why, now, requeue=True)
        decision.changes += [leaving, replace(job, state=advance_job(job.state, Step.STOP), stop=stop)]
    return decision, tuple(lease_id for lease_id in way.awaits if lease_id not in gone)


def end_lease(ledger: Ledger, lease: Lease, end: LeaseEnd, detail: str, now: int) -> Decision:
    """End a lease that nothing runs under any more, and let those who waited for it go on."""
    if lease.state in (LeaseState.RESERVING, LeaseState.ACTIVE):
        lease = replace(lease, state=advance_lease(lease.state, Step.RELEASE))
    held = lease.holds
    over = _ended(lease, end, detail, now)
    kind = "withdrawn" if end is LeaseEnd.WITHDRAWN else "expired" if end is LeaseEnd.EXPIRED else "released"
    record = record_of(kind, lease, ledger.jobs.get(lease.job), detail or str(end))
    decision = Decision(changes=[over], records=[record])
    if held:
        decision.changes += _freed_for(ledger, lease)
    decision.follow = [QueueLooked()] if ledger.waiting else []
    return decision


def _ended(lease: Lease, end: LeaseEnd, detail: str, now: int) -> Lease:
    step = Step.WITHDRAW if lease.state is LeaseState.ASKED else Step.END
    state = advance_lease(lease.state, step)
    return replace(lease, state=state, claim=None, awaits=(), end=end, detail=detail, ended_at_ms=now)


def _freed_for(ledger: Ledger, gone: Lease) -> list[Row]:
    """The preemptors that waited for this one, one victim nearer to their start."""
    changed: list[Row] = []
    for waiting in ledger.leases_of(gone.node):
        if gone.id not in waiting.awaits:
            continue
        left = tuple(lease_id for lease_id in waiting.awaits if lease_id != gone.id)
        state = waiting.state
        if not left and not waiting.job:
            state = advance_lease(state, Step.BIND)
        changed.append(replace(waiting, awaits=left, state=state))
    return changed


def is_urgent(lease: Lease) -> bool:
    return lease.request.priority >= Priority.URGENT
