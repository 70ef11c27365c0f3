"""Renewing in time what a living program holds: one thread for all of it, started with the first thing to renew.

Rule 1. What is gone is not renewed again; any other failure is tried again soon, well before the time is over.
Rule 2. The thread is the program's: it ends with it, and then time runs out for what it renewed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from distributed_grid.errors import BlockLost, GridError, NotFound

SOON_SECONDS = 5.0
log = logging.getLogger(__name__)


@dataclass
class _Renewal:
    every_seconds: float
    renew: Callable[[], object]
    due: float


class Renewals:
    """What has to be renewed, and how often."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: dict[str, _Renewal] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._wakes_at = math.inf

    def keep(self, name: str, every_seconds: float, renew: Callable[[], object]) -> None:
        """Renew this from now on; under a name that is kept already nothing changes."""
        with self._changed:
            if self._stopped or name in self._kept:
                return
            kept = self._kept[name] = _Renewal(every_seconds, renew, time.monotonic() + every_seconds)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memory-renewals", daemon=True)
                self._thread.start()
            elif kept.due < self._wakes_at:
                self._changed.notify()

    def drop(self, name: str) -> None:
        """Renew this no more; a second time is harmless. A renewal that goes on just now may still be done."""
        with self._changed:
            self._kept.pop(name, None)

    def stop(self) -> None:
        """Renew nothing more; safe to call twice."""
        with self._changed:
            self._stopped = True
            self._kept.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (chosen := self._next()) is not None:
            name, renewal = chosen
            try:
                renewal.renew()
                pause = renewal.every_seconds
            except (NotFound, BlockLost):
                self.drop(name)
                continue
            except (GridError, OSError) as failure:
                log.warning("cannot renew %s yet: %s", name, failure)
                pause = min(renewal.every_seconds, SOON_SECONDS)
            renewal.due = time.monotonic() + pause

    def _next(self) -> tuple[str, _Renewal] | None:
        """What is due, once it is; None when all is over."""
        with self._changed:
            while not self._stopped:
                first = min(self._kept.items(), key=lambda kept: kept[1].due, default=None)
                pause = first[1].due - time.monotonic() if first is not None else None
                if first is not None and pause is not None and pause <= 0:
                    return first
                self._wakes_at = first[1].due if first is not None else math.inf
                self._changed.wait(pause)
            return None
