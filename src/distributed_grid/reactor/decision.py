"""What a decider returns."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from distributed_grid.domain.blocks import Block
from distributed_grid.domain.events import Event
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.rows import Row
from distributed_grid.scheduling.placement.explanation import Choice


class Record(Struct, frozen=True):
    """One line of the audit trail: what happened to whom, where and why; `data` is whatever JSON can hold."""

    type: str
    user: str
    subject: str
    node: str = ""
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class LeaseAnswer(Struct, frozen=True):
    """A lease as it stands after the event; reasons say why it waits, the choice why it was placed where it is."""

    lease: Lease
    reasons: tuple[str, ...] = ()
    choice: Choice | None = None


class JobAnswer(Struct, frozen=True):
    """A job as it stands after the event; reasons say why it waits, the choice why it was placed where it is."""

    job: Job
    lease: Lease | None = None
    reasons: tuple[str, ...] = ()
    choice: Choice | None = None


class BlockAnswer(Struct, frozen=True):
    """A block as it stands after the event."""

    block: Block


Answer = LeaseAnswer | JobAnswer | BlockAnswer | None


class Decision(Struct):
    """Rows in their new state, lines for the audit trail, what the caller hears, and what to look at next.

    `choice` is why something was placed where it was, where that was decided.
    """

    changes: list[Row] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    answer: Answer = None
    follow: list[Event] = field(default_factory=list)
    choice: Choice | None = None
