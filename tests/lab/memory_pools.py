"""The memory pool of a lab's grid, as a program beside the control plane uses it."""

from __future__ import annotations

import functools
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from distributed_grid.client.conversation import JsonObject
from distributed_grid.client.memory.directory import block_directory
from distributed_grid.memory.client.block_client import BlockClient
from tests.lab.clusters import Cluster
from tests.lab.lab_host import Host
from tests.support.shell import wait_until

MB = 1024 * 1024
PERIOD = 4_194_301
SERVER = "distributed_grid.memory"


class Pool:
    """Allocates, reads and writes; frees what it has allocated when it is closed."""

    def __init__(self, cluster: Cluster) -> None:
        self.desk = block_directory(None, cluster.state_dir)
        self.blocks = BlockClient(self.desk)
        self._mine: list[str] = []

    def allocate(self, size: int, node: str = "", **more: Any) -> str:
        block_id = uuid.uuid4().hex
        found = self.desk.allocate_block(request_id=block_id, size=size, preferred_node=node, **more)
        self.blocks.add_location(cast("JsonObject", found))
        self._mine.append(block_id)
        return block_id

    def view(self, block_id: str) -> dict[str, Any]:
        return cast("JsonObject", self.desk.find_block(block_id=block_id).block)

    def nodes(self, block_id: str) -> list[str]:
        (found,) = [block for block in self.desk.every_block() if block.block_id == block_id]
        return found.nodes

    def free_all(self) -> None:
        alive = {block.block_id for block in self.desk.every_block()}
        for block_id in self._mine:
            if block_id in alive:
                self.desk.free_block(block_id=block_id)
        self._mine.clear()
        wait_until(lambda: not self.desk.every_block(), 30)

    def close(self) -> None:
        self.free_all()
        self.blocks.close()
        self.desk.close()


@functools.cache
def _tape(size: int) -> memoryview:
    """Random bytes that are repeated after a prime number of them: moved by any number of pages they are others."""
    return memoryview(os.urandom(PERIOD) * (size // PERIOD + 1))


def pattern(size: int, seed: int) -> memoryview:
    """Bytes that compress badly and differ from seed to seed. They are not copied: gigabytes of them cost nothing."""
    return _tape(size + PERIOD)[seed * 7919 % PERIOD :][:size]


MAX_PAUSE_SECONDS = 0.05


class Traffic:
    """Somebody who writes to a block and reads it back, piece by piece, and notes what is wrong.

    It works for a third of the time: the processors are needed by those whom it watches, too.
    """

    def __init__(self, pool: Pool, block_id: str, size: int, piece: int = MB) -> None:
        self._pool, self._block_id, self._piece = pool, block_id, piece
        self._model = bytearray(size)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.rounds = 0
        self.problem: Exception | None = None

    def _work(self) -> None:
        size, piece = len(self._model), self._piece
        while not self._stop.is_set() and self.problem is None:
            at = self.rounds * 7 * piece // 2 % (size - piece)
            data, began = bytes(pattern(piece, self.rounds)), time.monotonic()
            try:
                self._pool.blocks.write(self._block_id, data, at)
                self._model[at : at + piece] = data
                assert self._pool.blocks.read(self._block_id, piece, at) == data, "another content came back"
            except Exception as problem:
                self.problem = problem
            self.rounds += 1
            self._stop.wait(min(2 * (time.monotonic() - began), MAX_PAUSE_SECONDS))

    def more(self, rounds: int = 5, seconds: float = 60) -> None:
        """Wait until it has done some more, without anything wrong."""
        until = self.rounds + rounds
        wait_until(lambda: self.rounds >= until or self.problem is not None, seconds)
        assert self.problem is None, self.problem

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(150)

    def end(self) -> None:
        """Stop, and compare everything with what was written."""
        self.stop()
        assert not self._thread.is_alive(), "somebody still waits"
        if self.problem is not None:
            raise self.problem
        assert self._pool.blocks.read(self._block_id, len(self._model)) == self._model


@contextmanager
def traffic(pool: Pool, block_id: str, size: int, piece: int = MB) -> Iterator[Traffic]:
    """Traffic on a block meanwhile; at the end all that was written is there."""
    made = Traffic(pool, block_id, size, piece)
    made._thread.start()
    try:
        made.more(3)
        yield made
        made.more(3)
    except BaseException:
        made.stop()
        raise
    made.end()


def server_of(host: Host) -> int:
    """The memory server of a host; 0 where there is none."""
    found = host.find(SERVER)
    return found[0] if found else 0


def shared_memory(host: Host) -> list[str]:
    """Objects in the shared memory of a host that a process could have forgotten."""
    return host.run(["ls", "-A", "/dev/shm"], user="root").stdout.split()
