"""Making a copy of a copy at another memory server, beside the loop.

Rule 1. The source is frozen before this begins, so what is read is what stays.
Rule 2. An order that is repeated while it is being done changes nothing; one that was done is told as done again.
Rule 3. Whatever goes wrong is told as the problem; the source stays frozen until somebody decides.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from distributed_grid.errors import GridError
from distributed_grid.memory.client.connection import ServerConnection
from distributed_grid.memory.protocol.control_messages import MakeReplica
from distributed_grid.memory.protocol.frames import CHUNK_BYTES
from distributed_grid.memory.protocol.ticket import read_claims
from distributed_grid.memory.server.copy_file import CopyFile
from distributed_grid.memory.server.event_loop import EventLoop

AT_ONCE: Final = 2
REMEMBERED: Final = 10_000
CONNECT_SECONDS: Final = 10.0
Key = tuple[str, int]

log = logging.getLogger(__name__)


class ReplicationTask:
    """One copy to be made, with a descriptor of its own."""

    def __init__(self, order: MakeReplica, backing: CopyFile) -> None:
        self.order = order
        self.fd = os.dup(backing.fd)
        self.size = backing.size
        self.digests = array("Q", backing.digests)
        self.is_cancelled = False

    def run(self) -> str:
        """Do it; what went wrong, or nothing."""
        try:
            self._copy()
        except (GridError, OSError) as error:
            return str(error) or type(error).__name__
        except Exception as error:  # the outermost frame of a thread: whoever waits must hear of it
            log.exception("a copy could not be made")
            return f"a mistake of the memory server: {type(error).__name__}"
        finally:
            os.close(self.fd)
        return ""

    def _copy(self) -> None:
        if read_claims(self.order.ticket.claims).size != self.size:
            raise GridError("the ticket is for a block of another size")
        connection = ServerConnection.connect(self.order.target, seconds=CONNECT_SECONDS)
        try:
            opened = connection.open(self.order.ticket)
            if not opened.complete:
                connection.write_chunks(opened, self._chunks())
                connection.end_fill(opened)
        finally:
            connection.close()

    def _chunks(self) -> Iterator[tuple[int, memoryview, int]]:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for index, digest in enumerate(self.digests):
            if self.is_cancelled:
                raise GridError("the source was freed meanwhile")
            if digest:
                view = buffer[: min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)]
                if os.preadv(self.fd, [view], index * CHUNK_BYTES) != len(view):
                    raise GridError("the source could not be read")
                yield index * CHUNK_BYTES, view, digest


class CopyReplicator:
    """Does a few copies at once, in threads, and tells how each went in the loop's own."""

    def __init__(self, loop: EventLoop, made: Callable[[str, int, str], None]) -> None:
        self._made = made
        self._waiting: deque[ReplicationTask] = deque()
        self._running: dict[Key, ReplicationTask] = {}
        self._finished: deque[tuple[Key, str]] = deque()
        self._done: dict[Key, None] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.watch(self._wake, lambda _: self._collect())

    def begin(self, order: MakeReplica, backing: CopyFile) -> None:
        """Have this done, unless it is or was."""
        key = (order.source, order.generation)
        if key in self._done:
            self._made(*key, "")
        elif key not in self._running and all(key != _key(work) for work in self._waiting):
            self._waiting.append(ReplicationTask(order, backing))
            self._start_some()

    def cancel(self, source: str) -> None:
        """Nobody needs a copy of this any more."""
        for work in (*self._waiting, *self._running.values()):
            if work.order.source == source:
                work.is_cancelled = True

    def _start_some(self) -> None:
        while self._waiting and len(self._running) < AT_ONCE:
            work = self._waiting.popleft()
            self._running[_key(work)] = work
            threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: ReplicationTask) -> None:
        problem = work.run()
        self._finished.append((_key(work), problem))
        os.eventfd_write(self._wake, 1)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._finished:
            key, problem = self._finished.popleft()
            del self._running[key]
            if not problem:
                self._done[key] = None
                if len(self._done) > REMEMBERED:
                    del self._done[next(iter(self._done))]
            self._made(*key, problem)
        self._start_some()


def _key(work: ReplicationTask) -> Key:
    return (work.order.source, work.order.generation)
