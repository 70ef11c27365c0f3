"""An offer: what a node will lend now, and until when. Never stored: it comes from fresh measurements only."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.resources import Capacity


class Offer(Struct, frozen=True):
    """What a node will lend in all (what is lent already included), with the reasons for what it keeps."""

    kind: ClassVar[str] = "offer"

    node: str
    generation: int
    lends: Capacity
    made_at_ms: int
    expires_at_ms: int
    keeps: tuple[str, ...] = ()
    withdrawn: bool = False

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return self.withdrawn
