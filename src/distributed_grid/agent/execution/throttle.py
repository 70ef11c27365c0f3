"""Slows borrowed work down, stops it, and lets it run again.

Rule 1. What is stopped here is marked on the disk first, so that whoever comes after a crash lets it run again.
Rule 2. Nobody who is being ended is stopped: the time to clean up belongs to the job.
Rule 3. Letting go undoes everything, and doing it again changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING, NamedTuple

from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.limits import process_tree

if TYPE_CHECKING:
    from distributed_grid.agent.execution.host import AttemptHost

PERIOD_MS = 100
FREELY = 1000
log = logging.getLogger(__name__)


class ThrottledTree(NamedTuple):
    """A running attempt since `launched_boot_ms`, for whoever wants to slow it down; `stopping` is being ended
    already."""

    spec: AttemptSpec
    fence: int
    shim: process_tree.Proc
    stopping: bool
    launched_boot_ms: int

    @property
    def attempt_id(self) -> str:
        return self.spec.attempt_id


class Throttler:
    """Holds all borrowed work of a machine: on fewer cores, for a part of the time, or still."""

    def __init__(self, host: AttemptHost) -> None:
        self._host = host
        self._running_milli = FREELY
        self._stood_still: dict[str, int] = {}  # attempt to fence
        self._cycling: asyncio.Task[None] | None = None
        self._marked = False

    def hold(self, cores: int | None, running_milli: int) -> None:
        """Use so many cores (None: one's own), and each only for that part of the time."""
        self._mark(cores is not None or running_milli < FREELY)
        self._host.confine(None if cores is None else self._host.cores_in_use[: max(1, cores)])
        self._running_milli = running_milli
        if running_milli < FREELY and self._cycling is None:
            self._cycling = asyncio.get_running_loop().create_task(self._cycle())
        elif running_milli >= FREELY:
            self._stop_cycling()

    def stand_still(self, spared: frozenset[str] = frozenset()) -> list[ThrottledTree]:
        """Stop everything but `spared`; those that ran until now. Again: only what has come since."""
        self._mark(True)
        fresh = [one for one in self._held() if one.attempt_id not in self._stood_still | dict.fromkeys(spared)]
        for one in fresh:
            process_tree.freeze(one.shim.pid)
            self._stood_still[one.attempt_id] = one.fence
        return fresh

    def go_on(self, attempt_id: str | None = None) -> list[ThrottledTree]:
        """Let one, or everything, that stands still run as `hold` allows; those that stood still."""
        names = tuple(self._stood_still) if attempt_id is None else (attempt_id,)
        known = [name for name in names if self._stood_still.pop(name, None) is not None]
        stopped = [one for one in self._host.borrowed() if one.attempt_id in known]
        _signal(stopped, signal.SIGCONT)
        return stopped

    def let_go(self) -> list[ThrottledTree]:
        """Everything runs freely again; those that stood still."""
        stopped = self.go_on()
        self.hold(None, FREELY)
        return stopped

    # ------------------------------------------------------------------ a part of the time

    async def _cycle(self) -> None:
        """Run and stop in turns, the running part first in every period."""
        while True:
            on_ms = PERIOD_MS * self._running_milli // FREELY
            _signal(self._moving(), signal.SIGCONT)
            await asyncio.sleep(on_ms / 1000)
            _signal(self._moving(), signal.SIGSTOP)
            await asyncio.sleep((PERIOD_MS - on_ms) / 1000)

    def _stop_cycling(self) -> None:
        if self._cycling is not None:
            self._cycling.cancel()
            self._cycling = None
            _signal(self._moving(), signal.SIGCONT)

    def _moving(self) -> list[ThrottledTree]:
        return [one for one in self._held() if one.attempt_id not in self._stood_still]

    def _held(self) -> list[ThrottledTree]:
        return [one for one in self._host.borrowed() if not one.stopping]

    def _mark(self, held: bool) -> None:
        if held == self._marked:
            return
        try:
            (mark if held else unmark)(self._host.root)
        except OSError as error:  # a full disk; the owner comes first all the same
            log.warning("giving way could not be noted: %s", error.strerror)
        self._marked = held


def _signal(trees: list[ThrottledTree], signum: int) -> None:
    for one in trees:
        now = process_tree.look(one.shim.pid)
        if now is not None and now.start == one.shim.start:  # else somebody else has its pid by now
            process_tree.send_all(process_tree.quickly_below(one.shim.pid), signum)


def mark(root: str) -> None:
    """Say that something below the root may be stopped or confined (Rule 1)."""
    os.close(os.open(f"{root}/{job_dir.YIELDING}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def unmark(root: str) -> None:
    """Say that nothing is. Safe twice."""
    try:
        os.unlink(f"{root}/{job_dir.YIELDING}")
    except FileNotFoundError:
        pass


def is_marked(root: str) -> bool:
    """Whether something may have been left stopped or confined."""
    return os.access(f"{root}/{job_dir.YIELDING}", os.F_OK)
