"""Rate limit of log lines, by the log statement that writes them.

Agents, clients and jobs can cause log lines without end. Each log statement may write `BURST` lines at once, and one
more every `REFILL_SECONDS`; the number of omitted lines is in the next line of that statement. Other statements are not
affected.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

BURST = 50
REFILL_SECONDS = 10.0


class LogRateLimit(logging.Filter):
    """For handlers: lets a line pass unless its statement has written too many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._spent_until: dict[tuple[str, int], float] = {}
        self._omitted: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        statement, now = (record.pathname, record.lineno), self._clock()
        spent_until = max(self._spent_until.get(statement, now), now)
        if math.ceil((spent_until - now) / REFILL_SECONDS) >= BURST:
            self._omitted[statement] = self._omitted.get(statement, 0) + 1
            return False
        self._spent_until[statement] = spent_until + REFILL_SECONDS
        if omitted := self._omitted.pop(statement, 0):
            record.msg = f"{record.getMessage()} ({omitted} such lines before it were left out)"
            record.args = ()
        return True


def configure_logging(*handlers: logging.Handler) -> None:
    """Set up the log of a process that serves others."""
    for handler in handlers:
        handler.addFilter(LogRateLimit())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=handlers)
