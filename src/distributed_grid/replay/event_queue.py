"""Virtual time: a queue of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Callback = Callable[[], None]


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
        """Run the next event; False, with the clock at `until_ms`, when there is none before that."""
        while self._ahead and self._ahead[0][0] <= until_ms:
            when, _, event = heapq.heappop(self._ahead)
            callback = event.take()
            if callback is not None:
                self.now = when
                callback()
                return True
        self.now = max(self.now, until_ms)
        return False
