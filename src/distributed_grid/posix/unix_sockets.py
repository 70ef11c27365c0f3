"""Unix sockets: paths that fit the kernel's 108 bytes, descriptors in messages, and peer credentials."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterator

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
    """The user of the process at the other end, from SO_PEERCRED."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end when it was connected, from SO_PEERCRED."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def is_own_peer(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user, or of root."""
    return peer_uid(connection) in (os.geteuid(), 0)
