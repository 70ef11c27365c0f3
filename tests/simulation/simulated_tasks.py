"""Tasks in virtual time.

A task is a coroutine of the code that ships. It waits in a `Suspension`, which begins something in virtual time and
resumes the task when that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any

from distributed_grid.replay.event_queue import Callback, EventQueue

Resume = Callable[[Any, Exception | None], None]  # resumes a task with a value, or with a failure


class Suspension:
    """A point where a task waits; `begin` gets the callback that resumes it."""

    def __init__(self, begin: Callable[[Resume], None]) -> None:
        self.begin = begin

    def __await__(self) -> Generator[Suspension, tuple[Any, Exception | None], Any]:
        value, failure = yield self
        if failure is not None:
            raise failure
        return value


class SimulatedTask:
    """A coroutine in virtual time; its exceptions end the run."""

    def __init__(self, work: Coroutine[Any, Any, object], then: Callback | None = None) -> None:
        self._work = work
        self._then = then
        self._has_ended = False

    def start(self) -> None:
        """Run until the first wait."""
        self._continue(None)

    def cancel(self) -> None:
        """Stop the coroutine. Safe twice."""
        if not self._has_ended:
            self._has_ended = True
            self._work.close()

    def _continue(self, result: tuple[Any, Exception | None] | None) -> None:
        if self._has_ended:
            return
        try:
            waits = self._work.send(result)
        except StopIteration:
            self._has_ended = True
            if self._then is not None:
                self._then()
            return
        waits.begin(lambda value, failure: self._continue((value, failure)))


class SimulatedTasks:
    """Tasks beside each other, in virtual time."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue

    def spawn(self, work: Coroutine[Any, Any, None]) -> SimulatedTask:
        task = SimulatedTask(work)
        self._queue.after(0, task.start)
        return task

    def cancel(self, task: SimulatedTask) -> None:
        task.cancel()

    async def join(self, task: SimulatedTask) -> None:
        """A cancelled task has ended at once."""

    async def sleep(self, ms: int) -> None:
        await Suspension(lambda resume: self.resume_after(ms, resume))

    def resume_after(self, ms: int, resume: Resume) -> None:
        self._queue.after(ms, lambda: resume(None, None))
