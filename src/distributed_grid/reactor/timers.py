"""Deciding what time alone changes: terms that end, waits that are over, nodes nobody hears."""

from __future__ import annotations

from distributed_grid.domain.events import QueueScanned, TimePassed
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import LeaseEnd, LeaseState
from distributed_grid.reactor.block_copies import overdue
from distributed_grid.reactor.blocks import release
from distributed_grid.reactor.decision import Decision
from distributed_grid.reactor.engines import given_up_for_lost
from distributed_grid.reactor.jobs import stop_job, waited_too_long
from distributed_grid.reactor.lease_transitions import end_lease, users_out
from distributed_grid.reactor.nodes import doubts
from distributed_grid.scheduling.queue import reasons


def on_time_passed(ledger: Ledger, event: TimePassed, now: int) -> Decision:
    """Settle one thing that is due, then look again; nodes and offers when no lease is due."""
    due = ledger.due_by(now)
    if not due:
        decision = doubts(ledger, now)
        lost = given_up_for_lost(ledger, now)
        decision.changes += lost.changes
        decision.follow += lost.follow
        orphaned = [lease_id for lease_id in ledger.users_of if lease_id not in ledger.leases]
        decision.follow += [event for lease_id in orphaned for event in users_out(ledger, lease_id)]
        if ledger.blocks:
            decision.follow += overdue(ledger, now)
        if ledger.waiting:
            decision.follow.append(QueueScanned())
        return decision
    decision = _settle(ledger, ledger.leases[due[0]], now)
    decision.follow.append(TimePassed())
    return decision


def _settle(ledger: Ledger, lease: Lease, now: int) -> Decision:
    job = ledger.jobs.get(lease.job)
    if lease.state is LeaseState.ASKED:
        detail = reasons.gave_up(ledger, lease, now)
        if job is not None:
            return waited_too_long(ledger, job, detail, now)
        return end_lease(ledger, lease, LeaseEnd.WITHDRAWN, detail, now)
    if lease.request.block:
        return release(ledger, ledger.blocks[lease.request.block], LeaseEnd.EXPIRED, "its time is over", now)
    if job is not None:
        return stop_job(ledger, job, Ending.EXPIRED, "the lease's term is over", now)
    return end_lease(ledger, lease, LeaseEnd.EXPIRED, "the lease's term is over", now)
