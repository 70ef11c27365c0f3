"""One blocking connection to a memory server, used by one thread at a time.

Rule 1. Requests are pipelined; reads and writes never in one pipeline, so neither side waits for the other to drain.
Rule 2. What arrives is hashed right after it was received, while it is still in the cache.
Rule 3. When something goes wrong, what is not done is still in the list of what is to be done.

The bytes are in `line`, the two pipelines in `reading` and `writing`.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections.abc import Iterator
from typing import Final, NamedTuple

from distributed_grid.memory.client.buffered_socket import (
    ANSWER_SECONDS,
    SCRATCH,
    BufferedSocket,
    ConnectionBroken,
    StatusError,
)
from distributed_grid.memory.client.read_pipeline import read_pieces, read_small_piece
from distributed_grid.memory.client.write_pipeline import Filling, write_pieces
from distributed_grid.memory.protocol.frames import (
    ANSWER,
    MAGIC,
    NONCE,
    OPENED,
    PROOF,
    REQUEST,
    VERSION,
    FrameStatus,
    Op,
)
from distributed_grid.memory.protocol.ticket import client_proof, server_proof
from distributed_grid.memory.protocol.tls import proven
from distributed_grid.posix.unix_sockets import short_path
from distributed_grid.wire import Endpoint, Ticket

__all__ = ["ConnectionBroken", "Opened", "ServerConnection", "StatusError"]
FILL_END_SECONDS: Final = 120


class Opened(NamedTuple):
    """What a ticket opened on one connection."""

    handle: int
    generation: int
    size: int
    complete: bool


class ServerConnection(BufferedSocket):
    """A connection, ready to use. Methods raise `ConnectionBroken` when it breaks, `StatusError` when refused."""

    def __init__(self, sock: socket.socket, *, is_local: bool) -> None:
        super().__init__(sock)
        self.is_local = is_local
        self.is_near = is_local or _is_loopback(sock)
        self.opened: dict[bytes, Opened] = {}
        self.used_at = 0.0
        self._nonces = (secrets.token_bytes(NONCE), b"")

    # ------------------------------------------------------------------ beginning and end

    @classmethod
    def to(cls, endpoint: Endpoint, *, seconds: float) -> ServerConnection:
        """A connection over the network, the certificate proven by its fingerprint where there is one."""
        try:
            sock = socket.create_connection((endpoint.host, endpoint.port), timeout=seconds)
        except OSError as error:
            raise ConnectionBroken(f"{endpoint.host}:{endpoint.port}: {error.strerror or error}") from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.fingerprint:
                sock = proven(sock, endpoint)
            return cls._greeted(sock, is_local=False)
        except (OSError, ValueError) as error:
            sock.close()
            raise ConnectionBroken(f"{endpoint.host}:{endpoint.port}: {error}") from None
        except BaseException:
            sock.close()
            raise

    @classmethod
    def local(cls, path: str, *, seconds: float) -> ServerConnection:
        """A connection within this machine."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            with short_path(path) as name:
                sock.connect(name)
            return cls._greeted(sock, is_local=True)
        except OSError as error:
            sock.close()
            raise ConnectionBroken(f"{path}: {error.strerror or error}") from None
        except BaseException:
            sock.close()
            raise

    @classmethod
    def _greeted(cls, sock: socket.socket, *, is_local: bool) -> ServerConnection:
        sock.setblocking(True)
        channel = cls(sock, is_local=is_local)
        channel.wait_at_most(ANSWER_SECONDS)
        nonce = channel._nonces[0]
        _, body = channel._ask(Op.HELLO, body=nonce + VERSION.to_bytes(2, "little"))
        if len(body) != NONCE + 2:
            raise ConnectionBroken("the memory server does not speak this protocol")
        channel._nonces = (nonce, body[:NONCE])
        return channel

    # ------------------------------------------------------------------ reading and writing

    read = read_pieces
    read_small = read_small_piece
    write = write_pieces

    @contextlib.contextmanager
    def writing(self, opened: Opened) -> Iterator[Filling]:
        """A stream of chunks, each sent when it is put; all are there when this ends."""
        filling = Filling(self, opened.handle)
        yield filling
        filling.settle(0)

    # ------------------------------------------------------------------ single requests

    def open(self, ticket: Ticket) -> Opened:
        """What this ticket opens here; the server is proven to know its secret."""
        found = self.opened.get(ticket.claims)
        if found is not None:
            return found
        proof = client_proof(ticket.secret, *self._nonces, ticket.claims)
        _, body = self._ask(Op.OPEN, body=len(ticket.claims).to_bytes(2, "little") + ticket.claims + proof)
        expected = server_proof(ticket.secret, *self._nonces, ticket.claims)
        if len(body) != OPENED.size + PROOF or not hmac.compare_digest(body[OPENED.size :], expected):
            self.close()
            raise ConnectionBroken("the memory server could not prove who it is")
        handle, generation, size, complete = OPENED.unpack_from(body)
        opened = self.opened[ticket.claims] = Opened(handle, generation, size, bool(complete))
        return opened

    @property
    def nonce(self) -> bytes:
        """By this the server knows the connection."""
        return self._nonces[1]

    def sever(self, nonce: bytes) -> None:
        """Have the server end another connection: what was sent on it and not done yet is never done."""
        self._ask(Op.SEVER, body=nonce)

    def end_fill(self, opened: Opened) -> None:
        """The copy is complete; where it is on disk, durably."""
        self.wait_at_most(FILL_END_SECONDS)
        try:
            self._ask(Op.FILL_END, handle=opened.handle)
        finally:
            with contextlib.suppress(OSError):  # closed by now, where it broke
                self.wait_at_most(ANSWER_SECONDS)

    def mapped(self, opened: Opened) -> int:
        """A read-only descriptor of the copy, which is the caller's to close."""
        self.send([self._request(Op.MAP, handle=opened.handle)])
        try:
            packed, fds, _, _ = socket.recv_fds(self.sock, ANSWER.size, 1)
        except OSError as error:
            raise self.broken(error) from None
        if len(packed) == ANSWER.size and ANSWER.unpack(packed)[1] == FrameStatus.OK and len(fds) == 1:
            return fds[0]
        for fd in fds:
            socket.close(fd)
        if len(packed) != ANSWER.size:
            raise self.broken(EOFError("it was closed"))
        raise StatusError(FrameStatus(ANSWER.unpack(packed)[1]))

    def _ask(self, op: Op, *, handle: int = 0, body: bytes = b"") -> tuple[int, bytes]:
        self.send([self._request(op, handle=handle, wire=len(body)) + body])
        status, flags, length, _ = self.answer(0)
        if length > SCRATCH:
            raise self.broken(ValueError("an answer is too long"))
        found = bytearray(length)
        self.take(memoryview(found))
        if status:
            raise StatusError(FrameStatus(status))
        return flags, bytes(found)

    def _request(self, op: Op, *, handle: int = 0, wire: int = 0) -> bytes:
        self.seq = (self.seq + 1) & 0xFFFFFFFF
        return REQUEST.pack(MAGIC, op, 0, handle, self.seq, 0, wire, 0, 0)


def _is_loopback(sock: socket.socket) -> bool:
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:
        return False
    return bool(here == there)
