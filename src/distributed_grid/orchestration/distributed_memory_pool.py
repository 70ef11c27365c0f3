"""`DistributedMemoryPool`: other machines' memory, used like one's own; under the names the memory guide uses.

It wraps `memory_pool.MemoryPool`, which does all of it, for programs with an event loop: blocking work goes to threads.
`open_pool` is the same without an event loop. Both work on nodes too, where little is installed: what reads configs is
imported only by those who have one, and NumPy where arrays are used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from distributed_grid.client.async_client import GridSession
from distributed_grid.client.memory.directory import memory_desk
from distributed_grid.client.memory.mapping import PoolMapping
from distributed_grid.client.memory.pool import MemoryPool
from distributed_grid.client.memory.threads import BlockingWorkers
from distributed_grid.errors import Refused

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Buffer

    from distributed_grid.client.placement_arguments import Span
    from distributed_grid.config import ClusterConfig
    from distributed_grid.control.view_types import BlockRow, MemoryStats
    from distributed_grid.memory.client.arrays import RemoteArray

__all__ = ["DistributedMemoryPool", "MemoryPool", "open_pool"]

T = TypeVar("T")


def open_pool(
    config: ClusterConfig | None = None,
    *,
    state_dir: str | os.PathLike[str] | None = None,
    compression: str = "auto",
) -> MemoryPool:
    """A pool for programs without an event loop and for notebooks, connected; `with open_pool() as pool` closes it."""
    pool = MemoryPool(memory_desk(config, state_dir), compression=compression)
    try:
        pool.connect()
    except BaseException:
        pool.close()
        raise
    return pool


class DistributedMemoryPool(GridSession, PoolMapping):
    """Allocates, reads, writes and frees blocks of memory, wherever they are.

    As a mapping (`pool["key"]`) it blocks the event loop for as long as that takes; `store` and `retrieve` do not.
    A task that is cancelled stops waiting; a write that has begun goes on, an allocation is undone.
    """

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        compression: str = "auto",
    ) -> None:
        super().__init__(cluster_config, ssh_manager, state_dir=state_dir)
        self._make = partial(open_pool, cluster_config, state_dir=state_dir, compression=compression)
        self._pool: MemoryPool | None = None
        self._workers = BlockingWorkers()
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Attach to the grid, starting a control plane where none runs. Safe to call twice."""
        async with self._starting:
            if self._pool is None:
                self._workers = workers = BlockingWorkers()
                try:
                    self._pool = await workers.run(self._make, MemoryPool.close)
                except BaseException:
                    await workers.stop()
                    raise

    async def stop(self) -> None:
        """Let go, once what goes on is done; safe to call twice.

        Blocks stay until their time is over (an hour where nothing else was said), but are renewed no more.
        """
        pool, self._pool = self._pool, None
        await self._workers.stop()
        if pool is not None:
            pool.close()

    async def initialize(self) -> None:
        """As `start`."""
        await self.start()

    async def shutdown(self) -> None:
        """As `stop`."""
        await self.stop()

    async def allocate(
        self,
        size: int,
        preferred_node: str | None = None,
        *,
        ttl: Span | None = None,
        copies: int = 1,
        name: str = "",
    ) -> str:
        """The id of a new block of so many bytes, all zero.

        It lasts as long as this program and an hour longer, or exactly as long as `ttl` (seconds, or a timedelta)
        says. Raises Refused, with what keeps each node from lending.
        """
        pool = self.by_name
        ask = partial(pool.allocate, size, preferred_node, ttl=ttl, copies=copies, name=name)
        return await self._run(ask, pool.deallocate)

    async def write(self, block_id: str, data: Buffer, offset: int = 0) -> None:
        """Write bytes into a block, from an offset on. When it returns, every copy has them."""
        await self._run(partial(self.by_name.write, block_id, data, offset))

    async def read(self, block_id: str, size: int | None = None, offset: int = 0) -> bytes:
        """So many bytes of a block, from an offset on; without a size all to its end."""
        return await self._run(partial(self.by_name.read, block_id, size, offset))

    async def read_into(self, block_id: str, buffer: Buffer, offset: int = 0) -> None:
        """Fill a buffer of one's own with bytes of a block."""
        await self._run(partial(self.by_name.read_into, block_id, buffer, offset))

    async def deallocate(self, block_id: str) -> None:
        """Free a block; its bytes are gone. NotFound where there is none (any more)."""
        await self._run(partial(self.by_name.deallocate, block_id))

    async def store(
        self, name: str, data: Buffer, preferred_node: str | None = None, *, ttl: Span | None = None, copies: int = 1
    ) -> str:
        """Keep data under a name, and return its block's id; what went by the name before is freed, all at once.

        It lasts as long as this program and a day longer, or exactly as long as `ttl` says.
        """
        return await self._run(partial(self.by_name.store, name, data, preferred_node, ttl=ttl, copies=copies))

    async def retrieve(self, name: str) -> bytes:
        """The data that goes by a name; NotFound where none does."""
        return await self._run(partial(self.by_name.retrieve, name))

    async def put_array(
        self,
        array: ArrayLike,
        preferred_node: str | None = None,
        *,
        ttl: Span | None = None,
        copies: int = 1,
        name: str = "",
    ) -> str:
        """Store an array, and return its block's id; shape and type are noted with it. Objects are refused."""
        pool = self.by_name
        put = partial(pool.put_array, array, preferred_node, ttl=ttl, copies=copies, name=name)
        return await self._run(put, None if name else pool.deallocate)

    async def get_array(self, block_id: str = "", *, name: str = "") -> NDArray[Any]:
        """The array in a block, whole, as one's own."""
        return await self._run(partial(self.by_name.get_array, block_id, name=name))

    async def array(self, block_id: str = "", *, name: str = "") -> RemoteArray:
        """The array in a block, to be read and written where it is; indexing it blocks until the bytes are there."""
        return await self._run(partial(self.by_name.array, block_id, name=name))

    async def find(self, block_id: str = "", *, name: str = "") -> BlockRow:
        """What the grid knows of a block, by its id, any unique prefix, or its name."""
        return await self._run(partial(self.by_name.find, block_id, name=name))

    async def list_blocks(self) -> list[BlockRow]:
        """Every block there is."""
        return await self._run(self.by_name.list_blocks)

    async def stats(self) -> MemoryStats:
        """How much of the pool is used and where, and what this program has moved."""
        return await self._run(self.by_name.stats)

    @property
    def by_name(self) -> MemoryPool:
        if self._pool is None:
            raise Refused("the memory pool is not initialized, or is shut down: await pool.initialize() first")
        return self._pool

    async def _run(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        return await self._workers.run(work, undo)
