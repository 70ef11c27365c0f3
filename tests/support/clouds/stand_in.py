"""Stand-ins of clouds: behaviour and charges of a real cloud, on a clock that is handed to it, with faults.

A stand-in keeps the real rules of its cloud (idempotency keys, what is visible when, which error means what) at the
outermost border: the adapter that ships talks to it as it would to the cloud.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from distributed_grid.ports import CloudProviderBase

FAULTS = (
    "lose_before",  # no answer, no effect
    "lose_after",  # no answer, but the effect
    "throttle",  # refused for its rate, no effect
    "no_capacity",  # of that type and zone; `no_capacity:SCOPE` of all in that scope
    "quota",  # a limit of the account is reached
    "refuse",  # a permission is missing
    "fail",  # an error of the cloud itself
)


@dataclass
class FaultScript:
    """What goes wrong with the next calls, by method of the port (`create`, `list`, `describe`, `terminate`,
    `offers`), the next one first; safe in threads. `calls` says what was called, and which fault it met."""

    waiting: dict[str, list[str]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, method: str, about: str = "") -> str:
        """The fault that this call meets; empty where it meets none."""
        with self._lock:
            waiting = self.waiting.get(method) or []
            fault = waiting.pop(0) if waiting else ""
            self.calls.append(" ".join(filter(None, (method, about, fault))))
        return fault

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        with self._lock:
            self.waiting = {}


@dataclass(frozen=True)
class Machine:
    """A machine in a stand-in, as the cloud's console shows it; it costs money until `ended_at`."""

    worker_id: str
    grid_id: str
    instance: str
    made_at: float
    ended_at: float | None = None
    market: str = ""
    zone: str = ""


class CloudStandIn(Protocol):
    """A cloud for tests. `visible_after` is for how many seconds a new machine is not listed, `stops_in` how long a
    termination takes; both may be changed at any time."""

    faults: FaultScript
    visible_after: float
    stops_in: float

    @property
    def clock(self) -> Callable[[], float]:
        """The time, as this cloud knows it."""

    def provider(self) -> CloudProviderBase:
        """A new adapter that talks to this cloud, as a new process would make it."""

    def machines(self) -> list[Machine]:
        """Every machine there ever was, foreign ones included."""

    def add_foreign(self) -> str:
        """Have a machine there that is not of any grid; its id at the cloud."""

    def take_away(self, instance: str) -> None:
        """End a machine as the cloud does with a spot one, or as it ends itself by its power-off."""

    def close(self) -> None:
        """End the stand-in and everything that it started."""
