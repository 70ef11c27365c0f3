"""Reruns of jobs: memory limit and checkpoint directory of the next attempt.

The limits of jobs without stated needs are within the largest lease that some node could ever lend, and grow after an
overrun.

- A job that is requeued after an attempt with a checkpoint directory that is not empty starts its next attempt once
  that directory is here.
- An attempt that never ran, or whose end nobody reported, changes nothing: the next one gets the earlier checkpoint.
- A checkpoint that cannot be had is recorded, and the next attempt starts with the earlier one.
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
    """Memory limits of a job that has run over one."""

    limits: tuple[int, ...]  # empty: it is not run again
    why: str


def possible_estimate(ledger: Ledger, job: Job) -> JobEstimate | None:
    """The estimate of a new job, with a first limit that some node could lend, or else without limits."""
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
    limits, number = job.estimate.memory_limits, job.overruns + 1
    if number >= len(limits):
        given = ", ".join(_limit(limit) for limit in limits)
        return BiggerLimit((), f"the grid gave it {given}, and does not run it again; state its need")
    impossible = _impossible(ledger, _with_memory(job.request, limits[number]))
    if impossible is not None:
        most = most_memory_bytes(ledger, job.request)
        if most <= limits[number - 1] or _impossible(ledger, _with_memory(job.request, most)) is not None:
            return BiggerLimit((), f"it cannot be run again with more: {impossible}")
        limits = (*limits[:number], most)
    return BiggerLimit(limits, f"run again with {_limit(limits[number])}, time {number} of at most {len(limits) - 1}")


def why_not_again(over: Attempt) -> str:
    """The reason why a job that has outgrown a learned size is not run again."""
    refused = f"its lease could not grow: {over.growth_refused}; " if over.growth_refused else ""
    return f"{refused}it is not run again, which only --restartable or --retries allow; state its need with -r memory"


def _limit(size: int) -> str:
    return f"{size / GB:.2f} GB"


def _with_memory(request: Request, memory_bytes: int) -> Request:
    return replace(request, ask=replace(request.ask, memory_bytes=memory_bytes))


def _impossible(ledger: Ledger, request: Request) -> str | None:
    """The reason why no node can ever lend this, or None."""
    beyond = exceeds_quota_alone(ledger, request) if ledger.policy.quotas else None
    if beyond is not None:
        return beyond
    never = never_fits(ledger, request)
    return (
        None
        if never is None
        else f"no node can ever lend {describe_amounts(request.ask)}: {'; '.join(map(str, never))}"
    )


def after_attempt(job: Job, over: Attempt, event: AttemptEnded) -> Job:
    """The job after the reported end of an attempt, with the checkpoint that this has left."""
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
    """Whether its next attempt has its lease and waits for the checkpoint of the last one; no agent has its order."""
    return job.state is JobState.ASSIGNED and job.checkpoint_from > 0


def after_late_report(ledger: Ledger, event: AttemptEnded) -> Job | None:
    """The job whose last attempt was declared lost, but has left a checkpoint, if it has not started anew."""
    job = ledger.jobs.get(event.uid)
    last = job.attempts[-1] if job is not None and job.attempts else None
    if job is None or last is None or job.state is not JobState.QUEUED or not event.has_checkpoint:
        return None
    is_last = (last.number, last.fence) == (event.number, event.fence) and last.node in event.nodes
    was_lost = last.outcome is not None and last.outcome.ending is Ending.LOST
    return replace(job, checkpoint_from=last.number) if is_last and was_lost and last.pid else None


def on_checkpoint_shipped(ledger: Ledger, event: CheckpointShipped, now: int) -> Decision:
    """Let a job's next attempt start with this checkpoint; a repeated or foreign report changes nothing."""
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
    node = next((attempt.node for attempt in job.attempts if attempt.number == event.number), "")
    return Decision([job], [Record("checkpoint-shipped", job.request.user, job.uid, node, problem, data=data)])
