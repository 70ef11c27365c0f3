"""Reruns of jobs: what the next attempt of a job gets, a memory limit and the checkpoint directory of the last one.

The limits of jobs without stated needs are within what some node could ever lend, and bigger after an overrun.

- A job that is requeued after an attempt that left something in its checkpoint directory waits, before its next attempt
  starts, until that is here.
- An attempt that never ran, or of whose end nobody reported, changes nothing: the next one gets what there was before.
- What cannot be had is recorded, and the next attempt starts with what there was before.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.events import AttemptEnded, CheckpointShipped
from distributed_grid.domain.jobs import Attempt, Ending, Job, JobEstimate
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import GB
from distributed_grid.domain.states import JobState
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.scheduling.queue.fairness import exceeds_quota_alone
from distributed_grid.scheduling.queue.reasons import describe_amounts, most_memory_bytes, never_fits

MAX_PROBLEM_CHARS = 1000


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


def why_not_again(over: Attempt) -> str:
    """Why a job that has outgrown a learned size is not run again."""
    refused = f"its lease could not grow: {over.growth_refused}; " if over.growth_refused else ""
    return f"{refused}it is not run again, which only --restartable or --retries allow; state its need with -r memory"


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


def after_attempt(job: Job, over: Attempt, event: AttemptEnded) -> Job:
    """The job with what an attempt that is over, as its agent reported, has left for the next one."""
    if not over.pid or not event.nodes:
        return job
    if event.has_checkpoint:
        return replace(job, checkpoint_from=over.number)
    return replace(
        job,
        checkpoint="",
        checkpoint_from=0,
        checkpoint_attempt=0,
        checkpoint_files=0,
        checkpoint_bytes=0,
        checkpoint_problem="",
    )


def is_awaiting_checkpoint(job: Job) -> bool:
    """Whether its next attempt has its place and waits for what the last one left: nobody was ordered to start it."""
    return job.state is JobState.ASSIGNED and job.checkpoint_from > 0


def after_late_report(ledger: Ledger, event: AttemptEnded) -> Job | None:
    """The job whose last attempt was given up as lost, and left something after all, if it has not started anew."""
    job = ledger.jobs.get(event.uid)
    last = job.attempts[-1] if job is not None and job.attempts else None
    if job is None or last is None or job.state is not JobState.QUEUED or not event.has_checkpoint:
        return None
    is_last = (last.number, last.fence) == (event.number, event.fence) and last.node in event.nodes
    was_lost = last.outcome is not None and last.outcome.ending is Ending.LOST
    return replace(job, checkpoint_from=last.number) if is_last and was_lost and last.pid else None


def on_checkpoint_shipped(ledger: Ledger, event: CheckpointShipped, now: int) -> Decision:
    """Let a job's next attempt start with what is here; said twice, or of another attempt, it changes nothing."""
    job = ledger.jobs.get(event.uid)
    if job is None or not event.number or job.checkpoint_from != event.number:
        return Decision()
    problem = event.problem[:MAX_PROBLEM_CHARS]
    data: dict[str, str | int | list[str]] = {"job_id": job.id, "attempt": event.number}
    if problem:
        job = replace(job, checkpoint_from=0, checkpoint_problem=f"attempt {event.number}: {problem}")
    else:
        job = replace(
            job,
            checkpoint=event.manifest,
            checkpoint_from=0,
            checkpoint_attempt=event.number if event.manifest else 0,
            checkpoint_files=event.files,
            checkpoint_bytes=event.bytes,
            checkpoint_problem="",
        )
        data |= {"files": event.files, "bytes": event.bytes}
        if event.left_out:
            data["left_out"] = list(event.left_out)
    node = next((one.node for one in job.attempts if one.number == event.number), "")
    return Decision([job], [Record("checkpoint-shipped", job.request.user, job.uid, node, problem, data)])
