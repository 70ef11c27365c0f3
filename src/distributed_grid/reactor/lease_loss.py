"""Deciders for leases that a node takes back (`LeaseReclaimed`) and for those lost with it (`LeaseLost`)."""

from __future__ import annotations

from distributed_grid.domain.events import AttemptEnded, CopyUnwanted, LeaseLost, LeaseReclaimed
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState, LeaseEnd
from distributed_grid.reactor.decision import Decision
from distributed_grid.reactor.jobs import put_back, stop_job
from distributed_grid.reactor.lease_transitions import end_lease


def on_reclaimed(ledger: Ledger, event: LeaseReclaimed, now: int) -> Decision:
    """Give a lease back to its node: a job is stopped and waits for another place, a copy of a block moves to one,
    anything else just ends."""
    lease = ledger.leases.get(event.lease_id)
    if lease is None or not lease.holds:
        return Decision()
    if lease.request.block:
        return Decision(follow=[CopyUnwanted(lease.request.block, lease.id, event.detail)])
    job = ledger.jobs.get(lease.job)
    if job is None:
        return end_lease(ledger, lease, LeaseEnd.RECLAIMED, event.detail, now)
    if lease.awaits:
        return put_back(ledger, job, LeaseEnd.RECLAIMED, event.detail, now)
    if job.state is JobState.STOPPING:
        return Decision()
    decision = stop_job(ledger, job, Ending.RECLAIMED, event.detail, now)
    decision.answer = None
    return decision


def on_lost(ledger: Ledger, event: LeaseLost, now: int) -> Decision:
    """End what ran on a node that is gone: nobody can know how it ended, only that it has."""
    lease = ledger.leases.get(event.lease_id)
    if lease is None or not lease.holds:
        return Decision()
    job = ledger.jobs.get(lease.job)
    if job is None:
        return end_lease(ledger, lease, LeaseEnd.LOST, event.detail, now)
    if lease.awaits:
        return put_back(ledger, job, LeaseEnd.LOST, event.detail, now)
    attempt = job.attempt
    assert attempt is not None
    outcome = Outcome(Ending.LOST, detail=event.detail)
    return Decision(follow=[AttemptEnded(job.uid, attempt.number, attempt.fence, outcome)])
