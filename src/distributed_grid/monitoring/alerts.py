"""When to tell somebody that a node is short of something, and when that is over.

Rule 1: an alert is raised when a value has been above its mark for `raise_after_ms`, and cleared when it has been
`margin` below the mark, or lower, for `clear_after_ms`; in between nothing changes, so alerts do not flap.
Rule 2: raised and cleared take turns, per node and resource.
Rule 3: silence is not evidence: a node that is not heard from raises nothing and clears nothing, and a streak that a
silence interrupted begins anew.
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.config.sections import Alerts
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.monitoring.pressure import cpu_part, gpu_part, memory_part
from distributed_grid.reactor.nodes import SUSPECT_AFTER_MS

MARGIN = 0.05
BUSY_MS = 30_000
"""Cores and GPUs are there to be used: only what stays that busy is worth a word. Memory is told at once."""
CALM_MS = 60_000


class AlertThreshold(Struct, frozen=True):
    """How much of a resource is too much, and how sure one has to be."""

    high: float
    margin: float = MARGIN
    raise_after_ms: int = 0
    clear_after_ms: int = CALM_MS


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


CALM = AlertState()


def judge(standing: AlertState, mark: AlertThreshold, value: float, at_ms: int) -> AlertState:
    """The standing after one more measurement."""
    if standing.raised:
        leans, dwell = value <= mark.high - mark.margin, mark.clear_after_ms
    else:
        leans, dwell = value > mark.high, mark.raise_after_ms
    if not leans:
        return standing if standing.since_ms is None else AlertState(standing.raised, None, at_ms)
    unbroken = standing.since_ms is not None and at_ms - standing.last_ms <= SUSPECT_AFTER_MS
    since = standing.since_ms if unbroken and standing.since_ms is not None else at_ms
    if at_ms - since >= dwell:
        return AlertState(not standing.raised, None, at_ms)
    return AlertState(standing.raised, since, at_ms)


def marks_of(alerts: Alerts) -> dict[str, AlertThreshold]:
    """The marks that a config sets, by resource."""
    marks: dict[str, AlertThreshold] = {}
    if alerts.memory_high is not None:
        marks["memory"] = AlertThreshold(alerts.memory_high)
    if alerts.cpu_high is not None:
        marks["cpu"] = AlertThreshold(alerts.cpu_high, raise_after_ms=BUSY_MS)
    if alerts.gpu_high is not None:
        marks["gpu"] = AlertThreshold(alerts.gpu_high, raise_after_ms=BUSY_MS)
    return marks


class AlertRules:
    """The standings of all nodes; says what changed with each measurement."""

    def __init__(self, marks: dict[str, AlertThreshold]) -> None:
        self._marks = marks
        self._standings: dict[str, dict[str, AlertState]] = {}

    def observe(self, node: str, usage: Usage, capacity: Capacity, at_ms: int) -> list[Alert]:
        """What this measurement raises or clears; mostly nothing."""
        standings = self._standings.setdefault(node, {})
        changed: list[Alert] = []
        for resource, mark in self._marks.items():
            value = _value(resource, usage, capacity)
            if value is None:
                continue
            old = standings.get(resource, CALM)
            new = standings[resource] = judge(old, mark, value, at_ms)
            if new.raised is not old.raised:
                changed.append(_alert(node, resource, mark, value, new))
        return changed

    def forget(self, node: str, at_ms: int) -> list[Alert]:
        """Let go of a node that left the grid; what was raised there is cleared, for nobody else would."""
        return [
            Alert(node, resource, False, 0.0, self._marks[resource].high, at_ms, f"{node} left the grid")
            for resource, standing in self._standings.pop(node, {}).items()
            if standing.raised
        ]

    def raised(self) -> list[tuple[str, str]]:
        """The nodes and resources with an alert that is not cleared."""
        return [
            (node, resource)
            for node, standings in self._standings.items()
            for resource, standing in standings.items()
            if standing.raised
        ]


def _value(resource: str, usage: Usage, capacity: Capacity) -> float | None:
    """How much of a resource is used, or None where that was not measured."""
    if resource == "memory":
        return memory_part(capacity, usage) if capacity.memory_bytes else None
    return cpu_part(usage) if resource == "cpu" else gpu_part(usage)


def _alert(node: str, resource: str, mark: AlertThreshold, value: float, standing: AlertState) -> Alert:
    name = resource if resource == "memory" else resource.upper()
    says = "above" if standing.raised else "back below"
    detail = f"{node}: {name} at {value:.0%}, {says} the mark of {mark.high:.0%}"
    return Alert(node, resource, standing.raised, round(value, 4), mark.high, standing.last_ms, detail)
