"""Non-blocking byte stream of a connection, on the server's side.

What is queued goes out in order, in as few calls as possible; whole chunks go out straight from their file. A slot is
released when its bytes are out.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections import deque
from typing import Final

from distributed_grid.memory.server.copy_file import CopyFile
from distributed_grid.memory.server.write_journal import Slot, SlotPool

INBOX_BYTES: Final = 16 * 1024
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ConnectionClosed(Exception):
    """The connection has ended."""


class FilePart:
    """A range of a copy that is sent from its file by `sendfile`. A write to it meanwhile shows, and then the digest
    does not match: the client asks again, for a consistent snapshot."""

    __slots__ = ("backing", "left", "offset")

    def __init__(self, backing: CopyFile, offset: int, length: int) -> None:
        self.backing = backing
        self.offset = offset
        self.left = length

    def __len__(self) -> int:
        return self.left

    def send(self, to: int) -> int:
        """Send some; BlockingIOError where nothing can be sent now."""
        if self.backing.fd < 0:
            raise ConnectionClosed  # freed meanwhile; the header is out already
        sent = os.sendfile(to, self.backing.fd, self.offset, self.left)
        if sent == 0:
            raise ConnectionClosed
        self.offset += sent
        self.left -= sent
        return sent


class ClientStream:
    """Input and output buffers of a connection; `ConnectionClosed` or OSError is the end."""

    def __init__(self, sock: socket.socket, staging: SlotPool) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.progressed = False
        self.is_tls = isinstance(sock, ssl.SSLSocket)
        self.is_handshaken = not self.is_tls
        self.inbox = memoryview(bytearray(INBOX_BYTES))
        self.start = self.end = 0  # what is in the inbox and not consumed
        self.is_drained = False
        self.out: deque[tuple[bytes | bytearray | memoryview | FilePart, Slot | None]] = deque()
        self.out_bytes = 0
        self.out_fds: list[int] = []
        self._staging = staging

    @property
    def waits_to_send(self) -> bool:
        """Whether something is queued."""
        return bool(self.out)

    def close(self) -> None:
        """Close it; safe twice. Slots are released, queued descriptors closed."""
        for _, slot in self.out:
            if slot is not None:
                self._staging.release(slot)
        self.out.clear()
        for fd in self.out_fds:
            os.close(fd)
        self.out_fds.clear()
        self.sock.close()

    def continue_handshake(self) -> bool:
        """Continue the TLS handshake; False where it is not done yet."""
        assert isinstance(self.sock, ssl.SSLSocket)
        try:
            self.sock.do_handshake()
        except _NOT_NOW:
            return False
        self.is_handshaken = True
        return True

    # ------------------------------------------------------------------ in

    def fill_inbox(self) -> int:
        """Receive more into the inbox; -1 where there is nothing now."""
        if self.start == self.end:
            self.start = self.end = 0
        elif self.start:
            rest = bytes(self.inbox[self.start : self.end])
            self.inbox[: len(rest)] = rest
            self.start, self.end = 0, len(rest)
        got = self.receive_into(self.inbox[self.end :])
        if got > 0:
            self.end += got
        return got

    def receive_into(self, view: memoryview) -> int:
        """Receive what is there; -1 where nothing is, also right after a receive that did not fill its buffer."""
        if self.is_drained:
            self.is_drained = False
            return -1
        try:
            got = self.sock.recv_into(view)
        except _NOT_NOW:
            return -1
        if got == 0:
            raise ConnectionClosed
        self.progressed = True
        self.is_drained = got < len(view) and not self.is_tls
        return got

    # ------------------------------------------------------------------ out

    def queue(self, part: bytes | bytearray | memoryview, slot: Slot | None = None) -> None:
        """Send this with the next flush, and then release the slot."""
        self.out.append((part, slot))
        self.out_bytes += len(part)

    def flush(self) -> bool:
        """Send what is queued; False where not all can be sent now."""
        while self.out:
            try:
                first = self.out[0][0]
                if isinstance(first, FilePart):
                    sent = first.send(self.fd)
                    self.progressed = True
                    self.out_bytes -= sent
                    if not first.left:
                        self.out.popleft()
                    continue
                if self.out_fds:
                    sent = socket.send_fds(self.sock, self._leading(), self.out_fds[:1])
                    os.close(self.out_fds.pop(0))
                elif self.is_tls:
                    sent = self.sock.send(first)
                else:
                    parts = self._leading()
                    more = socket.MSG_MORE if len(parts) < len(self.out) else 0
                    sent = self.sock.sendmsg(parts, (), more)
            except _NOT_NOW:
                return False
            self.progressed = True
            self._sent(sent)
        return True

    def _leading(self) -> list[bytes | bytearray | memoryview]:
        """The parts that can go out in one call."""
        parts: list[bytes | bytearray | memoryview] = []
        for part, _ in self.out:
            if isinstance(part, FilePart) or len(parts) == 64:
                break
            parts.append(part)
        return parts

    def _sent(self, sent: int) -> None:
        self.out_bytes -= sent
        while sent:
            part, slot = self.out[0]
            assert not isinstance(part, FilePart)
            if sent < len(part):
                self.out[0] = (memoryview(part)[sent:], slot)
                return
            sent -= len(part)
            self.out.popleft()
            if slot is not None:
                self._staging.release(slot)
