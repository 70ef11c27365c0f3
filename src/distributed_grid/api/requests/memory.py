"""Blocks of the memory pool: allocated, found, named, renewed, freed."""

from __future__ import annotations

from distributed_grid.api.requests.message import Id, Message, Name, Seconds, Text


class MemAllocate(Message, frozen=True):
    """Bytes in the memory of other nodes; `request_id` becomes the block's id.

    Without a ttl it lasts an hour, and with a session another one whenever that is renewed.
    """

    request_id: Id
    size: int
    preferred_node: Name = ""
    copies: int = 1
    ttl_seconds: Seconds = 0.0
    session: Name = ""
    name: Text = ""
    meta: Text = ""


class MemFind(Message, frozen=True):
    """Where a block is, and what lets its user read and write it: by its id, any unique prefix, or its name."""

    block_id: Name = ""
    name: Text = ""


class MemFree(Message, frozen=True):
    """Nobody wants a block any more."""

    block_id: Name = ""
    name: Text = ""


class MemName(Message, frozen=True):
    """A block goes by a name from now on, and the one that did is freed; with a ttl its time is fixed."""

    block_id: Name
    name: Text
    meta: Text = ""
    ttl_seconds: Seconds = 0.0


class MemRenew(Message, frozen=True):
    """The program of a session lives."""

    session: Name


class MemList(Message, frozen=True):
    """Every block."""


class MemStats(Message, frozen=True):
    """How much of the pool is used, node by node."""
