"""Connection of one client to a memory server: a state machine over a non-blocking socket.

Lengths are checked before anything is allocated; an unreadable message ends the connection, an invalid one gets a
status. A payload is received whole and checked before anything changes. No turn moves more than about a MiB, so no
client waits long for another.

A ticket opens a handle. Both sides prove that they know the ticket's secret, with nonces of this connection, so that an
overheard proof is of no use on another one. A handle is checked anew with every request: its copy may have moved, and
its time may have passed.

Queued bytes go out in order, in as few calls as possible; whole chunks go out straight from their file. A slot is
released when its bytes are out.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import ssl
from collections import deque
from typing import Final, NamedTuple, Protocol

import lz4.block

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.frames import (
    ANSWER,
    ANSWER_MAGIC,
    CHUNK_BYTES,
    COMPRESSED,
    FILL,
    MAGIC,
    MAX_HANDLES,
    MAX_OPEN_BYTES,
    NONCE_BYTES,
    OPENED,
    READ,
    REQUEST,
    STAT,
    VERSION,
    WRITE,
    ZEROS,
    FrameStatus,
    Op,
    TicketClaims,
    client_proof,
    derive_secret,
    digest_of,
    read_claims,
    server_proof,
)
from distributed_grid.memory.server.copy_file import CopyFile
from distributed_grid.memory.server.copy_store import CopyStore, permits
from distributed_grid.memory.server.write_journal import Slot, SlotPool
from distributed_grid.posix.boot_clock import boot_ms

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
        self.start = self.end = 0  # unread part of the inbox
        self.is_drained = False
        self.out: deque[tuple[bytes | bytearray | memoryview | FilePart, Slot | None]] = deque()
        self.out_bytes = 0
        self.out_fds: list[int] = []
        self._staging = staging

    @property
    def waits_to_send(self) -> bool:
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


TURN_BYTES: Final = 1024 * 1024
QUEUED_BYTES: Final = 256 * 1024
SMALL_BYTES: Final = 32 * 1024


class ServerCallbacks(Protocol):
    """Methods of the server that a connection needs, besides the store."""

    def hold_elsewhere(self, backing: CopyFile) -> bool:
        """Have the supervisor hold a new copy, too; False if it cannot just now."""

    def sever(self, nonce: bytes) -> None:
        """End the connection with this nonce, if any."""


class Handle(NamedTuple):
    """Rights and copy of an authenticated ticket, at the time of opening."""

    backing: CopyFile
    claims: TicketClaims
    generation: int


class Handles:
    """The nonces of a connection, and the handles opened with them."""

    def __init__(self, store: CopyStore, server: ServerCallbacks) -> None:
        self._store = store
        self._server = server
        self._nonces: tuple[bytes, bytes] | None = None
        self._opened: dict[int, Handle] = {}
        self._next = 1
        self.is_authenticated = False

    @property
    def nonce(self) -> bytes:
        return self._nonces[1] if self._nonces is not None else b""

    def hello(self, payload: bytes) -> tuple[FrameStatus, bytes]:
        """Answer HELLO; nonces are new with each."""
        if len(payload) != NONCE_BYTES + 2 or int.from_bytes(payload[NONCE_BYTES:], "little") != VERSION:
            return FrameStatus.BAD, b""
        self._nonces = (payload[:NONCE_BYTES], secrets.token_bytes(NONCE_BYTES))
        return FrameStatus.OK, self._nonces[1] + VERSION.to_bytes(2, "little")

    def open(self, payload: bytes) -> tuple[FrameStatus, bytes]:
        """Answer OPEN: a ticket, and the proof that its secret is known. Without a HELLO there is no answer."""
        if self._nonces is None:
            raise ConnectionClosed
        length = int.from_bytes(payload[:2], "little")
        packed, proof = payload[2 : 2 + length], payload[2 + length :]
        secret = derive_secret(self._store.key, packed)
        if not hmac.compare_digest(proof, client_proof(secret, *self._nonces, packed)):
            # A ticket of another incarnation has another key; which one it names is no secret, and helps a client.
            try:
                is_other = read_claims(packed).incarnation != self._store.incarnation
            except ProtocolError:
                is_other = False
            return (FrameStatus.WRONG_INCARNATION if is_other else FrameStatus.DENIED), b""
        try:
            claims = read_claims(packed)
        except ProtocolError:
            return FrameStatus.DENIED, b""
        if len(self._opened) >= MAX_HANDLES:
            return FrameStatus.BAD, b""
        status, backing, is_new = self._store.open(claims, boot_ms())
        if backing is not None and is_new and not self._server.hold_elsewhere(backing):
            self._store.discard(backing)
            status, backing = FrameStatus.FROZEN, None
        self.is_authenticated = True
        if backing is None:
            return status, b""
        number = self._next
        self._next = number % 0xFFFFFFFF + 1
        self._opened[number] = Handle(backing, claims, backing.generation)
        body = OPENED.pack(number, backing.generation, backing.size, backing.complete)
        return status, body + server_proof(secret, *self._nonces, packed)

    def find(self, number: int, right: int) -> tuple[FrameStatus, Handle | None]:
        """The handle with this number, if it may be used with this right now; or why not."""
        handle = self._opened.get(number)
        if handle is None:
            return FrameStatus.BAD, None
        if handle.backing.fd < 0:
            return FrameStatus.MOVED, None
        if handle.claims.expires_boot_ms <= boot_ms():
            return FrameStatus.EXPIRED, None
        if handle.generation < handle.backing.generation:
            return FrameStatus.STALE, None
        if right and not handle.claims.rights & right and not permits(handle.claims.rights, right):
            return FrameStatus.DENIED, None
        return FrameStatus.OK, handle

    def close(self, number: int) -> None:
        self._opened.pop(number, None)

    def clear(self) -> None:
        self._opened.clear()


class ClientConnection(ClientStream):
    """Reads requests, performs them on the store, sends answers."""

    def __init__(
        self, sock: socket.socket, store: CopyStore, server: ServerCallbacks, *, is_local: bool, now: float
    ) -> None:
        super().__init__(sock, store.staging)
        self.is_local = is_local
        self.is_refused = False  # its peer has too many: it gets that answer, and no other
        self.opened_at = self.progress_at = now
        self._store = store
        self._server = server
        self._handles = Handles(store, server)
        # The request whose payload is being received: its header, where the payload goes, and how much of it is there.
        self._header: tuple[int, ...] | None = None
        self._slot: Slot | None = None
        self._got = 0

    # ------------------------------------------------------------------ for the event loop

    @property
    def nonce(self) -> bytes:
        return self._handles.nonce

    @property
    def is_authenticated(self) -> bool:
        return self._handles.is_authenticated

    @property
    def is_mid_request(self) -> bool:
        return bool(self.out) or self._header is not None or self.start != self.end

    def run_turn(self) -> bool:
        """Serve the requests at hand, up to a limit; True if there is more. OSError and `ConnectionClosed` end it."""
        if not self.is_handshaken and not self.continue_handshake():
            return False
        left = TURN_BYTES
        self.is_drained = False
        while left > 0:
            if self.out_bytes >= QUEUED_BYTES and not self.flush():
                return False
            if self._header is not None:
                got = self._receive_payload()
            elif self.end - self.start >= REQUEST.size:
                got = self._start_request()
            else:
                got = self.fill_inbox()
            if got < 0:
                self.flush()
                return False
            left -= got
        return self.flush()

    def close(self) -> None:
        """End it; safe twice. Slots go back, queued descriptors are closed."""
        if self._slot is not None:
            self._store.staging.release(self._slot)
            self._slot = None
        self._handles.clear()
        super().close()

    # ------------------------------------------------------------------ requests

    def _start_request(self) -> int:
        """Parse the next header, and perform what has no payload; the bytes it counts for."""
        header = REQUEST.unpack_from(self.inbox, self.start)
        self.start += REQUEST.size
        magic, op, _, _, seq, length, wire, offset, _ = header
        if magic != MAGIC:
            raise ConnectionClosed
        if op == Op.READ and wire == 0:
            return self._read(header)
        if op == Op.WRITE:
            if (
                not 1 <= wire <= CHUNK_BYTES
                or wire > length
                or length > CHUNK_BYTES
                or offset % CHUNK_BYTES + length > CHUNK_BYTES
            ):
                raise ConnectionClosed
        elif wire > _MAX_PAYLOAD.get(op, 0):
            raise ConnectionClosed
        elif op not in _OPS:
            self._answer(FrameStatus.BAD, seq)
            return REQUEST.size
        self._header, self._got = header, 0
        if wire:
            self._slot = self._store.staging.acquire()
        else:
            self._perform()
        return REQUEST.size

    def _receive_payload(self) -> int:
        assert self._header is not None
        assert self._slot is not None
        wire, view = self._header[6], self._slot.view
        ready = min(self.end - self.start, wire - self._got)
        if ready:
            view[self._got : self._got + ready] = self.inbox[self.start : self.start + ready]
            self.start += ready
            self._got += ready
        if self._got < wire:
            got = self.receive_into(view[self._got : wire])
            if got < 0:
                return -1
            self._got += got
            ready += got
        if self._got == wire:
            self._perform()
        return ready

    def _perform(self) -> None:
        """Perform a request that was received as a whole."""
        assert self._header is not None
        header, slot = self._header, self._slot
        self._header = self._slot = None
        _, op, _, number, seq, _, wire, _, _ = header
        payload = slot.view[:wire] if slot is not None else memoryview(b"")
        try:
            if op == Op.WRITE and slot is not None:
                self._answer(self._write(header, slot), seq)
            elif op == Op.HELLO:
                status, body = (FrameStatus.FULL, b"") if self.is_refused else self._handles.hello(bytes(payload))
                self._answer(status, seq, body)
            elif op == Op.OPEN:
                status, body = self._handles.open(bytes(payload))
                self._answer(status, seq, body)
            elif op == Op.SEVER:
                if payload != self.nonce:
                    self._server.sever(bytes(payload))
                self._answer(FrameStatus.OK, seq)
            elif op == Op.CLOSE:
                self._handles.close(number)
                self._answer(FrameStatus.OK, seq)
            else:
                status, handle = self._handles.find(number, FILL if op == Op.FILL_END else 0)
                if handle is None:
                    self._answer(status, seq)
                elif op == Op.FILL_END:
                    self._answer(self._store.end_fill(handle.backing), seq)
                elif op == Op.STAT:
                    backing = handle.backing
                    written = sum(map(bool, backing.digests))
                    self._answer(
                        FrameStatus.OK, seq, STAT.pack(backing.size, backing.generation, written, backing.frozen)
                    )
                elif not self.is_local or not permits(handle.claims.rights, READ):
                    self._answer(FrameStatus.DENIED, seq)
                else:
                    self.out_fds.append(os.open(f"/proc/self/fd/{handle.backing.fd}", os.O_RDONLY | os.O_CLOEXEC))
                    self._answer(FrameStatus.OK, seq)
        finally:
            if slot is not None:
                self._store.staging.release(slot)

    def _answer(self, status: FrameStatus, seq: int, body: bytes = b"") -> None:
        self.queue(ANSWER.pack(ANSWER_MAGIC, status, 0, seq, len(body), 0) + body)

    # ------------------------------------------------------------------ requests on a copy

    def _read(self, header: tuple[int, ...]) -> int:
        _, _, flags, number, seq, length, _, offset, _ = header
        status, handle = self._handles.find(number, READ)
        if handle is not None:
            beyond = not 1 <= length <= CHUNK_BYTES or offset % CHUNK_BYTES + length > CHUNK_BYTES
            if beyond or offset + length > handle.backing.size:
                status, handle = FrameStatus.BAD, None
            elif not handle.backing.complete and not handle.claims.rights & FILL:
                status, handle = FrameStatus.FROZEN, None
        if handle is None:
            self._answer(status, seq)
            return REQUEST.size
        if length <= SMALL_BYTES and not flags:
            data = self._store.read_small(handle.backing, offset, length)
            if data is not None:
                self._store.counters.wire_out += length
                self.queue(ANSWER.pack(ANSWER_MAGIC, FrameStatus.OK, 0, seq, length, digest_of(data)) + data)
                return REQUEST.size + length
        if not flags and not self.is_tls and length == handle.backing.chunk_length(offset // CHUNK_BYTES):
            digest = self._store.start_send(handle.backing, offset // CHUNK_BYTES)
            if digest:
                self._store.counters.wire_out += length
                self.queue(ANSWER.pack(ANSWER_MAGIC, FrameStatus.OK, 0, seq, length, digest))
                self.out.append((FilePart(handle.backing, offset, length), None))
                self.out_bytes += length
                return REQUEST.size + length
        slot = self._store.staging.acquire() if length > SMALL_BYTES else None
        view = slot.view[:length] if slot is not None else memoryview(bytearray(length))
        digest = self._store.read(handle.backing, offset, view)
        if digest <= 0:
            if slot is not None:
                self._store.staging.release(slot)
            status = FrameStatus.OK if digest == 0 else FrameStatus.CORRUPT
            self.queue(ANSWER.pack(ANSWER_MAGIC, status, ZEROS if digest == 0 else 0, seq, 0, 0))
            return REQUEST.size
        self._queue_data(seq, digest, view, slot, compress=bool(flags & COMPRESSED))
        return REQUEST.size + length

    def _queue_data(self, seq: int, digest: int, view: memoryview, slot: Slot | None, *, compress: bool) -> None:
        if compress:
            packed = lz4.block.compress(view, store_size=False)
            if len(packed) < len(view):
                self._store.counters.wire_out += len(packed)
                self.queue(ANSWER.pack(ANSWER_MAGIC, FrameStatus.OK, COMPRESSED, seq, len(packed), digest))
                self.queue(packed)
                if slot is not None:
                    self._store.staging.release(slot)
                return
        self._store.counters.wire_out += len(view)
        head = ANSWER.pack(ANSWER_MAGIC, FrameStatus.OK, 0, seq, len(view), digest)
        if slot is None:
            self.queue(head + view)
        else:
            self.queue(head)
            self.queue(view, slot)

    def _write(self, header: tuple[int, ...], slot: Slot) -> FrameStatus:
        _, _, flags, number, _, length, wire, offset, digest = header
        status, handle = self._handles.find(number, WRITE)
        if handle is None:
            return status
        backing = handle.backing
        filling = bool(handle.claims.rights & FILL)
        if offset + length > backing.size or (filling and backing.complete):
            return FrameStatus.BAD
        if backing.frozen or (not backing.complete and not filling):
            return FrameStatus.FROZEN
        if flags & COMPRESSED:
            try:
                plain = lz4.block.decompress(slot.view[:wire], uncompressed_size=length)
            except (lz4.block.LZ4BlockError, ValueError):
                return FrameStatus.CORRUPT
            if len(plain) != length:
                return FrameStatus.CORRUPT
            slot.view[:length] = plain
        elif wire != length:
            return FrameStatus.BAD
        if digest_of(slot.view[:length]) != digest:
            return FrameStatus.CORRUPT
        self._store.counters.wire_in += wire
        return self._store.write(backing, offset, slot, length, digest)


_OPS = frozenset(Op)
_MAX_PAYLOAD: dict[int, int] = {Op.HELLO: NONCE_BYTES + 2, Op.OPEN: MAX_OPEN_BYTES, Op.SEVER: NONCE_BYTES}
