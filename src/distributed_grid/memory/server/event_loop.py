"""Who may be served now: one thread, one epoll, every connection in its turn.

Rule 1. No connection ends the loop: what goes wrong on one ends that one.
Rule 2. Who has not shown a ticket in time, or stands still half-way, is let go of; who waits between requests is not,
        unless the room is needed.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

from distributed_grid.memory.server.connection import ClientConnection
from distributed_grid.memory.server.stream import ConnectionClosed

MOST_CONNECTIONS: Final = 1024
MOST_UNPROVEN: Final = 256
HANDSHAKE_SECONDS: Final = 10.0
STALL_SECONDS: Final = 30.0
TICK_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 5.0
Watcher = Callable[[int], None]

log = logging.getLogger(__name__)


class EventLoop:
    """The connections of one server, and whatever else has a descriptor to watch."""

    def __init__(self, accepted: Callable[[socket.socket, bool, float], ClientConnection | None]) -> None:
        self._accepted = accepted
        self._poll = select.epoll()
        self._watchers: dict[int, Watcher] = {}
        self.connections: dict[int, ClientConnection] = {}
        self._sending: set[int] = set()
        self._again: list[ClientConnection] = []
        self.ended = False

    def watch(self, fd: int, watcher: Watcher, events: int = select.EPOLLIN) -> None:
        """Have this called with the events of a descriptor."""
        self._poll.register(fd, events)
        self._watchers[fd] = watcher

    def watch_for(self, fd: int, events: int) -> None:
        self._poll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Not any more; a descriptor that is not watched is none to worry about."""
        if self._watchers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def listen(self, sock: socket.socket, *, is_local: bool) -> None:
        """Accept connections here."""
        sock.setblocking(False)
        self.watch(sock.fileno(), lambda _: self._accept(sock, is_local))

    def run(self, tick: Callable[[], None]) -> None:
        """Serve until `ended`, with a tick every now and then."""
        next_tick = time.monotonic()
        while not self.ended:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                self._let_go_of_the_slow(now)
                tick()
                continue
            again, self._again = self._again, []
            for fd, events in self._poll.poll(0 if again else next_tick - now, 256):
                connection = self.connections.get(fd)
                if connection is not None:
                    if connection not in again:
                        self._turn(connection)
                elif fd in self._watchers:
                    self._watchers[fd](events)
            for connection in again:
                if self.connections.get(connection.fd) is connection:
                    self._turn(connection)

    def _turn(self, connection: ClientConnection) -> None:
        try:
            if connection.turn():
                self._again.append(connection)
        except ConnectionClosed:
            self.drop(connection)
            return
        except (OSError, ssl.SSLError):
            self.drop(connection)
            return
        except Exception:  # the outermost place of a connection: a mistake with one must not end the others
            log.exception("a connection was ended by a mistake of the server")
            self.drop(connection)
            return
        if connection.progressed:
            connection.progressed = False
            connection.progress_at = time.monotonic()
        if connection.waits_to_send != (connection.fd in self._sending):
            if connection.waits_to_send:
                self._sending.add(connection.fd)
                self._poll.modify(connection.fd, select.EPOLLOUT)
            else:
                self._sending.discard(connection.fd)
                self._poll.modify(connection.fd, select.EPOLLIN)

    def _accept(self, listener: socket.socket, is_local: bool) -> None:
        for _ in range(64):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: let go of somebody who waits
                log.warning("cannot accept a connection: %s", error.strerror)
                self._make_room()
                return
            if not self._has_room():
                sock.close()
                continue
            try:
                sock.setblocking(False)
                connection = self._accepted(sock, is_local, time.monotonic())
            except (OSError, ssl.SSLError):
                sock.close()
                continue
            if connection is not None:
                self.connections[connection.fd] = connection
                self._poll.register(connection.fd, select.EPOLLIN)

    def _has_room(self) -> bool:
        if len(self.connections) < MOST_UNPROVEN:
            return True
        if sum(not one.proven for one in self.connections.values()) >= MOST_UNPROVEN:
            return False
        return len(self.connections) < MOST_CONNECTIONS or self._make_room()

    def _make_room(self) -> bool:
        """Let go of whoever has waited longest between requests; False where nobody has for long enough."""
        idle = [one for one in self.connections.values() if one.proven and not one.is_midway]
        oldest = min(idle, key=lambda one: one.progress_at, default=None)
        if oldest is None or oldest.progress_at > time.monotonic() - IDLE_SECONDS:
            return False
        self.drop(oldest)
        return True

    def _let_go_of_the_slow(self, now: float) -> None:
        for connection in list(self.connections.values()):
            late = not connection.proven and now - connection.begun_at > HANDSHAKE_SECONDS
            stalled = connection.is_midway and now - connection.progress_at > STALL_SECONDS
            if late or stalled:
                self.drop(connection)

    def drop(self, connection: ClientConnection) -> None:
        """End a connection; safe twice."""
        if self.connections.pop(connection.fd, None) is not None:
            self._sending.discard(connection.fd)
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(connection.fd)
        connection.close()

    def close(self) -> None:
        """End all of them."""
        for connection in list(self.connections.values()):
            self.drop(connection)
        self._poll.close()
