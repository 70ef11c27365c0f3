"""Resources of one node for another, for a while."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from distributed_grid.api.requests.message import Id, Message, Name, Seconds


class Boost(Message, frozen=True):
    """Resources of another node for a target node, for a while; `source` is the only one that may lend them."""

    request_id: Id
    target: Name
    resource_type: Name
    amount: float
    priority: Name = "medium"
    duration_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 3600.0
    source: Name = ""
    wait_seconds: Seconds = 0.0
    dry_run: bool = False


class Boosts(Message, frozen=True):
    """The boosts that hold something, for one node or for all."""

    node: Name = ""


class OneBoost(Message, frozen=True):
    """One boost, by its id or any unique prefix."""

    boost_id: Name


class ReleaseBoost(Message, frozen=True):
    """Give a boost back before its time is over."""

    boost_id: Name


class ExtendBoost(Message, frozen=True):
    """More time for a boost, counted from its end."""

    boost_id: Name
    seconds: Seconds
