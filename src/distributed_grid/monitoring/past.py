"""The histories of all nodes, and where they lead. Pure: time comes in as an argument."""

from __future__ import annotations

from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import NOTHING, Capacity, ResourceType
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.history import MINUTE_MS, UNMEASURED, MinuteRow, NodeHistory, Rows
from distributed_grid.monitoring.trends import WINDOWS, Floats, ResourceTrend, Trend, trend
from distributed_grid.reactor.nodes import SUSPECT_AFTER_MS


class Past:
    """What is remembered of all nodes."""

    def __init__(self) -> None:
        self._histories: dict[str, NodeHistory] = {}
        self._capacities: dict[str, Capacity] = {}

    def add(self, node: str, usage: Usage, capacity: Capacity, at_ms: int) -> bool:
        """Take a heartbeat in; False where it is not later than the node's last."""
        history = self._histories.get(node)
        if history is None:
            history = self._histories[node] = NodeHistory()
        self._capacities[node] = capacity
        return history.add(usage, at_ms)

    def forget(self, node: str) -> None:
        """Let go of a node; forgetting it twice is harmless."""
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
        rows = history.samples.since(now - max(WINDOWS) * MINUTE_MS)
        times, values = self._series(rows, kind, self._capacities.get(node, NOTHING), now)
        found: dict[int, Trend | None] = {
            minutes: trend(times, values, now=0.0, window=minutes) for minutes in WINDOWS if window in (None, minutes)
        }
        current = round(min(float(values[-1]), 1.0), 4) if len(values) else None
        return ResourceTrend(node, str(kind), current, *(found.get(minutes) for minutes in WINDOWS))

    def forecast(self, node: str, resource: str, now: int, ahead_minutes: float) -> Trend | None:
        """What a resource will be at so many minutes from now, by the shortest window that looks as far back."""
        kind, history = _kind(resource), self._histories.get(node)
        if history is None or now - history.last_ms > SUSPECT_AFTER_MS:
            return None
        window = next((minutes for minutes in WINDOWS if minutes >= ahead_minutes), max(WINDOWS))
        rows = history.samples.since(now - window * MINUTE_MS)
        times, values = self._series(rows, kind, self._capacities.get(node, NOTHING), now)
        return trend(times, values, now=0.0, window=window, horizon=ahead_minutes)

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
