"""Jumps of a wall clock, judged by the boot clock; the age that deletions compare with.

- Within a boot the boot clock says how far the wall clock should have moved. A larger difference is a jump.
- Across boots the time switched off cannot be checked. A clock that went back, or that moved by more than a week,
  counts as a jump; less does not.
- A jump is pending until the wall clock is back, until the machine was on for `CONFIRM_MS` without another one, or
  until the user confirms it. Nothing is deleted by age meanwhile.
- The age passes with the boot clock and never with the wall clock. Of the time switched off at most `MAX_CREDIT_MS` a
  boot counts: however wrong a clock is, one boot makes nothing older than that.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
TOLERANCE_MS = 600_000
"""Corrections of a clock within a boot that are not a jump."""
MAX_OFF_MS = 7 * DAY_MS
"""Time switched off that is not reported as a jump."""
MAX_CREDIT_MS = DAY_MS
"""Time switched off that counts as age, for each boot."""
CONFIRM_MS = 6 * HOUR_MS
"""Time on, after a jump, until the second look that confirms it."""
MAX_KEEP_MS = 100 * DAY_MS
"""Longer than anything is kept by age."""
CONFIRM_COMMAND = "grid daemon clock --confirm"


class ClockReading(Struct, frozen=True):
    """One look at the clocks of a machine."""

    boot_id: str
    boot_ms: int
    wall_ms: int


class ClockJump(Struct, frozen=True):
    """A jump that nobody has confirmed: the wall clock is `by_ms` off since the age `seen_ms`."""

    by_ms: int
    seen_ms: int
    across_boots: bool = False

    @property
    def is_back(self) -> bool:
        """True if the clock is where it was, or where time switched off may have brought it."""
        return -TOLERANCE_MS <= self.by_ms <= (MAX_OFF_MS if self.across_boots else TOLERANCE_MS)


class AgePoint(Struct, frozen=True):
    """From here on the grid's time and the age pass evenly, until the next point."""

    grid_ms: int
    age_ms: int


class ClockState(Struct, frozen=True):
    """The last look, the age at it, and the jump that is pending, if any."""

    reading: ClockReading
    age_ms: int = 0
    jump: ClockJump | None = None
    points: tuple[AgePoint, ...] = ()

    def observe(self, reading: ClockReading) -> ClockState:
        """The state after another look."""
        last = self.reading
        is_same_boot = reading.boot_id == last.boot_id and reading.boot_ms >= last.boot_ms
        if is_same_boot:
            passed_ms = reading.boot_ms - last.boot_ms
        else:  # a snapshot of a running machine has the boot it had: nothing is known to have passed
            passed_ms = reading.boot_ms if reading.boot_id != last.boot_id else 0
        moved_ms = reading.wall_ms - last.wall_ms - passed_ms
        credit_ms = 0 if is_same_boot else min(max(moved_ms, 0), MAX_CREDIT_MS)
        age_ms = self.age_ms + passed_ms + credit_ms
        jump = self.jump
        if jump is not None and credit_ms:  # only time on counts towards the second look
            jump = replace(jump, seen_ms=jump.seen_ms + credit_ms)
        moved = ClockJump(moved_ms, age_ms, not is_same_boot)
        if not moved.is_back:
            by_ms, across = (jump.by_ms, jump.across_boots) if jump is not None else (0, False)
            total = ClockJump(by_ms + moved_ms, age_ms, across or not is_same_boot)
            jump = None if total.is_back else total
        elif jump is not None and age_ms - jump.seen_ms >= CONFIRM_MS:
            jump = None
        return ClockState(reading, age_ms, jump, self.points)

    @property
    def waits_ms(self) -> int:
        """For how long nothing is deleted by age yet; 0 where no jump is pending."""
        return max(CONFIRM_MS - (self.age_ms - self.jump.seen_ms), 1) if self.jump is not None else 0

    def with_grid_time(self, grid_ms: int) -> ClockState:
        """The state that knows what the grid's time is now. A point is added where the two did not pass evenly."""
        last = self.points[-1] if self.points else None
        if last is not None and abs((grid_ms - self.age_ms) - (last.grid_ms - last.age_ms)) <= TOLERANCE_MS:
            return self
        needed = [
            point
            for point, successor in zip(self.points, self.points[1:], strict=False)
            if successor.age_ms > self.age_ms - MAX_KEEP_MS
        ]
        return replace(self, points=(*needed, *self.points[-1:], AgePoint(grid_ms, self.age_ms)))

    def grid_time_of(self, age_ms: int) -> int:
        """The grid's time at an age; 0 for an age before all that is known."""
        later_ms = None
        for point in reversed(self.points):
            if point.age_ms <= age_ms:
                time_ms = point.grid_ms + age_ms - point.age_ms
                return time_ms if later_ms is None else min(time_ms, later_ms)
            later_ms = point.grid_ms
        return 0


def jump_text(name: str, by_ms: int, waits_ms: int) -> str:
    """A pending jump in a sentence, with what to do."""
    waits = span_text(waits_ms)[1:]
    return (
        f"the clock of {name} jumped by {span_text(by_ms)}; nothing is deleted by age there for {waits} more; "
        f"if the clock is right, type: {CONFIRM_COMMAND}"
    )


def span_text(duration_ms: int) -> str:
    """A signed duration in its two largest units, such as `+40 d` or `-1 h 30 min`."""
    sign, minutes = "-" if duration_ms < 0 else "+", -(-abs(duration_ms) // 60_000)
    days, hours = minutes // 1440, minutes % 1440 // 60
    parts = ((days, "d"), (hours, "h"), (0 if days else minutes % 60, "min"))
    return sign + (" ".join(f"{number} {unit}" for number, unit in parts if number) or "0 min")
