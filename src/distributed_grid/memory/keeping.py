"""What a connection needs of its server."""

from __future__ import annotations

from typing import Protocol

from distributed_grid.memory.backing import Backing


class Keeping(Protocol):
    """What a connection needs of its server besides the shelf."""

    def secure(self, backing: Backing) -> bool:
        """Have somebody else know of this new copy, and hold it too; False where that is not possible just now."""

    def sever(self, nonce: bytes) -> None:
        """End the connection that was greeted with this nonce; where there is none, nothing happens."""
