"""Client of memory blocks: reads and writes them by their ids, wherever their copies are.

A move, a crash of a server or an expired ticket is a delay, not an error, until the retry budget is spent. A read comes
from the first copy, and corrupt parts from the next. A write goes to all copies, the first one last, and
returns when all have it: data of a write that failed may appear later, but data that was read once never vanishes.

A transfer uses one connection, or several at once, batched by server.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Final, Protocol

from distributed_grid.domain.blocks import MAX_BLOCK_BYTES
from distributed_grid.errors import BadInput, Corrupt, ProtocolError, Refused, TimedOut, Unreachable
from distributed_grid.memory.client.compression import AdaptiveCompression
from distributed_grid.memory.client.connection_pool import BlockLocation, ConnectionPool, CopyLocation, parse_location
from distributed_grid.memory.client.server_connection import ConnectionBroken, ServerConnection
from distributed_grid.memory.client.transfer_queue import SMALL_BYTES, ReadBuffer, TransferQueue
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, FrameStatus, StatusError

MIN_RANGES_PER_TRANSFER: Final = 64  # fewer are not worth a second connection
MAX_PAUSE_SECONDS: Final = 0.5
MAX_REFUSALS: Final = 3
Move = Callable[[CopyLocation, ServerConnection, TransferQueue], None]


def transfer(pool: ConnectionPool, location: CopyLocation, queue: TransferQueue, move: Move, streams: int) -> None:
    """Move all of the queue to or from one copy, over at most `streams` connections; after an error the queue has the
    rest."""
    if not queue:
        return
    if streams > 1 and len(queue) >= MIN_RANGES_PER_TRANSFER:
        share = max(MIN_RANGES_PER_TRANSFER // 2, -(-len(queue) // streams))
        parts: list[TransferQueue] = []
        while queue:
            parts.append(queue.take_batch(share))
        errors: list[BaseException] = []

        def run(part: TransferQueue) -> None:
            try:
                _transfer_over_one(pool, location, part, move)
            except BaseException as error:  # the outermost frame of a thread: raised below, to the caller
                errors.append(error)

        threads = [threading.Thread(target=run, args=(part,), daemon=True) for part in parts[1:]]
        for thread in threads:
            thread.start()
        run(parts[0])
        for thread in threads:
            thread.join()
        for part in reversed(parts):
            queue.give_back(part)
        if errors:
            raise errors[0]
    else:
        _transfer_over_one(pool, location, queue, move)


def _transfer_over_one(pool: ConnectionPool, location: CopyLocation, queue: TransferQueue, move: Move) -> None:
    with pool.connection(location) as connection:
        queue.bind_handle(connection.open(location.ticket).handle)
        move(location, connection, queue)


def transfer_many(
    pool: ConnectionPool, ranges: list[tuple[tuple[CopyLocation, ...], memoryview, int]], move: Move
) -> None:
    """Move ranges (copies, buffer, offset) of several blocks, those of one server together."""
    rounds: dict[int, dict[str, list[tuple[CopyLocation, memoryview, int]]]] = {}
    for locations, view, offset in ranges:
        for location in locations:
            # The first copies of all blocks come last, as with a single write.
            number = 1 if location is locations[-1] else 0
            rounds.setdefault(number, {}).setdefault(location.server_key, []).append((location, view, offset))
    for number in sorted(rounds):
        for parts in rounds[number].values():
            with pool.connection(parts[0][0]) as connection:
                queue = TransferQueue()
                for location, view, offset in parts:
                    handle = connection.open(location.ticket).handle
                    queue.extend(TransferQueue.of_range(view, offset, handle))
                move(parts[0][0], connection, queue)


class WriteProgress:
    """Rest of a write, copy by copy, across moves of the block.

    Where a block had one copy, its data move with it to the next. Where it had several, a new copy may have been
    made from any of them, so the write starts over.
    """

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view
        self._offset = offset
        self._generation = -1
        self._copies = 0
        self.left: dict[str, TransferQueue] = {}

    def resume(self, block: BlockLocation) -> None:
        """Continue with the copies of this generation."""
        names = [location.copy for location in block.copies]
        if block.generation == self._generation and set(names) == self.left.keys():
            return
        rest = next(iter(self.left.values())) if self._copies == 1 else TransferQueue.of_range(self._view, self._offset)
        self.left = {name: rest.copy() for name in names}
        self._generation, self._copies = block.generation, len(names)


class RetryBudget:
    """Time for retries of an operation on a block before `TimedOut`, with exponential backoff."""

    def __init__(self, block_id: str, seconds: float) -> None:
        self._block_id = block_id
        self._seconds = seconds
        self._began = time.monotonic()
        self._pause = 0.005
        self._refusals = 0
        self.last_problem = ""

    def wait(self, problem: str, *, retry_at_once: bool = False) -> None:
        """Note the problem and sleep before the next try; TimedOut, naming it, when the budget is spent."""
        self.last_problem = problem
        if time.monotonic() - self._began + self._pause > self._seconds:
            waited = f"{time.monotonic() - self._began:.0f} s"
            raise TimedOut(f"block {self._block_id} could not be used for {waited}; last: {problem}")
        if not retry_at_once:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def is_refused_for_good(self) -> bool:
        """Count a refusal; True if there were enough to report it."""
        self._refusals += 1
        return self._refusals >= MAX_REFUSALS


Buffer = bytes | bytearray | memoryview
MAX_BATCH: Final = 4096
MAX_STREAMS: Final = 16
DEFAULT_READ_STREAMS: Final = 1  # measured: more only wait for each other
DEFAULT_WRITE_STREAMS: Final = 2  # one hashes while the other sends
_OUT_OF_DATE = frozenset((FrameStatus.MOVED, FrameStatus.STALE, FrameStatus.EXPIRED, FrameStatus.WRONG_INCARNATION))

log = logging.getLogger(__name__)


class BlockDirectory(Protocol):
    """Where locations of blocks are looked up: the control plane."""

    def find_block(self, *, block_id: str) -> Any:
        """The JSON answer about a block; raises NotFound, BlockLost and Unreachable."""


class BlockClient:
    """All blocks a program uses; safe from several threads."""

    def __init__(
        self, directory: BlockDirectory, *, compression: str = "auto", streams: int = 0, retry_seconds: float = 120.0
    ) -> None:
        if not 0 <= streams <= MAX_STREAMS:
            raise BadInput(f"streams must be 1 to {MAX_STREAMS}, or 0 for the default, not {streams}")
        self._directory = directory
        self._retry_seconds = retry_seconds
        self._read_streams = streams or DEFAULT_READ_STREAMS
        self._write_streams = streams or DEFAULT_WRITE_STREAMS
        self._locations: dict[str, BlockLocation] = {}
        self._generations: dict[str, int] = {}  # the highest seen, also of locations that are out of date
        self._lock = threading.Lock()
        self._pool = ConnectionPool()
        self._compression = AdaptiveCompression(compression)
        self._maps: dict[str, tuple[tuple[str, int], memoryview]] = {}
        self._moves = self._retries = 0

    # ------------------------------------------------------------------ locations

    def add_location(self, answer: dict[str, Any]) -> None:
        """Remember an answer of the directory, so that it need not be asked again."""
        block = parse_location(answer)
        with self._lock:
            self._moves += self._generations.get(block.block_id, block.generation) < block.generation
            self._generations[block.block_id] = block.generation
            self._locations[block.block_id] = block

    def forget(self, block_id: str) -> None:
        """Drop all that is known of this block."""
        with self._lock:
            self._locations.pop(block_id, None)
            self._generations.pop(block_id, None)
            self._maps.pop(block_id, None)

    def _locate(self, block_id: str, budget: RetryBudget) -> BlockLocation:
        while True:
            block = self._locations.get(block_id)
            if block is not None:
                return block
            try:
                answer = self._directory.find_block(block_id=block_id)
            except Unreachable as error:
                budget.wait(str(error))
                continue
            self.add_location(answer)
            block = self._locations.get(answer["block"]["block_id"])  # `block_id` may be a prefix
            if block is not None:
                return block

    def record(self, block_id: str) -> tuple[int, str]:
        block = self._locations.get(block_id) or self._locate(block_id, self._budget(block_id))
        return block.size, block.meta

    def _invalidate(self, block: BlockLocation) -> None:
        """Mark this location as out of date, unless a newer one is known already."""
        with self._lock:
            if self._locations.get(block.block_id) is block:
                del self._locations[block.block_id]

    def _budget(self, block_id: str) -> RetryBudget:
        return RetryBudget(block_id, self._retry_seconds)

    # ------------------------------------------------------------------ reading

    def read(self, block_id: str, size: int, offset: int = 0) -> bytes:
        """`size` bytes from an offset on."""
        if size < 0:
            raise BadInput(f"cannot read {size} bytes")
        if size > MAX_BLOCK_BYTES:
            raise BadInput(f"cannot read {size} bytes: a block has at most {MAX_BLOCK_BYTES}")
        if 0 < size <= SMALL_BYTES and 0 <= offset % CHUNK_BYTES <= CHUNK_BYTES - size:
            small = self._read_small(block_id, size, offset)
            if small is not None:
                return small
        budget = self._budget(block_id)
        _check_range(self._locate(block_id, budget), size, offset, "read")
        buffer = ReadBuffer(size)
        self._read_into(block_id, buffer.view, offset, budget)
        return buffer.to_bytes()

    def _read_small(self, block_id: str, size: int, offset: int) -> bytes | None:
        """A few bytes of a block whose location is known, in one request; None where that does not work."""
        block = self._locations.get(block_id)
        if block is None or offset < 0 or offset + size > block.size:
            return None
        location = block.copies[0]
        try:
            connection = self._pool.acquire(location)
            try:
                opened = connection.opened.get(location.ticket.claims) or connection.open(location.ticket)
                data = connection.read_small(opened.handle, offset, size)
            except StatusError as error:
                self._pool.release_refused(location, connection, error)
                return None
            except BaseException:
                self._pool.discard(location, connection)
                raise
            self._pool.release(location, connection)
        except ConnectionBroken:
            return None
        self._compression.count_small(size)
        return data

    def read_into(self, block_id: str, buffer: Buffer, offset: int = 0) -> None:
        """Fill the buffer from an offset on."""
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise BadInput("cannot read into a buffer that is read-only")
        self._read_into(block_id, view, offset, self._budget(block_id))

    def _read_into(self, block_id: str, view: memoryview, offset: int, budget: RetryBudget) -> None:
        queue = TransferQueue.of_range(view, offset)
        self._retry(block_id, budget, len(view), offset, "read", lambda block: self._read_from(block, queue))

    def _read_from(self, block: BlockLocation, queue: TransferQueue) -> None:
        for location, another in zip_longest(block.copies, block.copies[1:]):
            try:
                transfer(self._pool, location, queue, self._compression.read, self._read_streams)
                return
            except StatusError as error:
                if error.status is not FrameStatus.CORRUPT or another is None:
                    raise
            log.warning("%s on %s is corrupt; reading %s instead", location.copy, location.node, another.copy)
            queue.clear_retries()

    def read_many(self, requests: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Several reads (block, size, offset), batched by server."""
        buffers: list[ReadBuffer] = []
        ranges: list[tuple[str, memoryview, int]] = []
        for block_id, size, offset in requests:
            if size < 0:
                raise BadInput(f"cannot read {size} bytes")
            _check_range(self._locate(block_id, self._budget(block_id)), size, offset, "read")
            buffer = ReadBuffer(size)
            buffers.append(buffer)
            ranges.append((block_id, buffer.view, offset))
        for start in range(0, len(ranges), MAX_BATCH):
            batch = ranges[start : start + MAX_BATCH]
            self._transfer_many(batch, lambda block: block.copies[:1], self._compression.read, self.read_into)
        return [buffer.to_bytes() for buffer in buffers]

    # ------------------------------------------------------------------ writing

    def write(self, block_id: str, data: Buffer, offset: int = 0) -> None:
        """Write the data at an offset; every copy has all of it when this returns."""
        view = memoryview(data).cast("B")
        progress = WriteProgress(view, offset)
        budget = self._budget(block_id)
        self._retry(block_id, budget, len(view), offset, "write", lambda block: self._write_to(block, progress))

    def _write_to(self, block: BlockLocation, progress: WriteProgress) -> None:
        progress.resume(block)
        for location in _first_copy_last(block):
            left = progress.left[location.copy]
            transfer(self._pool, location, left, self._compression.write, self._write_streams)

    def write_many(self, requests: Sequence[tuple[str, Buffer, int]]) -> None:
        """Several writes (block, data, offset), batched by server."""
        ranges = [(block_id, memoryview(data).cast("B"), offset) for block_id, data, offset in requests]
        for block_id, view, offset in ranges:
            _check_range(self._locate(block_id, self._budget(block_id)), len(view), offset, "write")
        for start in range(0, len(ranges), MAX_BATCH):
            batch = ranges[start : start + MAX_BATCH]
            self._transfer_many(batch, _first_copy_last, self._compression.write, self.write)

    def _transfer_many(
        self,
        ranges: list[tuple[str, memoryview, int]],
        copies_of: Callable[[BlockLocation], tuple[CopyLocation, ...]],
        move: Move,
        one_by_one: Callable[[str, memoryview, int], None],
    ) -> None:
        """All of these, batched by server; where that fails, one by one, with retries."""
        try:
            moves = [(copies_of(self._known(block_id)), view, offset) for block_id, view, offset in ranges]
            transfer_many(self._pool, moves, move)
        except (StatusError, ConnectionBroken):
            self._retries += 1
            for block_id, view, offset in ranges:
                one_by_one(block_id, view, offset)

    def _known(self, block_id: str) -> BlockLocation:
        block = self._locations.get(block_id)
        if block is None:
            raise ConnectionBroken("the location was invalidated meanwhile")
        return block

    # ------------------------------------------------------------------ retries

    def _retry(
        self,
        block_id: str,
        budget: RetryBudget,
        size: int,
        offset: int,
        verb: str,
        attempt: Callable[[BlockLocation], None],
    ) -> None:
        while True:
            block = self._locate(block_id, budget)
            _check_range(block, size, offset, verb)
            if size == 0:
                return
            try:
                attempt(block)
                return
            except StatusError as error:
                node = block.copies[0].node
                refusal = f"{node}: {error.status.name.lower()}"
                if error.status is FrameStatus.CORRUPT:
                    raise Corrupt(f"block {block.block_id}: what {node} holds is not what was written") from error
                if error.status is FrameStatus.BAD:
                    raise ProtocolError(f"the memory server of {node} did not understand a {verb}") from error
                self._invalidate(block)
                if error.status in _OUT_OF_DATE:
                    budget.wait(refusal, retry_at_once=budget.last_problem != refusal)
                elif error.status is FrameStatus.FROZEN or not budget.is_refused_for_good():
                    budget.wait(refusal)
                elif error.status is FrameStatus.FULL:
                    raise Refused(f"{node} has no room for block {block.block_id}") from error
                else:
                    raise Refused(f"{node} does not accept the ticket for a {verb} of {block.block_id}") from error
            except ConnectionBroken as problem:
                self._invalidate(block)
                budget.wait(str(problem))
            self._retries += 1

    # ------------------------------------------------------------------ mapping

    def map(self, block_id: str) -> memoryview | None:
        """The block's memory itself, read-only; None where it is not on this machine. It shows later writes, too,
        until the block moves: then it shows the state before the move."""
        budget = self._budget(block_id)
        block = self._locate(block_id, budget)
        key = (block.copies[0].copy, block.generation)
        kept = self._maps.get(block_id)
        if kept is not None and kept[0] == key:
            return kept[1]
        fd = -1

        def attempt(block: BlockLocation) -> None:
            nonlocal fd
            fd = self._pool.open_descriptor(block.copies[0])

        self._retry(block_id, budget, block.size, 0, "map", attempt)
        if fd < 0:
            return None
        try:
            view = memoryview(mmap.mmap(fd, block.size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED))
        finally:
            os.close(fd)
        self._maps[block_id] = (key, view)
        return view

    # ------------------------------------------------------------------ counters and closing

    def stats(self) -> dict[str, int | float]:
        return {**self._compression.stats(), "moves": self._moves, "retries": self._retries}

    def close(self) -> None:
        self._pool.close()
        self._maps.clear()


def _first_copy_last(block: BlockLocation) -> tuple[CopyLocation, ...]:
    return (*block.copies[1:], block.copies[0])


def _check_range(block: BlockLocation, size: int, offset: int, verb: str) -> None:
    if offset < 0 or offset + size > block.size:
        end = offset + size
        raise BadInput(f"cannot {verb} bytes {offset} to {end} of block {block.block_id}: it has {block.size}")
