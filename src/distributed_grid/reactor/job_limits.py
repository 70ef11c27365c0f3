"""Memory limits of jobs without stated needs: within what some node could ever lend, and bigger after an overrun."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.jobs import Job, JobEstimate
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import GB
from distributed_grid.scheduling.queue.fairness import exceeds_quota_alone
from distributed_grid.scheduling.queue.reasons import describe_amounts, most_memory_bytes, never_fits


class BiggerLimit(Struct, frozen=True):
    """The limits of a job whose next run gets a bigger one, and what is said of it; none where it is not run again."""

    limits: tuple[int, ...]
    why: str


def possible_estimate(ledger: Ledger, job: Job) -> JobEstimate | None:
    """The estimate of a new job with a first limit that some node could lend; without limits where none could."""
    estimate = job.estimate
    if estimate is None or not estimate.memory_limits or _impossible(ledger, job.sized_request) is None:
        return estimate
    smaller = replace(estimate, memory_limits=(most_memory_bytes(ledger, job.request),))
    if smaller.memory_limits[0] and _impossible(ledger, replace(job, estimate=smaller).sized_request) is None:
        return smaller
    return replace(estimate, memory_limits=())


def next_limit(ledger: Ledger, job: Job) -> BiggerLimit:
    """The next limit of a job that ran over the one that it was given: no more than some node could ever lend."""
    assert job.estimate is not None
    limits, at = job.estimate.memory_limits, job.overruns + 1
    if at >= len(limits):
        given = ", ".join(_limit(limit) for limit in limits)
        return BiggerLimit((), f"the grid gave it {given}, and does not run it again; state its need")
    impossible = _impossible(ledger, _with_memory(job.request, limits[at]))
    if impossible is not None:
        most = most_memory_bytes(ledger, job.request)
        if most <= limits[at - 1] or _impossible(ledger, _with_memory(job.request, most)) is not None:
            return BiggerLimit((), f"it cannot be run again with more: {impossible}")
        limits = (*limits[:at], most)
    return BiggerLimit(limits, f"run again with {_limit(limits[at])}, time {at} of at most {len(limits) - 1}")


def _limit(size: int) -> str:
    return f"{size / GB:.2f} GB"


def _with_memory(request: Request, memory_bytes: int) -> Request:
    return replace(request, ask=replace(request.ask, memory_bytes=memory_bytes))


def _impossible(ledger: Ledger, request: Request) -> str | None:
    """Why nobody will ever lend this, or None."""
    beyond = exceeds_quota_alone(ledger, request) if ledger.policy.quotas else None
    if beyond is not None:
        return beyond
    never = never_fits(ledger, request)
    return None if never is None else f"no node can ever lend {describe_amounts(request.ask)}: {'; '.join(never)}"
