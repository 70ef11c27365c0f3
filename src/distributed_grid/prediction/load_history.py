"""The last eight days of a load in slots of five minutes, and the regressors that a forecast of the next slot uses.

Values are kept as log(1 + value), so errors are relative for large loads and a load of 0 is allowed. The level is their
mean over about a day; regressors are relative to it.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

SLOTS_PER_DAY = 288
KEPT_SLOTS = 8 * SLOTS_PER_DAY

Vector = NDArray[np.float64]

LAGS = (*range(1, 14), 24, 36, 48)
"""Recent slots: the last hour, and the same minute of the hours before."""
MEAN_SLOTS = (12, 24, 48)
RECENT_SLOTS = 48
ERROR_LAGS = np.array((1, 2, 3, 12, SLOTS_PER_DAY))
PROFILE_DAYS = 7
PROFILE_OFFSETS = np.arange(-7, 5)
"""Slots around the forecast one, in the mean of the last seven days."""
HARMONICS = 6
"""Sines and cosines of the time of day."""
WINDOW_SLOTS = 24
"""Length of the stretches that are compared for the analogues."""
WINDOW_DECAY = 0.9
"""Weight of a slot in that comparison, relative to the next one."""
ANALOGUES = 10
UNIT = 0.1
"""Size of the regressors that are no loads, so that one prior fits all."""
MAX_OUTLIER = 8.0

_LOG, _DEVIATION, _ERROR, _WINDOW_MEAN, _WINDOW_ENERGY = range(5)


def _recent_map() -> Vector:
    """From the recent slots, oldest first, to lags and means."""
    rows = np.zeros((len(LAGS) + len(MEAN_SLOTS), RECENT_SLOTS))
    for row, lag in enumerate(LAGS):
        rows[row, RECENT_SLOTS - lag] = 1
    for row, slots in enumerate(MEAN_SLOTS, len(LAGS)):
        rows[row, RECENT_SLOTS - slots :] = 1 / slots
    return rows


def _profile_map() -> Vector:
    """From the daily profile to its value at the slot and at the next, and to means of 7 slots around three slots."""
    rows = np.zeros((5, len(PROFILE_OFFSETS)))
    first = int(PROFILE_OFFSETS[0])
    rows[0, -first] = rows[1, 1 - first] = 1
    for row, centre in enumerate((0, 1, -4), 2):
        rows[row, centre - 3 - first : centre + 4 - first] = 1 / 7
    return rows


def _time_of_day() -> Vector:
    angle = 2 * np.pi * np.outer(np.arange(SLOTS_PER_DAY), np.arange(1, HARMONICS + 1)) / SLOTS_PER_DAY
    return UNIT * np.hstack([np.sin(angle), np.cos(angle)])


RECENT_MAP = _recent_map()
PROFILE_MAP = _profile_map()
TIME_OF_DAY = _time_of_day()
PROFILE_LAGS = SLOTS_PER_DAY * np.arange(1, PROFILE_DAYS + 1)[:, None] - PROFILE_OFFSETS
WINDOW_WEIGHTS = WINDOW_DECAY ** np.arange(WINDOW_SLOTS)[::-1]
WINDOW_WEIGHTS /= WINDOW_WEIGHTS.sum()
REGRESSORS = len(RECENT_MAP) + len(PROFILE_MAP) + 2 * HARMONICS + 11 + len(ERROR_LAGS)


class SavedHistory(Struct, frozen=True):
    """The kept slots as a value; `rows` are float64 numbers."""

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
        """Whether nothing was added yet."""
        return self._count == 0

    def copy(self) -> LoadHistory:
        """An independent history of the same slots."""
        return LoadHistory.restore(self.save())

    def save(self) -> SavedHistory:
        """This history as a value."""
        kept = self._rows[:, self._end - self._count : self._end]
        return SavedHistory(kept.tobytes(), self._end, self._count, self.level)

    @classmethod
    def restore(cls, saved: SavedHistory) -> LoadHistory:
        """The history that was saved."""
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
        """What the load of the next slot is explained by; the first one is the load of the last slot."""
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
            # a peak returns otherwise than a ripple
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
        """What followed, on average, the stretches of the kept slots that are most like the last one."""
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
        nearest = _smallest(distances, ANALOGUES) + (start + WINDOW_SLOTS - 1)
        followed = rows[_LOG, nearest + 1] - rows[_WINDOW_MEAN, nearest]
        return float(followed.mean()) + mean - self.level


def _smallest(values: Vector, count: int) -> NDArray[np.intp]:
    """Places of the smallest; the eighth part of the values bounds them, so few are compared."""
    bound = np.partition(values[::8], count)[count] if len(values) > 16 * count else np.inf
    places = np.flatnonzero(values <= bound)
    return places[np.argpartition(values[places], count)[:count]]


def _clip(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)
