"""Transfers between buffers and copies: over one connection or several at once, batched by server, with retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from distributed_grid.errors import TimedOut
from distributed_grid.memory.client.connection_pool import BlockLocation, ConnectionPool, CopyLocation
from distributed_grid.memory.client.server_connection import ServerConnection
from distributed_grid.memory.client.transfer_queue import TransferQueue

MIN_RANGES_PER_TRANSFER: Final = 64  # fewer are not worth a second connection
MAX_PAUSE_SECONDS: Final = 0.5
MAX_REFUSALS: Final = 3
Move = Callable[[CopyLocation, ServerConnection, TransferQueue], None]


def transfer(pool: ConnectionPool, location: CopyLocation, queue: TransferQueue, move: Move, streams: int) -> None:
    """Move all of the queue to or from one copy, over up to so many connections; after an error it has what is still
    to do."""
    if not queue:
        return
    if streams > 1 and len(queue) >= MIN_RANGES_PER_TRANSFER:
        _transfer_in_streams(pool, location, queue, move, streams)
    else:
        _transfer_over_one(pool, location, queue, move)


def _transfer_over_one(pool: ConnectionPool, location: CopyLocation, queue: TransferQueue, move: Move) -> None:
    with pool.connection(location) as connection:
        queue.bind_handle(connection.open(location.ticket).handle)
        move(location, connection, queue)


def _transfer_in_streams(
    pool: ConnectionPool, location: CopyLocation, queue: TransferQueue, move: Move, streams: int
) -> None:
    share = max(MIN_RANGES_PER_TRANSFER // 2, -(-len(queue) // streams))
    parts: list[TransferQueue] = []
    while queue:
        parts.append(queue.take_batch(share))
    errors: list[BaseException] = []

    def run(part: TransferQueue) -> None:
        try:
            _transfer_over_one(pool, location, part, move)
        except BaseException as error:  # the outermost frame of a thread: raised below, to whoever waits
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
    """What is left of a write, copy by copy, across moves of the block.

    Where a block had one copy, what was written there moves with it to the next. Where it had several, a new copy may
    have been made from any of them, so the write starts over.
    """

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view
        self._offset = offset
        self._generation = -1
        self._copies = 0
        self.left: dict[str, TransferQueue] = {}

    def resume(self, block: BlockLocation) -> None:
        """Go on with the copies of this generation."""
        names = [location.copy for location in block.copies]
        if block.generation == self._generation and set(names) == self.left.keys():
            return
        rest = next(iter(self.left.values())) if self._copies == 1 else TransferQueue.of_range(self._view, self._offset)
        self.left = {name: rest.copy() for name in names}
        self._generation, self._copies = block.generation, len(names)


class RetryBudget:
    """How long an operation on a block is retried before `TimedOut`, with exponential backoff."""

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
        """Count a refusal; whether there were enough to report it."""
        self._refusals += 1
        return self._refusals >= MAX_REFUSALS
