"""Reading and writing blocks by their ids, wherever they are.

Rule 1. A move, a crash of a server, an expired ticket: a reader or writer sees a delay, never an error, until its
        patience ends.
Rule 2. A read comes from the first place, and what is not there as it was written from the next. A write goes to all
        places, the first one last, and is done when all have it: what nobody was told of may appear later, but never
        vanishes.
Rule 3. What makes no sense is refused here, with numbers, before anything is sent.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Final, Protocol

from distributed_grid.domain.blocks import LARGEST_BLOCK
from distributed_grid.errors import BadInput, Corrupt, ProtocolError, Refused, Unreachable
from distributed_grid.memory.client.buffered_socket import SMALL
from distributed_grid.memory.client.buffers import fresh_bytes
from distributed_grid.memory.client.chunks import ChunkRange, WriteProgress, cut
from distributed_grid.memory.client.compression import AdaptiveCompression
from distributed_grid.memory.client.connection import ConnectionBroken, StatusError
from distributed_grid.memory.client.connection_pool import ConnectionPool
from distributed_grid.memory.client.locations import BlockLocation, CopyLocation, known_from
from distributed_grid.memory.client.retry import RetryBudget
from distributed_grid.memory.client.transfer import Move, move_pieces, move_together
from distributed_grid.memory.protocol.frames import CHUNK, FrameStatus

Buffer = bytes | bytearray | memoryview
MANY_AT_ONCE: Final = 4096
MOST_STREAMS: Final = 16
BEST_READ_STREAMS: Final = 1  # measured: more only wait for each other
BEST_WRITE_STREAMS: Final = 2  # one hashes while the other sends
_ELSEWHERE = frozenset((FrameStatus.MOVED, FrameStatus.STALE, FrameStatus.EXPIRED, FrameStatus.GONE_LIFE))

log = logging.getLogger(__name__)


class BlockDirectory(Protocol):
    """Where blocks are asked for: the control plane."""

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The answer; NotFound, BlockLost and Unreachable are raised."""


class BlockClient:
    """All blocks a program uses; safe from several threads."""

    def __init__(
        self, desk: BlockDirectory, *, compression: str = "auto", streams: int = 0, patience_seconds: float = 120.0
    ) -> None:
        if not 0 <= streams <= MOST_STREAMS:
            raise BadInput(f"{streams} streams make no sense: 1 to {MOST_STREAMS}, or 0 for what is best")
        self._desk = desk
        self._patience_seconds = patience_seconds
        self._read_streams = streams or BEST_READ_STREAMS
        self._write_streams = streams or BEST_WRITE_STREAMS
        self._known: dict[str, BlockLocation] = {}
        self._seen: dict[str, int] = {}  # generations, also of what is out of date
        self._lock = threading.Lock()
        self._switchboard = ConnectionPool()
        self._squeezing = AdaptiveCompression(compression)
        self._maps: dict[str, tuple[tuple[str, int], memoryview]] = {}
        self._moves = self._retries = 0

    # ------------------------------------------------------------------ what is known

    def learn(self, found: dict[str, Any]) -> None:
        """Take in an answer of the desk, so that it need not be asked again."""
        known = known_from(found)
        with self._lock:
            self._moves += self._seen.get(known.block_id, known.generation) < known.generation
            self._seen[known.block_id] = known.generation
            self._known[known.block_id] = known

    def forget(self, block_id: str) -> None:
        """Know nothing of this block any more."""
        with self._lock:
            self._known.pop(block_id, None)
            self._seen.pop(block_id, None)
            self._maps.pop(block_id, None)

    def _find(self, block_id: str, patience: RetryBudget) -> BlockLocation:
        while True:
            known = self._known.get(block_id)
            if known is not None:
                return known
            try:
                found = self._desk.call("find_block", block_id=block_id)
            except Unreachable as error:
                patience.wait(str(error))
                continue
            self.learn(found)
            known = self._known.get(found["block"]["block_id"])  # only the beginning of its id may have been given
            if known is not None:
                return known

    def _lose(self, known: BlockLocation) -> None:
        """What was known is out of date, unless somebody has learned better already."""
        with self._lock:
            if self._known.get(known.block_id) is known:
                del self._known[known.block_id]

    # ------------------------------------------------------------------ reading

    def read(self, block_id: str, size: int, offset: int = 0) -> bytes:
        """So many bytes from there on."""
        if size < 0:
            raise BadInput(f"cannot read {size} bytes")
        if size > LARGEST_BLOCK:
            raise BadInput(f"cannot read {size} bytes: a block has at most {LARGEST_BLOCK}")
        if 0 < size <= SMALL and 0 <= offset % CHUNK <= CHUNK - size:
            quick = self._read_quickly(block_id, size, offset)
            if quick is not None:
                return quick
        patience = RetryBudget(block_id, self._patience_seconds)
        _within(self._find(block_id, patience), size, offset, "read")
        if size < 2:
            small = bytearray(size)
            self._read_into(block_id, memoryview(small), offset, patience)
            return bytes(small)
        made, view = fresh_bytes(size)
        self._read_into(block_id, view, offset, patience)
        return made

    def _read_quickly(self, block_id: str, size: int, offset: int) -> bytes | None:
        """A few bytes of a block that is known, by the shortest way; None where that way is not open."""
        known = self._known.get(block_id)
        if known is None or offset < 0 or offset + size > known.size:
            return None
        place = known.places[0]
        try:
            channel = self._switchboard.take(place)
            try:
                opened = channel.opened.get(place.ticket.claims) or channel.open(place.ticket)
                data = channel.read_small(opened.handle, offset, size)
            except StatusError as answer:
                self._switchboard.answered(answer, place, channel)
                return None
            except BaseException:
                self._switchboard.broke(place, channel)
                raise
            self._switchboard.give(place, channel)
        except ConnectionBroken:
            return None
        self._squeezing.count_small(size)
        return data

    def read_into(self, block_id: str, buffer: Buffer, offset: int = 0) -> None:
        """Fill the buffer from there on."""
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise BadInput("cannot read into a buffer that is read-only")
        self._read_into(block_id, view, offset, RetryBudget(block_id, self._patience_seconds))

    def _read_into(self, block_id: str, view: memoryview, offset: int, patience: RetryBudget) -> None:
        pieces = cut(view, offset)
        self._see_through(block_id, patience, len(view), offset, "read", lambda known: self._read_from(known, pieces))

    def _read_from(self, known: BlockLocation, pieces: deque[ChunkRange]) -> None:
        for place, another in zip_longest(known.places, known.places[1:]):
            try:
                move_pieces(self._switchboard, place, pieces, self._squeezing.read, self._read_streams)
                return
            except StatusError as answer:
                if answer.status is not FrameStatus.CORRUPT or another is None:
                    raise
            log.warning("%s of %s is not what was written; %s is read instead", place.copy, place.node, another.copy)
            for _ in range(len(pieces)):
                pieces.append(pieces.popleft()._replace(again=False))

    def read_many(self, asks: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Several reads (block, size, offset), sent together where they go to the same place."""
        found: list[bytes] = []
        wanted: list[tuple[str, memoryview, int]] = []
        for block_id, size, offset in asks:
            if size < 0:
                raise BadInput(f"cannot read {size} bytes")
            known = self._find(block_id, RetryBudget(block_id, self._patience_seconds))
            _within(known, size, offset, "read")
            made, view = fresh_bytes(max(size, 2))
            found.append(made)
            wanted.append((block_id, view[:size], offset))
        for start in range(0, len(wanted), MANY_AT_ONCE):
            self._many(wanted[start : start + MANY_AT_ONCE], self._read_places, self._squeezing.read, self.read_into)
        return [made if ask[1] >= 2 else made[: ask[1]] for made, ask in zip(found, asks, strict=True)]

    # ------------------------------------------------------------------ writing

    def write(self, block_id: str, data: Buffer, offset: int = 0) -> None:
        """Put the data there; all of it is at every place of the block when this returns."""
        view = memoryview(data).cast("B")
        patience = RetryBudget(block_id, self._patience_seconds)
        progress = WriteProgress(view, offset)
        self._see_through(block_id, patience, len(view), offset, "write", lambda known: self._write_to(known, progress))

    def _write_to(self, known: BlockLocation, progress: WriteProgress) -> None:
        progress.begin(known)
        for place in (*known.places[1:], known.places[0]):
            left = progress.left[place.copy]
            move_pieces(self._switchboard, place, left, self._squeezing.write, self._write_streams)

    def write_many(self, asks: Sequence[tuple[str, Buffer, int]]) -> None:
        """Several writes (block, data, offset), sent together where they go to the same place."""
        wanted = [(block_id, memoryview(data).cast("B"), offset) for block_id, data, offset in asks]
        for block_id, view, offset in wanted:
            known = self._find(block_id, RetryBudget(block_id, self._patience_seconds))
            _within(known, len(view), offset, "write")
        for start in range(0, len(wanted), MANY_AT_ONCE):
            self._many(wanted[start : start + MANY_AT_ONCE], self._write_places, self._squeezing.write, self.write)

    # ------------------------------------------------------------------ several at once

    def _read_places(self, known: BlockLocation) -> tuple[CopyLocation, ...]:
        return known.places[:1]

    def _write_places(self, known: BlockLocation) -> tuple[CopyLocation, ...]:
        return (*known.places[1:], known.places[0])

    def _many(
        self,
        wanted: list[tuple[str, memoryview, int]],
        places_of: Callable[[BlockLocation], tuple[CopyLocation, ...]],
        move: Move,
        one_by_one: Callable[[str, memoryview, int], None],
    ) -> None:
        """All of these, together per server; whatever cannot be done so is done one by one, with patience."""
        try:
            moves = [(places_of(self._still_known(block_id)), view, offset) for block_id, view, offset in wanted]
            move_together(self._switchboard, moves, move)
        except (StatusError, ConnectionBroken):
            self._retries += 1
            for block_id, view, offset in wanted:
                one_by_one(block_id, view, offset)

    def _still_known(self, block_id: str) -> BlockLocation:
        known = self._known.get(block_id)
        if known is None:
            raise ConnectionBroken("it was forgotten meanwhile")
        return known

    # ------------------------------------------------------------------ with patience

    def _see_through(
        self,
        block_id: str,
        patience: RetryBudget,
        size: int,
        offset: int,
        deed: str,
        do: Callable[[BlockLocation], None],
    ) -> None:
        while True:
            known = self._find(block_id, patience)
            _within(known, size, offset, deed)
            if size == 0:
                return
            try:
                do(known)
                return
            except StatusError as answer:
                self._after(answer.status, known, patience, deed)
            except ConnectionBroken as problem:
                self._lose(known)
                patience.wait(str(problem))
            self._retries += 1

    def _after(self, status: FrameStatus, known: BlockLocation, patience: RetryBudget, deed: str) -> None:
        where = f"{known.places[0].node}: {status.name.lower()}"
        if status is FrameStatus.CORRUPT:
            raise Corrupt(f"block {known.block_id}: what {where.partition(':')[0]} holds is not what was written")
        if status is FrameStatus.BAD:
            raise ProtocolError(f"the memory server of {known.places[0].node} did not understand a {deed}")
        self._lose(known)
        if status in _ELSEWHERE:
            patience.wait(where, at_once=patience.last != where)
        elif status is FrameStatus.FROZEN or not patience.refused():
            patience.wait(where)
        elif status is FrameStatus.FULL:
            raise Refused(f"{known.places[0].node} has no room for block {known.block_id}")
        else:
            raise Refused(f"{known.places[0].node} does not accept the ticket for a {deed} of {known.block_id}")

    # ------------------------------------------------------------------ mapping

    def mapped(self, block_id: str) -> memoryview | None:
        """The block itself, read-only, without a copy; None where it is not on this machine. It shows what is written
        later, too, until the block moves: then it shows what was."""
        patience = RetryBudget(block_id, self._patience_seconds)
        known = self._find(block_id, patience)
        place = known.places[0]
        key = (place.copy, known.generation)
        kept = self._maps.get(block_id)
        if kept is not None and kept[0] == key:
            return kept[1]
        fd = -1

        def get(known: BlockLocation) -> None:
            nonlocal fd
            fd = self._switchboard.descriptor(known.places[0])

        self._see_through(block_id, patience, known.size, 0, "map", get)
        if fd < 0:
            return None
        try:
            view = memoryview(mmap.mmap(fd, known.size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED))
        finally:
            os.close(fd)
        self._maps[block_id] = (key, view)
        return view

    # ------------------------------------------------------------------ numbers and the end

    def stats(self) -> dict[str, int | float]:
        """Bytes sent and received, plain and as they travelled, and how often something had to be tried again."""
        return {**self._squeezing.stats(), "moves": self._moves, "retries": self._retries}

    def close(self) -> None:
        """Close all connections; safe twice."""
        self._switchboard.close()
        self._maps.clear()


def _within(known: BlockLocation, size: int, offset: int, deed: str) -> None:
    if offset < 0 or offset + size > known.size:
        end = offset + size
        raise BadInput(f"cannot {deed} bytes {offset} to {end} of block {known.block_id}: it has {known.size}")
