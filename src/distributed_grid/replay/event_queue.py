"""Virtual time: a queue of events, and tasks that wait for them.

A task is a coroutine of the code that ships. Whatever it awaits ends in a `Suspension`, which begins something in
virtual time and goes on when that is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any

Callback = Callable[[], None]
Resume = Callable[[Any, Exception | None], None]  # goes on with a value, or with a failure


class ScheduledEvent:
    """A callback of the future, which can be cancelled; cancelling it twice is harmless."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback

    @property
    def is_pending(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        self._callback = None

    def take(self) -> Callback | None:
        callback, self._callback = self._callback, None
        return callback


class EventQueue:
    """A clock in milliseconds that jumps from one scheduled event to the next."""

    def __init__(self, now: int = 0) -> None:
        self.now = now
        self._ahead: list[tuple[int, int, ScheduledEvent]] = []
        self._count = 0

    def at(self, when_ms: int, callback: Callback) -> ScheduledEvent:
        """Schedule a callback; a moment in the past means now."""
        event = ScheduledEvent(callback)
        self._count += 1
        heapq.heappush(self._ahead, (max(when_ms, self.now), self._count, event))
        return event

    def after(self, delay_ms: int, callback: Callback) -> ScheduledEvent:
        return self.at(self.now + delay_ms, callback)

    def run_next(self, until_ms: int) -> bool:
        """Go on to the next event; False, with the clock at `until_ms`, when there is none before that."""
        while self._ahead and self._ahead[0][0] <= until_ms:
            when, _, event = heapq.heappop(self._ahead)
            callback = event.take()
            if callback is not None:
                self.now = when
                callback()
                return True
        self.now = max(self.now, until_ms)
        return False


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
        self._is_over = False

    def start(self) -> None:
        """Run until the first wait."""
        self._go_on(None)

    def cancel(self) -> None:
        """Stop the coroutine. Safe twice."""
        if not self._is_over:
            self._is_over = True
            self._work.close()

    def _go_on(self, result: tuple[Any, Exception | None] | None) -> None:
        if self._is_over:
            return
        try:
            waits = self._work.send(result)
        except StopIteration:
            self._is_over = True
            if self._then is not None:
                self._then()
            return
        waits.begin(lambda value, failure: self._go_on((value, failure)))


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
