"""Blocking connection of a client to a memory server, used by one thread at a time.

Requests are pipelined, reads and writes never in one pipeline, so that neither side waits for the other to drain. Data
are hashed right after they were received, while they are in the cache. Any I/O error closes the connection: there is no
way to continue in the middle of an answer.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import ssl
from collections.abc import Iterable, Sequence
from struct import pack
from typing import Final, NamedTuple

import lz4.block

from distributed_grid.errors import GridError
from distributed_grid.memory.client.transfer_queue import SMALL_BYTES, WINDOW, TransferQueue
from distributed_grid.memory.protocol.frames import (
    ANSWER,
    ANSWER_MAGIC,
    CHUNK_BYTES,
    COMPRESSED,
    MAGIC,
    NONCE_BYTES,
    OPENED,
    PROOF_BYTES,
    REQUEST,
    STEADY,
    VERSION,
    ZEROS,
    FrameStatus,
    Op,
    StatusError,
    client_proof,
    connect_tls,
    digest_of,
    server_proof,
)
from distributed_grid.posix.sockets import receive_descriptors, short_path
from distributed_grid.wire import Endpoint, Ticket

BUFFER_BYTES: Final = 64 * 1024
ANSWER_SECONDS: Final = 10
FILL_END_SECONDS: Final = 120
MAX_PARTS: Final = 64  # of one sendmsg


class ConnectionBroken(GridError):
    """The connection can no longer be used."""


class Opened(NamedTuple):
    """Handle of a ticket on one connection, with its copy's state."""

    handle: int
    generation: int
    size: int
    complete: bool


class ServerConnection:
    """A connection past its handshake. Methods raise `ConnectionBroken` when it breaks, `StatusError` when refused."""

    def __init__(self, sock: socket.socket, *, is_local: bool) -> None:
        self.sock = sock
        self.is_local = is_local
        self.is_near = is_local or _is_loopback(sock)
        self.opened: dict[bytes, Opened] = {}
        self.used_at = 0.0
        self.wire_received = self.wire_sent = 0
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._nonces = (secrets.token_bytes(NONCE_BYTES), b"")
        self._seq = 0  # of the last request
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0  # received and unread part of the buffer
        self._compressed = memoryview(b"")  # where compressed answers are received

    # ------------------------------------------------------------------ connecting

    @classmethod
    def connect(cls, endpoint: Endpoint, *, seconds: float) -> ServerConnection:
        """Connect over the network; the certificate is checked by its fingerprint where the endpoint has one."""
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection((endpoint.host, endpoint.port), timeout=seconds)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.fingerprint:
                sock = connect_tls(sock, endpoint)
            return cls.handshake(sock, is_local=False)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, OSError | ValueError):  # the latter: an invalid host name
                raise ConnectionBroken(f"{endpoint.host}:{endpoint.port}: {error}") from None
            raise

    @classmethod
    def connect_local(cls, path: str, *, seconds: float) -> ServerConnection:
        """Connect within this machine."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            with short_path(path) as name:
                sock.connect(name)
            return cls.handshake(sock, is_local=True)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise ConnectionBroken(f"{path}: {error.strerror or error}") from None
            raise

    @classmethod
    def handshake(cls, sock: socket.socket, *, is_local: bool) -> ServerConnection:
        """Exchange nonces and versions on a connected socket."""
        sock.setblocking(True)
        connection = cls(sock, is_local=is_local)
        connection._set_timeout(ANSWER_SECONDS)
        nonce = connection._nonces[0]
        try:
            body = connection._request(Op.HELLO, body=nonce + VERSION.to_bytes(2, "little"))
        except StatusError as refusal:
            if refusal.status is not FrameStatus.FULL:
                raise
            raise ConnectionBroken("the memory server has too many connections of this machine") from None
        if len(body) != NONCE_BYTES + 2:
            raise ConnectionBroken("the memory server does not speak this protocol")
        connection._nonces = (nonce, body[:NONCE_BYTES])
        return connection

    def close(self) -> None:
        self.sock.close()

    @property
    def nonce(self) -> bytes:
        return self._nonces[1]

    @property
    def is_usable(self) -> bool:
        """True if nothing was received since the last answer, not even the end."""
        if self._start != self._end:
            return False
        try:
            with socket.socket(fileno=os.dup(self.sock.fileno())) as plain:
                pending = plain.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False
        return self._is_tls and bool(pending)  # session tickets may wait to be read

    # ------------------------------------------------------------------ single requests

    def open(self, ticket: Ticket) -> Opened:
        """Open a copy by its ticket; the server has to prove that it knows the ticket's secret."""
        if (opened := self.opened.get(ticket.claims)) is not None:
            return opened
        proof = client_proof(ticket.secret, *self._nonces, ticket.claims)
        body = self._request(Op.OPEN, body=len(ticket.claims).to_bytes(2, "little") + ticket.claims + proof)
        expected = server_proof(ticket.secret, *self._nonces, ticket.claims)
        if len(body) != OPENED.size + PROOF_BYTES or not hmac.compare_digest(body[OPENED.size :], expected):
            self.close()
            raise ConnectionBroken("the memory server could not prove who it is")
        handle, generation, size, complete = OPENED.unpack_from(body)
        opened = self.opened[ticket.claims] = Opened(handle, generation, size, bool(complete))
        return opened

    def sever(self, nonce: bytes) -> None:
        """Have the server end another connection: requests on it that are not done yet are never done."""
        self._request(Op.SEVER, body=nonce)

    def end_fill(self, opened: Opened) -> None:
        """The copy is complete; where it is on disk, durably."""
        self._set_timeout(FILL_END_SECONDS)
        try:
            self._request(Op.FILL_END, handle=opened.handle)
        finally:
            with contextlib.suppress(OSError):  # closed by now, where it broke
                self._set_timeout(ANSWER_SECONDS)

    def open_descriptor(self, opened: Opened) -> int:
        """A read-only descriptor of the copy, which the caller closes; only for local connections."""
        self._send([self._header(Op.MAP, handle=opened.handle)])
        try:
            packed, fds = receive_descriptors(self.sock, ANSWER.size, 1)
        except OSError as error:
            raise self._broken(error) from None
        if len(packed) == ANSWER.size and ANSWER.unpack(packed)[1] == FrameStatus.OK and len(fds) == 1:
            return fds[0]
        for fd in fds:
            socket.close(fd)
        if len(packed) != ANSWER.size:
            raise self._broken(EOFError("it was closed"))
        raise StatusError(FrameStatus(ANSWER.unpack(packed)[1]))

    def _request(self, op: Op, *, handle: int = 0, body: bytes = b"") -> bytes:
        self._send([self._header(op, handle=handle, wire=len(body)) + body])
        status, _, length, _ = self._receive_answer(0)
        if length > BUFFER_BYTES:
            raise self._broken(ValueError("an answer is too long"))
        answer = bytearray(length)
        self._receive_exactly(memoryview(answer))
        if status:
            raise StatusError(FrameStatus(status))
        return bytes(answer)

    def _header(
        self, op: Op, flags: int = 0, handle: int = 0, length: int = 0, wire: int = 0, offset: int = 0, digest: int = 0
    ) -> bytes:
        self._seq = (self._seq + 1) & 0xFFFFFFFF
        return REQUEST.pack(MAGIC, op, flags, handle, self._seq, length, wire, offset, digest)

    # ------------------------------------------------------------------ reading

    def read(self, queue: TransferQueue, *, compress: bool = False) -> None:
        """Fill every range of the queue, which is empty afterwards; after an error it has the rest.

        A range that does not match its digest, as during a write, is requested once more, as a consistent
        snapshot; `StatusError(CORRUPT)` when that does not match either.
        """
        seq = self._seq + 1
        with queue:
            while queue.may_send or queue.in_flight:
                if queue.may_send and queue.in_flight <= queue.window // 2:
                    requests: list[bytes | memoryview] = []
                    for _ in range(min(queue.window, len(queue))):
                        item = queue.take()
                        flags = COMPRESSED if compress else STEADY if item.is_retry else 0
                        requests.append(self._header(Op.READ, flags, item.handle, len(item.view), 0, item.offset))
                    self._send(requests)
                status = self._receive_range(queue.oldest.view, seq)
                seq += 1
                queue.acknowledge(status)

    def _receive_range(self, view: memoryview, seq: int) -> int:
        size = len(view)
        status, flags, length, digest = self._receive_answer(size, seq)
        if status:
            return status
        if flags & ZEROS:
            view[:] = bytes(size)
            return 0
        if flags & COMPRESSED:
            if length >= size:
                raise self._broken(ValueError("an answer is too long"))
            if len(self._compressed) < length:
                self._compressed = memoryview(bytearray(CHUNK_BYTES))
            self._receive_exactly(self._compressed[:length])
            self.wire_received += length
            try:
                plain = lz4.block.decompress(self._compressed[:length], uncompressed_size=len(view))
            except (lz4.block.LZ4BlockError, ValueError):
                return FrameStatus.CORRUPT
            if len(plain) != len(view) or digest_of(plain) != digest:
                return FrameStatus.CORRUPT
            view[:] = plain
            return 0
        if length != size:
            raise self._broken(ValueError("an answer has the wrong length"))
        self._receive_exactly(view)
        self.wire_received += length
        return 0 if digest_of(view) == digest else FrameStatus.CORRUPT

    def read_small(self, handle: int, offset: int, size: int) -> bytes | None:
        """A few bytes within one chunk, with as little overhead as possible; None where they do not match their
        digest."""
        self._seq = seq = (self._seq + 1) & 0xFFFFFFFF
        try:
            self.sock.sendall(REQUEST.pack(MAGIC, Op.READ, 0, handle, seq, size, 0, offset, 0))
        except (OSError, ValueError) as error:
            raise self._broken(error) from None
        status, flags, length, digest = self._receive_answer(size, seq)
        if status:
            raise StatusError(FrameStatus(status))
        if flags & ZEROS:
            return bytes(size)
        if length != size:
            raise self._broken(ValueError("an answer has the wrong length"))
        while self._end - self._start < size:
            self._end += self._receive_some(self._buffer[self._end :])
        data = bytes(self._buffer[self._start : self._start + size])
        self._start += size
        self.wire_received += size
        return data if digest_of(data) == digest else None

    # ------------------------------------------------------------------ writing

    def write(self, queue: TransferQueue, *, compress: bool = False) -> None:
        """Write every range of the queue, which is empty afterwards; after an error it has what is still to do."""
        with queue:
            while queue.may_send or queue.in_flight:
                while queue.may_send and queue.in_flight < queue.window:
                    parts: list[bytes | memoryview] = []
                    room = CHUNK_BYTES
                    while not parts or (queue.next_fits(room) and len(parts) < MAX_PARTS):
                        item = queue.take()
                        parts += self._write_parts(
                            item.handle, item.offset, item.view, digest_of(item.view), compress=compress
                        )
                        room -= len(item.view)
                    self._send(parts)
                status, _, _, _ = self._receive_answer(0)
                queue.acknowledge(status)

    def _write_parts(
        self, handle: int, offset: int, view: memoryview, digest: int, *, compress: bool
    ) -> list[bytes | memoryview]:
        payload: bytes | memoryview = view
        flags = 0
        if compress:
            packed = lz4.block.compress(view, store_size=False)
            if len(packed) < len(view):
                payload, flags = packed, COMPRESSED
        wire = len(payload)
        self.wire_sent += wire
        return [self._header(Op.WRITE, flags, handle, len(view), wire, offset, digest), payload]

    def write_chunks(self, opened: Opened, chunks: Iterable[tuple[int, memoryview, int]]) -> None:
        """Stream chunks (offset, data, digest) to a new copy, which has them all when this returns. A buffer may be
        used again for the next chunk."""
        unanswered = 0
        for offset, view, digest in chunks:
            self._send(self._write_parts(opened.handle, offset, view, digest, compress=False))
            unanswered += 1
            if unanswered > WINDOW:
                self._receive_ok()
                unanswered -= 1
        for _ in range(unanswered):
            self._receive_ok()

    def _receive_ok(self) -> None:
        status, _, _, _ = self._receive_answer(0)
        if status:
            raise StatusError(FrameStatus(status))

    # ------------------------------------------------------------------ bytes

    def _set_timeout(self, seconds: int) -> None:
        """From now on a call that takes longer than this breaks the connection."""
        # By the kernel: Python's own time-outs cost a poll with every call. Its TLS does not know those, though.
        if self._is_tls:
            self.sock.settimeout(seconds)
            return
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.sock.setsockopt(socket.SOL_SOCKET, option, pack("@ll", seconds, 0))

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all of these, in as few calls as possible."""
        try:
            if self._is_tls:
                for part in parts:
                    self.sock.sendall(part)
                return
            left = sum(map(len, parts))
            sent = self.sock.sendmsg(parts)
            while sent < left:
                left -= sent
                while sent >= len(parts[0]):
                    sent -= len(parts[0])
                    parts = parts[1:]
                parts = [memoryview(parts[0])[sent:], *parts[1:]]
                sent = self.sock.sendmsg(parts)
        except (OSError, ValueError) as error:
            raise self._broken(error) from None

    def _receive_answer(self, expected: int, seq: int = 0) -> tuple[int, int, int, int]:
        """The next answer's status, flags, length and digest; small data that follow may be received along."""
        have = self._end - self._start
        if have < ANSWER.size:
            if have == 0:
                self._start = self._end = 0
            elif self._start:
                rest = bytes(self._buffer[self._start : self._end])
                self._buffer[:have] = rest
                self._start, self._end = 0, have
            limit = BUFFER_BYTES if expected <= SMALL_BYTES else ANSWER.size
            while self._end < ANSWER.size:
                self._end += self._receive_some(self._buffer[self._end : limit])
        magic, status, flags, got_seq, length, digest = ANSWER.unpack_from(self._buffer, self._start)
        self._start += ANSWER.size
        if magic != ANSWER_MAGIC or (seq and got_seq != seq & 0xFFFFFFFF) or status not in _STATUSES:
            raise self._broken(ValueError("the memory server does not speak this protocol"))
        return status, flags, length, digest

    def _receive_exactly(self, view: memoryview) -> None:
        ready = min(self._end - self._start, len(view))
        if ready:
            view[:ready] = self._buffer[self._start : self._start + ready]
            self._start += ready
        while ready < len(view):
            ready += self._receive_some(view[ready:], fill=True)

    def _receive_some(self, view: memoryview, *, fill: bool = False) -> int:
        """Receive at least a byte; how many."""
        try:
            if self._is_tls:
                got = self.sock.recv_into(view)
            else:
                got = self.sock.recv_into(view, 0, socket.MSG_WAITALL if fill else 0)
        except (OSError, ValueError) as error:
            raise self._broken(error) from None
        if got == 0:
            raise self._broken(EOFError("it was closed"))
        return got

    def _broken(self, error: Exception) -> ConnectionBroken:
        """Close it; the exception to raise because of this error."""
        self.close()
        waited = isinstance(error, BlockingIOError | TimeoutError)
        return ConnectionBroken(f"no answer for {ANSWER_SECONDS} s" if waited else str(error) or type(error).__name__)


def _is_loopback(sock: socket.socket) -> bool:
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:
        return False
    return bool(here == there)


_STATUSES = frozenset(FrameStatus)
