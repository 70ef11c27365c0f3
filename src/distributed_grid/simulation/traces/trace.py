"""What every format is read into."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from distributed_grid.domain.leases import MAX_DURATION_MS, Request
from distributed_grid.domain.nodes import Node
from distributed_grid.errors import BadInput

PATIENT_MS = MAX_DURATION_MS // 2
"""How long work waits whose log does not say."""


class LoggedJob(Struct, frozen=True):
    """One request as it was made, and how long what it was for took; without a command it is a plain lease."""

    at_ms: int
    request: Request
    run_ms: int
    retries: int = 0
    is_job: bool = True
    deadline_in_ms: int = 0


class Trace(Struct, frozen=True):
    """All that a log says, in the order of its requests; `left_out` counts what cannot be replayed, and why."""

    name: str
    work: tuple[LoggedJob, ...]
    nodes: tuple[Node, ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()

    def first(self, limit: int | None) -> Trace:
        """The same with only so many requests."""
        return self if limit is None else Trace(self.name, self.work[:limit], self.nodes, self.left_out)


def a_trace(name: str, work: Iterable[LoggedJob], nodes: Iterable[Node], left_out: dict[str, int]) -> Trace:
    """A trace in order; refused where nothing of it can be replayed."""
    ordered = tuple(sorted(work, key=lambda one: one.at_ms))
    if not ordered:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise BadInput(f"{name}: nothing in it can be replayed" + (f": {why}" if why else ""))
    return Trace(name, ordered, tuple(nodes), tuple(left_out.items()))
