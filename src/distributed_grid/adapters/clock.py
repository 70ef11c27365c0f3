"""Clock of the grid: milliseconds since the Unix epoch that never go back, and the anchor that survives restarts.

Within one boot, time passes as CLOCK_BOOTTIME does: setting the wall clock changes nothing, and suspend counts. A
restart on the same boot continues from the saved anchor; after a reboot time starts from the wall clock, or from the
last known time when that is later: of the anchor, which is saved every half minute, or of what is stored. Where the
wall clock is behind the anchor, because it was ahead at an earlier boot, it still says how long the machine was off.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

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
        """The time; never less than any result before."""
        elapsed_ms = self._boottime() - self._start.boot_ms
        self._latest_ms = max(self._latest_ms, self._start.wall_ms + elapsed_ms)
        return self._latest_ms

    def anchor(self) -> Anchor:
        """What a later `GridClock` needs in order to continue this time."""
        boot_ms = self._boottime()
        now_ms = self._start.wall_ms + boot_ms - self._start.boot_ms
        return Anchor(self._start.boot_id, now_ms, boot_ms, self._wall() - now_ms, self.steps)

    def wall_offset_ms(self) -> int:
        """What to add to the grid's times to display them as wall clock times.

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
    """Save the anchor, whole or not at all; on a full disk the previous one stays."""
    with contextlib.suppress(OSError):
        write_private(_anchor_file(state_dir), msgspec.json.encode(anchor), durable=durable)


async def save_anchor_forever(state_dir: StateDir, clock: GridClock, seconds: float = SAVE_SECONDS) -> None:
    """Save the anchor again and again: a power failure, after which the wall clock may be wrong, costs little."""
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(save_anchor, state_dir, clock.anchor(), durable=True)


def last_stored_ms(store: Store) -> int:
    """The grid's time of the last audit record; 0 where there is none."""
    return next((event.at_ms for event in store.events(limit=1, newest=True)), 0)


def _anchor_file(state_dir: StateDir) -> Path:
    return state_dir.host_dir / "clock.json"
