"""Resources to hold: asked for, extended, given back."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from distributed_grid.api.requests.message import Id, Message, Name, PlacementOptions, Seconds


class Ask(PlacementOptions, frozen=True):
    """Resources to hold, without a command; a gang is so many leases on as many nodes, all or nothing.

    With `again` the id is a name: where its lease is over, a new one is made instead of telling the old one's end.
    """

    request_id: Id
    resource_type: Name
    amount: float
    priority: Name = "medium"
    prefer: tuple[Name, ...] = ()
    require: tuple[Name, ...] = ()
    wait_seconds: Seconds = 300.0
    duration_seconds: Seconds = 0.0
    target: Name = ""
    gang: Annotated[int, Meta(ge=1, le=1000)] = 1
    again: bool = False


class Release(Message, frozen=True):
    """Give a lease back; an `exact` id is not taken for the beginning of a longer one."""

    allocation_id: Name
    exact: bool = False


class Extend(Message, frozen=True):
    """More time for a lease."""

    allocation_id: Name
    seconds: Seconds
