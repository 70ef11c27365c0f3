"""Clock of the grid, and age clock of a directory.

`GridClock`: milliseconds since the Unix epoch that never go back. Within one boot, time passes as CLOCK_BOOTTIME does:
setting the wall clock changes nothing, and suspend counts. A restart on the same boot continues from the saved anchor;
after a reboot time starts from the wall clock, or from the last known time when that is later: of the anchor, which is
saved every half minute, or of the stored records. Where the wall clock is behind the anchor, because it was ahead at an
earlier boot, it still says how long the machine was off.

`AgeClock`: the time that deletions by age compare with, and the jumps of the wall clock. The state is in one file, with
a digest. Where that is missing, cut short or changed, the age begins anew at 0: everything is kept for its whole time
once more. A full disk costs only the time since the last save.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.clock_jumps import ClockJump, ClockReading, ClockState, jump_text
from distributed_grid.ports import Store
from distributed_grid.posix import boot_clock
from distributed_grid.posix.private_files import write_private
from distributed_grid.state_dir import StateDir

MAX_JITTER_MS = 50
SAVE_SECONDS = 30.0
MAX_STEPS = 100


class TimeStep(Struct, frozen=True):
    """Until `until_ms` of the grid's time, which stepped forward there, the wall clock was `offset_ms` ahead of it."""

    until_ms: int
    offset_ms: int


class Anchor(Struct, frozen=True):
    """The grid's time at one moment of a boot; how far the wall clock was ahead of it then (None: not known), and the
    last reboots at which it stepped forward."""

    boot_id: str
    wall_ms: int
    boot_ms: int
    offset_ms: int | None = None
    steps: tuple[TimeStep, ...] = ()


class GridClock:
    """The grid's time; the caller saves `anchor()` durably now and then."""

    def __init__(
        self,
        anchor: Anchor | None = None,
        *,
        known_ms: int = 0,
        wall: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        boottime: Callable[[], int] = boot_clock.boot_ms,
        boot_id: Callable[[], str] = boot_clock.boot_id,
    ) -> None:
        """Continue from `anchor`, or begin at the wall clock, but not before `known_ms`; all three sources can be
        replaced."""
        self._wall = wall
        self._boottime = boottime
        here = Anchor(boot_id(), wall(), boottime())
        # A machine restored from a snapshot has the boot it had, but may be younger than its anchor.
        if anchor is not None and anchor.boot_id == here.boot_id and anchor.boot_ms <= here.boot_ms:
            now_ms = anchor.wall_ms + here.boot_ms - anchor.boot_ms
        elif anchor is not None:
            now_ms = max(_time_after_reboot(anchor, here.wall_ms), anchor.wall_ms)
        else:
            now_ms = here.wall_ms
        self._start = Anchor(here.boot_id, max(now_ms, known_ms), here.boot_ms)
        self.steps = anchor.steps if anchor is not None else ()
        if anchor is not None and anchor.offset_ms is not None and anchor.boot_id != here.boot_id:
            self.steps = (*self.steps, TimeStep(max(anchor.wall_ms, known_ms), anchor.offset_ms))[-MAX_STEPS:]
        self._latest_ms = self._start.wall_ms
        self._display_offset_ms: int | None = None

    def now_ms(self) -> int:
        elapsed_ms = self._boottime() - self._start.boot_ms
        self._latest_ms = max(self._latest_ms, self._start.wall_ms + elapsed_ms)
        return self._latest_ms

    def anchor(self) -> Anchor:
        """State from which a later `GridClock` continues this time."""
        boot_ms = self._boottime()
        now_ms = self._start.wall_ms + boot_ms - self._start.boot_ms
        return Anchor(self._start.boot_id, now_ms, boot_ms, self._wall() - now_ms, self.steps)

    def wall_offset_ms(self) -> int:
        """Difference between wall clock and grid time, for times on display.

        It stays the same until the wall clock was really moved, so that a time is always displayed the same.
        """
        offset_ms = self._wall() - self.now_ms()
        if self._display_offset_ms is None or abs(offset_ms - self._display_offset_ms) > MAX_JITTER_MS:
            self._display_offset_ms = offset_ms
        return self._display_offset_ms


def _time_after_reboot(anchor: Anchor, wall_ms: int) -> int:
    """The grid's time by the wall clock; where that is behind, as much later as the wall clock has moved since."""
    if wall_ms >= anchor.wall_ms or anchor.offset_ms is None:
        return wall_ms
    return wall_ms - anchor.offset_ms


def load_anchor(state_dir: StateDir) -> Anchor | None:
    """The anchor saved last; None where there is none, or it is unreadable."""
    try:
        return msgspec.json.decode(_anchor_file(state_dir).read_bytes(), type=Anchor)
    except (OSError, msgspec.DecodeError):
        return None


def save_anchor(state_dir: StateDir, anchor: Anchor, *, durable: bool = False) -> None:
    with contextlib.suppress(OSError):
        write_private(_anchor_file(state_dir), msgspec.json.encode(anchor), durable=durable)


async def save_anchor_forever(state_dir: StateDir, clock: GridClock, seconds: float = SAVE_SECONDS) -> None:
    """Save the anchor again and again: a power failure, after which the wall clock may be wrong, costs little."""
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(save_anchor, state_dir, clock.anchor(), durable=True)


def last_stored_ms(store: Store) -> int:
    return next((event.at_ms for event in store.events(limit=1, newest=True)), 0)


def _anchor_file(state_dir: StateDir) -> Path:
    return state_dir.host_dir / "clock.json"


FILE = "age.json"
log = logging.getLogger(__name__)


def sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unsealed(data: bytes) -> bytes | None:
    """Content of `sealed` data; None if the digest differs."""
    digest, _, content = data.partition(b"\n")
    return content if digest == hashlib.sha256(content).hexdigest().encode() else None


class AgeClock:
    """The age of the files below one directory. Calls from several threads take turns."""

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
            state = msgspec.json.decode(content, type=ClockState) if content is not None else None
        except (OSError, msgspec.DecodeError):
            state = None
        if state is None and path.exists():
            log.warning("%s cannot be used: ages begin anew, and nothing is deleted by age before its time", path)
        self._state = state or ClockState(self._reading())
        self.look()

    def look(self) -> ClockState:
        """Look at the clocks; a jump is logged and saved."""
        with self._lock:
            self._enter(self._state.observe(self._reading()))
            return self._state

    @property
    def state(self) -> ClockState:
        return self._state

    def may_delete(self) -> bool:
        """True if no jump is pending."""
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
        """Save the state durably; on a full disk the previous one stays. Call it in a thread."""
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
