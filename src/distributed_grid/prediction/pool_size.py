"""How many workers to keep in a pool, so that work seldom has to wait for a worker and few are idle.

The rule: where more work runs than the pool has workers, the pool grows at once, to what runs plus the headroom: a
wake-up. Else it shrinks to the highest load of the last hours plus the headroom. How many hours is learned: each of
nine windows has a shadow pool that follows the rule, and the shortest one whose pool woke up seldom enough is used.
A forecast of the load does not enter: on the cluster that was measured, the coming hours of the day before made pools
larger at the same number of wake-ups.
"""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct, field

from distributed_grid.errors import BadInput

WINDOW_HOURS = (0.5, 1, 2, 3, 4, 6, 8, 12, 24)
FIRST_WINDOW_HOURS = 4
"""Assumed to wake up as often as allowed, until it is known better."""
ASSUMED_DAYS = 7.0
"""Weight of that assumption."""
REMEMBERED_DAYS = 14.0


class ShadowPool(Struct):
    """The pool that a window would give, and its wake-ups, the older ones counting less."""

    window_steps: int
    size: int = 0
    wakeups: float = 0.0


class PoolSizer(Struct):
    """Learns from the load step by step; its fields are its whole state."""

    steps_per_day: int
    headroom: int
    wakeups_per_day: float = 1.0
    """As often, at most, the pool may be too small."""
    last_step: int = -1
    running: int = 0
    days: float = 0.0
    peak_steps: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Loads of the longest window that no later one reached, falling, and their steps."""
    shadows: list[ShadowPool] = field(default_factory=list)

    def observe(self, step: int, running: int) -> None:
        """Learn the highest number of workers in use during a step; steps may be left out."""
        if running < 0:
            raise BadInput(f"the number of running workers is at least 0, not {running}")
        if self.shadows and step <= self.last_step:
            raise BadInput(f"step {step} comes after step {self.last_step}")
        if not self.shadows:
            self.last_step = step - 1
            windows = (max(1, round(hours * self.steps_per_day / 24)) for hours in WINDOW_HOURS)
            self.shadows = [ShadowPool(window, running + self.headroom) for window in windows]
        elapsed_days = (step - self.last_step) / self.steps_per_day
        kept = (1 - 1 / (REMEMBERED_DAYS * self.steps_per_day)) ** (step - self.last_step)
        self.days = self.days * kept + elapsed_days
        self.last_step, self.running = step, running
        while self.peaks and self.peaks[-1] <= running:
            self.peaks.pop()
            self.peak_steps.pop()
        self.peaks.append(running)
        self.peak_steps.append(step)
        expired = bisect_right(self.peak_steps, step - self.shadows[-1].window_steps)
        del self.peaks[:expired], self.peak_steps[:expired]
        for shadow in self.shadows:
            shadow.wakeups = shadow.wakeups * kept + (running > shadow.size)
            shadow.size = self._resized(shadow.size, shadow.window_steps)

    def size(self, pool: int) -> int:
        """How many workers a pool of so many should have now; more only where more are running."""
        return self._resized(pool, self.window_steps()) if self.shadows else pool

    def window_steps(self) -> int:
        """The window in use: the shortest that woke up seldom enough, else the longest."""
        first_window = FIRST_WINDOW_HOURS * self.steps_per_day / 24
        for shadow in self.shadows:
            assumed = ASSUMED_DAYS * self.wakeups_per_day * first_window / shadow.window_steps
            if shadow.wakeups + assumed <= self.wakeups_per_day * (self.days + ASSUMED_DAYS):
                return shadow.window_steps
        return self.shadows[-1].window_steps

    def _resized(self, pool: int, window_steps: int) -> int:
        if self.running > pool:
            return self.running + self.headroom
        peak = self.peaks[bisect_right(self.peak_steps, self.last_step - window_steps)]
        return min(pool, peak + self.headroom)
