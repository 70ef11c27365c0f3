"""`MemoryPool`: bytes and arrays in the memory of other nodes, for programs without an event loop, and for notebooks.

Rule 1. It holds nothing that matters: blocks are leases in the one ledger, and outlive the program until their time is
over. While the program lives, the pool renews what was allocated without a time of its own.
Rule 2. A key has its old value or its new one, whole: a new value gets the name when all of it is written.
Rule 3. What was begun and failed is freed at once; what was begun by a program that died ends within a minute.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from distributed_grid.client.memory.arguments import bytes_view, checked_name, seconds, whole
from distributed_grid.client.memory.mapping import EMPTY, PoolMapping, length_of
from distributed_grid.client.memory.renewals import Renewals
from distributed_grid.client.memory.staging import STAGE_SECONDS, StagedBlock
from distributed_grid.errors import BadInput, BlockLost, GridError, NotFound, Refused, Unreachable
from distributed_grid.memory.client.block_client import BlockClient

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Buffer

    from distributed_grid.client.memory.directory import BlockDirectoryClient
    from distributed_grid.client.placement_arguments import Span
    from distributed_grid.control.view_types import BlockRow, MemoryStats
    from distributed_grid.memory.client.arrays import RemoteArray

KEY_SECONDS = 86_400.0
"""How long a key lasts after it was set, or after the program that set it was last heard of."""
PATIENCE_SECONDS = 30.0
"""How long the node of a block may be away before that is an error."""
ID_LENGTH = 32
TRIES = 10


class MemoryPool(PoolMapping):
    """Allocates, reads, writes and frees blocks; safe from several threads, and inside a running event loop."""

    def __init__(self, desk: BlockDirectoryClient, *, compression: str = "auto") -> None:
        """`compression` is `auto` (where it makes a slow network faster), `off` or `lz4`."""
        self._desk = desk
        self._open_blocks = BlockClient(desk, compression=compression)
        self._session = uuid.uuid4().hex
        self._renewals = Renewals()
        self._process = os.getpid()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def by_name(self) -> MemoryPool:
        return self

    @property
    def _blocks(self) -> BlockClient:
        if self._closed:
            raise Refused("the memory pool is shut down")
        if os.getpid() != self._process:
            raise Refused("this memory pool belongs to the process that opened it; after a fork, open another")
        return self._open_blocks

    def connect(self) -> None:
        """Make sure that somebody answers, starting a control plane where none runs."""
        self._call("get_memory_stats")

    def close(self) -> None:
        """Let go; safe to call twice. Blocks stay until their time is over, but are renewed no more."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._process:
            self._renewals.stop()
            self._open_blocks.close()
            self._desk.close()

    def allocate(
        self,
        size: int,
        preferred_node: str | None = None,
        *,
        ttl: Span | None = None,
        copies: int = 1,
        name: str = "",
        meta: str = "",
    ) -> str:
        """The id of a new block of so many bytes, all zero.

        It lasts as long as this program and an hour longer, or exactly as long as `ttl` (seconds, or a timedelta)
        says. Raises Refused, with what keeps each node from lending.
        """
        return self._allocate(uuid.uuid4().hex, size, preferred_node, ttl=ttl, copies=copies, name=name, meta=meta)

    def _allocate(
        self,
        block_id: str,
        size: int,
        preferred_node: str | None,
        *,
        ttl: Span | None = None,
        copies: int = 1,
        name: str = "",
        meta: str = "",
    ) -> str:
        blocks = self._blocks
        found = self._call(
            "allocate_block",
            request_id=block_id,
            size=whole(size, "the size of a block"),
            preferred_node=preferred_node or "",
            copies=whole(copies, "the number of copies"),
            ttl_seconds=0.0 if ttl is None else seconds(ttl),
            session="" if ttl is not None else self._session,
            name=name,
            meta=meta,
        )
        blocks.add_location(found)
        if ttl is None:
            term = float(found["block"]["term_seconds"])
            self._renewals.keep(self._session, term / 3, partial(self._call, "renew_blocks", session=self._session))
        return block_id

    def deallocate(self, block_id: str) -> None:
        """Free a block; its bytes are gone. NotFound where there is none (any more)."""
        blocks = self._blocks
        found = self._call("free_block", block_id=block_id)
        blocks.forget(found["block"]["block_id"])

    def find(self, block_id: str = "", *, name: str = "") -> BlockRow:
        """What the grid knows of a block, by its id, any unique prefix, or its name.

        A node that is just coming back is waited for; Unreachable where it does not.
        """
        gives_up, pause = time.monotonic() + PATIENCE_SECONDS, 0.01
        while True:
            try:
                found = self._call("find_block", block_id=block_id, name=name)
                break
            except Unreachable:
                if time.monotonic() + pause > gives_up:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
        self._blocks.add_location(found)
        return cast("BlockRow", found["block"])

    def read(self, block_id: str, size: int | None = None, offset: int = 0) -> bytes:
        """So many bytes of a block, from an offset on; without a size all to its end."""
        if size is None:
            size = self.find(block_id)["size"] - whole(offset, "an offset")
        return self._blocks.read(self._full(block_id), whole(size, "the size of a read"), whole(offset, "an offset"))

    def read_into(self, block_id: str, buffer: Buffer, offset: int = 0) -> None:
        """Fill a buffer of one's own with bytes of a block."""
        self._blocks.read_into(self._full(block_id), bytes_view(buffer), whole(offset, "an offset"))

    def write(self, block_id: str, data: Buffer, offset: int = 0) -> None:
        """Write bytes into a block, from an offset on. When it returns, every copy has them."""
        self._blocks.write(self._full(block_id), bytes_view(data), whole(offset, "an offset"))

    def mapped(self, block_id: str) -> memoryview | None:
        """The block's memory itself, to read; None where it is on another machine."""
        return self._blocks.map(self._full(block_id))

    def list_blocks(self) -> list[BlockRow]:
        """Every block there is."""
        return cast("list[BlockRow]", self._call("list_blocks")["blocks"])

    def stats(self) -> MemoryStats:
        """How much of the pool is used and where, and what this program has moved."""
        return cast("MemoryStats", {**self._call("get_memory_stats"), "transfers": self._blocks.stats()})

    @contextlib.contextmanager
    def staged(self, size: int, preferred_node: str | None = None, *, copies: int = 1) -> Iterator[StagedBlock]:
        """A block to write and then to name; without a name it is freed in the end."""
        stage = StagedBlock(self._desk, self._blocks, uuid.uuid4().hex)
        try:
            self._allocate(stage.block_id, size, preferred_node, ttl=STAGE_SECONDS, copies=copies)
            self._renewals.keep(stage.block_id, STAGE_SECONDS / 3, stage.prolong)
            yield stage
        finally:
            self._renewals.drop(stage.block_id)
            stage.end()

    def store(
        self,
        name: str,
        data: Buffer,
        preferred_node: str | None = None,
        *,
        ttl: Span | None = None,
        copies: int = 1,
        meta: str = "",
    ) -> str:
        """Keep data under a name, and return its block's id; what went by the name before is freed, all at once.

        It lasts as long as this program and a day longer, or exactly as long as `ttl` says.
        """
        checked_name(name)
        view = bytes_view(data)
        with self.staged(view.nbytes or 1, preferred_node, copies=copies) as stage:
            if view.nbytes:
                stage.write(view)
            stage.name(
                name,
                ttl_seconds=KEY_SECONDS if ttl is None else seconds(ttl),
                meta=meta or ("" if view.nbytes else EMPTY),
            )
        self._renewals.drop(f"key {name}")
        if ttl is None:
            again = partial(self._call, "name_block", block_id=stage.block_id, name=name, ttl_seconds=KEY_SECONDS)
            self._renewals.keep(f"key {name}", KEY_SECONDS / 3, again)
        return stage.block_id

    def retrieve(self, name: str) -> bytes:
        """The data that goes by a name; NotFound where none does."""
        checked_name(name)
        for left in reversed(range(TRIES)):
            found = self.find(name=name)
            try:
                return self._blocks.read(found["block_id"], length_of(found))
            except NotFound:  # replaced just now: the next look finds the new one
                if not left:
                    raise
            finally:  # it is looked up again anyway, and a name has another block each time it is set
                self._blocks.forget(found["block_id"])
        raise AssertionError("a loop that ends")

    def remove(self, name: str) -> None:
        """Free what goes by a name; NotFound where nothing does."""
        checked_name(name)
        self._renewals.drop(f"key {name}")
        found = self._call("free_block", name=name)
        self._blocks.forget(found["block"]["block_id"])

    def has(self, name: str) -> bool:
        """Whether something goes by a name; also where its bytes are lost."""
        if not name:
            return False
        try:
            self.find(name=name)
        except NotFound:
            return False
        except BlockLost:
            return True
        return True

    def names(self) -> list[str]:
        """Every name that something goes by."""
        return [block["name"] for block in self.list_blocks() if block["name"]]

    def put_array(
        self,
        array: ArrayLike,
        preferred_node: str | None = None,
        *,
        ttl: Span | None = None,
        copies: int = 1,
        name: str = "",
    ) -> str:
        """Store an array, and return its block's id; shape and type are noted with it. Objects are refused."""
        import numpy as np

        from distributed_grid.memory.client.arrays import bytes_of, noted

        whole_array = np.asarray(array, order="C")
        meta, data = noted(whole_array), bytes_of(whole_array)
        if name:
            return self.store(name, data.data, preferred_node, ttl=ttl, copies=copies, meta=meta)
        block_id = self.allocate(data.size or 1, preferred_node, ttl=ttl, copies=copies, meta=meta)
        try:
            if data.size:
                self.write(block_id, data.data)
        except BaseException:
            with contextlib.suppress(GridError, OSError):
                self.deallocate(block_id)
            raise
        return block_id

    def get_array(self, block_id: str = "", *, name: str = "") -> NDArray[Any]:
        """The array in a block, whole, as one's own."""
        import numpy as np

        return np.asarray(self.array(block_id, name=name))

    def array(self, block_id: str = "", *, name: str = "") -> RemoteArray:
        """The array in a block, to be read and written where it is, part by part."""
        from distributed_grid.memory.client.arrays import RemoteArray, shape_and_type

        found = self.find(block_id, name=name)
        remote = RemoteArray(self._blocks, found["block_id"], *shape_and_type(found["meta"], found["block_id"]))
        if remote.nbytes > found["size"]:
            raise BadInput(
                f"block {found['block_id']} has {found['size']:,} bytes, its array would have {remote.nbytes:,}"
            )
        return remote

    def _full(self, block_id: str) -> str:
        """A whole id, where only the beginning of one was given."""
        return block_id if len(block_id) == ID_LENGTH else self.find(block_id)["block_id"]

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self._closed:
            raise Refused("the memory pool is shut down")
        return self._desk.call(op, **arguments)
