"""The bytes of a connection to a memory server: requests go out, answers come in, or it is broken.

Rule 1. Whatever goes wrong with the bytes closes the connection: nobody can go on in the middle of an answer.
Rule 2. What small answers carry is received along with them; what large ones carry goes straight to where it belongs.
"""

from __future__ import annotations

import os
import socket
import ssl
from struct import pack
from typing import Final

from distributed_grid.errors import GridError
from distributed_grid.memory.protocol.frames import ANSWER, ANSWER_MAGIC, FrameStatus

SMALL: Final = 32 * 1024
SCRATCH: Final = 64 * 1024
ANSWER_SECONDS: Final = 10


class StatusError(GridError):
    """The server said no, and how."""

    def __init__(self, status: FrameStatus) -> None:
        super().__init__(f"the memory server answered: {status.name.lower()}")
        self.status = status


class ConnectionBroken(GridError):
    """The connection is of no use any more."""


class BufferedSocket:
    """A connected socket, used by one thread at a time. Every method raises `ConnectionBroken` when it breaks."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_tls = isinstance(sock, ssl.SSLSocket)
        self.seq = 0  # of the last request
        self.buffer = memoryview(bytearray(SCRATCH))
        self.start = self.end = 0  # what is received and not taken
        self.packed = memoryview(b"")  # room for what has to be unpacked
        self.wire_received = self.wire_sent = 0

    def wait_at_most(self, seconds: int) -> None:
        """From now on a call that takes longer than this breaks the connection."""
        # By the kernel: Python's own time-outs cost a poll with every call. Its TLS does not know those, though.
        if self.is_tls:
            self.sock.settimeout(seconds)
            return
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.sock.setsockopt(socket.SOL_SOCKET, option, pack("@ll", seconds, 0))

    def close(self) -> None:
        """End it; safe twice."""
        self.sock.close()

    @property
    def is_usable(self) -> bool:
        """Whether nothing has come, not even the end, since the last answer."""
        if self.start != self.end:
            return False
        try:
            with socket.socket(fileno=os.dup(self.sock.fileno())) as plain:
                found = plain.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False
        return self.is_tls and bool(found)  # session tickets may wait to be read

    def send(self, parts: list[bytes | memoryview] | list[bytes]) -> None:
        """Send all of these, in as few calls as possible."""
        try:
            if self.is_tls:
                for part in parts:
                    self.sock.sendall(part)
                return
            left = sum(map(len, parts))
            sent = self.sock.sendmsg(parts)
            while sent < left:
                left -= sent
                parts = _rest(parts, sent)
                sent = self.sock.sendmsg(parts)
        except (OSError, ValueError) as error:
            raise self.broken(error) from None

    def answer(self, expected: int, seq: int = 0) -> tuple[int, int, int, int]:
        """The next answer's status, flags, length and digest; small data that follow may be received along."""
        have = self.end - self.start
        if have < ANSWER.size:
            if have == 0:
                self.start = self.end = 0
            elif self.start:
                rest = bytes(self.buffer[self.start : self.end])
                self.buffer[:have] = rest
                self.start, self.end = 0, have
            most = SCRATCH if expected <= SMALL else ANSWER.size
            while self.end < ANSWER.size:
                self.end += self.receive_into(self.buffer[self.end : most])
        magic, status, flags, got_seq, length, digest = ANSWER.unpack_from(self.buffer, self.start)
        self.start += ANSWER.size
        if magic != ANSWER_MAGIC or (seq and got_seq != seq & 0xFFFFFFFF) or status not in _STATUSES:
            raise self.broken(ValueError("the memory server does not speak this protocol"))
        return status, flags, length, digest

    def take(self, view: memoryview) -> None:
        """Fill this with what follows."""
        ready = min(self.end - self.start, len(view))
        if ready:
            view[:ready] = self.buffer[self.start : self.start + ready]
            self.start += ready
        while ready < len(view):
            ready += self.receive_into(view[ready:], all_of_it=True)

    def receive_into(self, view: memoryview, *, all_of_it: bool = False) -> int:
        """Receive some of what follows, and at least a byte; how much."""
        try:
            if self.is_tls:
                got = self.sock.recv_into(view)
            else:
                got = self.sock.recv_into(view, 0, socket.MSG_WAITALL if all_of_it else 0)
        except (OSError, ValueError) as error:
            raise self.broken(error) from None
        if got == 0:
            raise self.broken(EOFError("it was closed"))
        return got

    def broken(self, error: Exception) -> ConnectionBroken:
        """Close it; what to raise because of this."""
        self.close()
        waited = isinstance(error, BlockingIOError | TimeoutError)
        return ConnectionBroken(f"no answer for {ANSWER_SECONDS} s" if waited else str(error) or type(error).__name__)


def _rest(parts: list[bytes | memoryview] | list[bytes], sent: int) -> list[bytes | memoryview]:
    left: list[bytes | memoryview] = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
        else:
            left.append(memoryview(part)[sent:])
            sent = 0
    return left


_STATUSES = frozenset(FrameStatus)
