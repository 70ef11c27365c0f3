"""Threads that do blocking work for a program with an event loop.

Rule 1. Work begins in the order it was given; as much of it goes on at once as there are threads.
Rule 2. Who waits for work and is cancelled does not stop it; what came of it is undone where that was asked for.

A queue without locks and one call back into the loop: half of what `asyncio.to_thread` costs, which counts where the
work itself takes a tenth of a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from distributed_grid.errors import Refused

MOST_THREADS = 16
T = TypeVar("T")


@dataclass
class _Job:
    loop: asyncio.AbstractEventLoop
    waiting: asyncio.Future[Any]
    work: Callable[[], Any] | None
    undo: Callable[[Any], object] | None
    """No work: the thread ends."""


class BlockingWorkers:
    """A few threads, each started when the others are busy; of one event loop."""

    def __init__(self, most: int = MOST_THREADS) -> None:
        self._most = most
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads = 0
        self._under_way = 0
        self._stopped = False

    async def run(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """What the work returns or raises; it is done in a thread."""
        if self._stopped:
            raise Refused("the memory pool is shut down")
        if self._under_way >= self._threads and self._threads < self._most:
            threading.Thread(target=self._serve, name=f"memory-pool-{self._threads}", daemon=True).start()
            self._threads += 1
        done: T = await self._given(work, undo)
        return done

    async def stop(self) -> None:
        """End the threads once all work is done; safe to call twice."""
        self._stopped = True
        threads, self._threads = self._threads, 0
        await asyncio.gather(*(self._given(None) for _ in range(threads)))

    def _given(
        self, work: Callable[[], Any] | None, undo: Callable[[Any], object] | None = None
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        job = _Job(loop, loop.create_future(), work, undo)
        self._under_way += 1
        self._jobs.put(job)
        return job.waiting

    def _serve(self) -> None:
        while self._done(self._jobs.get()):
            pass

    def _done(self, job: _Job) -> bool:
        """Do the work and tell; False for the last job of a thread."""
        result, failure = None, None
        try:
            if job.work is not None and not job.waiting.cancelled():
                result = job.work()
        except BaseException as raised:  # it belongs to whoever waits
            failure = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            job.loop.call_soon_threadsafe(self._told, job, result, failure)
        return job.work is not None

    def _told(self, job: _Job, result: Any, failure: BaseException | None) -> None:
        self._under_way -= 1
        if not job.waiting.cancelled():
            if failure is None:
                job.waiting.set_result(result)
            else:
                job.waiting.set_exception(failure)
        elif job.undo is not None and result is not None and not self._stopped:
            undo = job.undo
            self._given(lambda: undo(result)).add_done_callback(_heard)


def _heard(done: asyncio.Future[Any]) -> None:
    """What became of undoing something is nobody's business any more: it ends by itself, later."""
    if not done.cancelled():
        done.exception()
