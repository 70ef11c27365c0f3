"""What a keeper and its memory server say to each other, with descriptors, on a socket that keeps messages whole.

Rule 1. Whoever dies, the other side has every descriptor: what was sent arrives, and was sent before it mattered.
Rule 2. Sending never blocks; what does not go out now is queued, in order.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from distributed_grid.errors import ProtocolError
from distributed_grid.wire import Endpoint, Ticket

LARGEST: Final = 128 * 1024
BATCH: Final = 64  # names or descriptors in one message
JOURNAL: Final = "journal"


class _Said(Struct, frozen=True, tag=True):
    """Some of these carry keys, so none shows its content."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class Begin(_Said, frozen=True):
    """To a fresh server: who it is. What it is to hold comes next, in `HeldCopy`, and then `Go`."""

    folder: str
    host: str
    port: int
    incarnation: str
    key: bytes
    certificate: bytes = b""
    private_key: bytes = b""
    until_boot_ms: int = 0
    alone_ms: int = 60_000  # how long it waits for a keeper before it lets go of what has ended, and of itself


class Go(_Said, frozen=True):
    """That was all."""


class HeldCopy(_Said, frozen=True):
    """These are held in memory; their descriptors come along, in this order. `journal` is the journal."""

    copies: tuple[str, ...]


class OnDisk(_Said, frozen=True):
    """These are on disk."""

    copies: tuple[str, ...]


class ServerReady(_Said, frozen=True):
    """From a server: all that it holds was told, and it serves."""

    endpoint: Endpoint
    key: bytes
    certificate: bytes
    private_key: bytes
    until_boot_ms: int
    pid: int


class CommandFailed(_Said, frozen=True):
    """From a server that cannot begin, and why."""

    problem: str


class NewIncarnation(_Said, frozen=True):
    """The hold has run out: nothing is in memory any more, and tickets of before are worth nothing."""

    incarnation: str
    key: bytes


class ExtendHold(_Said, frozen=True):
    """What is in memory may be held until then (0: without end)."""

    until_boot_ms: int


class FreeCopy(_Said, frozen=True):
    """Let go of these."""

    copies: tuple[str, ...]


class CopyFreed(_Said, frozen=True):
    """They are gone."""

    copies: tuple[str, ...]


class MakeReplica(_Said, frozen=True):
    """Make a copy of a copy elsewhere."""

    source: str
    generation: int
    target: Endpoint
    ticket: Ticket


class ReplicaMade(_Said, frozen=True):
    """A copy was made, or why it was not."""

    source: str
    generation: int
    problem: str


class ServerStats(_Said, frozen=True):
    """What a server holds and has done."""

    resident_bytes: int = 0
    copies: int = 0
    reads: int = 0
    writes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    wire_in: int = 0
    wire_out: int = 0
    connections: int = 0


class Leave(_Said, frozen=True):
    """The keeper goes: a server that holds nothing has no reason to stay."""


Message = (
    Begin
    | Go
    | HeldCopy
    | OnDisk
    | ServerReady
    | CommandFailed
    | NewIncarnation
    | ExtendHold
    | FreeCopy
    | CopyFreed
    | MakeReplica
    | ReplicaMade
    | ServerStats
    | Leave
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class ControlSocket:
    """One end of the conversation; the socket is non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024 * 1024)
        self.sock = sock
        self._out: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def waits_to_send(self) -> bool:
        return bool(self._out)

    def send(self, message: Message, fds: Iterable[int] = ()) -> None:
        """Send, or queue; of the descriptors a duplicate travels. OSError when the other side is gone."""
        packed = _encoder.encode(message)
        self.flush()
        if self._out or not self._try(packed, list(fds)):
            self._out.append((packed, [os.dup(fd) for fd in fds]))

    def send_now(self, message: Message, fds: Iterable[int]) -> bool:
        """Send only where it goes out at once."""
        return not self._out and self._try(_encoder.encode(message), list(fds))

    def flush(self) -> bool:
        """Send what is queued; whether nothing is left. OSError when the other side is gone."""
        while self._out:
            packed, fds = self._out[0]
            if not self._try(packed, fds):
                return False
            self._out.popleft()
            for fd in fds:
                os.close(fd)
        return True

    def _try(self, packed: bytes, fds: list[int]) -> bool:
        try:
            socket.send_fds(self.sock, [packed], fds)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[tuple[Message, list[int]]]:
        """What has arrived, with the descriptors, which are the receiver's to close. EOFError at the end."""
        found: list[tuple[Message, list[int]]] = []
        for _ in range(256):
            try:
                packed, fds, _, _ = socket.recv_fds(self.sock, LARGEST, BATCH + 1)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                continue  # told once, before what was sent earlier: that is still to be had
            except OSError:
                packed, fds = b"", []
            if not packed:
                if found:
                    return found  # the end is seen again next time
                raise EOFError
            try:
                found.append((_decoder.decode(packed), fds))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                _close_all(fds)
                raise ProtocolError("the other end of a memory server's control socket speaks nonsense") from None
        return found

    def close(self) -> None:
        """End it; safe twice."""
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        self.sock.close()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def batches(names: Iterable[str]) -> Iterable[tuple[str, ...]]:
    """The names, in as many as fit in one message."""
    rest = tuple(names)
    for start in range(0, len(rest), BATCH):
        yield rest[start : start + BATCH]
