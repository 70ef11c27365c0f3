"""Recording of every run of a job in the predictor's history: what it used, once it is over and that is durable.

Runs are taken from the rows of jobs as they are committed. What a control plane had not passed on when it died is
caught up from the store by the next one; a run that is recorded twice is known by job and attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from distributed_grid.client.task_descriptions import task_fields
from distributed_grid.control.grid import Grid
from distributed_grid.domain.jobs import Attempt, Ending, Job
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import Row
from distributed_grid.errors import BadInput, GridError
from distributed_grid.ports import EndedRow, Store
from distributed_grid.prediction.task_runs import TaskRun, TaskShape, pulled_shape, task_shape, typed_task_shape
from distributed_grid.server.prediction.service import PredictionService
from distributed_grid.server.services.records import ended_job

CATCH_UP_MS = 3_600_000
"""What ended within this time before the last end may not have been recorded when the control plane died."""
MAX_CAUGHT_UP = 20_000
CATCH_UP_STEP = 200
"""Jobs of which the runs are passed on before others get the event loop."""
log = logging.getLogger(__name__)


class RunRecorder:
    """Records the runs of jobs as they end. It is called by the grid with what has changed."""

    def __init__(self, grid: Grid, prediction: PredictionService) -> None:
        self._grid = grid
        self._prediction = prediction

    def start(self) -> None:
        """Record from now on; `catch_up` finds what ended before."""
        self._grid.follow(self.record_ended)

    def record_ended(self, rows: Sequence[Row]) -> None:
        """Record the last run of every job among these rows, where it is over."""
        for row in rows:
            if isinstance(row, Job) and row.attempts and row.attempts[-1].outcome is not None:
                self._record(row, row.attempts[-1:])

    async def catch_up(self) -> None:
        """Record the runs that ended shortly before the last control plane did."""
        try:
            ended = await self._grid.query(_ended_last)
            living = await self._grid.read(_rerun_jobs)
        except GridError as failure:  # the store cannot be read: these runs are not learned from
            log.warning("the last runs of jobs could not be caught up: %s", failure)
            return
        for job in living:
            self._record(job, job.attempts)
        for at in range(0, len(ended), CATCH_UP_STEP):
            for row in ended[at : at + CATCH_UP_STEP]:
                job = ended_job(row)
                self._record(job, job.attempts)
            await asyncio.sleep(0)

    def _record(self, job: Job, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            run = run_of(job, attempt)
            if run is not None:
                self._prediction.record(run)


def run_of(job: Job, attempt: Attempt) -> TaskRun | None:
    """A run as the predictor remembers it; None where it is not over, or nothing has run.

    Only a command that has ended by itself, and well, shows all that it needs. Every other run is a lower bound. What a
    pull worker has reported is of another type than what a shim has measured, also of the same command.
    """
    outcome = attempt.outcome
    shape = command_shape(job.command.argv, job.command.payload)
    if outcome is None or not attempt.started_at_ms or not shape.key:
        return None
    is_pulled = not attempt.pid  # nobody of the grid has seen a process of it
    if is_pulled and not (outcome.max_memory_bytes or outcome.cpu_ms):
        return None  # nothing was reported, or by a worker of another user
    shape = pulled_shape(shape) if is_pulled else shape
    memory_bytes = outcome.max_memory_bytes
    if outcome.ending is Ending.OVER_LIMIT and not outcome.is_disk_overrun:
        memory_bytes = max(memory_bytes, attempt.memory_limit_bytes)
    return TaskRun(
        job.uid,
        attempt.number,
        job.request.user,
        shape.key,
        shape.features,
        input_bytes=job.estimate.input_bytes if job.estimate is not None else 0,
        memory_bytes=memory_bytes,
        cpu_ms=outcome.cpu_ms,
        run_ms=outcome.wall_ms,
        ended_at_ms=attempt.ended_at_ms,
        is_lower_bound=not outcome.succeeded,
        measured_bytes=0 if is_pulled else outcome.max_memory_bytes,
    )


@lru_cache(maxsize=256)
def command_shape(argv: tuple[str, ...], payload: str) -> TaskShape:
    """The shape of a command, or of a task by its type and parameters; empty where it has neither."""
    if argv:
        return task_shape(argv)
    try:
        told = task_fields(msgspec.json.decode(payload, type=dict[str, Any]))
        return (
            typed_task_shape(told["task_type"], told["parameters"]) if "task_type" in told else task_shape(told["argv"])
        )
    except (BadInput, msgspec.DecodeError):
        return TaskShape("")


def _ended_last(store: Store) -> list[EndedRow]:
    """The jobs that ended last, the oldest first."""
    newest = store.ended("job", limit=1)
    if not newest:
        return []
    since_ms = max(newest[0].ended_at_ms - CATCH_UP_MS, 0)
    return store.ended("job", since_ms=since_ms, limit=MAX_CAUGHT_UP)[::-1]


def _rerun_jobs(ledger: Ledger, now: int) -> list[Job]:
    """The living jobs that have a run behind them."""
    return [job for job in ledger.jobs.values() if job.attempts and job.attempts[0].outcome is not None]
