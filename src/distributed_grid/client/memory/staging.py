"""A block on its way to its name."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, cast

from distributed_grid.client.memory.arguments import bytes_view
from distributed_grid.errors import GridError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from distributed_grid.client.memory.directory import BlockDirectoryClient
    from distributed_grid.control.view_types import BlockRow
    from distributed_grid.memory.client.block_client import BlockClient

STAGE_SECONDS = 60.0
"""How long an unfinished block lasts once nobody renews it."""


class StagedBlock:
    """A block that is still being written: whoever stops halfway leaves nothing behind."""

    def __init__(self, desk: BlockDirectoryClient, blocks: BlockClient, block_id: str) -> None:
        self.block_id = block_id
        self._desk = desk
        self._blocks = blocks
        self._lock = threading.Lock()
        self._is_named = False

    def write(self, data: Buffer, offset: int = 0) -> None:
        """Write a part of it."""
        self._blocks.write(self.block_id, bytes_view(data), offset)

    def prolong(self) -> None:
        """Let it last a while longer, as long as it has no name."""
        with self._lock:
            if not self._is_named:
                self._desk.call("name_block", block_id=self.block_id, name="", ttl_seconds=STAGE_SECONDS)

    def name(self, name: str, *, ttl_seconds: float, meta: str = "") -> BlockRow:
        """Give it its name and its time; what went by the name before is freed."""
        with self._lock:
            self._is_named = True  # from here on it may be the only one that goes by the name: never free it
            found = self._desk.call("name_block", block_id=self.block_id, name=name, meta=meta, ttl_seconds=ttl_seconds)
        return cast("BlockRow", found["block"])

    def end(self) -> None:
        """Free it, unless it has got its name; whoever wants it from now on finds it by that."""
        self._blocks.forget(self.block_id)
        if not self._is_named:
            with contextlib.suppress(GridError, OSError):  # never allocated, or nobody answers: its time ends it
                self._desk.call("free_block", block_id=self.block_id)
