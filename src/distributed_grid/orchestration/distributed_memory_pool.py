"""`DistributedMemoryPool`: the memory of other machines, for programs with an event loop.

It runs `client.memory.pool.MemoryPool` in threads; `open_pool` is the same pool without an event loop. Both work on
nodes too, where little is installed: what reads configs is imported only where there is one, and NumPy where arrays are
used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from distributed_grid.client.async_client import GridSession
from distributed_grid.client.memory.directory import block_directory
from distributed_grid.client.memory.pool import MemoryPool, PoolMapping
from distributed_grid.errors import Refused

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Buffer

    from distributed_grid.client.conversation import JsonObject
    from distributed_grid.config import ClusterConfig
    from distributed_grid.memory.client.arrays import RemoteArray
    from distributed_grid.quantities import Span

__all__ = ["DistributedMemoryPool", "MemoryPool", "open_pool"]

MAX_THREADS = 16
T = TypeVar("T")


def open_pool(
    config: ClusterConfig | None = None,
    *,
    state_dir: str | os.PathLike[str] | None = None,
    compression: str = "auto",
) -> MemoryPool:
    """A pool for programs without an event loop and for notebooks, connected; `with open_pool() as pool` closes it."""
    return MemoryPool(block_directory(config, state_dir), compression=compression).connected()


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
        """Close the pool, once running work is done; safe to call twice.

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
        allocate = partial(pool.allocate, size, preferred_node, ttl=ttl, copies=copies, name=name)
        return await self._run(allocate, pool.deallocate)

    async def write(self, block_id: str, data: Buffer, offset: int = 0) -> None:
        """Write bytes into a block, from an offset on. When it returns, every copy has them."""
        await self._run(partial(self.by_name.write, block_id, data, offset))

    async def read(self, block_id: str, size: int | None = None, offset: int = 0) -> bytes:
        """So many bytes of a block, from an offset on; without a size all to its end."""
        return await self._run(partial(self.by_name.read, block_id, size, offset))

    async def read_into(self, block_id: str, buffer: Buffer, offset: int = 0) -> None:
        """Fill a buffer with bytes of a block."""
        await self._run(partial(self.by_name.read_into, block_id, buffer, offset))

    async def deallocate(self, block_id: str) -> None:
        """Free a block; its bytes are gone. NotFound where there is none (any more)."""
        await self._run(partial(self.by_name.deallocate, block_id))

    async def store(
        self, name: str, data: Buffer, preferred_node: str | None = None, *, ttl: Span | None = None, copies: int = 1
    ) -> str:
        """Store data under a name, and return its block's id; the block that had the name is freed, in one step.

        It lasts as long as this program and a day longer, or exactly as long as `ttl` says.
        """
        return await self._run(partial(self.by_name.store, name, data, preferred_node, ttl=ttl, copies=copies))

    async def retrieve(self, name: str) -> bytes:
        """The data stored under a name; NotFound where there is none."""
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
        """Store an array with its shape and type, and return its block's id. Python objects are refused."""
        pool = self.by_name
        put = partial(pool.put_array, array, preferred_node, ttl=ttl, copies=copies, name=name)
        return await self._run(put, None if name else pool.deallocate)

    async def get_array(self, block_id: str = "", *, name: str = "") -> NDArray[Any]:
        """The whole array in a block, as a NumPy array."""
        return await self._run(partial(self.by_name.get_array, block_id, name=name))

    async def array(self, block_id: str = "", *, name: str = "") -> RemoteArray:
        """The array in a block, to be read and written where it is; indexing it blocks until the bytes are there."""
        return await self._run(partial(self.by_name.array, block_id, name=name))

    async def find(self, block_id: str = "", *, name: str = "") -> JsonObject:
        """The grid's record of a block, by its id, any unique prefix, or its name."""
        return await self._run(partial(self.by_name.find, block_id, name=name))

    async def list_blocks(self) -> list[JsonObject]:
        """Every block there is."""
        return await self._run(self.by_name.list_blocks)

    async def stats(self) -> JsonObject:
        """How much of the pool is used and where, and what this program has moved."""
        return await self._run(self.by_name.stats)

    @property
    def by_name(self) -> MemoryPool:
        if self._pool is None:
            raise Refused("the memory pool is not initialized, or is shut down: await pool.initialize() first")
        return self._pool

    async def _run(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        return await self._workers.run(work, undo)


@dataclass
class _Task:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    work: Callable[[], Any] | None  # None: the thread ends
    undo: Callable[[Any], object] | None


class BlockingWorkers:
    """Threads for blocking calls of one event loop, each started when the others are busy.

    Work begins in the order of its requests. Cancelling a waiting task does not stop its work; the result is undone
    where an `undo` was given. A queue without locks and one call back into the loop cost half of `run_in_executor`,
    which counts where a read takes a tenth of a millisecond; and daemon threads do not delay the end of a program.
    """

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._threads = 0
        self._pending = 0
        self._stopped = False

    async def run(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """The result of work in a thread."""
        if self._stopped:
            raise Refused("the memory pool is shut down")
        if self._pending >= self._threads and self._threads < self._max_threads:
            threading.Thread(target=self._run_tasks, name=f"memory-pool-{self._threads}", daemon=True).start()
            self._threads += 1
        result: T = await self._submit(work, undo)
        return result

    async def stop(self) -> None:
        """End the threads once all work is done; safe to call twice."""
        self._stopped = True
        threads, self._threads = self._threads, 0
        await asyncio.gather(*(self._submit(None) for _ in range(threads)))

    def _submit(
        self, work: Callable[[], Any] | None, undo: Callable[[Any], object] | None = None
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        task = _Task(loop, loop.create_future(), work, undo)
        self._pending += 1
        self._tasks.put(task)
        return task.future

    def _run_tasks(self) -> None:
        while True:
            task = self._tasks.get()
            result, failure = None, None
            try:
                if task.work is not None and not task.future.cancelled():
                    result = task.work()
            except BaseException as raised:  # the waiting task gets it
                failure = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                task.loop.call_soon_threadsafe(self._finish, task, result, failure)
            if task.work is None:
                return

    def _finish(self, task: _Task, result: Any, failure: BaseException | None) -> None:
        self._pending -= 1
        if not task.future.cancelled():
            if failure is None:
                task.future.set_result(result)
            else:
                task.future.set_exception(failure)
        elif task.undo is not None and result is not None and not self._stopped:
            undo = task.undo
            undone = self._submit(lambda: undo(result))
            # no task waits for it: a block that was not freed here ends by itself
            undone.add_done_callback(lambda done: None if done.cancelled() else done.exception())
