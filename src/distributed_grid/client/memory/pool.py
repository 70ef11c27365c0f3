"""`MemoryPool`: bytes and arrays in the memory of other nodes, for programs without an event loop, and for notebooks.

It has no state that matters: blocks are leases in the ledger, and outlive the program until they expire. While the
program runs, the pool renews blocks that were allocated without a time of their own. A key has its old value or its new
one, whole: a new value gets the name when all of it is written. A block whose writing failed is freed at once; one of a
program that died ends within a minute.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from distributed_grid.client.conversation import JsonObject, as_object, as_objects
from distributed_grid.client.memory.directory import (
    EMPTY_META,
    length_of,
    packed_length,
    packed_meta,
    preference_note,
)
from distributed_grid.client.memory.lifetimes import STAGE_SECONDS, Renewals, StagedBlock
from distributed_grid.client.memory.packed_values import PackedLayout, PackedValue
from distributed_grid.errors import BadInput, BlockLost, GridError, NotFound, Refused, Unreachable
from distributed_grid.memory.client.block_client import BlockClient

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Buffer

    from distributed_grid.api.answers.memory import BlockRow
    from distributed_grid.client.memory.directory import BlockDirectoryClient
    from distributed_grid.memory.client.arrays import RemoteArray
    from distributed_grid.quantities import Span


KEY_SECONDS = 86_400.0
"""Lifetime of a key after it was set, or renewed by the program that set it."""
MAX_INDEXES = 64
"""Compressed values whose index is kept."""
FIND_SECONDS = 30.0
"""Wait for the node of a block that is away, before that is an error."""
ID_LENGTH = 32
MAX_TRIES = 10
log = logging.getLogger(__name__)


class PoolMapping(MutableMapping[str, bytes]):
    """A pool by its names: `pool["key"] = data`, `pool["key"]`, `del pool["key"]`, `"key" in pool`.

    A pool is equal to itself alone, and true even where it is empty.
    """

    @property
    @abstractmethod
    def by_name(self) -> MemoryPool:
        """The pool that stores the values."""

    def __getitem__(self, name: str) -> bytes:
        try:
            return self.by_name.retrieve(name)
        except NotFound:
            raise KeyError(name) from None

    def __setitem__(self, name: str, data: Any) -> None:
        self.by_name.store(name, data)

    def __delitem__(self, name: str) -> None:
        try:
            self.by_name.remove(name)
        except NotFound:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.by_name.has(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name.names())

    def __len__(self) -> int:
        return len(self.by_name.names())

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class MemoryPool(PoolMapping):
    """Allocates, reads, writes and frees blocks; safe from several threads, and inside a running event loop."""

    def __init__(self, directory: BlockDirectoryClient, *, compression: str = "auto") -> None:
        """`compression` is `auto` (where it makes a slow network faster), `off` or `lz4`: every transfer, and the
        values of keys where they are stored."""
        self._directory = directory
        self._open_blocks = BlockClient(directory, compression=compression)
        self._packs_values = compression == "lz4"
        self._packed: dict[str, PackedValue] = {}
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

    def connected(self) -> Self:
        """The pool itself, once the control plane answers, which is started where none runs; closed on an error."""
        try:
            self._asked.get_memory_stats()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Close the pool; safe to call twice. Blocks stay until they expire, but are not renewed any more."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._process:
            self._renewals.stop()
            self._open_blocks.close()
            self._directory.close()

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
        """The id of a new block of `size` bytes, all zero.

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
        answer = self._asked.allocate_block(
            request_id=block_id,
            size=_integer(size, "the size of a block"),
            preferred_node=preferred_node or "",
            copies=_integer(copies, "the number of copies"),
            ttl_seconds=0.0 if ttl is None else _seconds(ttl),
            session="" if ttl is not None else self._session,
            name=name,
            meta=meta,
        )
        blocks.add_location(cast("JsonObject", answer))
        note = preference_note(answer.block, preferred_node or "")
        if note:
            log.warning("%s", note)
        if ttl is None:
            again = partial(self._directory.renew_blocks, session=self._session)
            self._renewals.add(self._session, answer.block.term_seconds / 3, again)
        return block_id

    def deallocate(self, block_id: str) -> None:
        """Free a block; its bytes are gone. NotFound where there is none (any more)."""
        blocks = self._blocks
        blocks.forget(self._asked.free_block(block_id=block_id).block.block_id)

    def find(self, block_id: str = "", *, name: str = "") -> JsonObject:
        """The grid's record of a block, by its id, any unique prefix, or its name.

        A node that is just coming back is waited for; Unreachable where it does not.
        """
        return cast("JsonObject", self.look_up(block_id, name=name))

    def look_up(self, block_id: str = "", *, name: str = "") -> BlockRow:
        """The same record, with its fields as attributes."""
        deadline, pause = time.monotonic() + FIND_SECONDS, 0.01
        while True:
            try:
                answer = self._asked.find_block(block_id=block_id, name=name)
                break
            except Unreachable:
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
        self._blocks.add_location(cast("JsonObject", answer))
        return answer.block

    def read(self, block_id: str, size: int | None = None, offset: int = 0) -> bytes:
        """`size` bytes of a block, from an offset on; without a size all to its end."""
        if size is None:
            size = length_of(self.look_up(block_id)) - _integer(offset, "an offset")
        size, offset = _integer(size, "the size of a read"), _integer(offset, "an offset")
        full_id = self._full_id(block_id)
        packed = self._packed_value(full_id) if size > 0 else None
        return self._blocks.read(full_id, size, offset) if packed is None else packed.read(size, offset)

    def read_into(self, block_id: str, buffer: Buffer, offset: int = 0) -> None:
        """Fill a buffer with bytes of a block."""
        view, offset, full_id = _view_of(buffer), _integer(offset, "an offset"), self._full_id(block_id)
        packed = self._packed_value(full_id)
        if packed is None or view.readonly:
            self._blocks.read_into(full_id, view, offset)
        else:
            packed.read_into(view, offset)

    def write(self, block_id: str, data: Buffer, offset: int = 0) -> None:
        """Write bytes into a block, from an offset on. When it returns, every copy has them. Refused for the value of a
        key that is compressed where it is stored: it is replaced as a whole."""
        full_id = self._full_id(block_id)
        if self._packed_value(full_id) is not None:
            raise Refused(f"block {full_id} is a compressed value, which cannot be changed in place: store it again")
        self._blocks.write(full_id, _view_of(data), _integer(offset, "an offset"))

    def mapped(self, block_id: str) -> memoryview | None:
        """The block's memory itself, to read; None where it is on another machine, or compressed."""
        full_id = self._full_id(block_id)
        return self._blocks.map(full_id) if self._packed_value(full_id) is None else None

    def list_blocks(self) -> list[JsonObject]:
        """Every block there is."""
        return as_objects(self._asked.every_block())

    def stats(self) -> JsonObject:
        """How much of the pool is used and where, and what this program has moved."""
        return JsonObject({**as_object(self._asked.get_memory_stats()), "transfers": self._blocks.stats()})

    @contextlib.contextmanager
    def staged(self, size: int, preferred_node: str | None = None, *, copies: int = 1) -> Iterator[StagedBlock]:
        """A block to write and then to name; freed on exit where it was not named."""
        stage = StagedBlock(self._directory, self._blocks, uuid.uuid4().hex)
        try:
            self._allocate(stage.block_id, size, preferred_node, ttl=STAGE_SECONDS, copies=copies)
            self._renewals.add(stage.block_id, STAGE_SECONDS / 3, stage.renew)
            yield stage
        finally:
            self._renewals.remove(stage.block_id)
            stage.close()

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
        """Store data under a name, and return its block's id; the block that had the name is freed, in one step.

        It lasts as long as this program and a day longer, or exactly as long as `ttl` says. With `compression="lz4"`
        the block holds the data compressed, where that makes them smaller; data with a meta are stored as they are.
        """
        check_name(name)
        view = _view_of(data)
        layout = PackedLayout(view) if self._packs_values and view.nbytes and not meta else None
        if layout is not None and not layout.pays:
            layout = None
        block_bytes = layout.block_bytes if layout is not None else view.nbytes or 1
        with self.staged(block_bytes, preferred_node, copies=copies) as stage:
            for offset, piece in layout.pieces() if layout is not None else [(0, view)] if view.nbytes else []:
                stage.write(piece, offset)
            if layout is not None:
                meta = packed_meta(view.nbytes)
            elif not view.nbytes:
                meta = meta or EMPTY_META
            stage.name(name, ttl_seconds=KEY_SECONDS if ttl is None else _seconds(ttl), meta=meta)
        self._renewals.remove(f"key {name}")
        if ttl is None:
            again = partial(self._directory.name_block, block_id=stage.block_id, name=name, ttl_seconds=KEY_SECONDS)
            self._renewals.add(f"key {name}", KEY_SECONDS / 3, again)
        return stage.block_id

    def retrieve(self, name: str) -> bytes:
        """The data stored under a name; NotFound where there is none."""
        check_name(name)
        for left in reversed(range(MAX_TRIES)):
            block = self.look_up(name=name)
            try:
                return self.read(block.block_id, length_of(block))
            except NotFound:  # replaced just now: the next try finds the new one
                if not left:
                    raise
            finally:  # it is looked up again anyway, and a name has another block each time it is set
                self._blocks.forget(block.block_id)
                self._packed.pop(block.block_id, None)
        raise AssertionError("unreachable")

    def remove(self, name: str) -> None:
        """Free the block of this name; NotFound where there is none."""
        check_name(name)
        self._renewals.remove(f"key {name}")
        self._blocks.forget(self._asked.free_block(name=name).block.block_id)

    def has(self, name: str) -> bool:
        """Whether a block has this name; also where its bytes are lost."""
        if not name:
            return False
        try:
            self.look_up(name=name)
        except NotFound:
            return False
        except BlockLost:
            return True
        return True

    def names(self) -> list[str]:
        """The names of all blocks that have one."""
        return [block.name for block in self._asked.every_block() if block.name]

    def put_array(
        self,
        array: ArrayLike,
        preferred_node: str | None = None,
        *,
        ttl: Span | None = None,
        copies: int = 1,
        name: str = "",
    ) -> str:
        """Store an array with its shape and type, and return its block's id. Python objects are refused."""
        import numpy as np

        from distributed_grid.memory.client.arrays import array_meta, bytes_of

        contiguous = np.asarray(array, order="C")
        meta, data = array_meta(contiguous), bytes_of(contiguous)
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
        """The whole array in a block, as a NumPy array."""
        import numpy as np

        return np.asarray(self.array(block_id, name=name))

    def array(self, block_id: str = "", *, name: str = "") -> RemoteArray:
        """The array in a block, to be read and written where it is, part by part."""
        from distributed_grid.memory.client.arrays import RemoteArray, parse_array_meta

        block = self.look_up(block_id, name=name)
        remote = RemoteArray(self._blocks, block.block_id, *parse_array_meta(block.meta, block.block_id))
        if remote.nbytes > block.size:
            raise BadInput(f"block {block.block_id} has {block.size:,} bytes, its array would have {remote.nbytes:,}")
        return remote

    def _packed_value(self, block_id: str) -> PackedValue | None:
        """The compressed value in a block; None where its bytes are plain."""
        block_bytes, meta = self._blocks.record(block_id)
        length = packed_length(meta)
        if not length:
            return None
        known = self._packed.get(block_id)
        if known is None:
            if len(self._packed) >= MAX_INDEXES:
                self._packed.clear()
            known = self._packed[block_id] = PackedValue(self._blocks, block_id, block_bytes, length)
        return known

    def _full_id(self, block_id: str) -> str:
        """The whole id, where a prefix may have been given."""
        return block_id if len(block_id) == ID_LENGTH else self.look_up(block_id).block_id

    @property
    def _asked(self) -> BlockDirectoryClient:
        """The directory, for a pool that is open."""
        if self._closed:
            raise Refused("the memory pool is shut down")
        return self._directory


def check_name(name: str) -> str:
    """The name; BadInput where it cannot be one."""
    if not name or type(name) is not str:
        raise BadInput(f"a key is a text of at least one letter, not {name!r}")
    return name


def _view_of(data: Buffer) -> memoryview:
    """The bytes of any contiguous buffer, without a copy."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError):
        raise BadInput(f"contiguous bytes can be stored, and not this {type(data).__name__}; see put_array") from None


def _integer(number: int, what: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise BadInput(f"{what} is a whole number of bytes, not {number!r}") from None


def _seconds(ttl: Span) -> float:
    from distributed_grid.client.placement_arguments import positive_seconds

    return positive_seconds(ttl, "the time of a block")
