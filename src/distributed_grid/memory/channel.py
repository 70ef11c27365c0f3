"""One blocking connection to a memory server, used by one thread at a time.

Rule 1. Requests are pipelined; reads and writes never in one pipeline, so neither side waits for the other to drain.
Rule 2. What arrives is hashed right after it was received, while it is still in the cache.
Rule 3. When something goes wrong, what is not done is still in the list of what is to be done.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from struct import pack
from typing import Final, NamedTuple

import lz4.block

from distributed_grid.errors import GridError
from distributed_grid.memory.claims import client_proof, server_proof
from distributed_grid.memory.frames import (
    ANSWER,
    ANSWER_MAGIC,
    CHUNK,
    COMPRESSED,
    MAGIC,
    NONCE,
    OPENED,
    PROOF,
    REQUEST,
    STEADY,
    VERSION,
    ZEROS,
    Op,
    Status,
    digest_of,
)
from distributed_grid.memory.short_paths import short_path
from distributed_grid.wire import Endpoint, Ticket

WINDOW: Final = 16  # chunks under way
SMALL: Final = 32 * 1024
SMALL_WINDOW: Final = 128
SCRATCH: Final = 64 * 1024
ANSWER_SECONDS: Final = 10
FILL_END_SECONDS: Final = 120


class Answered(GridError):
    """The server said no, and how."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"the memory server answered: {status.name.lower()}")
        self.status = status


class Broken(GridError):
    """The connection is of no use any more."""


class Opened(NamedTuple):
    """What a ticket opened on one connection."""

    handle: int
    generation: int
    size: int
    complete: bool


class Piece(NamedTuple):
    """A part of a block that lies within one chunk, and where its bytes are or go."""

    handle: int
    offset: int
    view: memoryview
    again: bool = False


class Channel:
    """A connection, greeted and ready. Every method raises `Broken` when it breaks, `Answered` when told no."""

    def __init__(self, sock: socket.socket, *, is_local: bool) -> None:
        self.sock = sock
        self.is_local = is_local
        self.is_near = is_local or _is_loopback(sock)
        self.opened: dict[bytes, Opened] = {}
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._seq = 0
        self._buffer = memoryview(bytearray(SCRATCH))
        self._start = self._end = 0
        self._packed = memoryview(b"")
        self._nonces = (secrets.token_bytes(NONCE), b"")
        self.wire_received = self.wire_sent = 0
        self.used_at = 0.0

    # ------------------------------------------------------------------ beginning and end

    @classmethod
    def to(cls, endpoint: Endpoint, *, seconds: float) -> Channel:
        """A connection over the network, the certificate proven by its fingerprint where there is one."""
        try:
            sock = socket.create_connection((endpoint.host, endpoint.port), timeout=seconds)
        except OSError as error:
            raise Broken(f"{endpoint.host}:{endpoint.port}: {error.strerror or error}") from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.fingerprint:
                sock = _proven(sock, endpoint)
            return cls._greeted(sock, is_local=False)
        except (OSError, ValueError) as error:
            sock.close()
            raise Broken(f"{endpoint.host}:{endpoint.port}: {error}") from None
        except BaseException:
            sock.close()
            raise

    @classmethod
    def local(cls, path: str, *, seconds: float) -> Channel:
        """A connection within this machine."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            with short_path(path) as name:
                sock.connect(name)
            return cls._greeted(sock, is_local=True)
        except OSError as error:
            sock.close()
            raise Broken(f"{path}: {error.strerror or error}") from None
        except BaseException:
            sock.close()
            raise

    @classmethod
    def _greeted(cls, sock: socket.socket, *, is_local: bool) -> Channel:
        sock.setblocking(True)
        channel = cls(sock, is_local=is_local)
        channel._wait_at_most(ANSWER_SECONDS)
        nonce = channel._nonces[0]
        _, body = channel._ask(Op.HELLO, body=nonce + VERSION.to_bytes(2, "little"))
        if len(body) != NONCE + 2:
            raise Broken("the memory server does not speak this protocol")
        channel._nonces = (nonce, body[:NONCE])
        return channel

    def _wait_at_most(self, seconds: int) -> None:
        # By the kernel: Python's own time-outs cost a poll with every call. Its TLS does not know those, though.
        if self._is_tls:
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
        if self._start != self._end:
            return False
        try:
            with socket.socket(fileno=os.dup(self.sock.fileno())) as plain:
                found = plain.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False
        return self._is_tls and bool(found)  # session tickets may wait to be read

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
            raise Broken("the memory server could not prove who it is")
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
        self._wait_at_most(FILL_END_SECONDS)
        self._ask(Op.FILL_END, handle=opened.handle)
        self._wait_at_most(ANSWER_SECONDS)

    def mapped(self, opened: Opened) -> int:
        """A read-only descriptor of the copy, which is the caller's to close."""
        self._send([self._request(Op.MAP, handle=opened.handle)])
        try:
            packed, fds, _, _ = socket.recv_fds(self.sock, ANSWER.size, 1)
        except OSError as error:
            raise self._broken(error) from None
        if len(packed) == ANSWER.size and ANSWER.unpack(packed)[1] == Status.OK and len(fds) == 1:
            return fds[0]
        for fd in fds:
            socket.close(fd)
        if len(packed) != ANSWER.size:
            raise self._broken(EOFError("it was closed"))
        raise Answered(Status(ANSWER.unpack(packed)[1]))

    def _ask(self, op: Op, *, handle: int = 0, body: bytes = b"") -> tuple[int, bytes]:
        self._send([self._request(op, handle=handle, wire=len(body)) + body])
        status, flags, length, _ = self._answer(0)
        if length > SCRATCH:
            raise self._broken(ValueError("an answer is too long"))
        found = bytearray(length)
        self._take(memoryview(found))
        if status:
            raise Answered(Status(status))
        return flags, bytes(found)

    def _request(self, op: Op, *, handle: int = 0, wire: int = 0) -> bytes:
        self._seq = (self._seq + 1) & 0xFFFFFFFF
        return REQUEST.pack(MAGIC, op, 0, handle, self._seq, 0, wire, 0, 0)

    # ------------------------------------------------------------------ reading

    def read(self, todo: deque[Piece], *, compress: bool = False) -> None:
        """Fill every piece of the list, which is empty afterwards; after an error it has what is still to do.

        A piece that does not fit its digest, as when somebody writes to it meanwhile, is asked for once more and then
        as it is at one moment; `Answered(CORRUPT)` when that is no better.
        """
        pending: deque[Piece] = deque()
        window = WINDOW if todo and len(todo[0].view) > SMALL else SMALL_WINDOW
        refusal: Status | None = None
        again: list[Piece] = []
        first = self._seq + 1
        try:
            while todo or pending:
                if todo and refusal is None and len(pending) <= window // 2:
                    self._send([self._read_request(todo, pending, compress) for _ in range(min(window, len(todo)))])
                elif not pending:
                    break
                status = self._read_answer(pending[0], first)
                first += 1
                piece = pending.popleft()
                if status == Status.CORRUPT and not piece.again:
                    todo.append(piece._replace(again=True))
                elif status:
                    refusal = refusal or Status(status)
                    again.append(piece)
        finally:
            todo.extendleft(reversed(pending))
            todo.extendleft(reversed(again))
        if refusal is not None:
            raise Answered(refusal)

    def _read_request(self, todo: deque[Piece], pending: deque[Piece], compress: bool) -> bytes:
        piece = todo.popleft()
        pending.append(piece)
        self._seq = (self._seq + 1) & 0xFFFFFFFF
        flags = COMPRESSED if compress else STEADY if piece.again else 0
        return REQUEST.pack(MAGIC, Op.READ, flags, piece.handle, self._seq, len(piece.view), 0, piece.offset, 0)

    def _read_answer(self, piece: Piece, seq: int) -> int:
        view = piece.view
        wanted = len(view)
        status, flags, length, digest = self._answer(wanted, seq)
        if status:
            return status
        if flags & ZEROS:
            view[:] = bytes(wanted)
            return 0
        if flags & COMPRESSED:
            if length >= wanted:
                raise self._broken(ValueError("an answer is too long"))
            return self._unpacked(view, length, digest)
        if length != wanted:
            raise self._broken(ValueError("an answer has the wrong length"))
        self._take(view)
        self.wire_received += length
        return 0 if digest_of(view) == digest else Status.CORRUPT

    def _unpacked(self, view: memoryview, length: int, digest: int) -> int:
        if len(self._packed) < length:
            self._packed = memoryview(bytearray(CHUNK))
        self._take(self._packed[:length])
        self.wire_received += length
        try:
            plain = lz4.block.decompress(self._packed[:length], uncompressed_size=len(view))
        except (lz4.block.LZ4BlockError, ValueError):
            return Status.CORRUPT
        if len(plain) != len(view) or digest_of(plain) != digest:
            return Status.CORRUPT
        view[:] = plain
        return 0

    def read_small(self, handle: int, offset: int, size: int) -> bytes | None:
        """A few bytes within one chunk, by the shortest way; None where they did not fit their digest."""
        self._seq = seq = (self._seq + 1) & 0xFFFFFFFF
        try:
            self.sock.sendall(REQUEST.pack(MAGIC, Op.READ, 0, handle, seq, size, 0, offset, 0))
        except (OSError, ValueError) as error:
            raise self._broken(error) from None
        status, flags, length, digest = self._answer(size, seq)
        if status:
            raise Answered(Status(status))
        if flags & ZEROS:
            return bytes(size)
        if length != size:
            raise self._broken(ValueError("an answer has the wrong length"))
        while self._end - self._start < size:
            self._end += self._receive_into(self._buffer[self._end :])
        data = bytes(self._buffer[self._start : self._start + size])
        self._start += size
        self.wire_received += size
        return data if digest_of(data) == digest else None

    # ------------------------------------------------------------------ writing

    def write(self, todo: deque[Piece], *, compress: bool = False) -> None:
        """Write every piece of the list, which is empty afterwards; after an error it has what is still to do."""
        failed: list[Piece] = []
        pending: deque[Piece] = deque()
        refusal: Status | None = None
        window = WINDOW if todo and len(todo[0].view) > SMALL else SMALL_WINDOW
        try:
            while pending or (todo and refusal is None):
                while todo and refusal is None and len(pending) < window:
                    self._send_some(todo, pending, compress)
                status, _, _, _ = self._answer(0)
                piece = pending.popleft()
                if status == Status.CORRUPT and not piece.again:
                    todo.append(piece._replace(again=True))
                elif status:
                    refusal = refusal or Status(status)
                    failed.append(piece)
        finally:
            todo.extendleft(reversed(pending))
            todo.extendleft(reversed(failed))
        if refusal is not None:
            raise Answered(refusal)

    def _send_some(self, todo: deque[Piece], pending: deque[Piece], compress: bool) -> None:
        """One large piece, or several small ones together."""
        piece = todo.popleft()
        pending.append(piece)
        parts = self._write_request(piece, digest_of(piece.view), compress)
        room = CHUNK - len(piece.view)
        while todo and room > len(todo[0].view) and len(parts) < 64:
            piece = todo.popleft()
            pending.append(piece)
            parts += self._write_request(piece, digest_of(piece.view), compress)
            room -= len(piece.view)
        self._send(parts)

    def _write_request(self, piece: Piece, digest: int, compress: bool) -> list[bytes | memoryview]:
        payload: bytes | memoryview = piece.view
        flags, length = 0, len(payload)
        if compress:
            packed = lz4.block.compress(payload, store_size=False)
            if len(packed) < length:
                payload, flags = packed, COMPRESSED
        self._seq = (self._seq + 1) & 0xFFFFFFFF
        wire = len(payload)
        self.wire_sent += wire
        head = REQUEST.pack(MAGIC, Op.WRITE, flags, piece.handle, self._seq, length, wire, piece.offset, digest)
        return [head, payload]

    @contextlib.contextmanager
    def writing(self, opened: Opened) -> Iterator[Filling]:
        """A stream of chunks, each sent when it is put; all are there when this ends."""
        filling = Filling(self, opened.handle)
        yield filling
        filling.settle(0)

    # ------------------------------------------------------------------ bytes

    def _send(self, parts: list[bytes | memoryview] | list[bytes]) -> None:
        try:
            if self._is_tls:
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
            raise self._broken(error) from None

    def _answer(self, expected: int, seq: int = 0) -> tuple[int, int, int, int]:
        """The next answer's status, flags, length and digest; small data that follow may be received along."""
        have = self._end - self._start
        if have < ANSWER.size:
            if have == 0:
                self._start = self._end = 0
            elif self._start:
                rest = bytes(self._buffer[self._start : self._end])
                self._buffer[:have] = rest
                self._start, self._end = 0, have
            most = SCRATCH if expected <= SMALL else ANSWER.size
            while self._end < ANSWER.size:
                self._end += self._receive_into(self._buffer[self._end : most])
        magic, status, flags, got_seq, length, digest = ANSWER.unpack_from(self._buffer, self._start)
        self._start += ANSWER.size
        if magic != ANSWER_MAGIC or (seq and got_seq != seq & 0xFFFFFFFF) or status not in _STATUSES:
            raise self._broken(ValueError("the memory server does not speak this protocol"))
        return status, flags, length, digest

    def _take(self, view: memoryview) -> None:
        """Fill this with what follows."""
        ready = min(self._end - self._start, len(view))
        if ready:
            view[:ready] = self._buffer[self._start : self._start + ready]
            self._start += ready
        while ready < len(view):
            ready += self._receive_into(view[ready:], all_of_it=True)

    def _receive_into(self, view: memoryview, *, all_of_it: bool = False) -> int:
        try:
            if self._is_tls:
                got = self.sock.recv_into(view)
            else:
                got = self.sock.recv_into(view, 0, socket.MSG_WAITALL if all_of_it else 0)
        except (OSError, ValueError) as error:
            raise self._broken(error) from None
        if got == 0:
            raise self._broken(EOFError("it was closed"))
        return got

    def _broken(self, error: Exception) -> Broken:
        self.close()
        waited = isinstance(error, BlockingIOError | TimeoutError)
        return Broken(f"no answer for {ANSWER_SECONDS} s" if waited else str(error) or type(error).__name__)


class Filling:
    """Chunks on their way to a new copy."""

    def __init__(self, channel: Channel, handle: int) -> None:
        self._channel = channel
        self._handle = handle
        self._under_way = 0

    def put(self, offset: int, view: memoryview, digest: int) -> None:
        """Send a chunk with the digest it has had since it was written; the buffer may be used again afterwards."""
        piece = Piece(self._handle, offset, view)
        self._channel._send(self._channel._write_request(piece, digest, compress=False))  # noqa: SLF001 - one file
        self._under_way += 1
        self.settle(WINDOW)

    def settle(self, left: int) -> None:
        """Wait until no more than so many are unanswered."""
        while self._under_way > left:
            status, _, _, _ = self._channel._answer(0)  # noqa: SLF001
            self._under_way -= 1
            if status:
                raise Answered(Status(status))


def _is_loopback(sock: socket.socket) -> bool:
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:
        return False
    return bool(here == there)


def _rest(parts: list[bytes | memoryview] | list[bytes], sent: int) -> list[bytes | memoryview]:
    left: list[bytes | memoryview] = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
        else:
            left.append(memoryview(part)[sent:])
            sent = 0
    return left


def _proven(sock: socket.socket, endpoint: Endpoint) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # proven by its fingerprint instead
    wrapped = context.wrap_socket(sock, server_hostname=endpoint.host)
    der = wrapped.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(der).hexdigest(), endpoint.fingerprint):
        wrapped.close()
        raise OSError("the memory server has another certificate than it should")
    return wrapped


_STATUSES = frozenset(Status)
