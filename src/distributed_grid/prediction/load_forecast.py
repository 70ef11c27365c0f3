"""Forecast of a load that is measured every five minutes: one step and several steps ahead, learned online.

Linear regressions on the history of the load (`load_history.py`) are mixed by how well they have done lately. Each is
recursive least squares with its own memory (forgetting) and its own Huber limit, above which an error counts only in
proportion. The third member of the mixture is the first regressor itself: the last value.
"""

from __future__ import annotations

import math

import numpy as np
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

FORGETTING = np.array((0.997, 0.9998))
HUBER_LIMITS = np.array((2.5, 1.0))
"""In mean absolute errors."""
PRIOR_VARIANCE = 1.0
MAX_VARIANCE_GROWTH = 10.0
"""A regressor that stays 0 must not let the variance of its weight grow for ever."""
COST_DISCOUNT = 0.997
COST_RATE = 0.3
MAX_COST = 5.0
SCALE_RATE = 0.02
MIN_SCALE = 0.005
FIRST_SCALE = 0.05
FIRST_WEIGHTS = 0.4 * 0.6 ** np.arange(13)
"""Exponential smoothing of the first regressors, the newest slots."""
MAX_LOG = 700.0
FORECAST_GAP_SLOTS = 12
MAX_DAILY_SHARE = 0.5
HALF_SHARE_STEPS = 24
"""The further ahead, the more a forecast is what is usual at that time of day; half of that share so many steps on."""


class SavedMixture(Struct, frozen=True):
    """A mixture as a value; arrays are float64 numbers."""

    variances: bytes
    weights: bytes
    costs: bytes
    error_scale: float


class RegressionMixture:
    """Predicts a number from regressors, and learns from the truth."""

    def __init__(self, regressors: int) -> None:
        members = len(FORGETTING)
        self._size = regressors
        self._variances = np.tile(np.eye(regressors) * PRIOR_VARIANCE, (members, 1, 1))
        self._weights = np.zeros((members, regressors))
        self._weights[:, : len(FIRST_WEIGHTS)] = FIRST_WEIGHTS
        self._costs = np.zeros(members + 1)
        self.error_scale = FIRST_SCALE

    def save(self) -> SavedMixture:
        """This mixture as a value."""
        return SavedMixture(self._variances.tobytes(), self._weights.tobytes(), self._costs.tobytes(), self.error_scale)

    @classmethod
    def restore(cls, saved: SavedMixture, regressors: int) -> RegressionMixture:
        """The mixture that was saved; one with other regressors, of another version, is learned anew."""
        mixture = cls(regressors)
        if len(saved.weights) != mixture._weights.nbytes:
            return mixture
        mixture._variances[:] = np.frombuffer(saved.variances).reshape(mixture._variances.shape)
        mixture._weights[:] = np.frombuffer(saved.weights).reshape(mixture._weights.shape)
        mixture._costs[:] = np.frombuffer(saved.costs)
        mixture.error_scale = saved.error_scale
        return mixture

    def predictions(self, regressors: Vector) -> Vector:
        """What each member predicts."""
        return np.append(self._weights @ regressors, regressors[0])

    def mixed(self, predictions: Vector) -> float:
        """The members' mean, weighted by their recent errors."""
        shares = np.exp(-COST_RATE * (self._costs - self._costs.min()))
        return float(shares @ predictions / shares.sum())

    def learn(self, regressors: Vector, predictions: Vector, truth: float) -> None:
        """Correct each member by its error."""
        error = abs(truth - self.mixed(predictions))
        errors = truth - predictions
        sizes = np.abs(errors)
        self._costs = COST_DISCOUNT * self._costs + np.minimum(sizes / self.error_scale, MAX_COST)
        self.error_scale += SCALE_RATE * (min(error, 3 * self.error_scale) - self.error_scale)
        self.error_scale = max(self.error_scale, MIN_SCALE)
        trust = np.minimum(1, HUBER_LIMITS * self.error_scale / np.maximum(sizes[:-1], 1e-12))
        direction = self._variances @ regressors
        explained = direction @ regressors
        if explained.min() < 0:  # rounding over a very long time
            self._variances[:] = np.eye(self._size) * PRIOR_VARIANCE
            return
        noise = FORGETTING / trust + explained
        self._weights += direction * (errors[:-1] / noise)[:, None]
        direction /= np.sqrt(noise)[:, None]
        self._variances -= direction[:, :, None] * direction[:, None, :]
        self._variances /= FORGETTING[:, None, None]
        growth = np.trace(self._variances, axis1=1, axis2=2) / (self._size * PRIOR_VARIANCE * MAX_VARIANCE_GROWTH)
        if growth.max() > 1:
            self._variances /= np.maximum(growth, 1)[:, None, None]


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
