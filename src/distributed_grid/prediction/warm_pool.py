"""Warm workers: how many to keep for the load that is expected, learned from the load so far.

Load is counted in thousandths of a worker: what is lent and what waits. Its five-minute means feed the load forecast,
the most workers in use within ten minutes feed the size of the pool (`pool_size.py`). Nothing is forecast before a day
is known. What is kept does not grow with time; the slots of the last eight days are enough to begin anew.
"""

from __future__ import annotations

import math

from msgspec import Struct

from distributed_grid.prediction.load_forecast import LoadForecaster
from distributed_grid.prediction.load_history import KEPT_SLOTS, SLOTS_PER_DAY
from distributed_grid.prediction.pool_size import PoolSizer

SLOT_MS = 86_400_000 // SLOTS_PER_DAY
KEPT_MS = KEPT_SLOTS * SLOT_MS
SLOTS_PER_POOL_STEP = 2
AHEAD_SLOTS = 3
"""How far ahead workers are started: about as long as a machine needs to boot and to join."""
HEADROOM_WORKERS = 1


class LoadSlot(Struct, frozen=True):
    """Five minutes of load: the sum of its samples and their number, and the most workers in use at once."""

    slot: int
    load_sum: int = 0
    samples: int = 0
    workers_in_use: int = 0

    def added(self, load_milli: int, workers_in_use: int) -> LoadSlot:
        highest = max(self.workers_in_use, workers_in_use)
        return LoadSlot(self.slot, self.load_sum + load_milli, self.samples + 1, highest)


class WarmPool:
    """Learns from the load, sample by sample; times are those of the wall clock, so that a day is a day."""

    def __init__(self) -> None:
        self._forecaster = LoadForecaster()
        self._sizer = PoolSizer(SLOTS_PER_DAY // SLOTS_PER_POOL_STEP, HEADROOM_WORKERS)
        self._slots = 0
        self._current: LoadSlot | None = None
        self._last_slot = -1
        self._step_peak = 0

    def observe(self, wall_ms: int, load_milli: int, workers_in_use: int) -> LoadSlot | None:
        """Learn a sample; the slot that it ends, if it does. A clock that went back says nothing new."""
        slot = wall_ms // SLOT_MS
        ended = None
        if self._current is not None and slot > self._current.slot:
            ended = self._current
            self.learn(ended)
            self._current = None
        if self._current is None:
            self._current = LoadSlot(slot) if slot > self._last_slot else None
        if self._current is not None:
            self._current = self._current.added(load_milli, workers_in_use)
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
        """The highest load expected in the next slots; None while less than a day is known."""
        if self._slots < SLOTS_PER_DAY:
            return None
        return round(max(self._forecaster.forecast(AHEAD_SLOTS)))

    def size(self, workers: int, in_use: int, *, own_milli: int, target_milli: int, limit: int) -> int:
        """How many workers to keep of so many: what recent loads call for, or the expected one if that is more.

        `own_milli` is what the grid has without workers. Of `limit` never more.
        """
        kept = self._sizer.size(workers) if self._sizer.shadows and workers else 0
        expected = self.expected_milli()
        ahead = 0
        if expected is not None:
            ahead = math.ceil((1000 * expected / max(target_milli, 1) - own_milli) / 1000)
        return min(max(kept, ahead, in_use, 0), limit)
