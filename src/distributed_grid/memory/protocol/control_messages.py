"""Control messages between a memory server and its supervisor, with descriptors, over a SOCK_SEQPACKET socket.

Each side has every descriptor when the other dies: messages that were sent arrive, and were sent before they mattered.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from distributed_grid.errors import ProtocolError
from distributed_grid.posix.sockets import receive_descriptors
from distributed_grid.wire import MAX_CONNECTIONS_PER_PEER, Count, Endpoint, Id, Index, Name, Pid, Text, Ticket

MAX_MESSAGE_BYTES: Final = 128 * 1024
BATCH_SIZE: Final = 64  # names or descriptors in one message
JOURNAL: Final = "journal"
Copies = Annotated[tuple[Id, ...], Meta(max_length=BATCH_SIZE)]
Key = Annotated[bytes, Meta(max_length=64)]
Pem = Annotated[bytes, Meta(max_length=16384)]


class _ControlMessage(Struct, frozen=True, tag=True):
    """Base of all messages. Some carry keys, so none shows its content."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class ConfigureServer(_ControlMessage, frozen=True):
    """Identity of a new server. Its copies follow, in `HeldCopy`, then `StartServing`."""

    folder: Annotated[str, Meta(max_length=4096)]
    host: Name
    port: Index
    incarnation: Name
    key: Key
    certificate: Pem = b""
    private_key: Pem = b""
    hold_until_boot_ms: Count = 0
    max_connections_per_peer: Count = MAX_CONNECTIONS_PER_PEER
    floor_boot_ms: Count = 0  # tickets that expire at or before this time create no copy
    unsupervised_ms: Count = (
        60_000  # how long it waits for a supervisor before it frees what has ended, and ends itself
    )


class StartServing(_ControlMessage, frozen=True):
    """To a new server: the configuration is complete."""


class HeldCopy(_ControlMessage, frozen=True):
    """These copies are held in memory; their descriptors come along, in this order. `journal` is the journal."""

    copies: Copies


class CopyOnDisk(_ControlMessage, frozen=True):
    """These copies are on disk."""

    copies: Copies


class ServerReady(_ControlMessage, frozen=True):
    """From a server: it has listed all that it holds, and serves."""

    endpoint: Endpoint
    key: Key
    certificate: Pem
    private_key: Pem
    hold_until_boot_ms: Count
    pid: Pid


class CommandFailed(_ControlMessage, frozen=True):
    """From a server that cannot start, and why."""

    problem: Text


class NewIncarnation(_ControlMessage, frozen=True):
    """The hold has expired: nothing is in memory any more, and earlier tickets are void."""

    incarnation: Name
    key: Key


class SetHold(_ControlMessage, frozen=True):
    """Hold what is in memory until then (0: without end)."""

    until_boot_ms: Count


class FreeCopy(_ControlMessage, frozen=True):
    """Free these copies."""

    copies: Copies


class CopyFreed(_ControlMessage, frozen=True):
    """These copies are freed."""

    copies: Copies


class MakeReplica(_ControlMessage, frozen=True):
    """Make a copy of a copy on another server."""

    source: Id
    generation: Count
    target: Endpoint
    ticket: Ticket


class ReplicaMade(_ControlMessage, frozen=True):
    """A copy was made, or why it was not."""

    source: Id
    generation: Count
    problem: Text


class ServerStats(_ControlMessage, frozen=True):
    """Copies and counters of a server."""

    resident_bytes: Count = 0
    copies: Count = 0
    reads: Count = 0
    writes: Count = 0
    bytes_in: Count = 0
    bytes_out: Count = 0
    wire_in: Count = 0
    wire_out: Count = 0
    connections: Count = 0


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


def decode(packed: bytes) -> Message:
    """The message in these bytes. Raises ProtocolError."""
    try:
        return _decoder.decode(packed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ProtocolError("invalid message on the control socket of a memory server") from None


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
        """Send if the socket has room."""
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
        received: list[tuple[Message, list[int]]] = []
        for _ in range(256):
            try:
                packed, fds = receive_descriptors(self.sock, MAX_MESSAGE_BYTES, BATCH_SIZE + 1)
            except BlockingIOError:
                return received
            except ConnectionResetError:
                continue  # reported once, before earlier messages: those can still be received
            except OSError:
                packed, fds = b"", []
            if not packed:
                if received:
                    return received  # the end is seen again next time
                raise EOFError
            try:
                received.append((decode(packed), fds))
            except ProtocolError:
                for descriptors in (fds, *(fds for _, fds in received)):
                    close_all(descriptors)
                raise
        return received

    def close(self) -> None:
        """Close it; safe twice."""
        for _, fds in self._out:
            close_all(fds)
        self._out.clear()
        self.sock.close()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def batches(names: Iterable[str]) -> Iterable[tuple[str, ...]]:
    rest = tuple(names)
    for start in range(0, len(rest), BATCH_SIZE):
        yield rest[start : start + BATCH_SIZE]
