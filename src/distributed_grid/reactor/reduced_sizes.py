"""Reduction of learned sizes: a job that waits only for its learned memory gets the free memory instead.

It gets it after `MAX_SIZE_WAIT_MS`, one job in each scan of the queue, as a lease that may grow (`lease_growth.py`).
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import GB
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.scheduling.placement.machine_limits import free_bytes
from distributed_grid.scheduling.placement.placement import candidate_rows
from distributed_grid.scheduling.queue.fairness import Quotas
from distributed_grid.scheduling.queue.order import contending_groups

MAX_SIZE_WAIT_MS = 60_000
MIN_REDUCED_BYTES = 64 << 20
MAX_TRIES = 16
"""Waiting jobs of one scan that are tried with a smaller size."""


def reduce_waiting(ledger: Ledger, now: int) -> Decision | None:
    """Reduce one job that waits only for its learned size to the free memory; None where there is no such job."""
    tried = 0
    for members in contending_groups(ledger, now):
        lease = ledger.leases[members[0][1]]
        job = ledger.jobs.get(lease.job)
        if job is None or not job.given_limit_bytes or now - _waits_since(job) < MAX_SIZE_WAIT_MS:
            continue
        tried += 1
        if tried > MAX_TRIES:
            return None
        size = _reduced_size(ledger, job, lease)
        if size is not None:
            assert job.estimate is not None
            learned = job.given_limit_bytes
            estimate = replace(
                job.estimate,
                memory_limits=(*job.estimate.memory_limits[: job.overruns], size),
                reduced_from_bytes=job.estimate.reduced_from_bytes or learned,
            )
            smaller = replace(lease, request=replace(lease.request, ask=replace(lease.request.ask, memory_bytes=size)))
            waited_s = (now - _waits_since(job)) // 1000
            reason = (
                f"waited {waited_s} s for {_gigabytes(learned)} of memory, a learned size: {_gigabytes(size)} is free"
            )
            data = {"job_id": job.id, "memory_limit_bytes": size}
            record = Record("reduced", job.request.user, job.uid, "", reason, data=data)
            return Decision([smaller, replace(job, estimate=estimate)], [record])
    return None


def _waits_since(job: Job) -> int:
    return job.attempts[-1].ended_at_ms if job.attempts else job.submitted_at_ms


def _reduced_size(ledger: Ledger, job: Job, lease: Lease) -> int | None:
    """The memory that a job could have at once on some node with room for its other needs; None where there is no such
    node, or where it is below `MIN_REDUCED_BYTES` or a limit that the job has run over."""
    rest = replace(lease.request, ask=replace(lease.request.ask, memory_bytes=0))
    quotas = Quotas(ledger)
    if quotas.exceeded(rest) is not None:
        return None
    mask = candidate_rows(ledger, rest)
    if not mask.any():
        return None
    columns = ledger.columns
    row = int(np.argmax(np.where(mask, columns.memory, -1)))
    size = free_bytes(ledger, ledger.nodes[columns.names[row]])
    left = quotas.memory_left(lease.request)
    size = size if left is None else min(size, left[0])
    over = [attempt.memory_limit_bytes for attempt in job.attempts if attempt.outcome is not None]
    least = max(MIN_REDUCED_BYTES, max(over, default=0) + 1)
    return size if least <= size < lease.request.ask.memory_bytes else None


def _gigabytes(size: int) -> str:
    return f"{size / GB:.2f} GB"
