"""Engines that carry leases besides the grid itself (a Ray cluster), and the bindings of leases to them.

In Ray a binding is a placement group, named for the lease and a fence. It is in the ledger before its group is made,
and leaves when its group is known to be gone. Of a lease's bindings only the newest is to be made, only while the
lease holds, and only when all older ones are gone, so that a lease is never held twice.
"""

from __future__ import annotations

import re
from typing import ClassVar

from msgspec import Struct

SSH, ATTACHED = "ssh", "attached"
"""How the grid came to an engine: it started it by SSH, or took one that somebody else runs."""


class EngineResources(Struct, frozen=True):
    """So much of a node, by an engine's own count; a GPU of an engine has no number."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0


class EngineCapacity(Struct, frozen=True):
    """What an engine leaves us of a node: what is free there and what we have of it. Never stored."""

    kind: ClassVar[str] = "engine_capacity"

    node: str
    room: EngineResources
    gone: bool = False

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return self.gone


class EngineRow(Struct, frozen=True):
    """An engine that carries leases; it stays registered over restarts of the control plane, until it is removed.

    `address` is where its head is. `nodes` are those on which the grid itself has to keep it running (mode `ssh`).
    `session` is the engine's own name of its present life, where it is known: another one has forgotten everything.
    """

    kind: ClassVar[str] = "engine"

    name: str
    mode: str
    address: str
    namespace: str = "grid"
    session: str = ""
    nodes: tuple[str, ...] = ()
    gone: bool = False

    @property
    def key(self) -> str:
        return self.name

    @property
    def is_over(self) -> bool:
        return self.gone


GROUP_PREFIX = "grid-boost-"
_GROUP_NAME = re.compile(f"{GROUP_PREFIX}(.{{1,200}})-([0-9]{{1,19}})")


class Binding(Struct, frozen=True):
    """A lease's reservation on a node of an engine; `place` is the engine's own name of that node.

    `bound_at_ms` is when the engine said that it is made (0: not yet). `again`: the lease was bound before, so this
    one waits however long the engine is away. `dropped`: its place is gone, and so it is not wanted any more.
    `term_ms` is the end of the lease that the engine has acknowledged (0: none); by that it removes the group itself.
    `in_use`: something runs in the group, `was_used`: something did; both are kept for automatic leases only.
    """

    kind: ClassVar[str] = "binding"

    lease_id: str
    fence: int
    node: str
    place: str
    made_at_ms: int = 0
    bound_at_ms: int = 0
    again: bool = False
    dropped: bool = False
    gone: bool = False
    term_ms: int = 0
    in_use: bool = False
    was_used: bool = False

    @property
    def key(self) -> str:
        return f"{self.lease_id}-{self.fence}"

    @property
    def group(self) -> str:
        """The name of its group in the engine."""
        return GROUP_PREFIX + self.key

    @property
    def is_over(self) -> bool:
        return self.gone


def parse_group_name(group: str) -> tuple[str, int] | None:
    """The lease and the fence that a group's name tells; None where it is not one of ours."""
    found = _GROUP_NAME.fullmatch(group)
    return (found[1], int(found[2])) if found is not None else None
