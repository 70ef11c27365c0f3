"""Age clock of a directory: the time that deletions by age compare with, and the jumps of the wall clock.

The state is in one file, with a digest. Where that is missing, cut short or changed, the age begins anew at 0: all that
is there is kept for its whole time once more. A disk that takes no file costs the time since the last save only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from distributed_grid.domain.clock_jumps import ClockJump, ClockReading, ClockState, jump_text
from distributed_grid.posix import boot_clock
from distributed_grid.posix.private_files import write_private

FILE = "age.json"
log = logging.getLogger(__name__)


def sealed(content: bytes) -> bytes:
    """Content after its digest, which `unsealed` checks."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unsealed(data: bytes) -> bytes | None:
    """The content of `sealed`; None where it is another one."""
    digest, _, content = data.partition(b"\n")
    return content if digest == hashlib.sha256(content).hexdigest().encode() else None


class AgeClock:
    """The age of what is below one directory. Calls from several threads take turns."""

    def __init__(
        self,
        path: Path,
        *,
        wall: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        boottime: Callable[[], int] = boot_clock.boot_ms,
        boot_id: Callable[[], str] = boot_clock.boot_id,
    ) -> None:
        """Continue from the file at `path`, or begin anew; all three sources can be replaced."""
        self._path = path
        self._wall = wall
        self._boottime = boottime
        self._boot_id = boot_id()
        self._lock = threading.Lock()
        self._saved: ClockState | None = None
        try:
            content = unsealed(path.read_bytes())
            found = msgspec.json.decode(content, type=ClockState) if content is not None else None
        except (OSError, msgspec.DecodeError):
            found = None
        if found is None and path.exists():
            log.warning("%s cannot be used: ages begin anew, and nothing is deleted by age before its time", path)
        self._state = found or ClockState(self._reading())
        self.look()

    def look(self) -> ClockState:
        """Look at the clocks; a jump is logged and saved."""
        with self._lock:
            self._enter(self._state.observe(self._reading()))
            return self._state

    @property
    def state(self) -> ClockState:
        """The state at the last look."""
        return self._state

    def may_delete(self) -> bool:
        """True if no jump is pending: look first, then decide."""
        return self.look().jump is None

    def confirm(self) -> ClockJump | None:
        """The wall clock is right: end the wait. The jump that was pending; None, and no change, where none was."""
        with self._lock:
            jump = self._state.jump
            if jump is not None:
                self._enter(replace(self._state, jump=None), confirmed=True)
            return jump

    def cutoff_ms(self, grid_ms: int, keep_ms: int) -> int:
        """The grid's time before which something is older than `keep_ms`, if it is `grid_ms` now; 0, which is before
        everything, while a jump is pending or nothing is known to be that old."""
        with self._lock:
            self._enter(self._state.observe(self._reading()).with_grid_time(grid_ms))
            return 0 if self._state.jump is not None else self._state.grid_time_of(self._state.age_ms - keep_ms)

    def save(self) -> None:
        """Save the state durably, every few minutes; on a full disk the previous one stays. Call it in a thread."""
        with self._lock:
            self._save(durable=True)

    def _enter(self, state: ClockState, *, confirmed: bool = False) -> None:
        before, self._state = self._state, state
        if _size_of(state.jump) != _size_of(before.jump):
            if state.jump is not None:
                log.warning("%s", jump_text("this machine", state.jump.by_ms, state.waits_ms))
            elif confirmed:
                log.info("the wall clock was confirmed: deletions by age go on")
            else:
                log.info("the wall clock is steady: deletions by age go on")
        if self._saved is None or state.jump != self._saved.jump or state.points != self._saved.points:
            self._save()

    def _save(self, *, durable: bool = False) -> None:
        with contextlib.suppress(OSError):
            write_private(self._path, sealed(msgspec.json.encode(self._state)), durable=durable)
            self._saved = self._state

    def _reading(self) -> ClockReading:
        return ClockReading(self._boot_id, self._boottime(), self._wall())


def _size_of(jump: ClockJump | None) -> int:
    return jump.by_ms if jump is not None else 0
