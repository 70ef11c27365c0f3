"""Usage history of the nodes with its trends: an hour of every heartbeat and, by default, a day of minutes, in fixed
memory.

The memory of a node is allocated once and never grows: below 200 kB with everything around it, and adding a heartbeat
costs the same at any size. Only later samples than the last are added, so the same heartbeat may be reported twice.
Unmeasured values are absent: a silent minute has no row, a node without GPUs no GPU numbers. Minutes can be written
down and restored after a restart: a trend then begins with them and continues with heartbeats.

A few wild samples do not make a trend: the slope is the median of the slopes between all pairs of up to 60 points
(Theil-Sen), and a point is the median of its part of the window. A window is time, not a number of samples: samples
before a long silence do not count, nothing is filled in, and a window with too few samples has no trend. A forecast
comes with the range in which nine of ten later measurements should lie: the spread around the line, and the uncertainty
of the slope, which grows with the distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.api.answers.common import gigabytes, utc
from distributed_grid.api.answers.metrics import Direction, MinuteRow, ResourceTrend, Trend
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import WATCHED_RESOURCES, Forecast, PressureReading
from distributed_grid.domain.resources import NOTHING, Capacity, ResourceType
from distributed_grid.errors import BadInput
from distributed_grid.reactor.node_liveness import SUSPECT_AFTER_MS

WINDOWS = (5, 15, 60)  # minutes: short-term changes, medium-term patterns, long-term trends
SHORTEST_WINDOW = 0.5  # minutes of the shortest window of a forecast: fifteen heartbeats
POINTS = 60
MIN_SAMPLES = 10
MIN_POINTS = 6
MIN_CHANGE = 0.02  # a change over the window that is smaller than this is no change, however certain
CONFIDENCE_Z = 1.6449  # standard deviations on each side of a range that holds nine of ten
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


def trend(minutes: Floats, values: Floats, *, now: float, window: float, horizon: float | None = None) -> Trend | None:
    """The trend of the samples in the window before `now`, or None where there are too few.

    `minutes` are times in order; the forecast is for `horizon` minutes (by default the window) after `now`.
    """
    times, values = _since_last_gap(minutes, values, now=now, window=window)
    if len(times) < MIN_SAMPLES or times[-1] - times[0] < window / 2:
        return None
    at, points = times, values
    if len(times) > POINTS:  # medians over equal parts of the time; a part without samples has no point
        parts = np.minimum(((times - times[0]) / (times[-1] - times[0]) * POINTS).astype(int), POINTS - 1)
        ordered = values[np.lexsort((values, parts))]
        starts = np.flatnonzero(np.diff(parts, prepend=-1))
        counts = np.diff(starts, append=len(parts))
        below, above = starts + (counts - 1) // 2, starts + counts // 2
        at, points = (times[below] + times[above]) / 2, (ordered[below] + ordered[above]) / 2
    if len(at) < MIN_POINTS:
        return None
    line = theil_sen(at, points)
    residuals = points - line.values_at(at)
    # Each point resembles the one before, which widens the uncertainty by this factor; 1 for independent points.
    energy = float(np.dot(residuals, residuals))
    correlation = float(np.dot(residuals[1:], residuals[:-1])) / energy if energy > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.9)
    factor = math.sqrt((1 + correlation) / (1 - correlation))
    slope_low = line.slope - factor * (line.slope - line.slope_low)
    slope_high = line.slope + factor * (line.slope_high - line.slope)
    ahead = float(window if horizon is None else horizon)
    forecast = line.value + line.slope * (now + ahead - line.at)
    # How far a measurement may lie from the forecast: noise, and uncertainty of the line's level and slope.
    noise = CONFIDENCE_Z * _sigma(values - line.values_at(times))
    level = CONFIDENCE_Z * _sigma(residuals) * factor * math.sqrt(math.pi / 2 / len(residuals))
    tilt = max(slope_high - line.slope, line.slope - slope_low) * (now + ahead - line.at)
    margin = math.sqrt(noise**2 + level**2 + tilt**2)
    change = line.slope * window
    certain = slope_low > 0 or slope_high < 0
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


def _sigma(residuals: Floats) -> float:
    """Standard deviation estimated from the median deviation, so that outliers do not widen it."""
    return SIGMA_PER_MAD * float(np.median(np.abs(residuals - np.median(residuals))))


def _part(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 4)


FULL_RATE_ROWS = 1_800  # an hour of heartbeats, one every two seconds
MIN_SAMPLE_GAP_MS = 1_500
"""Heartbeats that come nearer together than this only count for their minute, so that an hour stays an hour."""
MINUTE_ROWS = 1_440
MINUTE_MS = 60_000
UNMEASURED = 0xFFFF  # busy thousandths of unmeasured GPUs
_MAX_MILLI = 0xFFFE
_MAX_BYTES = 2**62

Rows = npt.NDArray[np.void]
FIELDS = ("cpu", "cpu_outside", "gpu", "memory", "memory_outside", "gpu_memory")
"""Cpu and gpu in thousandths of the whole, memory in bytes."""
GPU, GPU_MEMORY = FIELDS.index("gpu"), FIELDS.index("gpu_memory")
_KINDS = {"cpu": "u2", "cpu_outside": "u2", "gpu": "u2", "memory": "i8", "memory_outside": "i8", "gpu_memory": "i8"}
SAMPLE = np.dtype([("at_ms", "i8"), *_KINDS.items()])
MINUTE = np.dtype(
    [("at_ms", "i8"), ("samples", "u2"), *_KINDS.items(), *((f"{name}_max", kind) for name, kind in _KINDS.items())]
)
_Numbers = tuple[int, ...]


class Ring:
    """The last rows of a fixed number, in the order of their time."""

    __slots__ = ("_length", "_next", "rows")

    def __init__(self, kind: np.dtype[np.void], size: int) -> None:
        self.rows: Rows = np.zeros(size, kind)
        self._next = 0
        self._length = 0

    def add(self, row: tuple[int, ...]) -> None:
        """Append a row, overwriting the oldest."""
        self.rows[self._next] = row
        self._next = (self._next + 1) % len(self.rows)
        self._length = min(self._length + 1, len(self.rows))

    def since(self, at_ms: int) -> Rows:
        """A copy of the rows from that moment on, oldest first."""
        if self._length < len(self.rows):
            rows = self.rows[: self._length]
        else:
            rows = np.concatenate((self.rows[self._next :], self.rows[: self._next]))
        return rows[np.searchsorted(rows["at_ms"], at_ms) :].copy()


class NodeHistory:
    __slots__ = ("_begin_ms", "_count", "_gpu_count", "_max", "_sampled_ms", "_sums", "last_ms", "minutes", "samples")

    def __init__(self, minute_rows: int = MINUTE_ROWS) -> None:
        self.samples = Ring(SAMPLE, FULL_RATE_ROWS)
        self.minutes = Ring(MINUTE, minute_rows)
        self.last_ms = 0
        self._sampled_ms = -MIN_SAMPLE_GAP_MS
        self._count = 0
        self._begin(0)

    def add(self, usage: Usage, at_ms: int) -> bool:
        """Add a heartbeat; False where it is not later than the last."""
        if at_ms <= self.last_ms:
            return False
        if at_ms - self._begin_ms >= MINUTE_MS:
            self._begin(at_ms - at_ms % MINUTE_MS)
        self.last_ms = at_ms
        # A measurement in the order of `FIELDS`, clamped to the bounds of a row: agents are not trusted.
        gpus = usage.gpus
        busy, used = UNMEASURED, 0
        if gpus:
            busy = _clamp(sum([gpu.in_use_milli for gpu in gpus]) // len(gpus), _MAX_MILLI)
            used = _clamp(sum([gpu.in_use_bytes for gpu in gpus]), _MAX_BYTES)
        numbers: _Numbers = (
            _clamp(usage.cpu_busy_milli, _MAX_MILLI),
            _clamp(usage.cpu_outside_milli, _MAX_MILLI),
            busy,
            _clamp(usage.memory_bytes, _MAX_BYTES),
            _clamp(usage.memory_outside_bytes, _MAX_BYTES),
            used,
        )
        if at_ms - self._sampled_ms >= MIN_SAMPLE_GAP_MS:
            self._sampled_ms = at_ms
            self.samples.add((at_ms, *numbers))
        self._count += 1
        if numbers[GPU] == UNMEASURED:
            numbers = (*numbers[:GPU], 0, *numbers[GPU + 1 :])
        else:
            self._gpu_count += 1
        sums, highest = self._sums, self._max
        for place, number in enumerate(numbers):
            sums[place] += number
            if number > highest[place]:
                highest[place] = number
        return True

    def _begin(self, at_ms: int) -> None:
        """Begin a minute; the one before becomes a row if it has heartbeats."""
        if self._count:
            self.minutes.add(self._minute())
        self._begin_ms = at_ms
        self._count = self._gpu_count = 0
        self._sums = [0] * len(FIELDS)
        self._max = [0] * len(FIELDS)

    def _minute(self) -> tuple[int, ...]:
        means = [total // self._count for total in self._sums]
        most = list(self._max)
        if self._gpu_count:
            means[GPU], means[GPU_MEMORY] = (self._sums[place] // self._gpu_count for place in (GPU, GPU_MEMORY))
        else:
            means[GPU] = most[GPU] = UNMEASURED
        return (self._begin_ms, min(self._count, _MAX_MILLI), *means, *most)

    def restore(self, rows: Rows) -> None:
        """Begin with the minutes of an earlier run, in order; the last may be the current one."""
        for row in rows:
            begin_ms = int(row["at_ms"])
            if begin_ms - self._begin_ms < MINUTE_MS:
                continue
            self._begin(begin_ms)
            self._count = int(row["samples"])
            self._gpu_count = self._count if row["gpu"] != UNMEASURED else 0
            for place, name in enumerate(FIELDS):
                is_missing = place in (GPU, GPU_MEMORY) and not self._gpu_count
                self._sums[place] = 0 if is_missing else int(row[name]) * self._count
                self._max[place] = 0 if is_missing else int(row[f"{name}_max"])
            self.last_ms = begin_ms

    def written_rows(self, since_ms: int) -> list[tuple[int, bytes]]:
        """The minutes that began at that moment or later, as (begin, row), the current one included."""
        return [(int(row["at_ms"]), row.tobytes()) for row in self._minutes_since(since_ms)]

    def _minutes_since(self, since_ms: int) -> Rows:
        rows = self.minutes.since(since_ms)
        if self._count and self._begin_ms >= since_ms:
            rows = np.append(rows, np.array([self._minute()], MINUTE))
        return rows

    def minute_rows(self, since_ms: int, offset_ms: int = 0) -> list[MinuteRow]:
        """The minutes that began at that moment or later, the current one included.

        `offset_ms` is the lead of the wall clock over the grid's time.
        """
        rows: list[MinuteRow] = []
        for row in self._minutes_since(since_ms):
            at_ms, samples, cpu, cpu_outside, gpu, memory, memory_outside, gpu_memory, *highest = row.tolist()
            cpu_max, _, gpu_max, memory_max, _, _ = highest
            is_measured = gpu != UNMEASURED
            minute = MinuteRow(
                time=utc(at_ms + offset_ms),
                samples=samples,
                cpu_percent=cpu / 10,
                cpu_percent_max=cpu_max / 10,
                cpu_outside_percent=cpu_outside / 10,
                memory_used_gb=gigabytes(memory),
                memory_used_gb_max=gigabytes(memory_max),
                memory_outside_gb=gigabytes(memory_outside),
                gpu_percent=gpu / 10 if is_measured else None,
                gpu_percent_max=gpu_max / 10 if is_measured else None,
                gpu_memory_used_gb=gigabytes(gpu_memory) if is_measured else None,
            )
            rows.append(minute)
        return rows


def _clamp(number: int, high: int) -> int:
    return 0 if number < 0 else min(number, high)


class ClusterHistory:
    """The histories of all nodes. Pure: time comes in as an argument."""

    def __init__(self, retention_ms: int = MINUTE_ROWS * MINUTE_MS) -> None:
        """`retention_ms`: age up to which minutes are kept."""
        self._minute_rows = max(-(-retention_ms // MINUTE_MS), 1)
        self._histories: dict[str, NodeHistory] = {}
        self._capacities: dict[str, Capacity] = {}

    def add(self, node: str, usage: Usage, capacity: Capacity, at_ms: int) -> bool:
        """Add a heartbeat; False where it is not later than the node's last."""
        history = self._histories.get(node)
        if history is None:
            history = self._histories[node] = NodeHistory(self._minute_rows)
        self._capacities[node] = capacity
        return history.add(usage, at_ms)

    def restore(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Begin with the rows written before a restart: (node, row), oldest first."""
        by_node: dict[str, list[bytes]] = {}
        for node, row in rows:
            by_node.setdefault(node, []).append(row)
        for node, minutes in by_node.items():
            history = self._histories.setdefault(node, NodeHistory(self._minute_rows))
            history.restore(np.frombuffer(b"".join(minutes), MINUTE))

    def written_rows(self, since_ms: int) -> list[tuple[int, str, bytes]]:
        """The minutes of all nodes that began at that moment or later, as `MinuteStore.write` takes them."""
        return [
            (begin_ms, node, row)
            for node, history in self._histories.items()
            for begin_ms, row in history.written_rows(since_ms)
        ]

    def minute_levels(self, node: str, now: int) -> dict[str, float]:
        """The mean use of each resource over the last minute, as parts of the whole, where it was measured."""
        history = self._histories.get(node)
        if history is None:
            return {}
        rows, capacity = history.samples.since(now - MINUTE_MS), self._capacities.get(node, NOTHING)
        levels = {}
        for kind in (ResourceType.CPU, ResourceType.MEMORY, ResourceType.GPU):
            _, values = self._series(rows, kind, capacity, now)
            if len(values):
                levels[str(kind)] = round(float(values.mean()), 4)
        return levels

    def forget(self, node: str) -> None:
        self._histories.pop(node, None)
        self._capacities.pop(node, None)

    def nodes(self) -> list[str]:
        return list(self._histories)

    def trend(self, node: str, resource: str, now: int, window: int | None = None) -> ResourceTrend:
        """Trend of a resource over one window (minutes) or all of them."""
        kind = _kind(resource)
        if window is not None and window not in WINDOWS:
            raise BadInput(f"no window of {window} minutes: use 5, 15 or 60")
        history = self._histories.get(node)
        if history is None or now - history.last_ms > SUSPECT_AFTER_MS:
            return ResourceTrend(node, str(kind))
        times, values = self._recent(node, history, kind, now, max(WINDOWS))
        trends = [
            trend(times, values, now=0.0, window=minutes) if window in (None, minutes) else None for minutes in WINDOWS
        ]
        current = round(min(float(values[-1]), 1.0), 4) if len(values) else None
        return ResourceTrend(node, str(kind), current, *trends)

    def forecast(self, node: str, resource: str, now: int, ahead_minutes: float) -> Trend | None:
        """Forecast of a resource in `ahead_minutes`, by the shortest window that looks as far back. For the next
        minutes the window has their length, because a longer one sees a rise too late."""
        kind, history = _kind(resource), self._histories.get(node)
        if history is None or now - history.last_ms > SUSPECT_AFTER_MS:
            return None
        if ahead_minutes < min(WINDOWS):
            window = max(ahead_minutes, SHORTEST_WINDOW)
        else:
            window = next((minutes for minutes in WINDOWS if minutes >= ahead_minutes), max(WINDOWS))
        times, values = self._recent(node, history, kind, now, window)
        return trend(times, values, now=0.0, window=window, horizon=ahead_minutes)

    def with_forecasts(self, reading: PressureReading, now: int, ahead_ms: int) -> PressureReading:
        """A pressure reading with the levels expected in `ahead_ms`, where enough is known."""
        ahead = {}
        for resource in WATCHED_RESOURCES:
            if reading.level(resource) is None:
                continue
            trend = self.forecast(reading.node, resource, now, ahead_ms / MINUTE_MS)
            if trend is not None:
                reach = max(trend.forecast - trend.low, trend.high - trend.forecast)
                ahead[f"{resource}_ahead"] = Forecast(round(1000 * trend.forecast), round(1000 * reach))
        return replace(reading, **ahead) if ahead else reading

    def _recent(
        self, node: str, history: NodeHistory, kind: ResourceType, now: int, minutes: float
    ) -> tuple[Floats, Floats]:
        """The series of the last minutes: heartbeats, and before the first of them the restored minutes."""
        capacity, since_ms = self._capacities.get(node, NOTHING), now - round(minutes * MINUTE_MS)
        samples = history.samples.since(since_ms)
        times, values = self._series(samples, kind, capacity, now)
        restored = history.minutes.since(since_ms)
        if len(samples):
            restored = restored[restored["at_ms"] + MINUTE_MS <= samples["at_ms"][0]]
        if not len(restored):
            return times, values
        earlier, means = self._series(restored, kind, capacity, now)
        return np.concatenate((earlier + 0.5, times)), np.concatenate((means, values))

    def _series(self, rows: Rows, kind: ResourceType, capacity: Capacity, now: int) -> tuple[Floats, Floats]:
        """Minutes (0 is now) and parts of the whole, where they were measured."""
        if kind is ResourceType.GPU:
            rows = rows[rows["gpu"] != UNMEASURED]
        times = (rows["at_ms"] - now) / MINUTE_MS
        if kind is ResourceType.MEMORY:
            if not capacity.memory_bytes:
                return times[:0], times[:0]
            return times, rows["memory"] / capacity.memory_bytes
        return times, rows[str(kind)] / 1000.0

    def minutes(self, node: str, now: int, minutes: int, offset_ms: int = 0) -> list[MinuteRow]:
        """The last minutes of a node, silent ones left out."""
        history = self._histories.get(node)
        return history.minute_rows(now - minutes * MINUTE_MS, offset_ms) if history is not None else []


def _kind(resource: str) -> ResourceType:
    try:
        return ResourceType(resource)
    except ValueError:
        raise BadInput(f"no trend of {resource!r}: use cpu, memory or gpu") from None
