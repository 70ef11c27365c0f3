"""Looking at what is and what was; nothing changes by it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from distributed_grid.api.requests.message import Message, Name


class Status(Message, frozen=True):
    """Everything at a glance."""


class Explain(Message, frozen=True):
    """Why it waits, why it is there, why it was stopped, when it will start: of a job, a lease or a refused request."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    kind: Literal["", "job", "lease"] = ""


class Ledger(Message, frozen=True):
    """Who lent whom how much; without `by` lender by borrower."""

    since_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 30 * 86_400.0
    by: Literal["", "user", "node", "day"] = ""


class Events(Message, frozen=True):
    """The audit trail, and with `follow` what still comes."""

    after: Annotated[int, Meta(ge=0)] | None = None
    follow: bool = False
    subject: Name | None = None
    types: tuple[Name, ...] = ()
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 100


class Metrics(Message, frozen=True):
    """What the nodes do and did; `window` is in minutes."""

    kind: Literal["snapshots", "trend", "summary", "history", "rebalancing", "scheduling", "prometheus"]
    node: Name = ""
    resource_type: Name = ""
    window: Annotated[int, Meta(ge=1, le=1_440)] | None = None
