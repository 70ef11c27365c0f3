"""Control messages between a memory server and its supervisor, with descriptors, over a SOCK_SEQPACKET socket.

Whoever dies, the other side has every descriptor: what was sent arrives, and was sent before it mattered.
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

MAX_MESSAGE_BYTES: Final = 128 * 1024
BATCH_SIZE: Final = 64  # names or descriptors in one message
JOURNAL: Final = "journal"


class _ControlMessage(Struct, frozen=True, tag=True):
    """Base of all messages. Some carry keys, so none shows its content."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class ConfigureServer(_ControlMessage, frozen=True):
    """To a new server: who it is. What it is to hold comes next, in `HeldCopy`, and then `StartServing`."""

    folder: str
    host: str
    port: int
    incarnation: str
    key: bytes
    certificate: bytes = b""
    private_key: bytes = b""
    hold_until_boot_ms: int = 0
    unsupervised_ms: int = 60_000  # how long it waits for a supervisor before it frees what has ended, and ends itself


class StartServing(_ControlMessage, frozen=True):
    """To a new server: the configuration is complete."""


class HeldCopy(_ControlMessage, frozen=True):
    """These copies are held in memory; their descriptors come along, in this order. `journal` is the journal."""

    copies: tuple[str, ...]


class CopyOnDisk(_ControlMessage, frozen=True):
    """These copies are on disk."""

    copies: tuple[str, ...]


class ServerReady(_ControlMessage, frozen=True):
    """From a server: it has listed all that it holds, and serves."""

    endpoint: Endpoint
    key: bytes
    certificate: bytes
    private_key: bytes
    hold_until_boot_ms: int
    pid: int


class CommandFailed(_ControlMessage, frozen=True):
    """From a server that cannot start, and why."""

    problem: str


class NewIncarnation(_ControlMessage, frozen=True):
    """The hold has expired: nothing is in memory any more, and earlier tickets are void."""

    incarnation: str
    key: bytes


class SetHold(_ControlMessage, frozen=True):
    """Hold what is in memory until then (0: without end)."""

    until_boot_ms: int


class FreeCopy(_ControlMessage, frozen=True):
    """Free these copies."""

    copies: tuple[str, ...]


class CopyFreed(_ControlMessage, frozen=True):
    """These copies are freed."""

    copies: tuple[str, ...]


class MakeReplica(_ControlMessage, frozen=True):
    """Make a copy of a copy on another server."""

    source: str
    generation: int
    target: Endpoint
    ticket: Ticket


class ReplicaMade(_ControlMessage, frozen=True):
    """A copy was made, or why it was not."""

    source: str
    generation: int
    problem: str


class ServerStats(_ControlMessage, frozen=True):
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


class SupervisorLeaving(_ControlMessage, frozen=True):
    """The supervisor goes: a server that holds nothing ends."""


Message = (
    ConfigureServer
    | StartServing
    | HeldCopy
    | CopyOnDisk
    | ServerReady
    | CommandFailed
    | NewIncarnation
    | SetHold
    | FreeCopy
    | CopyFreed
    | MakeReplica
    | ReplicaMade
    | ServerStats
    | SupervisorLeaving
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class ControlSocket:
    """One end of the control socket. Sending never blocks: what does not go out now is queued, in order."""

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
        if self._out or not self._try_send(packed, list(fds)):
            self._out.append((packed, [os.dup(fd) for fd in fds]))

    def send_now(self, message: Message, fds: Iterable[int]) -> bool:
        """Send only where it goes out at once."""
        return not self._out and self._try_send(_encoder.encode(message), list(fds))

    def flush(self) -> bool:
        """Send what is queued; whether nothing is left. OSError when the other side is gone."""
        while self._out:
            packed, fds = self._out[0]
            if not self._try_send(packed, fds):
                return False
            self._out.popleft()
            close_all(fds)
        return True

    def _try_send(self, packed: bytes, fds: list[int]) -> bool:
        try:
            socket.send_fds(self.sock, [packed], fds)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[tuple[Message, list[int]]]:
        """The messages that have arrived, with descriptors, which the caller closes. EOFError at the end."""
        found: list[tuple[Message, list[int]]] = []
        for _ in range(256):
            try:
                packed, fds, _, _ = socket.recv_fds(self.sock, MAX_MESSAGE_BYTES, BATCH_SIZE + 1)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                continue  # reported once, before what was sent earlier: that can still be received
            except OSError:
                packed, fds = b"", []
            if not packed:
                if found:
                    return found  # the end is seen again next time
                raise EOFError
            try:
                found.append((_decoder.decode(packed), fds))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                close_all(fds)
                raise ProtocolError("invalid message on the control socket of a memory server") from None
        return found

    def close(self) -> None:
        """Close it; safe twice."""
        for _, fds in self._out:
            close_all(fds)
        self._out.clear()
        self.sock.close()


def close_all(fds: Iterable[int]) -> None:
    """Close every one of these descriptors."""
    for fd in fds:
        os.close(fd)


def batches(names: Iterable[str]) -> Iterable[tuple[str, ...]]:
    """The names, in groups that fit in one message."""
    rest = tuple(names)
    for start in range(0, len(rest), BATCH_SIZE):
        yield rest[start : start + BATCH_SIZE]
