"""Usage trends: robust slopes over several windows, and their forecasts.

A few wild samples do not make a trend: the slope is the median of the slopes between all pairs of up to 60 points
(Theil-Sen), and a point is the median of its part of the window. A window is time, not a number of samples: what came
before a long silence does not count, nothing is filled in, and where too little of the window is left there is no trend
rather than a bad one. A forecast comes with the range in which nine of ten later measurements should lie: the spread
around the line, and the uncertainty of the slope, which grows with the distance.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from distributed_grid.api.answers.metrics import Direction, Trend

WINDOWS = (5, 15, 60)
"""Minutes: short-term changes, medium-term patterns, the long run."""
SHORTEST_WINDOW = 0.5
"""Minutes of the shortest window of a forecast: fifteen heartbeats."""
POINTS = 60
MIN_SAMPLES = 10
MIN_POINTS = 6
MIN_CHANGE = 0.02
"""A change over the window that is smaller than this is no change, however certain."""
CONFIDENCE_Z = 1.6449
"""Standard deviations on each side of what holds nine of ten."""
SIGMA_PER_MAD = 1.4826

Floats = npt.NDArray[np.float64]


class FittedLine(Struct, frozen=True):
    """A line through `value` at the middle of its points; the slope lies between `slope_low` and `slope_high`."""

    at: float
    value: float
    slope: float
    slope_low: float
    slope_high: float

    def values_at(self, at: Floats) -> Floats:
        return self.value + self.slope * (at - self.at)

    def widened(self, factor: float) -> FittedLine:
        """The same line with a wider range of its slope."""
        low = self.slope - factor * (self.slope - self.slope_low)
        high = self.slope + factor * (self.slope_high - self.slope)
        return FittedLine(self.at, self.value, self.slope, low, high)


def trend(minutes: Floats, values: Floats, *, now: float, window: float, horizon: float | None = None) -> Trend | None:
    """The trend of the samples in the window before `now`, or None where there are too few.

    `minutes` are times in order; the forecast is for `horizon` minutes (by default the window) after `now`.
    """
    times, values = _since_last_gap(minutes, values, now=now, window=window)
    if len(times) < MIN_SAMPLES or times[-1] - times[0] < window / 2:
        return None
    at, points = _points(times, values)
    if len(at) < MIN_POINTS:
        return None
    line = theil_sen(at, points)
    residuals = points - line.values_at(at)
    line = line.widened(_correlation_factor(residuals))
    ahead = float(window if horizon is None else horizon)
    forecast = line.value + line.slope * (now + ahead - line.at)
    margin = _margin(line, values - line.values_at(times), residuals, distance=now + ahead - line.at)
    change = line.slope * window
    certain = line.slope_low > 0 or line.slope_high < 0
    direction: Direction = "steady"
    if certain and abs(change) >= MIN_CHANGE:
        direction = "rising" if change > 0 else "falling"
    return Trend(
        window_minutes=math.ceil(window),
        slope_per_minute=round(line.slope, 6),
        direction=direction,
        horizon_minutes=ahead,
        forecast=_part(forecast),
        low=_part(forecast - margin),
        high=_part(forecast + margin),
        samples=len(times),
    )


def theil_sen(at: Floats, values: Floats) -> FittedLine:
    """The line whose slope is the median over all pairs, with the range that holds the true one in nine of ten."""
    first, second = np.triu_indices(len(at), k=1)
    slopes = np.sort((values[second] - values[first]) / (at[second] - at[first]))
    count, n = len(slopes), len(at)
    # How far the number of rising pairs strays by chance (Kendall), as a distance from the middle slope.
    stray = CONFIDENCE_Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(math.floor((count - stray) / 2), 0)
    high = min(math.ceil((count + stray) / 2), count - 1)
    slope = float(np.median(slopes))
    middle = float(np.median(at))
    value = float(np.median(values - slope * (at - middle)))
    return FittedLine(middle, value, slope, float(slopes[low]), float(slopes[high]))


def _since_last_gap(minutes: Floats, values: Floats, *, now: float, window: float) -> tuple[Floats, Floats]:
    """The samples of the window since the last silence that was longer than a quarter of it; none after a last one."""
    inside = (minutes >= now - window) & (minutes <= now)
    times, kept = minutes[inside], values[inside]
    if not len(times) or now - times[-1] > window / 4:
        return times[:0], kept[:0]
    silences = np.flatnonzero(np.diff(times) > window / 4)
    start = int(silences[-1]) + 1 if len(silences) else 0
    return times[start:], kept[start:]


def _points(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """At most 60 points: medians over equal parts of the time; a part without samples has none."""
    if len(times) <= POINTS:
        return times, values
    parts = np.minimum(((times - times[0]) / (times[-1] - times[0]) * POINTS).astype(int), POINTS - 1)
    ordered = values[np.lexsort((values, parts))]
    starts = np.flatnonzero(np.diff(parts, prepend=-1))
    counts = np.diff(starts, append=len(parts))
    below, above = starts + (counts - 1) // 2, starts + counts // 2
    return (times[below] + times[above]) / 2, (ordered[below] + ordered[above]) / 2


def _margin(line: FittedLine, spread: Floats, residuals: Floats, *, distance: float) -> float:
    """How far a measurement may lie from the forecast: noise, and uncertainty of the line's level and slope."""
    noise = CONFIDENCE_Z * _sigma(spread)
    level = CONFIDENCE_Z * _sigma(residuals) * _correlation_factor(residuals) * math.sqrt(math.pi / 2 / len(residuals))
    tilt = max(line.slope_high - line.slope, line.slope - line.slope_low) * distance
    return math.sqrt(noise**2 + level**2 + tilt**2)


def _correlation_factor(residuals: Floats) -> float:
    """How much wider the uncertainty is because each point resembles the one before; 1 for independent ones."""
    energy = float(np.dot(residuals, residuals))
    correlation = float(np.dot(residuals[1:], residuals[:-1])) / energy if energy > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.9)
    return math.sqrt((1 + correlation) / (1 - correlation))


def _sigma(residuals: Floats) -> float:
    """Standard deviation estimated from the median deviation, so that outliers do not widen it."""
    return SIGMA_PER_MAD * float(np.median(np.abs(residuals - np.median(residuals))))


def _part(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 4)
