"""Alert rules: when an alert of a node is raised and when it is cleared.

An alert is raised when a value has been above its threshold for `raise_after_ms`, and cleared when it has been `margin`
below the threshold, or lower, for `clear_after_ms`; in between nothing changes, so alerts do not flap. Raised and
cleared alternate, per node and resource. Silence is not evidence: a node that is not heard from raises nothing and
clears nothing, and a streak that a silence interrupted begins anew.
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.config.sections import Alerts
from distributed_grid.domain.nodes import Usage, cpu_part, gpu_part, memory_part
from distributed_grid.domain.resources import Capacity
from distributed_grid.reactor.node_liveness import SUSPECT_AFTER_MS

MARGIN = 0.05
RAISE_AFTER_MS = 30_000
"""Cores and GPUs are there to be used: only what stays that busy is worth an alert. Memory is reported at once."""
CLEAR_AFTER_MS = 60_000


class AlertThreshold(Struct, frozen=True):
    """How much of a resource is too much, and how sure one has to be."""

    high: float
    margin: float = MARGIN
    raise_after_ms: int = 0
    clear_after_ms: int = CLEAR_AFTER_MS


class AlertState(Struct, frozen=True):
    """Whether an alert is raised; since when and until when there is a streak towards the other (None: none)."""

    raised: bool = False
    since_ms: int | None = None
    last_ms: int = 0


class Alert(Struct, frozen=True):
    """An alert that was raised or cleared; `value` and `mark` are parts of the whole."""

    node: str
    resource: str
    raised: bool
    value: float
    mark: float
    at_ms: int
    detail: str

    @property
    def state(self) -> str:
        return "raised" if self.raised else "cleared"


CLEARED = AlertState()


def next_state(state: AlertState, threshold: AlertThreshold, value: float, at_ms: int) -> AlertState:
    """The alert state after one more measurement."""
    if state.raised:
        crossed, dwell = value <= threshold.high - threshold.margin, threshold.clear_after_ms
    else:
        crossed, dwell = value > threshold.high, threshold.raise_after_ms
    if not crossed:
        return state if state.since_ms is None else AlertState(state.raised, None, at_ms)
    unbroken = state.since_ms is not None and at_ms - state.last_ms <= SUSPECT_AFTER_MS
    since = state.since_ms if unbroken and state.since_ms is not None else at_ms
    if at_ms - since >= dwell:
        return AlertState(not state.raised, None, at_ms)
    return AlertState(state.raised, since, at_ms)


def alert_thresholds(alerts: Alerts) -> dict[str, AlertThreshold]:
    """The thresholds that a config sets, by resource."""
    thresholds: dict[str, AlertThreshold] = {}
    if alerts.memory_high is not None:
        thresholds["memory"] = AlertThreshold(alerts.memory_high)
    if alerts.cpu_high is not None:
        thresholds["cpu"] = AlertThreshold(alerts.cpu_high, raise_after_ms=RAISE_AFTER_MS)
    if alerts.gpu_high is not None:
        thresholds["gpu"] = AlertThreshold(alerts.gpu_high, raise_after_ms=RAISE_AFTER_MS)
    return thresholds


class AlertRules:
    """The alert states of all nodes; returns what changed with each measurement."""

    def __init__(self, thresholds: dict[str, AlertThreshold]) -> None:
        self._thresholds = thresholds
        self._states: dict[str, dict[str, AlertState]] = {}

    def set_thresholds(self, thresholds: dict[str, AlertThreshold]) -> list[Alert]:
        """Go by other thresholds: what was raised by the old ones is cleared, and may be raised anew."""
        cleared = [
            Alert(node, one, False, 0.0, self._thresholds[one].high, state.last_ms, f"{node}: other alerts are set")
            for node, states in self._states.items()
            for one, state in states.items()
            if state.raised
        ]
        self._thresholds, self._states = thresholds, {}
        return cleared

    def observe(self, node: str, usage: Usage, capacity: Capacity, at_ms: int) -> list[Alert]:
        """What this measurement raises or clears; mostly nothing."""
        states = self._states.setdefault(node, {})
        changed: list[Alert] = []
        for resource, threshold in self._thresholds.items():
            value = _value(resource, usage, capacity)
            if value is None:
                continue
            old = states.get(resource, CLEARED)
            new = states[resource] = next_state(old, threshold, value, at_ms)
            if new.raised is not old.raised:
                changed.append(_alert(node, resource, threshold, value, new))
        return changed

    def forget(self, node: str, at_ms: int) -> list[Alert]:
        """Drop a node that left the grid; what was raised there is cleared, for nobody else would."""
        return [
            Alert(node, resource, False, 0.0, self._thresholds[resource].high, at_ms, f"{node} left the grid")
            for resource, state in self._states.pop(node, {}).items()
            if state.raised
        ]

    def raised(self) -> list[tuple[str, str]]:
        """The nodes and resources with an alert that is not cleared."""
        return [
            (node, resource)
            for node, states in self._states.items()
            for resource, state in states.items()
            if state.raised
        ]


def _value(resource: str, usage: Usage, capacity: Capacity) -> float | None:
    """How much of a resource is used, or None where that was not measured."""
    if resource == "memory":
        return memory_part(capacity, usage) if capacity.memory_bytes else None
    return cpu_part(usage) if resource == "cpu" else gpu_part(usage)


def _alert(node: str, resource: str, threshold: AlertThreshold, value: float, state: AlertState) -> Alert:
    name = resource if resource == "memory" else resource.upper()
    position = "above" if state.raised else "back below"
    detail = f"{node}: {name} at {100 * value:.0f} %, {position} the mark of {100 * threshold.high:.0f} %"
    return Alert(node, resource, state.raised, round(value, 4), threshold.high, state.last_ms, detail)
