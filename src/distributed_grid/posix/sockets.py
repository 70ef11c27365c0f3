"""Unix sockets: paths within the kernel's 108 bytes, descriptors in messages, peer credentials, limits of peers."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

MAX_PATH_BYTES = 100
UNCONNECTED = -1
"""The peer of a socket that is not connected, as when the backlog of the listener is full."""


@contextlib.contextmanager
def short_path(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name for this path that a socket can be bound or connected to, while the block runs."""
    name = os.fspath(path)
    if len(os.fsencode(name)) < MAX_PATH_BYTES:
        yield name
        return
    folder = os.open(os.path.dirname(name), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(name)}"
    finally:
        os.close(folder)


def receive_descriptors(sock: socket.socket, max_bytes: int, max_descriptors: int) -> tuple[bytes, list[int]]:
    """The next message and its descriptors, which no child process inherits (`socket.recv_fds` ignores its flags)."""
    descriptors = array.array("i")
    room = socket.CMSG_LEN(max_descriptors * descriptors.itemsize)
    packed, ancillary, _, _ = sock.recvmsg(max_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return packed, list(descriptors)


def peer_uid(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def peer_pid(connection: socket.socket) -> int:
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def is_own_peer(connection: socket.socket) -> bool:
    return peer_uid(connection) in (os.geteuid(), 0)


MAX_REFUSALS = 8
"""Connections of a peer beyond its limit, at once; each gets the reason and is closed."""


class PeerLimits:
    """The open connections of each peer, by descriptor."""

    def __init__(self, max_per_peer: int) -> None:
        self.max_per_peer = max_per_peer
        self._peers: dict[int, str] = {}
        self._counts: dict[str, int] = {}

    def add(self, descriptor: int, peer: str) -> bool:
        """Count a connection; False if its peer has too many even for an answer."""
        if self._counts.get(peer, 0) >= self.max_per_peer + MAX_REFUSALS:
            return False
        self._peers[descriptor] = peer
        self._counts[peer] = self._counts.get(peer, 0) + 1
        return True

    def remove(self, descriptor: int) -> None:
        """Do not count a connection any more: it is closed, or authenticated. Harmless twice."""
        peer = self._peers.pop(descriptor, None)
        if peer is not None:
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]

    def exceeded_by(self, peer: str) -> bool:
        return self._counts.get(peer, 0) > self.max_per_peer


class LimitedListener(socket.socket):
    """A listening socket that counts what it accepts until that is closed."""

    limits: PeerLimits

    @classmethod
    def of(cls, listener: socket.socket, max_per_peer: int) -> LimitedListener:
        """The same listening socket, with a limit."""
        limited = cls(fileno=listener.detach())
        limited.setblocking(False)
        limited.limits = PeerLimits(max_per_peer)
        return limited

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. One of a peer that has far too many is closed (ConnectionAbortedError)."""
        connection, address = super().accept()
        if not self.limits.add(connection.fileno(), address[0]):
            connection.close()
            raise ConnectionAbortedError
        return _CountedSocket(self.limits, connection.detach()), address


class _CountedSocket(socket.socket):
    def __init__(self, limits: PeerLimits, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self._limits = limits

    def close(self) -> None:
        descriptor = self.fileno()
        super().close()
        self._limits.remove(descriptor)
