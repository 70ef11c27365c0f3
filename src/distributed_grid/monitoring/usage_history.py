"""Usage history of the nodes: an hour of every heartbeat and, unless told otherwise, a day of minutes, in fixed memory,
with their trends.

The memory of a node is allocated once and never grows: below 200 kB with everything around it, and adding a heartbeat
costs the same however much is there. Only what is later than the last sample is added, so the same heartbeat may be
reported twice. What was not measured is absent: a silent minute has no row, a node without GPUs no GPU numbers. Minutes
can be written down and restored after a restart: a trend then begins with them and goes on with heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from distributed_grid.api.answers.common import gigabytes, utc
from distributed_grid.api.answers.metrics import MinuteRow, ResourceTrend, Trend
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import WATCHED_RESOURCES, Forecast, PressureReading
from distributed_grid.domain.resources import NOTHING, Capacity, ResourceType
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.trends import SHORTEST_WINDOW, WINDOWS, Floats, trend
from distributed_grid.reactor.node_liveness import SUSPECT_AFTER_MS

FULL_RATE_ROWS = 1_800
"""An hour of heartbeats, one every two seconds."""
MIN_SAMPLE_GAP_MS = 1_500
"""Heartbeats that come nearer together than this only count for their minute, so that an hour stays an hour."""
MINUTE_ROWS = 1_440
MINUTE_MS = 60_000
UNMEASURED = 0xFFFF
"""The busy thousandths of GPUs that nobody measured."""
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
    """The last so many rows, in the order of their time."""

    __slots__ = ("_length", "_next", "_rows")

    def __init__(self, kind: np.dtype[np.void], size: int) -> None:
        self._rows: Rows = np.zeros(size, kind)
        self._next = 0
        self._length = 0

    def add(self, row: tuple[int, ...]) -> None:
        """Append a row, overwriting the oldest."""
        self._rows[self._next] = row
        self._next = (self._next + 1) % len(self._rows)
        self._length = min(self._length + 1, len(self._rows))

    def since(self, at_ms: int) -> Rows:
        """A copy of the rows from that moment on, oldest first."""
        if self._length < len(self._rows):
            rows = self._rows[: self._length]
        else:
            rows = np.concatenate((self._rows[self._next :], self._rows[: self._next]))
        return rows[np.searchsorted(rows["at_ms"], at_ms) :].copy()

    @property
    def size_bytes(self) -> int:
        return self._rows.nbytes


class NodeHistory:
    """The history of one node."""

    __slots__ = ("_begin_ms", "_count", "_gpu_count", "_max", "_sampled_ms", "_sums", "last_ms", "minutes", "samples")

    def __init__(self, minute_rows: int = MINUTE_ROWS) -> None:
        self.samples = Ring(SAMPLE, FULL_RATE_ROWS)
        self.minutes = Ring(MINUTE, minute_rows)
        self.last_ms = 0
        self._sampled_ms = -MIN_SAMPLE_GAP_MS
        self._begin(0)

    def add(self, usage: Usage, at_ms: int) -> bool:
        """Add a heartbeat; False where it is not later than the last."""
        if at_ms <= self.last_ms:
            return False
        if at_ms - self._begin_ms >= MINUTE_MS:
            self._end_minute()
            self._begin(at_ms - at_ms % MINUTE_MS)
        self.last_ms = at_ms
        numbers = _numbers(usage)
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
        self._begin_ms = at_ms
        self._count = self._gpu_count = 0
        self._sums = [0] * len(FIELDS)
        self._max = [0] * len(FIELDS)

    def _end_minute(self) -> None:
        if self._count:
            self.minutes.add(self._minute())

    def _minute(self) -> tuple[int, ...]:
        means = [total // self._count for total in self._sums]
        most = list(self._max)
        if self._gpu_count:
            means[GPU], means[GPU_MEMORY] = (self._sums[place] // self._gpu_count for place in (GPU, GPU_MEMORY))
        else:
            means[GPU] = most[GPU] = UNMEASURED
        return (self._begin_ms, min(self._count, _MAX_MILLI), *means, *most)

    def restore(self, rows: Rows) -> None:
        """Begin with the minutes of an earlier time, in order; the last may be the one that still goes on."""
        for row in rows:
            begin_ms = int(row["at_ms"])
            if begin_ms - self._begin_ms < MINUTE_MS:
                continue
            self._end_minute()
            self._begin(begin_ms)
            self._count = int(row["samples"])
            self._gpu_count = self._count if row["gpu"] != UNMEASURED else 0
            for place, name in enumerate(FIELDS):
                is_missing = place in (GPU, GPU_MEMORY) and not self._gpu_count
                self._sums[place] = 0 if is_missing else int(row[name]) * self._count
                self._max[place] = 0 if is_missing else int(row[f"{name}_max"])
            self.last_ms = begin_ms

    def written_rows(self, since_ms: int) -> list[tuple[int, bytes]]:
        """The minutes that began at that moment or later, as (begin, row), the one that still goes on included."""
        rows = list(self.minutes.since(since_ms))
        if self._count and self._begin_ms >= since_ms:
            rows.append(np.array([self._minute()], MINUTE)[0])
        return [(int(row["at_ms"]), row.tobytes()) for row in rows]

    def minute_rows(self, since_ms: int, offset_ms: int = 0) -> list[MinuteRow]:
        """The minutes that began at that moment or later, the one that still goes on included.

        `offset_ms` is how far the wall clock is ahead of the grid's own time.
        """
        rows = [_minute_row(row.tolist(), offset_ms) for row in self.minutes.since(since_ms)]
        if self._count and self._begin_ms >= since_ms:
            rows.append(_minute_row(self._minute(), offset_ms))
        return rows

    @property
    def size_bytes(self) -> int:
        """How many bytes the buffers take."""
        return self.samples.size_bytes + self.minutes.size_bytes


def _numbers(usage: Usage) -> _Numbers:
    """A measurement in the order of `FIELDS`, within what a row can hold: agents are not trusted to be sane."""
    gpus = usage.gpus
    busy, used = UNMEASURED, 0
    if gpus:
        busy = _clamp(sum([gpu.in_use_milli for gpu in gpus]) // len(gpus), _MAX_MILLI)
        used = _clamp(sum([gpu.in_use_bytes for gpu in gpus]), _MAX_BYTES)
    return (
        _clamp(usage.cpu_busy_milli, _MAX_MILLI),
        _clamp(usage.cpu_outside_milli, _MAX_MILLI),
        busy,
        _clamp(usage.memory_bytes, _MAX_BYTES),
        _clamp(usage.memory_outside_bytes, _MAX_BYTES),
        used,
    )


def _clamp(number: int, high: int) -> int:
    return 0 if number < 0 else min(number, high)


def _minute_row(row: tuple[int, ...], offset_ms: int) -> MinuteRow:
    at_ms, samples, cpu, cpu_outside, gpu, memory, memory_outside, gpu_memory = row[:8]
    cpu_max, _, gpu_max, memory_max, _, _ = row[8:]
    measured = gpu != UNMEASURED
    return MinuteRow(
        time=utc(at_ms + offset_ms),
        samples=samples,
        cpu_percent=cpu / 10,
        cpu_percent_max=cpu_max / 10,
        cpu_outside_percent=cpu_outside / 10,
        memory_used_gb=gigabytes(memory),
        memory_used_gb_max=gigabytes(memory_max),
        memory_outside_gb=gigabytes(memory_outside),
        gpu_percent=gpu / 10 if measured else None,
        gpu_percent_max=gpu_max / 10 if measured else None,
        gpu_memory_used_gb=gigabytes(gpu_memory) if measured else None,
    )


class ClusterHistory:
    """The histories of all nodes. Pure: time comes in as an argument."""

    def __init__(self, retention_ms: int = MINUTE_ROWS * MINUTE_MS) -> None:
        """Minutes are kept for so long."""
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
        """Begin with what was written down before a restart: (node, row), oldest first."""
        by_node: dict[str, list[bytes]] = {}
        for node, row in rows:
            by_node.setdefault(node, []).append(row)
        for node, kept in by_node.items():
            self._histories.setdefault(node, NodeHistory(self._minute_rows)).restore(
                np.frombuffer(b"".join(kept), MINUTE)
            )

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
        """Drop the history of a node; dropping it twice is harmless."""
        self._histories.pop(node, None)
        self._capacities.pop(node, None)

    def nodes(self) -> list[str]:
        return list(self._histories)

    def trend(self, node: str, resource: str, now: int, window: int | None = None) -> ResourceTrend:
        """Where a resource is going, over one window (minutes) or all of them."""
        kind = _kind(resource)
        if window is not None and window not in WINDOWS:
            raise BadInput(f"no window of {window} minutes: use 5, 15 or 60")
        history = self._histories.get(node)
        if history is None or now - history.last_ms > SUSPECT_AFTER_MS:
            return ResourceTrend(node, str(kind))
        times, values = self._recent(node, history, kind, now, max(WINDOWS))
        found: dict[int, Trend | None] = {
            minutes: trend(times, values, now=0.0, window=minutes) for minutes in WINDOWS if window in (None, minutes)
        }
        current = round(min(float(values[-1]), 1.0), 4) if len(values) else None
        return ResourceTrend(node, str(kind), current, *(found.get(minutes) for minutes in WINDOWS))

    def forecast(self, node: str, resource: str, now: int, ahead_minutes: float) -> Trend | None:
        """What a resource will be at so many minutes from now, by the shortest window that looks as far back; for the
        next minutes the window is as long as they are, because a longer one sees a rise too late."""
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
        """A pressure reading with the levels expected so much later, where enough is known to say."""
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
        """The series of so many minutes: heartbeats, and before the first of them the minutes that were restored."""
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
        """The last so many minutes of a node, those it was silent in left out."""
        history = self._histories.get(node)
        return history.minute_rows(now - minutes * MINUTE_MS, offset_ms) if history is not None else []


def _kind(resource: str) -> ResourceType:
    try:
        return ResourceType(resource)
    except ValueError:
        raise BadInput(f"no trend of {resource!r}: use cpu, memory or gpu") from None
