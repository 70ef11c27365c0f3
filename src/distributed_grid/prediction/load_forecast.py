"""Forecast of a load that is measured every five minutes: one step and several steps ahead, learned online."""

from __future__ import annotations

import math

from msgspec import Struct

from distributed_grid.errors import BadInput
from distributed_grid.prediction.load_history import (
    KEPT_SLOTS,
    REGRESSORS,
    SLOTS_PER_DAY,
    LoadHistory,
    SavedHistory,
    Vector,
)
from distributed_grid.prediction.regression_mixture import RegressionMixture, SavedMixture

MAX_LOG = 700.0
FORECAST_GAP_SLOTS = 12
MAX_DAILY_SHARE = 0.5
HALF_SHARE_STEPS = 24
"""The further ahead, the more a forecast is what is usual at that time of day; half of that share so many steps on."""


class SavedForecaster(Struct, frozen=True):
    """A forecaster as a value."""

    next_slot: int
    history: SavedHistory
    mixture: SavedMixture


class LoadForecaster:
    """Forecasts the slots after the last one it was told; what it keeps does not grow with time.

    A regression on recent slots, on the mean of the last seven days at this time of day, on the time of day, on what
    followed the most similar two hours of the last eight days, and on its own last errors.
    """

    def __init__(self) -> None:
        self._history = LoadHistory()
        self._mixture = RegressionMixture(REGRESSORS)
        self._next_slot = 0
        self._prepared: tuple[Vector, Vector, float] | None = None

    def save(self) -> SavedForecaster:
        """This forecaster as a value."""
        return SavedForecaster(self._next_slot, self._history.save(), self._mixture.save())

    @classmethod
    def restore(cls, saved: SavedForecaster) -> LoadForecaster:
        """The forecaster that was saved; it forecasts the same."""
        forecaster = cls()
        forecaster._next_slot = saved.next_slot
        forecaster._history = LoadHistory.restore(saved.history)
        forecaster._mixture = RegressionMixture.restore(saved.mixture, REGRESSORS)
        return forecaster

    def observe(self, slot: int, value: float) -> None:
        """Learn the load of a slot, counted in five minutes since any midnight; slots that were left out are gaps."""
        if not math.isfinite(value) or value < 0:
            raise BadInput(f"a load is a finite number of at least 0, not {value}")
        if self._history.empty:
            self._next_slot = slot
        elif slot < self._next_slot:
            raise BadInput(f"slot {slot} comes after slot {self._next_slot - 1}")
        self._fill_gap(slot - self._next_slot)
        log = math.log1p(value)
        error = 0.0
        if not self._history.empty:
            regressors, predictions, mixed = self._prepare()
            truth = log - self._history.level
            error = truth - mixed
            self._mixture.learn(regressors, predictions, truth)
        self._history.add(log, error)
        self._next_slot = slot + 1
        self._prepared = None

    def forecast(self, steps: int = 1) -> list[float]:
        """The loads of the next slots, in order; 0 while nothing is known."""
        if self._history.empty:
            return [0.0] * steps
        return [math.expm1(log) for log in self._forecast_logs(steps)[:steps]]

    def _forecast_logs(self, steps: int) -> list[float]:
        low, high = self._history.bounds()
        low, high = max(low, 0.0), min(high, MAX_LOG)
        logs = [min(max(self._prepare()[2] + self._history.level, low), high)]
        history = self._history.copy() if steps > 1 else self._history
        assumed = logs[0]
        for ahead in range(1, steps):
            history.add(assumed, 0.0, measured=False)
            regressors = history.regressors((self._next_slot + ahead) % SLOTS_PER_DAY, self._mixture.error_scale)
            mixed = self._mixture.mixed(self._mixture.predictions(regressors))
            assumed = min(max(mixed + history.level, low), high)
            share = MAX_DAILY_SHARE * ahead / (ahead + HALF_SHARE_STEPS)
            logs.append(assumed + share * (history.usual() - assumed))
        return logs

    def _prepare(self) -> tuple[Vector, Vector, float]:
        """Regressors, predictions and their mixture for the next slot."""
        if self._prepared is None:
            regressors = self._history.regressors(self._next_slot % SLOTS_PER_DAY, self._mixture.error_scale)
            predictions = self._mixture.predictions(regressors)
            self._prepared = regressors, predictions, self._mixture.mixed(predictions)
        return self._prepared

    def _fill_gap(self, slots: int) -> None:
        """Stand in for slots without a measurement: a forecast of an hour, then the same slots of the day before."""
        if slots <= 0:
            return
        logs = self._forecast_logs(min(slots, FORECAST_GAP_SLOTS))
        whole_days = max(0, math.ceil((slots - KEPT_SLOTS) / SLOTS_PER_DAY))  # of a gap longer than what is kept
        for index in range(slots - whole_days * SLOTS_PER_DAY):
            log = logs[index] if index < len(logs) else self._history.day_before()
            self._history.add(log, 0.0, measured=False)
        self._next_slot += slots
        self._prepared = None
