"""Event loop of a memory server: one thread, one epoll, every connection in its turn.

No connection ends the loop: a failure on one ends that one. A client that has not authenticated in time, or
stalls in the middle of a request, is dropped; one that is idle between requests only when there are too many.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from distributed_grid.memory.server.client_connection import ClientConnection, ConnectionClosed
from distributed_grid.posix.sockets import PeerLimits, short_path

MAX_CONNECTIONS: Final = 1024
MAX_UNAUTHENTICATED: Final = 256
HANDSHAKE_SECONDS: Final = 10.0
STALL_SECONDS: Final = 30.0
TICK_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 5.0
Watcher = Callable[[int], None]

log = logging.getLogger(__name__)


class EventLoop:
    """The connections of one server, and whatever else has a descriptor to watch."""

    def __init__(
        self, make_connection: Callable[[socket.socket, bool, float], ClientConnection | None], max_per_peer: int
    ) -> None:
        self._make_connection = make_connection
        self._limits = PeerLimits(max_per_peer)
        self._poll = select.epoll()
        self._watchers: dict[int, Watcher] = {}
        self.connections: dict[int, ClientConnection] = {}
        self._sending: set[int] = set()
        self._unfinished: list[ClientConnection] = []
        self._stopped = False

    def watch(self, fd: int, watcher: Watcher, events: int = select.EPOLLIN) -> None:
        self._poll.register(fd, events)
        self._watchers[fd] = watcher

    def watch_for(self, fd: int, events: int) -> None:
        self._poll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        if self._watchers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def stop(self) -> None:
        self._stopped = True

    def listen(self, sock: socket.socket, *, is_local: bool) -> None:
        sock.setblocking(False)
        self.watch(sock.fileno(), lambda _: self._accept(sock, is_local))

    def run(self, tick: Callable[[], None]) -> None:
        """Serve until `stop`, with a tick every now and then."""
        next_tick = time.monotonic()
        while not self._stopped:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                for connection in list(self.connections.values()):
                    late = not connection.is_authenticated and now - connection.opened_at > HANDSHAKE_SECONDS
                    stalled = connection.is_mid_request and now - connection.progress_at > STALL_SECONDS
                    if late or stalled:
                        self.drop(connection)
                tick()
                continue
            unfinished, self._unfinished = self._unfinished, []
            for fd, events in self._poll.poll(0 if unfinished else next_tick - now, 256):
                ready = self.connections.get(fd)
                if ready is not None:
                    if ready not in unfinished:
                        self._run_turn(ready)
                elif fd in self._watchers:
                    self._watchers[fd](events)
            for connection in unfinished:
                if self.connections.get(connection.fd) is connection:
                    self._run_turn(connection)

    def _run_turn(self, connection: ClientConnection) -> None:
        try:
            if connection.run_turn():
                self._unfinished.append(connection)
        except ConnectionClosed:
            self.drop(connection)
            return
        except (OSError, ssl.SSLError):
            self.drop(connection)
            return
        except Exception:  # the outermost frame of a connection: a bug met on one must not end the others
            log.exception("a connection was ended by an internal error")
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
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: drop an idle connection
                log.warning("cannot accept a connection: %s", error.strerror)
                self._make_room()
                return
            peer = "" if is_local else address[0]
            if not self._has_room() or (peer and not self._limits.add(sock.fileno(), peer)):
                sock.close()
                continue
            descriptor = sock.fileno()
            try:
                sock.setblocking(False)
                connection = self._make_connection(sock, is_local, time.monotonic())
            except (OSError, ssl.SSLError):
                sock.close()
                connection = None
            if connection is None:
                self._limits.remove(descriptor)
                continue
            connection.is_refused = self._limits.exceeded_by(peer)
            self.connections[connection.fd] = connection
            self._poll.register(connection.fd, select.EPOLLIN)

    def _has_room(self) -> bool:
        if len(self.connections) < MAX_UNAUTHENTICATED:
            return True
        if sum(not each.is_authenticated for each in self.connections.values()) >= MAX_UNAUTHENTICATED:
            return False
        return len(self.connections) < MAX_CONNECTIONS or self._make_room()

    def _make_room(self) -> bool:
        """Drop the connection that has been idle longest; False where none has for long enough."""
        idle = [each for each in self.connections.values() if each.is_authenticated and not each.is_mid_request]
        oldest = min(idle, key=lambda each: each.progress_at, default=None)
        if oldest is None or oldest.progress_at > time.monotonic() - IDLE_SECONDS:
            return False
        self.drop(oldest)
        return True

    def drop(self, connection: ClientConnection) -> None:
        """End a connection; safe twice."""
        if self.connections.pop(connection.fd, None) is not None:
            self._limits.remove(connection.fd)
            self._sending.discard(connection.fd)
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(connection.fd)
        connection.close()

    def close(self) -> None:
        for connection in list(self.connections.values()):
            self.drop(connection)
        self._poll.close()


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket at this address; at any port where this one is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in dict.fromkeys((port, 0)):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, number))
            sock.listen(256)
        except OSError:
            sock.close()
            if number == 0:
                raise
        else:
            return sock
    raise AssertionError  # the loop returns or raises


def listen_unix(path: Path, kind: int) -> socket.socket:
    """A listening socket for this user. The caller has the lock, so an earlier server is gone."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, kind)
    before = os.umask(0o177)
    try:
        with short_path(path) as name:
            sock.bind(name)
    finally:
        os.umask(before)
    sock.listen(256)
    return sock
