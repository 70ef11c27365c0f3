"""A job's output as it comes: from the files of its attempts, in order, at the reader's pace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.control.attempt_files import AttemptFiles
from distributed_grid.domain.jobs import Attempt, Ending, Job
from distributed_grid.errors import NotFound, Unreachable

CHUNK = 256 * 1024
QUICK_SECONDS, SLOW_SECONDS = 0.02, 0.2
FAR_SECONDS = 0.05
LAST_WORDS_SECONDS = 10.0
"""How long the rest of an ended job's output is waited for while its node cannot be reached."""
Send = Callable[[bytes, bytes], Awaitable[None]]
_NAMES = ((STDOUT, b"stdout"), (STDERR, b"stderr"))


class OutputStream:
    """Reads the output of one job's attempts and remembers how far it got.

    `seen` is how many bytes of each kind a reader who comes back has had already.
    """

    def __init__(self, files: AttemptFiles, send: Send, seen: dict[bytes, int]) -> None:
        self._files = files
        self._send = send
        self._seen = seen
        self._read: dict[tuple[str, bytes], int] = {}
        self._tail: int | None = None
        self._over: set[str] = set()

    def skip_to_tail(self, tail_bytes: int) -> None:
        """Begin so many bytes before the end of each attempt's output."""
        self._tail = tail_bytes

    async def pass_on(self, attempts: tuple[Attempt, ...]) -> bool:
        """Send what is new; whether there was anything. Unreachable while an attempt's node is."""
        anything = False
        for attempt in attempts:
            if attempt.lease_id in self._over:
                continue
            for kind, name in _NAMES:
                while chunk := await self._next(attempt, name):
                    anything = True
                    known = min(self._seen[kind], len(chunk))
                    self._seen[kind] -= known
                    if known < len(chunk):
                        await self._send(kind, chunk[known:])
            if attempt.outcome is not None:
                self._over.add(attempt.lease_id)
        return anything

    def is_near(self, attempt: Attempt | None) -> bool:
        """Whether looking costs next to nothing."""
        return attempt is None or self._files.is_here(attempt)

    async def _next(self, attempt: Attempt, name: bytes) -> bytes:
        key = (attempt.lease_id, name)
        from_end = self._tail is not None and key not in self._read
        offset = self._tail or 0 if from_end else self._read.get(key, 0)
        try:
            start, chunk = await self._files.read(attempt, name, offset, CHUNK, from_end=from_end)
        except NotFound:
            return b""
        self._read[key] = start + len(chunk)
        return chunk


async def follow(output: OutputStream, current: Callable[[], Awaitable[Job]], changed: asyncio.Event) -> Job:
    """Pass output on until the job is over and all of it was passed on; the job as it ended.

    While a node cannot be reached its output waits there. Of a job that is over, the rest is waited for a while.
    """
    pause = QUICK_SECONDS
    patience = LAST_WORDS_SECONDS
    while True:
        changed.clear()
        job = await current()
        try:
            anything = await output.pass_on(job.attempts)
        except Unreachable:
            if job.is_over and (patience <= 0 or _is_lost(job)):
                return job
            patience -= SLOW_SECONDS if job.is_over else 0
            await asyncio.sleep(SLOW_SECONDS)
            continue
        if job.is_over:
            return job
        quick = QUICK_SECONDS if output.is_near(job.attempt) else FAR_SECONDS
        pause = quick if anything else min(pause * 1.5, SLOW_SECONDS)
        try:
            await asyncio.wait_for(changed.wait(), pause if job.attempt is not None else None)
        except TimeoutError:
            continue


def _is_lost(job: Job) -> bool:
    return job.outcome is not None and job.outcome.ending is Ending.LOST
