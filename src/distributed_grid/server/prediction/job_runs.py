"""Runs of jobs and the predictor: sizing of jobs at their submission, and recording of every run that has ended.

Only memory is sized, and only for a job that states no needs: a pinned command cannot show that it wanted more cores.
The run time is estimated for every job. Sizing never refuses a submission, nor delays it for long.

Runs are taken from the rows of jobs as they are committed. Runs that a control plane had not recorded when it died are
caught up from the store by the next one; a repeated run is recognized by job and attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import msgspec

from distributed_grid.api import requests
from distributed_grid.client.task_descriptions import task_fields
from distributed_grid.control.grid import Grid
from distributed_grid.domain.jobs import Attempt, Ending, Job, JobEstimate
from distributed_grid.domain.rows import Row, decode_as
from distributed_grid.errors import BadInput, GridError
from distributed_grid.ports import EndedRow, Store
from distributed_grid.prediction.task_runs import (
    MemoryPrediction,
    TaskRun,
    TaskShape,
    limits_of,
    number_of,
    pulled_shape,
    task_shape,
    typed_task_shape,
)
from distributed_grid.server.prediction.service import PredictionService

MAX_INPUT_FILES = 64
MAX_INPUT_SECONDS = 0.5  # wait for the sizes of input files: a network disk may not answer
MAX_PATH_CHARS = 4096
KEPT_SECONDS, MAX_KEPT = 0.1, 256
"""Estimates that are kept for the next submission of the same words: many submissions at once do not wait."""
CATCH_UP_MS = 3_600_000
"""Age, counted from the last end, of runs that may not have been recorded when the control plane died."""
MAX_CAUGHT_UP = 20_000
CATCH_UP_STEP = 200  # jobs between two passes of the event loop
log = logging.getLogger(__name__)


class JobSizer:
    """Estimates jobs; `stop` ends the thread that reads the sizes of input files."""

    def __init__(self, prediction: PredictionService) -> None:
        self._prediction = prediction
        self._files = ThreadPoolExecutor(1, thread_name_prefix="grid-inputs")
        self._kept: dict[tuple[str, tuple[str, ...], int, bool], JobEstimate] = {}
        self._kept_until = 0.0

    async def estimate(self, op: requests.SubmitJob, user: str) -> JobEstimate:
        """Estimate of a job from earlier runs; limits only if it states no needs."""
        size = await self._input_bytes(op)
        now = time.monotonic()
        if now >= self._kept_until or len(self._kept) >= MAX_KEPT:
            self._kept, self._kept_until = {}, now + KEPT_SECONDS
        kept, key = self._kept, (user, op.argv, size, op.states_needs)
        estimate = kept.get(key)
        if estimate is None:
            predicted = None if op.states_needs else await self._prediction.size(user, op.argv, size)
            if predicted is not None:
                estimate = estimate_of(predicted, size)
            else:
                run_ms = await self._prediction.run_ms(user, op.argv, size)
                estimate = JobEstimate(run_ms=run_ms or 0, input_bytes=size)
            kept[key] = estimate
        return estimate

    async def estimate_shape(self, shape: TaskShape, user: str) -> JobEstimate | None:
        """Estimate of a task of this shape without stated needs, from the reports of pull workers; None if too little
        is known."""
        predicted = await self._prediction.size_pulled(user, shape) if shape.key else None
        return estimate_of(predicted, 0) if predicted is not None else None

    def stop(self) -> None:
        """Safe to call twice."""
        self._files.shutdown(wait=False, cancel_futures=True)

    async def _input_bytes(self, op: requests.SubmitJob) -> int:
        """Total size of the files that the command names; 0 if it cannot be read in time."""
        paths = input_paths(op.argv, op.cwd)
        if not paths:
            return 0
        sizes = asyncio.get_running_loop().run_in_executor(self._files, file_bytes, paths)
        try:
            async with asyncio.timeout(MAX_INPUT_SECONDS):
                return await sizes
        except TimeoutError:
            return 0


def estimate_of(predicted: MemoryPrediction, input_bytes: int) -> JobEstimate:
    return JobEstimate(
        memory_limits=limits_of(predicted),
        run_ms=predicted.run_ms or 0,
        input_bytes=input_bytes,
        tier=str(predicted.tier),
        confidence_milli=round(1000 * predicted.confidence),
        samples=predicted.samples,
    )


def input_paths(argv: Sequence[str], cwd: str) -> tuple[str, ...]:
    """Possible paths among the words of a command and the values of its options."""
    paths: dict[str, None] = {}
    for word in argv[1:]:
        value = word.partition("=")[2] if word.startswith("-") else word
        if not value or len(value) > MAX_PATH_CHARS or number_of(value) is not None:
            continue
        if value.startswith("/") or cwd:
            paths[os.path.join(cwd, value)] = None
        if len(paths) == MAX_INPUT_FILES:
            break
    return tuple(paths)


def file_bytes(paths: Sequence[str]) -> int:
    """Total size of the regular files among these paths."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(path)
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


class RunRecorder:
    """Records the runs of jobs as they end. The grid calls it with changed rows."""

    def __init__(self, grid: Grid, prediction: PredictionService) -> None:
        self._grid = grid
        self._prediction = prediction

    def start(self) -> None:
        """Record from now on; `catch_up` finds earlier runs."""
        self._grid.follow(self.record_ended)

    def record_ended(self, rows: Sequence[Row]) -> None:
        """Record the last run of every job among these rows, if it has ended."""
        for row in rows:
            if isinstance(row, Job) and row.attempts and row.attempts[-1].outcome is not None:
                self._record(row, row.attempts[-1:])

    async def catch_up(self) -> None:
        """Record the runs that ended shortly before the last control plane did."""
        try:
            ended = await self._grid.query(_ended_last)
            living = await self._grid.read(lambda ledger, now: [job for job in ledger.jobs.values() if job.attempts])
        except GridError as failure:  # the store cannot be read: these runs are not learned
            log.warning("the last runs of jobs could not be caught up: %s", failure)
            return
        for job in living:
            if job.attempts[0].outcome is not None:  # it runs again
                self._record(job, job.attempts)
        for first in range(0, len(ended), CATCH_UP_STEP):
            for row in ended[first : first + CATCH_UP_STEP]:
                job = decode_as(Job, row.blob)
                self._record(job, job.attempts)
            await asyncio.sleep(0)

    def _record(self, job: Job, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            run = run_of(job, attempt)
            if run is not None:
                self._prediction.record(run)


def run_of(job: Job, attempt: Attempt) -> TaskRun | None:
    """A run for the predictor's history; None if it has not ended, or nothing has run.

    Only a command that succeeded shows all that it needs; every other run is a lower bound. A run reported by a pull
    worker has another type than one measured by a shim, also of the same command.
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
        task_id=job.uid,
        attempt=attempt.number,
        user=job.request.user,
        key=shape.key,
        features=shape.features,
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
        task = task_fields(msgspec.json.decode(payload, type=dict[str, Any]))
        return (
            typed_task_shape(task["task_type"], task["parameters"]) if "task_type" in task else task_shape(task["argv"])
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
