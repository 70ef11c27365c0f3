"""CPU time of a machine over the last moments: who spent how much of it, over a short and over a long window.

Rule 1. The long window is about ten seconds, the short one the shortest that is at least 200 ms; after a pause
        both begin where the pause began.
Rule 2. Outside time is all time minus the grid's own; it is never negative.
Rule 3. Own time that steps back, or runs faster than the cores can, is not believed: such a step counts as none,
        or as all there was room for. So a process missed once spoils one step, not the window.

How exact: the kernel counts most CPU time in ticks (10 ms). All time is off by at most a tick for every core, own
time by a tick for every process of the grid's; over 200 ms a tick is 50 thousandths of a core. A control group's
counter has no such noise.
"""

from collections import deque
from dataclasses import dataclass

LONG_MS = 10_000
SHORT_MS = 200
STEP_MS = 50
NOISE_MS = 100


@dataclass(frozen=True, slots=True)
class CpuTimeSpan:
    """A stretch of time, and the CPU time spent in it: in all, and by the grid."""

    ms: int
    busy_ms: int
    ours_ms: int

    @property
    def outside_ms(self) -> int:
        return max(0, self.busy_ms - self.ours_ms)


@dataclass(frozen=True, slots=True)
class _Point:
    at_ms: int
    busy_ms: int
    told_ms: int
    ours_ms: int


class CpuTimes:
    """The counters of the last ten seconds; a point every 50 ms at most, however often it is told."""

    def __init__(self, cpu_milli: int) -> None:
        self._milli = cpu_milli
        self._points: deque[_Point] = deque()

    def spells(self, *, at_ms: int, busy_ms: int, own_ms: int) -> tuple[CpuTimeSpan | None, CpuTimeSpan | None]:
        """Note the counters, all of which only grow; the long and the short window that end now, if there are any."""
        points = self._points
        now = self._point(at_ms, busy_ms, own_ms)
        while len(points) > 1 and at_ms - points[0].at_ms > LONG_MS:
            points.popleft()
        long = points[0] if points and at_ms - points[0].at_ms >= SHORT_MS else None
        short = next((point for point in reversed(points) if at_ms - point.at_ms >= SHORT_MS), None)
        if not points or at_ms - points[-1].at_ms >= STEP_MS:
            points.append(now)
        return _between(long, now), _between(short, now)

    def _point(self, at_ms: int, busy_ms: int, own_ms: int) -> _Point:
        """The counters with what is believed of own time (Rule 3)."""
        if not self._points:
            return _Point(at_ms, busy_ms, own_ms, 0)
        last = self._points[-1]
        room_ms = (at_ms - last.at_ms) * self._milli // 1000 + NOISE_MS
        step_ms = min(max(0, own_ms - last.told_ms), room_ms)
        return _Point(at_ms, busy_ms, own_ms, last.ours_ms + step_ms)


def _between(start: _Point | None, end: _Point) -> CpuTimeSpan | None:
    if start is None:
        return None
    return CpuTimeSpan(end.at_ms - start.at_ms, max(0, end.busy_ms - start.busy_ms), end.ours_ms - start.ours_ms)
