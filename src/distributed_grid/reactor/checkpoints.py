"""Deciders of checkpoint directories: what an attempt left there goes to the job's next attempt.

- A job that is requeued after an attempt that left something waits, before its next attempt starts, until that is here.
- An attempt that never ran, or of whose end nobody reported, changes nothing: the next one gets what there was before.
- What cannot be had is recorded, and the next attempt starts with what there was before.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import AttemptEnded, CheckpointShipped
from distributed_grid.domain.jobs import Attempt, Ending, Job
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState
from distributed_grid.reactor.decision import Decision, Record

MAX_PROBLEM_CHARS = 1000


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


def on_shipped(ledger: Ledger, event: CheckpointShipped, now: int) -> Decision:
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
