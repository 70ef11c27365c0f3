"""Automatic offloading between two looks: what is remembered of each node, and which nodes are degraded.

A watch is never stored: what lasts are moves, jobs and degraded nodes.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

MAX_CONSIDERED = 20
"""Jobs of a node of which it is remembered why they were moved or left."""


class Considered(Struct, frozen=True):
    """A job that was looked at, and why it was moved or left."""

    job: str
    reason: str


class OffloadWatch(Struct, frozen=True):
    """A node between two looks: since when each resource is above its threshold (or works so much harder than others:
    `spread`), since when its memory is below the low mark again, and what the last look decided, and why.

    `moved_at_ms` is when something last left it or came to it by itself. `tried` are the jobs that it was tried to
    move within the last hour, with the time.
    """

    kind: ClassVar[str] = "offload_watch"

    node: str
    memory_since_ms: int | None = None
    cpu_since_ms: int | None = None
    gpu_since_ms: int | None = None
    spread_since_ms: int | None = None
    low_since_ms: int | None = None
    moved_at_ms: int = 0
    tried: tuple[tuple[str, int], ...] = ()
    looked_at_ms: int = 0
    reason: str = ""
    considered: tuple[Considered, ...] = ()

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return False

    def since_ms(self, cause: str) -> int | None:
        """Since when a resource, or the distance to the least loaded node, has been too high."""
        causes = {"memory": self.memory_since_ms, "cpu": self.cpu_since_ms, "gpu": self.gpu_since_ms}
        return causes.get(cause, self.spread_since_ms)


class DegradedNode(Struct, frozen=True):
    """A node that is short of memory while nothing there can go elsewhere: it gets no new work, its `low` jobs stand
    still, and blocks of the memory pool go to disk, until it is `restored`."""

    kind: ClassVar[str] = "degraded_node"

    node: str
    since_ms: int
    why: str
    restored: bool = False

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return self.restored
