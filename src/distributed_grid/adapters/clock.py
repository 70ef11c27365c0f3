"""The grid's own time: milliseconds since the Unix epoch that only ever move on.

Rule 1. Within one boot, time passes as CLOCK_BOOTTIME does: setting the wall clock changes nothing, and
        sleep counts.
Rule 2. A restart on the same boot continues the same line, given the anchor that was kept.
Rule 3. After a reboot time starts from the wall clock, or from the last known time when that is later.

The anchor of the grid's clock on disk, so that the next control plane goes on with the same time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from distributed_grid.posix import boot_clock
from distributed_grid.state_dir import StateDir

STEADY_MS = 50


class Anchor(Struct, frozen=True):
    """A point on the grid's line of time: what it showed when that boot was so old."""

    boot_id: str
    wall_ms: int
    boot_ms: int


class GridClock:
    """Tells the grid's time; the caller keeps `anchor()` somewhere durable now and then."""

    def __init__(
        self,
        anchor: Anchor | None = None,
        *,
        wall: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        boottime: Callable[[], int] = boot_clock.boot_ms,
        boot_id: Callable[[], str] = boot_clock.boot_id,
    ) -> None:
        """Continue from `anchor`, or begin at the wall clock; all three sources can be replaced."""
        self._wall = wall
        self._boottime = boottime
        here = Anchor(boot_id(), wall(), boottime())
        # A machine restored from a snapshot has the boot it had, but may be younger than its anchor.
        if anchor is not None and anchor.boot_id == here.boot_id and anchor.boot_ms <= here.boot_ms:
            self._start = anchor
        else:
            known_ms = anchor.wall_ms if anchor is not None else 0
            self._start = Anchor(here.boot_id, max(here.wall_ms, known_ms), here.boot_ms)
        self._latest_ms = self._start.wall_ms
        self._shown_offset_ms: int | None = None

    def now_ms(self) -> int:
        """The time; never less than any answer before."""
        elapsed_ms = self._boottime() - self._start.boot_ms
        self._latest_ms = max(self._latest_ms, self._start.wall_ms + elapsed_ms)
        return self._latest_ms

    def anchor(self) -> Anchor:
        """What a later `GridClock` needs in order to continue this line."""
        boot_ms = self._boottime()
        return Anchor(self._start.boot_id, self._start.wall_ms + boot_ms - self._start.boot_ms, boot_ms)

    def wall_offset_ms(self) -> int:
        """What to add to the grid's times to show them as the wall clock would.

        It stays the same until the wall clock was really moved: a time that was shown once is shown the same again.
        """
        offset_ms = self._wall() - self.now_ms()
        if self._shown_offset_ms is None or abs(offset_ms - self._shown_offset_ms) > STEADY_MS:
            self._shown_offset_ms = offset_ms
        return self._shown_offset_ms


def load_anchor(places: StateDir) -> Anchor | None:
    """What was saved last; None where there is nothing, or nothing that makes sense."""
    try:
        return msgspec.json.decode(_note(places).read_bytes(), type=Anchor)
    except (OSError, msgspec.DecodeError):
        return None


def save_anchor(places: StateDir, anchor: Anchor) -> None:
    """Keep it, whole or not at all; a full disk leaves the one before."""
    fresh = _note(places).with_suffix(".new")
    with contextlib.suppress(OSError):
        fresh.write_bytes(msgspec.json.encode(anchor))
        fresh.replace(_note(places))


def _note(places: StateDir) -> Path:
    return places.host_dir / "clock.json"
