"""Outcomes of calls to a provider, as events: what is known after an answer, an error, or none.

`Throttled` had no effect, `NoCapacity` and every other error that cannot pass by itself made nothing; of all else
nobody knows whether it had its effect.
"""

from __future__ import annotations

from distributed_grid.domain.events import (
    Event,
    WorkerBooted,
    WorkerCallFailed,
    WorkerGone,
    WorkerRefused,
    WorkerTerminationAccepted,
)
from distributed_grid.domain.workers import Worker
from distributed_grid.errors import GridError, NoCapacity, Throttled
from distributed_grid.ports import WorkerInstance
from distributed_grid.scheduling.scaling.worker_availability import place_of


def created(worker: Worker, made: WorkerInstance, wall_ms: int) -> Event:
    """A creation was answered."""
    if made.state == "gone":
        return WorkerGone(worker.id, "it was gone when it was asked for again", wall_ms)
    warning = "" if made.waits else made.detail
    return WorkerBooted(worker.id, made.instance, warning, ends_in_ms(made), waits=made.waits)


def ends_in_ms(instance: WorkerInstance) -> int | None:
    """In how long the provider ends a machine by itself."""
    return None if instance.ends_in_seconds is None else round(1000 * instance.ends_in_seconds)


def not_created(worker: Worker, failure: Exception, wall_ms: int, instead: Worker | None = None) -> Event:
    """A creation failed, or its answer was lost."""
    why = str(failure) or type(failure).__name__
    if isinstance(failure, NoCapacity):
        return WorkerRefused(worker.id, why, wall_ms, scope=closed_scope(worker, failure), instead=instead)
    if isinstance(failure, Throttled):
        return WorkerCallFailed(worker.id, why, was_lost=False)
    if isinstance(failure, GridError) and not failure.retryable:
        return WorkerRefused(worker.id, why, wall_ms)
    return WorkerCallFailed(worker.id, why, was_lost=True)


def closed_scope(worker: Worker, failure: NoCapacity) -> str:
    """What of a provider's offers has no capacity: what it names, if the one that was asked for is in it, else that."""
    return place_of(worker).scope_like(failure.scope)


def terminated(
    worker: Worker, found: WorkerInstance | None, wall_ms: int, *, is_gone: bool = False, problem: str = ""
) -> Event:
    """A termination was accepted, and this is what the provider knows of the machine now; `is_gone`: knowing nothing
    proves that there is nothing."""
    if is_gone or (found is not None and found.state == "gone"):
        return WorkerGone(worker.id, worker.why or "it was terminated", wall_ms)
    return WorkerTerminationAccepted(worker.id, problem)


def not_terminated(worker: Worker, failure: Exception) -> Event:
    """A termination failed, or its answer was lost: it may go on and cost money."""
    return WorkerCallFailed(worker.id, f"it cannot be terminated: {failure}", was_lost=True)
