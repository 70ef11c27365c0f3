"""A job's output as it comes: from the files of its attempts, in order, at the reader's pace."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from distributed_grid.domain.jobs import Attempt, Job
from distributed_grid.orchestration.protocol import STDERR, STDOUT

CHUNK = 256 * 1024
QUICK_SECONDS, SLOW_SECONDS = 0.02, 0.2
Send = Callable[[bytes, bytes], Awaitable[None]]


class Output:
    """Reads the output of one job's attempts and remembers how far it got.

    `seen` is how many bytes of each kind a reader who comes back has had already.
    """

    def __init__(self, jobs: Path, send: Send, seen: dict[bytes, int]) -> None:
        self._jobs = jobs
        self._send = send
        self._seen = seen
        self._read: dict[Path, int] = {}

    def skip_to_tail(self, attempts: tuple[Attempt, ...], tail_bytes: int) -> None:
        """Begin so many bytes before the end."""
        for _, path in self._files(attempts):
            self._read[path] = max(_size(path) - tail_bytes, 0)

    async def pass_on(self, attempts: tuple[Attempt, ...]) -> bool:
        """Send what is new; whether there was anything."""
        anything = False
        for kind, path in self._files(attempts):
            while chunk := self._next(path):
                anything = True
                known = min(self._seen[kind], len(chunk))
                self._seen[kind] -= known
                if known < len(chunk):
                    await self._send(kind, chunk[known:])
        return anything

    def _files(self, attempts: tuple[Attempt, ...]) -> list[tuple[bytes, Path]]:
        folders = [self._jobs / attempt.lease_id for attempt in attempts]
        return [(kind, folder / name) for folder in folders for kind, name in ((STDOUT, "stdout"), (STDERR, "stderr"))]

    def _next(self, path: Path) -> bytes:
        start = self._read.get(path, 0)
        try:
            with open(path, "rb", buffering=0, opener=_no_links) as file:
                file.seek(start)
                chunk = file.read(CHUNK)
        except FileNotFoundError:
            return b""
        self._read[path] = start + len(chunk)
        return chunk


async def follow(output: Output, current: Callable[[], Awaitable[Job]], changed: asyncio.Event) -> Job:
    """Pass output on until the job is over; the job as it ended."""
    pause = QUICK_SECONDS
    while True:
        changed.clear()
        job = await current()
        anything = await output.pass_on(job.attempts)
        if job.is_over:
            return job
        pause = QUICK_SECONDS if anything else min(pause * 1.5, SLOW_SECONDS)
        try:
            await asyncio.wait_for(changed.wait(), pause if job.attempt is not None else None)
        except TimeoutError:
            continue


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
