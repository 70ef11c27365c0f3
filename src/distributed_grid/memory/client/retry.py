"""How long somebody tries to reach a block before it is an error."""

from __future__ import annotations

import time
from typing import Final

from distributed_grid.errors import TimedOut

LONGEST_PAUSE_SECONDS: Final = 0.5
TRIES_WHEN_REFUSED: Final = 3


class RetryBudget:
    """How long somebody tries, and what came of it so far."""

    def __init__(self, block_id: str, seconds: float) -> None:
        self._block_id = block_id
        self._seconds = seconds
        self._began = time.monotonic()
        self._pause = 0.005
        self._refusals = 0
        self.last = ""

    def wait(self, problem: str, *, at_once: bool = False) -> None:
        """Note what happened and wait a little; TimedOut with what was tried when it is enough."""
        self.last = problem
        if time.monotonic() - self._began + self._pause > self._seconds:
            waited = f"{time.monotonic() - self._began:.0f} s"
            raise TimedOut(f"block {self._block_id} could not be used for {waited}; last: {problem}")
        if not at_once:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def refused(self) -> bool:
        """Whether the same no was heard often enough to believe it."""
        self._refusals += 1
        return self._refusals >= TRIES_WHEN_REFUSED
