"""A binding: what stands for a lease in an engine. In Ray it is a placement group, named for the lease and a fence.

Rule 1: a binding is in the ledger before its group is made, and leaves when its group is known to be gone.
Rule 2: of a lease's bindings only the newest is wanted, and only while the lease holds. A new one is made good when
        all older ones are gone, so a lease is never held twice.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

GROUP_PREFIX = "grid-boost-"


class Binding(Struct, frozen=True):
    """A lease's reservation on a node of an engine; `place` is the engine's own name of that node.

    `bound_at_ms` is when the engine said that it is made (0: not yet). `again`: the lease was bound before, so this
    one waits however long the engine is away. `dropped`: its place is gone, and so it is not wanted any more.
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


def parsed(group: str) -> tuple[str, int] | None:
    """The lease and the fence that a group's name tells; None where it is not one of ours."""
    lease_id, _, fence = group.removeprefix(GROUP_PREFIX).rpartition("-")
    ours = group.startswith(GROUP_PREFIX) and lease_id and fence.isdecimal()
    return (lease_id, int(fence)) if ours else None
