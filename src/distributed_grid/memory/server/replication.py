"""Replication: copies of copies made on other memory servers, in threads beside the event loop.

The source is frozen before this starts, so what is read is what stays, and stays frozen until the control plane
decides, whatever goes wrong.
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
from distributed_grid.memory.client.server_connection import ServerConnection
from distributed_grid.memory.protocol.authentication import read_claims
from distributed_grid.memory.protocol.control_messages import MakeReplica
from distributed_grid.memory.protocol.frames import CHUNK_BYTES
from distributed_grid.memory.server.copy_file import CopyFile
from distributed_grid.memory.server.event_loop import EventLoop

MAX_RUNNING: Final = 2
MAX_DONE: Final = 10_000
CONNECT_SECONDS: Final = 10.0
Key = tuple[str, int]

log = logging.getLogger(__name__)


class ReplicationTask:
    """A replica to be made, with a descriptor of the source of its own."""

    def __init__(self, order: MakeReplica, backing: CopyFile) -> None:
        self.order = order
        self.fd = os.dup(backing.fd)
        self.size = backing.size
        self.digests = array("Q", backing.digests)
        self.is_cancelled = False

    def run(self) -> str:
        """Make it; the problem, or nothing."""
        try:
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
        except (GridError, OSError) as error:
            return str(error) or type(error).__name__
        except Exception as error:  # the outermost frame of a thread: the problem must be reported
            log.exception("a replica could not be made")
            return f"internal error of the memory server: {type(error).__name__}"
        finally:
            os.close(self.fd)
        return ""

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
    """Makes a few replicas at once, in threads, and reports each from the event loop's thread."""

    def __init__(self, loop: EventLoop, report: Callable[[str, int, str], None]) -> None:
        self._report = report
        self._waiting: deque[ReplicationTask] = deque()
        self._running: dict[Key, ReplicationTask] = {}
        self._finished: deque[tuple[Key, str]] = deque()
        self._done: dict[Key, None] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.watch(self._wake, lambda _: self._collect())

    def start(self, order: MakeReplica, backing: CopyFile) -> None:
        """Make a replica, unless that is running or done; one that is done is reported again."""
        key = (order.source, order.generation)
        if key in self._done:
            self._report(*key, "")
        elif key not in self._running and all(key != _key(task) for task in self._waiting):
            self._waiting.append(ReplicationTask(order, backing))
            self._start_waiting()

    def cancel(self, source: str) -> None:
        """Stop replicating this source."""
        for task in (*self._waiting, *self._running.values()):
            if task.order.source == source:
                task.is_cancelled = True

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < MAX_RUNNING:
            task = self._waiting.popleft()
            self._running[_key(task)] = task
            try:
                threading.Thread(target=self._run, args=(task,), daemon=True).start()
            except RuntimeError as error:  # no thread to be had
                os.close(task.fd)
                self._finish(task, str(error))

    def _run(self, task: ReplicationTask) -> None:
        self._finish(task, task.run())

    def _finish(self, task: ReplicationTask, problem: str) -> None:
        self._finished.append((_key(task), problem))
        os.eventfd_write(self._wake, 1)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._finished:
            key, problem = self._finished.popleft()
            del self._running[key]
            if not problem:
                self._done[key] = None
                if len(self._done) > MAX_DONE:
                    del self._done[next(iter(self._done))]
            self._report(*key, problem)
        self._start_waiting()


def _key(task: ReplicationTask) -> Key:
    return (task.order.source, task.order.generation)
