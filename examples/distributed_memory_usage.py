"""A tour of the memory pool: other machines' memory, used like one's own.

    python examples/distributed_memory_usage.py
    python examples/distributed_memory_usage.py --size 256 --config config/my-cluster.yaml

Whatever it allocates it frees, even when it is interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator

import numpy as np

from distributed_grid.config import load_cluster_config
from distributed_grid.errors import BadInput, NotFound, Refused
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool, open_pool

DEFAULT = "config/my-cluster-enhanced.yaml"
MIB = 1024 * 1024
MINUTES = 600.0
"""Should this program be killed, its blocks end by themselves after so many seconds."""


async def bytes_in_remote_memory(pool: DistributedMemoryPool, node: str, size: int) -> None:
    """Allocate a block on another node, write to it, read from it."""
    _heading(f"Bytes in the memory of {node}")
    async with _block(pool, size, node) as block_id:
        found = await pool.find(block_id)
        print(f"block {block_id[:8]}: {size // MIB} MiB on {', '.join(found['nodes'])}, until {found['expires_at']}")
        data = os.urandom(size)
        began = time.perf_counter()
        await pool.write(block_id, data)
        written = time.perf_counter()
        retrieved = await pool.read(block_id, size)
        ended = time.perf_counter()
        print(f"written with {_rate(size, written - began)}, read with {_rate(size, ended - written)}")
        print(f"byte for byte the same: {retrieved == data}")
        await pool.write(block_id, b"in the middle", offset=size // 2)
        print(f"a part of it: {await pool.read(block_id, 13, offset=size // 2)!r}")
        try:
            await pool.read(block_id, 1, offset=size)
        except BadInput as no:
            print(f"beyond its end: {no}")


async def arrays_in_remote_memory(pool: DistributedMemoryPool, node: str, size: int) -> None:
    """Store a NumPy array, and use a part of it without moving the rest."""
    _heading("NumPy arrays")
    rows = max(size // 8000, 10)
    array = np.random.default_rng(0).random((rows, 1000))
    block_id = await pool.put_array(array, preferred_node=node, ttl=MINUTES)
    try:
        print(f"stored {array.shape[0]} x {array.shape[1]} numbers; back again the same: ", end="")
        print(np.array_equal(await pool.get_array(block_id), array))
        remote = await pool.array(block_id)
        print(f"one row of {remote.shape}, {remote[3].nbytes} bytes of {remote.nbytes}: mean {remote[3].mean():.3f}")
        remote[0] = 1.0
        print(f"the first row, assigned: {remote[0, :3]}")
        print(f"the sum, chunk by chunk: {sum(float(chunk.sum()) for chunk in remote.chunks()):.1f}")
    finally:
        await pool.deallocate(block_id)


async def keys_for_everybody(pool: DistributedMemoryPool) -> None:
    """Data under a name, that any other process of yours can read."""
    _heading("Keys")
    key = f"demo-{os.getpid()}"
    try:
        await pool.store(key, b"first", ttl=MINUTES)
        await pool.store(key, b"second", ttl=MINUTES)
        print(f"{key}: {await pool.retrieve(key)!r}; read also by: grid memory retrieve {key} -o FILE")
        print(f"{key} is a key of the pool: {key in pool}")
    finally:
        with contextlib.suppress(KeyError):
            del pool[key]
    print(f"and now: {key in pool}")


async def two_copies(pool: DistributedMemoryPool, size: int) -> None:
    """A block on two nodes, of which one may be lost."""
    _heading("Two copies")
    try:
        async with _block(pool, size, copies=2) as block_id:
            print(f"a block on {' and '.join((await pool.find(block_id))['nodes'])}")
    except Refused as no:
        print(f"not here: {no}")


def without_an_event_loop(pool_of: str, size: int) -> None:
    """The same in a notebook, or in any program without async."""
    _heading("Without an event loop")
    with open_pool(load_cluster_config(pool_of)) as pool:
        block_id = pool.allocate(size, ttl=MINUTES)
        try:
            pool.write(block_id, b"hello")
            print(pool.read(block_id, 5))
        finally:
            pool.deallocate(block_id)
        try:
            pool.read(block_id, 5)
        except NotFound as gone:
            print(f"after deallocate: {gone}")


@contextlib.asynccontextmanager
async def _block(pool: DistributedMemoryPool, size: int, node: str = "", copies: int = 1) -> AsyncIterator[str]:
    """A block for as long as it is used."""
    block_id = await pool.allocate(size, preferred_node=node, ttl=MINUTES, copies=copies)
    try:
        yield block_id
    finally:
        await pool.deallocate(block_id)


def _heading(text: str) -> None:
    print(f"\n== {text} ==")


def _rate(size: int, seconds: float) -> str:
    return f"{size / MIB / seconds:,.0f} MiB/s"


async def tour(path: str, size: int) -> None:
    """All parts, one after the other."""
    config = load_cluster_config(path)
    node = config.nodes[-1].name
    async with DistributedMemoryPool(config) as pool:
        await bytes_in_remote_memory(pool, node, size)
        await arrays_in_remote_memory(pool, node, size)
        await keys_for_everybody(pool)
        await two_copies(pool, size)
    without_an_event_loop(path, size)
    print("\neverything is freed")


def main() -> None:
    """Tell the whole story."""
    parser = argparse.ArgumentParser(description="A tour of the memory pool.")
    parser.add_argument("--config", default=DEFAULT, help="a cluster file (default: %(default)s)")
    parser.add_argument("--size", type=int, default=8, metavar="MIB", help="MiB to move about (default: %(default)s)")
    options = parser.parse_args()
    if options.size < 1:
        parser.error("--size is at least 1")
    asyncio.run(tour(options.config, options.size * MIB))


if __name__ == "__main__":
    main()
