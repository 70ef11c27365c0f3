"""Virtual time: what will happen, in the order of its moment, then in the order it was planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Deed = Callable[[], None]


class ScheduledEvent:
    """A deed of the future, which can be called off; calling it off twice is harmless."""

    __slots__ = ("deed",)

    def __init__(self, deed: Deed) -> None:
        self.deed: Deed | None = deed

    def call_off(self) -> None:
        self.deed = None


class EventQueue:
    """A clock in milliseconds that jumps from one planned deed to the next."""

    def __init__(self, now: int = 0) -> None:
        self.now = now
        self._ahead: list[tuple[int, int, ScheduledEvent]] = []
        self._count = 0

    def at(self, when_ms: int, deed: Deed) -> ScheduledEvent:
        """Do it then; what is planned for the past happens now."""
        planned = ScheduledEvent(deed)
        self._count += 1
        heapq.heappush(self._ahead, (max(when_ms, self.now), self._count, planned))
        return planned

    def after(self, delay_ms: int, deed: Deed) -> ScheduledEvent:
        return self.at(self.now + delay_ms, deed)

    def do_next(self, until_ms: int) -> bool:
        """Go on to the next deed and do it; False, with the clock at `until_ms`, when there is none before that."""
        while self._ahead and self._ahead[0][0] <= until_ms:
            when, _, planned = heapq.heappop(self._ahead)
            deed, planned.deed = planned.deed, None
            if deed is not None:
                self.now = when
                deed()
                return True
        self.now = max(self.now, until_ms)
        return False
