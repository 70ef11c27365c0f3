"""Sizing of jobs at their submission, from earlier runs of their commands.

Only memory is sized, and only for a job that states no needs: a pinned command cannot show that it wanted more cores.
The run time is estimated for every job. Sizing never refuses a submission, nor delays it for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from distributed_grid.api import requests
from distributed_grid.domain.jobs import JobEstimate
from distributed_grid.prediction.task_runs import MemoryPrediction, limits_of
from distributed_grid.prediction.task_shape import TaskShape, number_of
from distributed_grid.server.prediction.service import PredictionService

MAX_INPUT_FILES = 64
MAX_INPUT_SECONDS = 0.5  # wait for the sizes of input files: a network disk may not answer
MAX_PATH_CHARS = 4096
KEPT_SECONDS, MAX_KEPT = 0.1, 256
"""Estimates that are kept for the next submission of the same words: many submissions at once do not wait."""


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
        limits_of(predicted),
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
