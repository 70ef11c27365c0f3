"""Locations of blocks, and the pool of connections to the memory servers that hold them.

A connection with an error is not used again, and the server must drop it before anything else is sent: a write that was
retried must not be done again, later, over newer bytes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.client.server_connection import ConnectionBroken, ServerConnection
from distributed_grid.memory.protocol.frames import MAX_HANDLES, FrameStatus, StatusError
from distributed_grid.wire import Endpoint, Ticket

CONNECT_SECONDS: Final = 5.0
MAX_IDLE: Final = 8
CHECK_AFTER_SECONDS: Final = 1.0


class CopyLocation(NamedTuple):
    """A copy of a block: its server, and the ticket for it. `server_key` is the same for all copies of one server, and
    cheap to look up."""

    node: str
    copy: str
    endpoint: Endpoint
    ticket: Ticket
    on_disk: bool
    server_key: str


class BlockLocation(NamedTuple):
    """A block and where its copies are; reads go to the first."""

    block_id: str
    size: int
    generation: int
    copies: tuple[CopyLocation, ...]
    meta: str = ""


def parse_location(answer: dict[str, Any]) -> BlockLocation:
    """The block directory's answer as a value; ProtocolError where it is not valid."""
    try:
        block = answer["block"]
        copies = tuple(_parse_copy(entry) for entry in answer["places"])
        numbers = int(block["size"]), int(block["generation"])
        location = BlockLocation(str(block["block_id"]), *numbers, copies, str(block.get("meta", "")))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ProtocolError(f"invalid answer about a block: {error!r}") from None
    if not copies:
        raise ProtocolError(f"the answer names no copy of block {location.block_id}")
    return location


def _parse_copy(entry: dict[str, Any]) -> CopyLocation:
    fingerprint, path = str(entry.get("fingerprint") or ""), str(entry.get("path") or "")
    endpoint = Endpoint(
        str(entry["host"]), int(entry["port"]), fingerprint, path, incarnation=str(entry.get("incarnation") or "")
    )
    key = "|".join((endpoint.host, str(endpoint.port), endpoint.fingerprint, endpoint.path, endpoint.incarnation))
    ticket = Ticket(base64.b64decode(entry["claims"]), base64.b64decode(entry["secret"]))
    on_disk = bool(entry.get("on_disk"))
    return CopyLocation(str(entry["node"]), str(entry["copy"]), endpoint, ticket, on_disk, server_key=key)


class ConnectionPool:
    """The connections of one program; each is one thread's at a time.

    A server on the same machine is reached by its Unix socket, others over the network. A socket file counts as the
    server's if it accepts connections and serves the incarnation the ticket names.
    """

    def __init__(self) -> None:
        self._idle: dict[str, list[ServerConnection]] = {}
        self._not_local: set[str] = set()
        self._broken: dict[str, list[bytes]] = {}  # nonces of broken connections, until their server has severed them
        self._severing = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    @contextlib.contextmanager
    def connection(self, location: CopyLocation) -> Iterator[ServerConnection]:
        """A connection to the server of this copy, for this thread. Raises `ConnectionBroken` where there is none."""
        connection = self.acquire(location)
        try:
            yield connection
        except StatusError as error:
            self.release_refused(location, connection, error)
            raise
        except BaseException:
            self.discard(location, connection)
            raise
        else:
            self.release(location, connection)

    def acquire(self, location: CopyLocation) -> ServerConnection:
        """A connection, this thread's until it releases or discards it."""
        if self._pid != os.getpid():
            # A child must not send on its parent's connections; it starts with none.
            self._pid = os.getpid()
            self._lock, self._severing = threading.Lock(), threading.Lock()
            idle, self._idle, self._broken = self._idle, {}, {}
            _close_all(idle)
        connection = self._pop_idle(location.server_key) or self._connect(location)
        if location.server_key in self._broken:
            with self._severing:  # other threads wait until it is done
                for nonce in list(self._broken.get(location.server_key, ())):
                    try:
                        connection.sever(nonce)
                    except BaseException:
                        connection.close()
                        raise
                    with self._lock:
                        self._broken[location.server_key].remove(nonce)
                with self._lock:
                    if not self._broken.get(location.server_key, True):
                        del self._broken[location.server_key]
        return connection

    def release(self, location: CopyLocation, connection: ServerConnection) -> None:
        """Keep a connection for the next transfer."""
        connection.used_at = time.monotonic()
        idle = self._idle.get(location.server_key)
        if idle is None:
            with self._lock:
                idle = self._idle.setdefault(location.server_key, [])
        if len(idle) < MAX_IDLE and not self._closed:
            idle.append(connection)
        else:
            connection.close()

    def release_refused(self, location: CopyLocation, connection: ServerConnection, error: StatusError) -> None:
        """Release a connection on which a request was refused: it is as good as before."""
        if connection.is_local and error.status is FrameStatus.WRONG_INCARNATION:
            self._not_local.add(location.server_key)  # another server's socket by the same name
            connection.close()
        else:
            self.release(location, connection)

    def discard(self, location: CopyLocation, connection: ServerConnection) -> None:
        """Close a broken connection; the next one severs writes that are in flight on it."""
        connection.close()
        if connection.wire_sent:
            with self._lock:
                self._broken.setdefault(location.server_key, []).append(connection.nonce)

    def open_descriptor(self, location: CopyLocation) -> int:
        """Read-only descriptor of this copy; -1 if its server is on another machine."""
        with self.connection(location) as connection:
            return connection.open_descriptor(connection.open(location.ticket)) if connection.is_local else -1

    def close(self) -> None:
        """Close what is idle, and what will be; safe twice."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        _close_all(idle)

    def _pop_idle(self, server_key: str) -> ServerConnection | None:
        now = time.monotonic()
        while True:
            try:
                connection = self._idle[server_key].pop()  # one step, so two threads never get the same
            except (KeyError, IndexError):
                return None
            must_check = now - connection.used_at > CHECK_AFTER_SECONDS
            if len(connection.opened) < MAX_HANDLES - 1 and not (must_check and not connection.is_usable):
                return connection
            connection.close()

    def _connect(self, location: CopyLocation) -> ServerConnection:
        endpoint = location.endpoint
        if endpoint.path and location.server_key not in self._not_local and os.path.exists(endpoint.path):
            with contextlib.suppress(ConnectionBroken):
                return ServerConnection.connect_local(endpoint.path, seconds=CONNECT_SECONDS)
        return ServerConnection.connect(endpoint, seconds=CONNECT_SECONDS)


def _close_all(idle: dict[str, list[ServerConnection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()
