"""Sizing of jobs at their submission, from earlier runs of their commands.

Only memory is sized, and only for a job that states no needs: a pinned command cannot show that it wanted more cores.
The run time is estimated for every job. Nothing here can refuse or delay a submission for long.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from distributed_grid.api import requests
from distributed_grid.domain.jobs import JobEstimate
from distributed_grid.prediction.task_runs import MemoryPrediction, TaskShape, limits_of, number_of
from distributed_grid.server.prediction.service import PredictionService

MAX_INPUT_FILES = 64
MAX_INPUT_SECONDS = 0.5
"""How long the sizes of input files are waited for: a network disk may not answer."""
MAX_PATH_CHARS = 4096
KEPT_SECONDS, MAX_KEPT = 0.1, 256
"""Estimates that are kept for the next submission of the same words: who submits many jobs at once does not wait."""


class JobSizer:
    """Estimates jobs; `stop` ends the thread that looks at input files."""

    def __init__(self, prediction: PredictionService) -> None:
        self._prediction = prediction
        self._files = ThreadPoolExecutor(1, thread_name_prefix="grid-inputs")
        self._kept: dict[tuple[str, tuple[str, ...], int, bool], JobEstimate] = {}
        self._kept_until = 0.0

    async def estimate(self, op: requests.SubmitJob, user: str) -> JobEstimate:
        """What earlier runs say of this job; limits only where it states no needs."""
        size = await self._input_bytes(op)
        now = time.monotonic()
        if now >= self._kept_until or len(self._kept) >= MAX_KEPT:
            self._kept, self._kept_until = {}, now + KEPT_SECONDS
        kept, key = self._kept, (user, op.argv, size, op.states_needs)
        found = kept.get(key)
        if found is None:
            found = kept[key] = await self._estimate(op, user, size)
        return found

    async def _estimate(self, op: requests.SubmitJob, user: str, size: int) -> JobEstimate:
        predicted = None if op.states_needs else await self._prediction.size(user, op.argv, size)
        if predicted is None:
            run_ms = await self._prediction.run_ms(user, op.argv, size)
            return JobEstimate(run_ms=run_ms or 0, input_bytes=size)
        return estimate_of(predicted, size)

    async def estimate_shape(self, shape: TaskShape, user: str) -> JobEstimate | None:
        """What pull workers have reported of tasks of this shape that state no needs; None where too little is
        known."""
        predicted = await self._prediction.size_pulled(user, shape) if shape.key else None
        return estimate_of(predicted, 0) if predicted is not None else None

    def stop(self) -> None:
        """Safe to call twice."""
        self._files.shutdown(wait=False, cancel_futures=True)

    async def _input_bytes(self, op: requests.SubmitJob) -> int:
        """The size of the files that the command names; what cannot be found out in time counts as nothing."""
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
    """What is predicted, as a job keeps it."""
    return JobEstimate(
        limits_of(predicted),
        run_ms=predicted.run_ms or 0,
        input_bytes=input_bytes,
        tier=str(predicted.tier),
        confidence_milli=round(1000 * predicted.confidence),
        samples=predicted.samples,
    )


def input_paths(argv: Sequence[str], cwd: str) -> tuple[str, ...]:
    """Where the files would be that the words of a command name: words, and values of options."""
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
    """The size of those that are regular files."""
    total = 0
    for path in paths:
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(found.st_mode):
            total += found.st_size
    return total
