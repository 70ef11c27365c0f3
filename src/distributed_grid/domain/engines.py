"""An engine that is to carry leases besides the grid itself: a Ray cluster, started by the grid or taken as it runs."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

SSH, ATTACHED = "ssh", "attached"
"""How the grid came to an engine: it started it by SSH, or took one that somebody else runs."""


class Room(Struct, frozen=True):
    """So much of a node, by an engine's own count; a GPU of an engine has no number."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0


class Stock(Struct, frozen=True):
    """What an engine leaves us of a node: what is free there and what we have of it. Never stored."""

    kind: ClassVar[str] = "stock"

    node: str
    room: Room
    gone: bool = False

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return self.gone


class EngineRow(Struct, frozen=True):
    """An engine that is wanted; it stays wanted over restarts of the control plane, until it is given up.

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
    given_up: bool = False

    @property
    def key(self) -> str:
        return self.name

    @property
    def is_over(self) -> bool:
        return self.given_up
