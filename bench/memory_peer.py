"""What `bench/memory.py` runs inside the hosts of its lab: servers to compare with, and clients that measure.

`memory_peer.py serve bare|flight HOST PORT`, `memory_peer.py measure KIND ...`: a client prints one line of JSON with
the seconds of each write and read of SIZE bytes and the median seconds of a small read.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

IS_SMOKE = bool(os.environ.get("GRID_BENCH_SMOKE"))  # this file is alone in its host: it cannot import bench.sizes
SIZE = 1024 * 1024 if IS_SMOKE else 256 * 1024 * 1024
MAPPED = 16 * SIZE if IS_SMOKE else 4 * SIZE
SMALL = 4096
SMALL_READS = 20 if IS_SMOKE else 4_000
ASK = struct.Struct("<cQQ")
VERBS = ("write", "new", "again", "read", "into")


def serve_bare(host: str, port: int) -> None:
    """A loop over one socket: takes bytes into one buffer (or into new memory each time), and gives them back."""
    held = memoryview(bytearray(SIZE))
    listener = socket.create_server((host, port))
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := connection.recv(ASK.size, socket.MSG_WAITALL):
            kind, offset, length = ASK.unpack(head)
            view = held[offset : offset + length] if kind != b"n" else memoryview(bytearray(length))
            if kind == b"r":
                connection.sendall(view)
                continue
            got = 0
            while got < length:
                got += connection.recv_into(view[got:])
            connection.sendall(b"k")


def serve_flight(host: str, port: int) -> None:
    import pyarrow.flight as flight

    class Shelf(flight.FlightServerBase):
        def __init__(self) -> None:
            super().__init__(f"grpc://{host}:{port}")
            self.held: dict[bytes, Any] = {}

        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            self.held[descriptor.path[0]] = reader.read_all()

        def do_get(self, context: Any, ticket: Any) -> Any:
            return flight.RecordBatchStream(self.held[ticket.ticket])

    server = Shelf()
    print("ready", flush=True)
    server.serve()


class Bare:
    """The bare socket loop."""

    def __init__(self, host: str, port: str) -> None:
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, data: bytes, kind: bytes = b"w") -> None:
        self._socket.sendall(ASK.pack(kind, 0, len(data)))
        self._socket.sendall(data)
        assert self._socket.recv(1) == b"k"

    def write_new(self, data: bytes) -> None:
        self.write(data, b"n")

    def read_into(self, view: memoryview, offset: int = 0) -> None:
        length, got = len(view), 0
        self._socket.sendall(ASK.pack(b"r", offset, length))
        while got < length:
            got += self._socket.recv_into(view[got:])

    def read(self, length: int, offset: int = 0) -> bytearray:
        found = bytearray(length)
        self.read_into(memoryview(found), offset)
        return found


class Redis:
    """A value of a Redis server."""

    def __init__(self, host: str, port: str) -> None:
        import redis

        self._redis = redis.Redis(host, int(port))

    def write(self, data: bytes) -> None:
        self._redis.set("block", data)

    def read(self, length: int, offset: int = 0) -> Any:
        if length == SIZE:
            return self._redis.get("block")
        return self._redis.getrange("block", offset, offset + length - 1)


class Flight:
    """A batch of an Arrow Flight server."""

    def __init__(self, host: str, port: str) -> None:
        import pyarrow as pa
        import pyarrow.flight as flight

        self._arrow, self._flight = pa, flight
        self._client = flight.connect(f"grpc://{host}:{port}")

    def _put(self, name: str, data: bytes) -> None:
        array = self._arrow.py_buffer(data)
        column = self._arrow.Array.from_buffers(self._arrow.uint8(), len(data), [None, array])
        batch = self._arrow.record_batch([column], ["bytes"])
        descriptor = self._flight.FlightDescriptor.for_path(name)
        writer, _ = self._client.do_put(descriptor, batch.schema)
        writer.write_batch(batch)
        writer.close()

    def write(self, data: bytes) -> None:
        self._put("block", data)
        self._put("small", data[:SMALL])

    def read(self, length: int, offset: int = 0) -> Any:
        name = b"block" if length == SIZE else b"small"
        return self._client.do_get(self._flight.Ticket(name)).read_all()


class Ray:
    """An array held by an actor on the lender."""

    def __init__(self, address: str, lender: str) -> None:
        import numpy as np
        import ray

        ray.init(address, log_to_driver=False, logging_level=40, namespace="bench")

        @ray.remote(num_cpus=0, resources={lender: 0.001})
        class Holder:
            def put(self, array: Any) -> int:
                self.array = array.copy()
                return len(array)

            def get(self, offset: int, length: int) -> Any:
                return self.array[offset : offset + length]

        self._numpy, self._ray = np, ray
        holder: Any = Holder  # what the decorator makes of it
        self._holder = holder.remote()

    def write(self, data: bytes) -> None:
        self._ray.get(self._holder.put.remote(self._numpy.frombuffer(data, dtype="u1")))

    def read(self, length: int, offset: int = 0) -> Any:
        return self._ray.get(self._holder.get.remote(offset, length))


class Ours:
    """A block of the memory pool; every write but with `again` goes to a new one."""

    def __init__(self, node: str) -> None:
        from distributed_grid.client.memory.directory import block_directory
        from distributed_grid.memory.client.block_client import BlockClient

        self.directory = block_directory()
        self.blocks = BlockClient(self.directory)
        self._node = node
        self.block = self.allocate(SIZE)

    def allocate(self, size: int) -> str:
        block = uuid.uuid4().hex
        self.blocks.add_location(
            self.directory.call("allocate_block", request_id=block, size=size, preferred_node=self._node)
        )
        return block

    def fresh(self) -> None:
        self.directory.call("free_block", block_id=self.block)
        self.blocks.forget(self.block)
        self.block = self.allocate(SIZE)

    def write(self, data: bytes) -> None:
        self.blocks.write(self.block, data)

    def read_into(self, view: memoryview, offset: int = 0) -> None:
        self.blocks.read_into(self.block, view, offset)

    def read(self, length: int, offset: int = 0) -> bytes:
        return self.blocks.read(self.block, length, offset)


KINDS: dict[str, Callable[..., Any]] = {"bare": Bare, "redis": Redis, "flight": Flight, "ray": Ray, "ours": Ours}


def timed(operation: Callable[[], Any]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def measure(kind: str, rounds: int, words: list[str]) -> dict[str, Any]:
    """Seconds of each write and read of one, and the median of small ones."""
    return in_turns({kind: KINDS[kind](*words)}, rounds)[kind]


def beside(rounds: int, node: str, host: str, port: str) -> dict[str, Any]:
    """The same of ours and of a bare loop, transfer by transfer: other load of the machine affects both."""
    return in_turns({"bare": Bare(host, port), "ours": Ours(node)}, rounds)


def in_turns(peers: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each write and read of each peer, and the median of small ones.

    With ours every write goes to a new block, `again` over what is there; `new` is a write that a bare loop takes into
    new memory. `into` reads into memory that was used before; a bare loop and ours are compared by that, the others by
    whatever their read makes.
    """
    data, own = os.urandom(SIZE), memoryview(bytearray(SIZE))
    found: dict[str, dict[str, Any]] = {kind: {verb: [] for verb in VERBS} for kind in peers}
    for _ in range(rounds):
        for verb in VERBS:
            for kind, peer in peers.items():
                if verb == "write" and kind == "ours":
                    peer.fresh()
                deed = _operation(verb, kind, peer, data, own)
                if deed is not None:
                    found[kind][verb].append(timed(deed))
                if verb == "into" and deed is not None:
                    assert own == data
    for kind, peer in peers.items():
        found[kind]["small"] = _small(kind, peer)
        if kind == "ours":
            peer.directory.call("free_block", block_id=peer.block)
    return found


def _operation(verb: str, kind: str, peer: Any, data: bytes, own: memoryview) -> Callable[[], Any] | None:
    if verb == "write" or (verb == "again" and kind == "ours"):
        return lambda: peer.write(data)
    if verb == "new" and kind == "bare":
        return lambda: peer.write_new(data)
    if verb == "read":
        return lambda: peer.read(SIZE)
    if verb == "into" and kind in ("bare", "ours"):
        return lambda: peer.read_into(own)
    return None


def _small(kind: str, peer: Any) -> float:
    count = SMALL_READS if kind in ("bare", "ours") else SMALL_READS // 10
    for n in range(SMALL_READS // 10):
        peer.read(SMALL, n * 7919 % (SIZE - SMALL))
    took = [timed(lambda n=n: peer.read(SMALL, n * 7919 % (SIZE - SMALL))) for n in range(count)]
    return statistics.median(took)


def many(node: str, block: str, seconds: float) -> dict[str, Any]:
    """How many small reads one of many programs gets done; begins when it is told to."""
    peer = Ours.__new__(Ours)
    from distributed_grid.client.memory.directory import block_directory
    from distributed_grid.memory.client.block_client import BlockClient

    peer.blocks = BlockClient(block_directory())
    peer.block = block
    peer.read(SMALL)
    print("ready", flush=True)
    sys.stdin.readline()
    done, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            peer.read(SMALL, done * 7919 % (SIZE - SMALL))
            done += 1
    return {"rate": done / seconds}


def mapped(node: str) -> dict[str, Any]:
    """On the lender itself: seconds to map a GiB, and the speed of a second pass beside a copy of an own array."""
    import numpy as np

    size = MAPPED
    ours = Ours(node)
    block = ours.allocate(size)
    piece = os.urandom(size // 16)
    for at in range(0, size, len(piece)):
        ours.blocks.write(block, piece, at)
    took = []
    for _ in range(9):
        ours.blocks.forget(block)
        ours.blocks.read(block, 1)
        took.append(timed(lambda: ours.blocks.map(block)))
    view = ours.blocks.map(block)
    assert view is not None
    there, own, room = np.frombuffer(view, dtype="u1"), np.empty(size, dtype="u1"), np.zeros(size + 8192, dtype="u1")
    own[:] = room[:] = 1

    def beside(array: Any) -> Any:
        """Room half a page off: where the lowest bits of both addresses are nearly the same, any copy takes thrice."""
        start = (array.ctypes.data + 2048 - room.ctypes.data) % 4096
        return room[start : start + size]

    np.copyto(beside(there), there)
    of_block = [timed(lambda: np.copyto(beside(there), there)) for _ in range(5)]
    of_own = [timed(lambda: np.copyto(beside(own), own)) for _ in range(5)]
    overhead = _overhead()
    for name in (block, ours.block):
        ours.directory.call("free_block", block_id=name)
    return {"map": statistics.median(took), "ratio": min(of_own) / min(of_block), "overhead": overhead / size}


def _overhead() -> int:
    """Memory of this host's memory server besides the blocks."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line, status = Path(f"/proc/{pid}/cmdline").read_text(), Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if "distributed_grid.memory" in line:
            wanted = (row.split() for row in status.splitlines() if row.startswith(("RssAnon", "RssFile")))
            return sum(int(row[1]) * 1024 for row in wanted)
    raise AssertionError("no memory server")


def main() -> None:
    verb, *words = sys.argv[1:]
    if verb == "serve":
        {"bare": serve_bare, "flight": serve_flight}[words[0]](words[1], int(words[2]))
    elif verb == "measure":
        print(json.dumps(measure(words[0], int(words[1]), words[2:])), flush=True)
    elif verb == "beside":
        print(json.dumps(beside(int(words[0]), *words[1:])), flush=True)
    elif verb == "many":
        print(json.dumps(many(words[0], words[1], float(words[2]))), flush=True)
    else:
        print(json.dumps(mapped(words[0])), flush=True)


if __name__ == "__main__":
    main()
