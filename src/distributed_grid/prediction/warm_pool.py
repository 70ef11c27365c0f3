"""Warm workers: how many to keep, so that work seldom has to wait for a worker and few are idle.

Load is counted in thousandths of a worker: lent capacity and waiting requests. Its five-minute means feed the load
forecast, the most workers in use within ten minutes feed the size of the pool. Nothing is forecast before a day is
known. The kept data does not grow with time; the slots of the last eight days are enough to begin anew.

The rule for the size: where more workers are in use than the pool has, the pool grows at once, to those in use plus the
headroom: a wake-up. Else it shrinks to the highest load of the last hours plus the headroom. How many hours is learned:
each of nine windows has a shadow pool that follows the rule, and the shortest one whose pool woke up seldom enough is
used. The pool is the size that this rule gave last, not the workers that are there: where the queue has started more,
that is a wake-up, too.

A forecast of the load only makes the pool grow, where the load that is expected soon exceeds it. It keeps no worker: on
the cluster that was measured, a pool for the whole expected load at the target utilization was a third idle, and the
coming hours of the day before made pools larger at the same number of wake-ups.
"""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct, field

from distributed_grid.errors import BadInput
from distributed_grid.prediction.load_forecast import KEPT_SLOTS, SLOTS_PER_DAY, LoadForecaster

WINDOW_HOURS = (0.5, 1, 2, 3, 4, 6, 8, 12, 24)
FIRST_WINDOW_HOURS = 4  # assumed to wake up as often as allowed, until it is known better
ASSUMED_DAYS = 7.0  # weight of that assumption
REMEMBERED_DAYS = 14.0
SLOT_MS = 86_400_000 // SLOTS_PER_DAY
KEPT_MS = KEPT_SLOTS * SLOT_MS
SLOTS_PER_POOL_STEP = 2
AHEAD_SLOTS = 3  # how far ahead workers are started: about as long as a machine needs to boot and to join
HEADROOM_WORKERS = 1
HEADROOM_DIVISOR = 16
"""The headroom is this part of the workers in use, at least HEADROOM_WORKERS: large pools have larger bursts."""


class ShadowPool(Struct):
    """The pool that a window would give, and its wake-ups, the older ones counting less."""

    window_steps: int
    size: int = 0
    wakeups: float = 0.0


class PoolSizer(Struct):
    """Learns from the load step by step; its fields are its whole state."""

    steps_per_day: int
    headroom: int  # workers beyond those in use, at least: a large pool has a sixteenth
    wakeups_per_day: float = 1.0  # as often, at most, the pool may be too small
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
            self.shadows = [ShadowPool(window, self._with_headroom(running)) for window in windows]
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
            shadow.size = self._resized(shadow.size, running, shadow.window_steps)

    def size(self, pool: int, running: int = 0) -> int:
        """Size of the pool with `running` workers in use; above `pool` only if more are running now or in the last
        step."""
        return self._resized(pool, max(running, self.running), self.window_steps()) if self.shadows else pool

    def window_steps(self) -> int:
        """The window in use: the shortest that woke up seldom enough, else the longest."""
        first_window = FIRST_WINDOW_HOURS * self.steps_per_day / 24
        for shadow in self.shadows:
            assumed = ASSUMED_DAYS * self.wakeups_per_day * first_window / shadow.window_steps
            if shadow.wakeups + assumed <= self.wakeups_per_day * (self.days + ASSUMED_DAYS):
                return shadow.window_steps
        return self.shadows[-1].window_steps

    def _resized(self, pool: int, running: int, window_steps: int) -> int:
        if running > pool:
            return self._with_headroom(running)
        peak = self.peaks[bisect_right(self.peak_steps, self.last_step - window_steps)]
        return min(pool, self._with_headroom(max(peak, running)))

    def _with_headroom(self, running: int) -> int:
        return running + max(self.headroom, -(-running // HEADROOM_DIVISOR))


class LoadSlot(Struct, frozen=True):
    slot: int
    load_sum: int = 0
    samples: int = 0
    workers_in_use: int = 0


class WarmPool:
    """Learns from the load, sample by sample; times are the grid's, which never jump back: a wall clock that is ahead
    for a moment would end the learning until that time comes."""

    def __init__(self) -> None:
        self._forecaster = LoadForecaster()
        self._sizer = PoolSizer(SLOTS_PER_DAY // SLOTS_PER_POOL_STEP, HEADROOM_WORKERS)
        self._slots = 0
        self._current: LoadSlot | None = None
        self._last_slot = -1
        self._step_peak = 0
        self._kept: int | None = None  # the size that the sizer gave last

    def observe(self, now_ms: int, load_milli: int, workers_in_use: int) -> LoadSlot | None:
        """Learn a sample and return the slot that it ends, if any; a sample of an earlier slot is ignored."""
        slot = now_ms // SLOT_MS
        ended = None
        if self._current is not None and slot > self._current.slot:
            ended = self._current
            self.learn(ended)
            self._current = None
        if self._current is None:
            self._current = LoadSlot(slot) if slot > self._last_slot else None
        if self._current is not None:
            self._current = LoadSlot(
                slot=self._current.slot,
                load_sum=self._current.load_sum + load_milli,
                samples=self._current.samples + 1,
                workers_in_use=max(self._current.workers_in_use, workers_in_use),
            )
        return ended

    def learn(self, slot: LoadSlot) -> None:
        """Learn a whole slot; one that is not later than the last is left out."""
        if slot.slot <= self._last_slot or not slot.samples:
            return
        self._forecaster.observe(slot.slot, slot.load_sum / slot.samples)
        self._slots += 1
        step = slot.slot // SLOTS_PER_POOL_STEP
        begun = self._last_slot // SLOTS_PER_POOL_STEP
        self._step_peak = max(self._step_peak, slot.workers_in_use) if step == begun else slot.workers_in_use
        self._last_slot = slot.slot
        if slot.slot % SLOTS_PER_POOL_STEP == SLOTS_PER_POOL_STEP - 1 and step > self._sizer.last_step:
            self._sizer.observe(step, self._step_peak)

    def expected_milli(self) -> int | None:
        """The highest load expected in the next slots; None with less than a day of data."""
        if self._slots < SLOTS_PER_DAY:
            return None
        return round(max(self._forecaster.forecast(AHEAD_SLOTS)))

    def size(self, workers: int, in_use: int, *, own_milli: int, target_milli: int, limit: int) -> int:
        """Number of workers to keep, at most `limit`: by recent loads, and more where the expected load exceeds that.

        Workers for the growth are used up to the target. `own_milli` is the capacity of the grid without workers.
        """
        pool = workers if self._kept is None else self._kept
        excess_milli = (self.expected_milli() or 0) - own_milli - 1000 * pool
        grown = pool - -excess_milli // max(target_milli, 1) if excess_milli > 0 else 0
        needed = max(in_use, grown)
        if self._sizer.shadows and workers:
            needed = self._kept = self._sizer.size(pool, needed)
        return min(needed, limit)
