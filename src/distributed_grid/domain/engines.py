"""Engines that carry leases besides the grid itself (a Ray cluster), and the bindings of leases to them.

In Ray a binding is a placement group, named for the lease and a fence. It is in the ledger before its group is made,
and leaves when its group is known to be gone. Of a lease's bindings only the newest is to be made, only while the
lease holds, and only when all older ones are gone, so that a lease is never held twice.
"""

from __future__ import annotations

import re
from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.rows import Row

SSH, ATTACHED = "ssh", "attached"
"""Modes of an engine: started by the grid over SSH, or run by somebody else."""


class EngineResources(Struct, frozen=True):
    """Resources of a node by an engine's own count; a GPU of an engine has no number."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0


class EngineCapacity(Row, frozen=True):
    """Resources of a node that an engine leaves to the grid: free ones and those of its bindings. Never stored."""

    kind: ClassVar[str] = "engine_capacity"
    is_volatile: ClassVar[bool] = True

    node: str
    room: EngineResources
    gone: bool = False

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return self.gone


class EngineRow(Row, frozen=True, kw_only=True):
    """An engine that carries leases; it stays registered over restarts of the control plane, until it is removed."""

    kind: ClassVar[str] = "engine"

    name: str
    mode: str
    address: str  # of its head
    namespace: str = "grid"
    session: str = ""  # the engine's own name of its present life; another one has forgotten all groups
    nodes: tuple[str, ...] = ()  # on which the grid itself keeps it running (mode `ssh`)
    gone: bool = False

    @property
    def key(self) -> str:
        return self.name

    @property
    def is_over(self) -> bool:
        return self.gone


GROUP_PREFIX = "grid-boost-"
_GROUP_NAME = re.compile(f"{GROUP_PREFIX}(.{{1,200}})-([0-9]{{1,19}})")


class Binding(Row, frozen=True, kw_only=True):
    """A lease's reservation on a node of an engine."""

    kind: ClassVar[str] = "binding"

    lease_id: str
    fence: int
    node: str
    place: str  # the engine's own name of that node
    made_at_ms: int = 0
    bound_at_ms: int = 0  # time at which the engine reported it made; 0: not yet
    again: bool = False  # the lease was bound before, so this one waits however long the engine is away
    dropped: bool = False  # its place is gone: it is not wanted any more
    gone: bool = False
    term_ms: int = 0  # end of the lease that the engine has acknowledged, and removes the group at; 0: none
    in_use: bool = False  # a process is in the group, `was_used`: was; for automatic leases only
    was_used: bool = False

    @property
    def key(self) -> str:
        return f"{self.lease_id}-{self.fence}"

    @property
    def group(self) -> str:
        return GROUP_PREFIX + self.key

    @property
    def is_over(self) -> bool:
        return self.gone


def parse_group_name(group: str) -> tuple[str, int] | None:
    """The lease and the fence of a group by its name; None for a group of others."""
    parts = _GROUP_NAME.fullmatch(group)
    return (parts[1], int(parts[2])) if parts is not None else None
