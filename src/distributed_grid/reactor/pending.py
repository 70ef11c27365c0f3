"""What the world still has to do, derived from state alone: start-up, reconnection and reconcile are this."""

from __future__ import annotations

from collections.abc import Iterable

from distributed_grid.domain.changes import Row
from distributed_grid.domain.effects import Effect, StartAttempt, StopAttempt
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.lives import JobState


def pending(ledger: Ledger) -> list[Effect]:
    """Every effect that the ledger calls for; performing one twice is harmless."""
    return [effect for job in ledger.jobs.values() if (effect := _effect_of(ledger, job)) is not None]


def pending_for(ledger: Ledger, changed: Iterable[Row]) -> list[Effect]:
    """The effects that these changed rows may have called for."""
    uids = dict.fromkeys(
        row.uid if isinstance(row, Job) else row.job for row in changed if isinstance(row, Job | Lease)
    )
    jobs = (ledger.jobs[uid] for uid in uids if uid in ledger.jobs)
    return [effect for job in jobs if (effect := _effect_of(ledger, job)) is not None]


def _effect_of(ledger: Ledger, job: Job) -> Effect | None:
    attempt = job.attempt
    if attempt is None:
        return None
    if job.state is JobState.STOPPING:
        return StopAttempt(attempt.node, job)
    lease = ledger.leases[attempt.lease_id]
    if job.state is JobState.ASSIGNED and not lease.awaits:
        return StartAttempt(attempt.node, job, lease)
    return None
