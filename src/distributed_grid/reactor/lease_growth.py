"""Growth of leases whose memory was learned from earlier runs.

The learned size of a job that its user has not declared restartable is the size of its lease and no limit
(`Job.may_outgrow`). The agent reports an attempt that holds more, with each heartbeat until its lease is as large.

- The lease grows within the free memory of its node and the user's quota. Only this step gives it memory, so that no
  byte is lent twice: of two that want the same memory the first event gets it.
- A report that is lost comes again, and one that comes twice finds the lease grown: it changes nothing.
- Where a growth is refused the job runs on. Its node ends it, as `over_limit` and without a rerun, when the memory of
  the machine is short or its owner needs it.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import AttemptOutgrown
from distributed_grid.domain.jobs import Attempt, Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import GB, MAX_AMOUNT, gigabytes
from distributed_grid.domain.states import JobState, LeaseState, NodeState
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.reactor.jobs import reported_attempt
from distributed_grid.reactor.lease_transitions import settle_account
from distributed_grid.scheduling.placement.machine_limits import free_bytes
from distributed_grid.scheduling.queue.fairness import Quotas

MB = 1024**2
GROWTH_DIVISOR = 4
"""A lease grows to a quarter more than its job holds, where that is free."""
PART_DIVISOR = 16
"""A lease that cannot be as large as its job grows by a sixteenth of it at least, or not at all."""


def on_outgrown(ledger: Ledger, event: AttemptOutgrown, now: int) -> Decision:
    """Grow the lease of an attempt that holds more memory; a refusal is recorded once, and it runs on."""
    job, attempt = reported_attempt(ledger, event)
    if job is None or attempt is None or not job.may_outgrow or job.state is JobState.STOPPING:
        return Decision()
    lease = ledger.leases[attempt.lease_id]
    if lease.claim is None or lease.state is not LeaseState.ACTIVE:
        return Decision()
    size, held = lease.claim.memory_bytes, min(max(event.memory_bytes, 0), MAX_AMOUNT)
    if held <= size:
        return Decision()
    wanted = min(-(-(held + held // GROWTH_DIVISOR) // MB) * MB, MAX_AMOUNT)
    most, reason = _most_bytes(ledger, lease, wanted)
    is_worth_it = most >= held or most - size >= held // PART_DIVISOR
    refused = f"it holds {_gb(held)}: {reason}" if most < held else ""
    if is_worth_it:
        return _grow(ledger, job, attempt, lease, most, held, refused, now)
    if attempt.growth_refused:
        return Decision()
    return Decision([_with_attempt(job, replace(attempt, growth_refused=refused))], [_refusal(job, attempt, refused)])


def _most_bytes(ledger: Ledger, lease: Lease, wanted: int) -> tuple[int, str]:
    """The size that a lease could have now, up to the wanted one, and the reason why not more."""
    assert lease.claim is not None
    node, size = ledger.nodes[lease.node], lease.claim.memory_bytes
    if lease.engine:
        return size, f"its lease of {_gb(size)} is reserved through {lease.engine}, where it cannot grow"
    if node.state is not NodeState.ALIVE:
        return size, f"its lease of {_gb(size)} cannot grow: {node.name} is {node.state}"
    free = free_bytes(ledger, node)
    beside = f"beside its lease of {_gb(size)}"
    most, reason = size + free, f"{node.name} has {gigabytes(free) if free else 'no memory'} free {beside}"
    left = Quotas(ledger).memory_left(lease.request) if ledger.policy.quotas else None
    if left is not None and size + left[0] < min(most, wanted):
        most, reason = (
            size + left[0],
            f"quota of {left[1]}: {gigabytes(left[0]) if left[0] else 'nothing'} left {beside}",
        )
    return min(most, wanted), reason


def _grow(
    ledger: Ledger, job: Job, attempt: Attempt, lease: Lease, size: int, held: int, refused: str, now: int
) -> Decision:
    assert lease.claim is not None
    assert job.estimate is not None
    before = lease.claim.memory_bytes
    larger = replace(lease, claim=replace(lease.claim, memory_bytes=size))
    grown = replace(attempt, memory_limit_bytes=size, growths=attempt.growths + 1, growth_refused=refused)
    estimate = replace(job.estimate, memory_limits=(*job.estimate.memory_limits[: job.overruns], size))
    record = Record(
        "grown",
        job.request.user,
        job.uid,
        attempt.node,
        f"its lease has {_gb(size)} of memory instead of {_gb(before)}: it holds {_gb(held)}",
        data={"job_id": job.id, "allocation_id": lease.id, "attempt": attempt.number, "memory_limit_bytes": size},
    )
    rows = settle_account(ledger, lease.request.user, now)
    job = _with_attempt(replace(job, estimate=estimate), grown)
    records = [record, _refusal(job, grown, refused)] if refused and not attempt.growth_refused else [record]
    return Decision([*rows, larger, job], records)


def _refusal(job: Job, attempt: Attempt, why: str) -> Record:
    data = {"job_id": job.id, "attempt": attempt.number}
    return Record("not-grown", job.request.user, job.uid, attempt.node, f"{why}; it runs on", data=data)


def _with_attempt(job: Job, attempt: Attempt) -> Job:
    return replace(job, attempts=(*job.attempts[:-1], attempt))


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"
