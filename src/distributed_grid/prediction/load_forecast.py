"""Forecast of a load that is measured every five minutes: one step and several steps ahead, learned online.

Linear regressions on the last eight days of the load are mixed by their recent errors. Each is recursive least squares
with its own memory (forgetting) and its own Huber limit, above which an error counts only in proportion. The third
member of the mixture is the first regressor itself: the last value.

Values are kept as log(1 + value), so errors are relative for large loads and a load of 0 is allowed. The level is their
mean over about a day; regressors are relative to it.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distributed_grid.errors import BadInput

SLOTS_PER_DAY = 288
KEPT_SLOTS = 8 * SLOTS_PER_DAY

Vector = NDArray[np.float64]

LAGS = (*range(1, 14), 24, 36, 48)  # recent slots: the last hour, and the same minute of the hours before
MEAN_SLOTS = (12, 24, 48)
RECENT_SLOTS = 48
ERROR_LAGS = np.array((1, 2, 3, 12, SLOTS_PER_DAY))
PROFILE_DAYS = 7
PROFILE_OFFSETS = np.arange(-7, 5)  # slots around the forecast one, in the mean of the last seven days
HARMONICS = 6  # sines and cosines of the time of day
WINDOW_SLOTS = 24  # length of the stretches that are compared for the analogues
WINDOW_DECAY = 0.9  # weight of a slot in that comparison, relative to the next one
ANALOGUES = 10
UNIT = 0.1  # size of the regressors that are no loads, so that one prior fits all
MAX_OUTLIER = 8.0

_LOG, _DEVIATION, _ERROR, _WINDOW_MEAN, _WINDOW_ENERGY = range(5)


# From the recent slots, oldest first, to lags and means.
RECENT_MAP = np.zeros((len(LAGS) + len(MEAN_SLOTS), RECENT_SLOTS))
RECENT_MAP[np.arange(len(LAGS)), RECENT_SLOTS - np.array(LAGS)] = 1
for _row, _slots in enumerate(MEAN_SLOTS, len(LAGS)):
    RECENT_MAP[_row, RECENT_SLOTS - _slots :] = 1 / _slots
# From the daily profile to its value at the slot and at the next, and to means of 7 slots around three slots.
PROFILE_MAP = np.zeros((5, len(PROFILE_OFFSETS)))
_FIRST = int(PROFILE_OFFSETS[0])
PROFILE_MAP[0, -_FIRST] = PROFILE_MAP[1, 1 - _FIRST] = 1
for _row, _centre in enumerate((0, 1, -4), 2):
    PROFILE_MAP[_row, _centre - 3 - _FIRST : _centre + 4 - _FIRST] = 1 / 7
_TURN = 2 * np.pi * np.outer(np.arange(SLOTS_PER_DAY), np.arange(1, HARMONICS + 1)) / SLOTS_PER_DAY
TIME_OF_DAY = UNIT * np.hstack([np.sin(_TURN), np.cos(_TURN)])
PROFILE_LAGS = SLOTS_PER_DAY * np.arange(1, PROFILE_DAYS + 1)[:, None] - PROFILE_OFFSETS
WINDOW_WEIGHTS = WINDOW_DECAY ** np.arange(WINDOW_SLOTS)[::-1]
WINDOW_WEIGHTS /= WINDOW_WEIGHTS.sum()
REGRESSORS = len(RECENT_MAP) + len(PROFILE_MAP) + 2 * HARMONICS + 11 + len(ERROR_LAGS)


class SavedHistory(Struct, frozen=True):
    rows: bytes
    end: int
    count: int
    level: float


class LoadHistory:
    """The kept slots, newest last, with the error that the forecast of each had."""

    def __init__(self) -> None:
        # twice the kept slots, so that they are contiguous and are moved only once in eight days
        self._rows = np.zeros((5, 2 * KEPT_SLOTS))
        self._end = KEPT_SLOTS
        self._count = 0
        self.level = 0.0

    @property
    def empty(self) -> bool:
        return self._count == 0

    def save(self) -> SavedHistory:
        kept = self._rows[:, self._end - self._count : self._end]
        return SavedHistory(kept.tobytes(), self._end, self._count, self.level)

    @classmethod
    def restore(cls, saved: SavedHistory) -> LoadHistory:
        history = cls()
        rows = np.frombuffer(saved.rows).reshape(len(history._rows), saved.count)
        history._rows[:, saved.end - saved.count : saved.end] = rows
        history._end, history._count, history.level = saved.end, saved.count, saved.level
        return history

    def add(self, log: float, error: float, *, measured: bool = True) -> None:
        """Append a slot; one that was not measured does not move the level."""
        if self._count == 0:
            self.level = log
        if self._end == 2 * KEPT_SLOTS:
            self._rows[:, :KEPT_SLOTS] = self._rows[:, KEPT_SLOTS:]
            self._end = KEPT_SLOTS
        end = self._end
        self._rows[:3, end] = log, log - self.level, error
        self._end = end + 1
        self._count = min(self._count + 1, KEPT_SLOTS)
        window = self._rows[_LOG, end + 1 - WINDOW_SLOTS : end + 1]
        mean = float(window @ WINDOW_WEIGHTS)
        self._rows[_WINDOW_MEAN:, end] = mean, float((window * window) @ WINDOW_WEIGHTS) - mean * mean
        if measured:
            self.level += max(1 / SLOTS_PER_DAY, 1 / (self._count + 1)) * (log - self.level)

    def bounds(self) -> tuple[float, float]:
        """The kept extremes, each moved out by half of their distance."""
        logs = self._rows[_LOG, self._end - self._count : self._end]
        low, high = float(logs.min()), float(logs.max())
        margin = (high - low) / 2
        return low - margin, high + margin

    def day_before(self) -> float:
        """The slot a day before the next one; the newest while less is kept."""
        return float(self._rows[_LOG, self._end - (SLOTS_PER_DAY if self._count >= SLOTS_PER_DAY else 1)])

    def usual(self) -> float:
        """The mean of the next slot's time of day over the kept days; the newest slot while less is kept."""
        days = min(self._count // SLOTS_PER_DAY, PROFILE_DAYS)
        if days == 0:
            return float(self._rows[_LOG, self._end - 1])
        return float(self._rows[_LOG, self._end - days * SLOTS_PER_DAY : self._end : SLOTS_PER_DAY].mean())

    def regressors(self, time_of_day: int, error_scale: float) -> Vector:
        """Regressors of the next slot's load; the first one is the load of the last slot."""
        end = self._end
        recent = self._rows[_LOG, end - RECENT_SLOTS : end] - self.level
        if self._count < RECENT_SLOTS:
            recent[: RECENT_SLOTS - self._count] = 0
        days = min(PROFILE_DAYS, max(1, self._count // SLOTS_PER_DAY))
        profile = PROFILE_MAP @ (self._rows[_DEVIATION, end - PROFILE_LAGS].sum(0) / days)
        errors = self._rows[_ERROR, end - ERROR_LAGS]
        last, second, third = recent[-1:-4:-1].tolist()
        from_profile = last - float(profile[0])
        from_mean = last - sum(recent[-6:].tolist()) / 6
        newest_error, older_error = errors[:2].tolist()
        further = (
            UNIT,
            self._analogue(last),
            self.day_before() - self.level,
            # peaks and ripples return at different rates
            from_profile - _clip(from_profile, 2 * error_scale),
            from_mean - _clip(from_mean, 2 * error_scale),
            _clip(from_mean, 2 * error_scale),
            _clip(from_mean, error_scale),
            max(last, second, third),
            min(last, second, third),
            newest_error * min(abs(newest_error) / error_scale, MAX_OUTLIER),
            older_error * min(abs(older_error) / error_scale, MAX_OUTLIER),
        )
        return np.concatenate([RECENT_MAP @ recent, profile, TIME_OF_DAY[time_of_day], further, errors])

    def _analogue(self, last: float) -> float:
        """Mean of the slots after the stretches that are most like the last one."""
        if self._count < WINDOW_SLOTS + 4 * ANALOGUES:
            return last
        end, start = self._end, self._end - self._count
        rows = self._rows
        mean = float(rows[_WINDOW_MEAN, end - 1])
        stretch = (rows[_LOG, end - WINDOW_SLOTS : end] - mean) * WINDOW_WEIGHTS
        # squared distance of shapes, less a constant; the mean of a window drops out, for the stretch's is 0
        distances = rows[_WINDOW_ENERGY, start + WINDOW_SLOTS - 1 : end - 1] - 2 * np.correlate(
            rows[_LOG, start : end - 1], stretch
        )
        # the eighth part of the values bounds the smallest, so few are compared
        is_long = len(distances) > 16 * ANALOGUES
        bound = np.partition(distances[::8], ANALOGUES)[ANALOGUES] if is_long else np.inf
        small = np.flatnonzero(distances <= bound)
        nearest = small[np.argpartition(distances[small], ANALOGUES)[:ANALOGUES]] + (start + WINDOW_SLOTS - 1)
        followed = rows[_LOG, nearest + 1] - rows[_WINDOW_MEAN, nearest]
        return float(followed.mean()) + mean - self.level


def _clip(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


FORGETTING = np.array((0.997, 0.9998))
HUBER_LIMITS = np.array((2.5, 1.0))  # in mean absolute errors
PRIOR_VARIANCE = 1.0
MAX_VARIANCE_GROWTH = 10.0  # limits the variance of the weight of a regressor that stays 0
COST_DISCOUNT = 0.997
COST_RATE = 0.3
MAX_COST = 5.0
SCALE_RATE = 0.02
MIN_SCALE = 0.005
FIRST_SCALE = 0.05
FIRST_WEIGHTS = 0.4 * 0.6 ** np.arange(13)  # exponential smoothing of the first regressors, the newest slots
MAX_LOG = 700.0
FORECAST_GAP_SLOTS = 12
MAX_DAILY_SHARE = 0.5
HALF_SHARE_STEPS = 24
"""Steps ahead at which the usual value of the time of day has half of its largest share."""


class SavedMixture(Struct, frozen=True):
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
    next_slot: int
    history: SavedHistory
    mixture: SavedMixture


class LoadForecaster:
    """Forecasts the slots after the last one; its memory does not grow with time.

    A regression on recent slots, the mean of the last seven days at this time of day, the time of day, the sequels of
    the most similar two hours of the last eight days, and its own last errors.
    """

    def __init__(self) -> None:
        self._history = LoadHistory()
        self._mixture = RegressionMixture(REGRESSORS)
        self._next_slot = 0
        self._prepared: tuple[Vector, Vector, float] | None = None

    def save(self) -> SavedForecaster:
        return SavedForecaster(self._next_slot, self._history.save(), self._mixture.save())

    @classmethod
    def restore(cls, saved: SavedForecaster) -> LoadForecaster:
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
        if gap := slot - self._next_slot:
            # A gap is filled by a forecast of an hour, then by the same slots of the day before.
            logs = self._forecast_logs(min(gap, FORECAST_GAP_SLOTS))
            whole_days = max(0, math.ceil((gap - KEPT_SLOTS) / SLOTS_PER_DAY))  # beyond the kept slots
            for index in range(gap - whole_days * SLOTS_PER_DAY):
                log = logs[index] if index < len(logs) else self._history.day_before()
                self._history.add(log, 0.0, measured=False)
            self._next_slot = slot
            self._prepared = None
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
        """The loads of the next slots, in order; 0 without any data."""
        if self._history.empty:
            return [0.0] * steps
        return [math.expm1(log) for log in self._forecast_logs(steps)[:steps]]

    def _forecast_logs(self, steps: int) -> list[float]:
        low, high = self._history.bounds()
        low, high = max(low, 0.0), min(high, MAX_LOG)
        logs = [min(max(self._prepare()[2] + self._history.level, low), high)]
        history = LoadHistory.restore(self._history.save()) if steps > 1 else self._history
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
