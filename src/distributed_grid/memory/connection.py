"""One connection to a memory server: a small state machine over a socket that never blocks.

Rule 1. Lengths are checked before anything is made room for; what cannot be parsed ends the connection, what makes no
        sense gets a status.
Rule 2. A payload is received whole and checked before anything changes; who goes away half-way leaves nothing behind.
Rule 3. No turn moves more than about a MiB, so nobody waits long for anybody.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import ssl
from collections import deque
from typing import Final, NamedTuple

import lz4.block

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.backing import Backing
from distributed_grid.memory.claims import (
    FILL,
    READ,
    WRITE,
    Claims,
    boot_ms,
    client_proof,
    read_claims,
    secret_for,
    server_proof,
)
from distributed_grid.memory.frames import (
    ANSWER,
    ANSWER_MAGIC,
    CHUNK,
    COMPRESSED,
    LONGEST_OPEN,
    MAGIC,
    MOST_HANDLES,
    NONCE,
    OPENED,
    REQUEST,
    STAT,
    VERSION,
    ZEROS,
    Op,
    Status,
    digest_of,
)
from distributed_grid.memory.journal import Slot
from distributed_grid.memory.shelf import Shelf, may

TURN_BYTES: Final = 1024 * 1024
QUEUED_BYTES: Final = 256 * 1024
SMALL_BYTES: Final = 32 * 1024
INBOX_BYTES: Final = 16 * 1024
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Handle(NamedTuple):
    """What a proven ticket opened, as it was then."""

    backing: Backing
    claims: Claims
    generation: int


class FilePart:
    """A stretch of a copy that is sent from its file, without a copy of it: whoever writes there meanwhile is seen, and
    then the digest does not fit. The client asks again for a steady look."""

    __slots__ = ("backing", "left", "offset")

    def __init__(self, backing: Backing, offset: int, length: int) -> None:
        self.backing = backing
        self.offset = offset
        self.left = length

    def __len__(self) -> int:
        return self.left

    def send(self, to: int) -> int:
        """Send some; BlockingIOError where nothing can be sent now."""
        if self.backing.fd < 0:
            raise Ended  # let go of meanwhile; the header is out already
        sent = os.sendfile(to, self.backing.fd, self.offset, self.left)
        if sent == 0:
            raise Ended
        self.offset += sent
        self.left -= sent
        return sent


class Ended(Exception):
    """This connection is over."""


class Keeping:
    """What a connection needs of its server besides the shelf."""

    def secure(self, backing: Backing) -> bool:
        """Have somebody else know of this new copy, and hold it too; False where that is not possible just now."""
        raise NotImplementedError

    def sever(self, nonce: bytes) -> None:
        """End the connection that was greeted with this nonce, where there is one."""
        raise NotImplementedError


class Connection:
    """Reads requests, does them on the shelf, sends answers."""

    def __init__(self, sock: socket.socket, shelf: Shelf, keeping: Keeping, *, is_local: bool, now: float) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.is_local = is_local
        self.proven = False
        self.begun_at = self.progress_at = now
        self.progressed = False
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._shaken = not self._is_tls
        self._shelf = shelf
        self._keeping = keeping
        self._nonces: tuple[bytes, bytes] | None = None
        self._handles: dict[int, Handle] = {}
        self._next_handle = 1
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._start = self._end = 0
        self._is_drained = False
        self._out: deque[tuple[bytes | bytearray | memoryview | FilePart, Slot | None]] = deque()
        self._out_bytes = 0
        self._out_fds: list[int] = []
        # The request whose payload is under way: its header, where the payload goes, and how much of it is there.
        self._header: tuple[int, ...] | None = None
        self._slot: Slot | None = None
        self._got = 0

    # ------------------------------------------------------------------ the loop's side

    @property
    def nonce(self) -> bytes:
        """What this side said in its greeting; nobody but the client on the other side knows it."""
        return self._nonces[1] if self._nonces is not None else b""

    @property
    def waits_to_send(self) -> bool:
        return bool(self._out)

    @property
    def is_midway(self) -> bool:
        """Whether something was begun that the other side has to go on with."""
        return bool(self._out) or self._header is not None or self._start != self._end

    def turn(self) -> bool:
        """Do what can be done now, up to a limit; True where there may be more. `Ended` (or OSError) is the end."""
        if not self._shaken and not self._shake_hands():
            return False
        left = TURN_BYTES
        self._is_drained = False
        while left > 0:
            if self._out_bytes >= QUEUED_BYTES and not self._flush():
                return False
            if self._header is not None:
                got = self._receive_payload()
            elif self._end - self._start >= REQUEST.size:
                got = self._begin()
            else:
                got = self._fill_inbox()
            if got < 0:
                self._flush()
                return False
            left -= got
        return self._flush()

    def close(self) -> None:
        """End it; safe twice. Slots go back, queued descriptors are closed."""
        if self._slot is not None:
            self._shelf.staging.give(self._slot)
            self._slot = None
        for _, slot in self._out:
            if slot is not None:
                self._shelf.staging.give(slot)
        self._out.clear()
        for fd in self._out_fds:
            os.close(fd)
        self._out_fds.clear()
        self._handles.clear()
        self.sock.close()

    def _shake_hands(self) -> bool:
        assert isinstance(self.sock, ssl.SSLSocket)
        try:
            self.sock.do_handshake()
        except _NOT_NOW:
            return False
        self._shaken = True
        return True

    # ------------------------------------------------------------------ bytes

    def _fill_inbox(self) -> int:
        """More bytes of a header, and what comes with it; -1 where there are none now."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._inbox[self._start : self._end])
            self._inbox[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        got = self._receive_into(self._inbox[self._end :])
        if got > 0:
            self._end += got
        return got

    def _receive_into(self, view: memoryview) -> int:
        """What is there, into this; -1 where nothing is. Who got less than there was room for need not ask again."""
        if self._is_drained:
            self._is_drained = False
            return -1
        try:
            got = self.sock.recv_into(view)
        except _NOT_NOW:
            return -1
        if got == 0:
            raise Ended
        self.progressed = True
        self._is_drained = got < len(view) and not self._is_tls
        return got

    def _receive_payload(self) -> int:
        assert self._header is not None
        assert self._slot is not None
        wire, view = self._header[6], self._slot.view
        ready = min(self._end - self._start, wire - self._got)
        if ready:
            view[self._got : self._got + ready] = self._inbox[self._start : self._start + ready]
            self._start += ready
            self._got += ready
        if self._got < wire:
            got = self._receive_into(view[self._got : wire])
            if got < 0:
                return -1
            self._got += got
            ready += got
        if self._got == wire:
            self._perform()
        return ready

    def _flush(self) -> bool:
        """Send what is queued; False where the other side does not take it all now."""
        while self._out:
            try:
                first = self._out[0][0]
                if isinstance(first, FilePart):
                    sent = first.send(self.fd)
                    self.progressed = True
                    self._out_bytes -= sent
                    if not first.left:
                        self._out.popleft()
                    continue
                if self._out_fds:
                    sent = socket.send_fds(self.sock, self._leading(), self._out_fds[:1])
                    os.close(self._out_fds.pop(0))
                elif self._is_tls:
                    sent = self.sock.send(first)
                else:
                    parts = self._leading()
                    more = socket.MSG_MORE if len(parts) < len(self._out) else 0
                    sent = self.sock.sendmsg(parts, (), more)
            except _NOT_NOW:
                return False
            self.progressed = True
            self._sent(sent)
        return True

    def _leading(self) -> list[bytes | bytearray | memoryview]:
        """The parts that can go out in one call."""
        parts: list[bytes | bytearray | memoryview] = []
        for part, _ in self._out:
            if isinstance(part, FilePart) or len(parts) == 64:
                break
            parts.append(part)
        return parts

    def _sent(self, sent: int) -> None:
        self._out_bytes -= sent
        while sent:
            part, slot = self._out[0]
            assert not isinstance(part, FilePart)
            if sent < len(part):
                self._out[0] = (memoryview(part)[sent:], slot)
                return
            sent -= len(part)
            self._out.popleft()
            if slot is not None:
                self._shelf.staging.give(slot)

    # ------------------------------------------------------------------ requests

    def _begin(self) -> int:
        """Take the next header, and do what has no payload; the bytes it was worth."""
        header = REQUEST.unpack_from(self._inbox, self._start)
        self._start += REQUEST.size
        magic, op, _, _, seq, length, wire, offset, _ = header
        if magic != MAGIC:
            raise Ended
        if op == Op.READ and wire == 0:
            return self._read(header)
        if op == Op.WRITE:
            if not 1 <= wire <= CHUNK or wire > length or length > CHUNK or offset % CHUNK + length > CHUNK:
                raise Ended
        elif wire > _LONGEST.get(op, 0):
            raise Ended
        elif op not in _OPS:
            self._answer(Status.BAD, seq)
            return REQUEST.size
        self._header, self._got = header, 0
        if wire:
            self._slot = self._shelf.staging.take()
        else:
            self._perform()
        return REQUEST.size

    def _perform(self) -> None:
        """The request is here as a whole."""
        assert self._header is not None
        header, slot = self._header, self._slot
        self._header = self._slot = None
        _, op, _, number, seq, _, wire, _, _ = header
        payload = slot.view[:wire] if slot is not None else memoryview(b"")
        try:
            if op == Op.WRITE and slot is not None:
                self._answer(self._write(header, slot), seq)
            elif op == Op.HELLO:
                self._hello(seq, bytes(payload))
            elif op == Op.OPEN:
                self._open(seq, bytes(payload))
            elif op == Op.SEVER:
                if payload != self.nonce:
                    self._keeping.sever(bytes(payload))
                self._answer(Status.OK, seq)
            elif op == Op.CLOSE:
                self._handles.pop(number, None)
                self._answer(Status.OK, seq)
            else:
                self._small(op, number, seq)
        finally:
            if slot is not None:
                self._shelf.staging.give(slot)

    def _answer(self, status: Status, seq: int, body: bytes = b"") -> None:
        self._queue(ANSWER.pack(ANSWER_MAGIC, status, 0, seq, len(body), 0) + body)

    def _queue(self, part: bytes | bytearray | memoryview, slot: Slot | None = None) -> None:
        self._out.append((part, slot))
        self._out_bytes += len(part)

    def _hello(self, seq: int, payload: bytes) -> None:
        if len(payload) != NONCE + 2 or int.from_bytes(payload[NONCE:], "little") != VERSION:
            self._answer(Status.BAD, seq)
            return
        self._nonces = (payload[:NONCE], secrets.token_bytes(NONCE))
        self._answer(Status.OK, seq, self._nonces[1] + VERSION.to_bytes(2, "little"))

    def _open(self, seq: int, payload: bytes) -> None:
        if self._nonces is None:
            raise Ended
        letters = int.from_bytes(payload[:2], "little")
        packed, proof = payload[2 : 2 + letters], payload[2 + letters :]
        secret = secret_for(self._shelf.key, packed)
        if not hmac.compare_digest(proof, client_proof(secret, *self._nonces, packed)):
            # A ticket of another life has another key; which life it is of is no secret, and helps an honest client.
            self._answer(self._why_unproven(packed), seq)
            return
        try:
            claims = read_claims(packed)
        except ProtocolError:
            self._answer(Status.DENIED, seq)
            return
        if len(self._handles) >= MOST_HANDLES:
            self._answer(Status.BAD, seq)
            return
        status, backing, is_new = self._shelf.open(claims, boot_ms())
        if backing is not None and is_new and not self._keeping.secure(backing):
            self._shelf.discard(backing)
            status, backing = Status.FROZEN, None
        self.proven = True
        if backing is None:
            self._answer(status, seq)
            return
        number = self._next_handle
        self._next_handle = number % 0xFFFFFFFF + 1
        self._handles[number] = Handle(backing, claims, backing.generation)
        body = OPENED.pack(number, backing.generation, backing.size, backing.complete)
        self._answer(status, seq, body + server_proof(secret, *self._nonces, packed))

    def _why_unproven(self, packed: bytes) -> Status:
        try:
            other_life = read_claims(packed).incarnation != self._shelf.incarnation
        except ProtocolError:
            other_life = False
        return Status.GONE_LIFE if other_life else Status.DENIED

    def _usable(self, number: int, right: int) -> tuple[Status, Handle | None]:
        handle = self._handles.get(number)
        if handle is None:
            return Status.BAD, None
        if handle.backing.fd < 0:
            return Status.MOVED, None
        if handle.claims.expires_boot_ms <= boot_ms():
            return Status.EXPIRED, None
        if handle.generation < handle.backing.generation:
            return Status.STALE, None
        if right and not handle.claims.rights & right and not may(handle.claims.rights, right):
            return Status.DENIED, None
        return Status.OK, handle

    def _read(self, header: tuple[int, ...]) -> int:
        _, _, flags, number, seq, length, _, offset, _ = header
        status, handle = self._usable(number, READ)
        if handle is not None:
            beyond = not 1 <= length <= CHUNK or offset % CHUNK + length > CHUNK
            if beyond or offset + length > handle.backing.size:
                status, handle = Status.BAD, None
            elif not handle.backing.complete and not handle.claims.rights & FILL:
                status, handle = Status.FROZEN, None
        if handle is None:
            self._answer(status, seq)
            return REQUEST.size
        if length <= SMALL_BYTES and not flags:
            data = self._shelf.read_small(handle.backing, offset, length)
            if data is not None:
                self._shelf.counters.wire_out += length
                self._queue(ANSWER.pack(ANSWER_MAGIC, Status.OK, 0, seq, length, digest_of(data)) + data)
                return REQUEST.size + length
        if not flags and not self._is_tls and length == handle.backing.chunk_length(offset // CHUNK):
            digest = self._shelf.look(handle.backing, offset // CHUNK)
            if digest:
                self._shelf.counters.wire_out += length
                self._queue(ANSWER.pack(ANSWER_MAGIC, Status.OK, 0, seq, length, digest))
                self._out.append((FilePart(handle.backing, offset, length), None))
                self._out_bytes += length
                return REQUEST.size + length
        slot = self._shelf.staging.take() if length > SMALL_BYTES else None
        view = slot.view[:length] if slot is not None else memoryview(bytearray(length))
        digest = self._shelf.read(handle.backing, offset, view)
        if digest <= 0:
            if slot is not None:
                self._shelf.staging.give(slot)
            status = Status.OK if digest == 0 else Status.CORRUPT
            self._queue(ANSWER.pack(ANSWER_MAGIC, status, ZEROS if digest == 0 else 0, seq, 0, 0))
            return REQUEST.size
        self._queue_data(seq, digest, view, slot, compress=bool(flags & COMPRESSED))
        return REQUEST.size + length

    def _queue_data(self, seq: int, digest: int, view: memoryview, slot: Slot | None, *, compress: bool) -> None:
        if compress:
            packed = lz4.block.compress(view, store_size=False)
            if len(packed) < len(view):
                self._shelf.counters.wire_out += len(packed)
                self._queue(ANSWER.pack(ANSWER_MAGIC, Status.OK, COMPRESSED, seq, len(packed), digest))
                self._queue(packed)
                if slot is not None:
                    self._shelf.staging.give(slot)
                return
        self._shelf.counters.wire_out += len(view)
        head = ANSWER.pack(ANSWER_MAGIC, Status.OK, 0, seq, len(view), digest)
        if slot is None:
            self._queue(head + view)
        else:
            self._queue(head)
            self._queue(view, slot)

    def _write(self, header: tuple[int, ...], slot: Slot) -> Status:
        _, _, flags, number, _, length, wire, offset, digest = header
        status, handle = self._usable(number, WRITE)
        if handle is None:
            return status
        backing = handle.backing
        filling = bool(handle.claims.rights & FILL)
        if offset + length > backing.size or (filling and backing.complete):
            return Status.BAD
        if backing.frozen or (not backing.complete and not filling):
            return Status.FROZEN
        if flags & COMPRESSED:
            try:
                plain = lz4.block.decompress(slot.view[:wire], uncompressed_size=length)
            except (lz4.block.LZ4BlockError, ValueError):
                return Status.CORRUPT
            if len(plain) != length:
                return Status.CORRUPT
            slot.view[:length] = plain
        elif wire != length:
            return Status.BAD
        if digest_of(slot.view[:length]) != digest:
            return Status.CORRUPT
        self._shelf.counters.wire_in += wire
        return self._shelf.write(backing, offset, slot, length, digest)

    def _small(self, op: int, number: int, seq: int) -> None:
        status, handle = self._usable(number, FILL if op == Op.FILL_END else 0)
        if handle is None:
            self._answer(status, seq)
        elif op == Op.FILL_END:
            self._answer(self._shelf.fill_ended(handle.backing), seq)
        elif op == Op.STAT:
            backing = handle.backing
            written = sum(map(bool, backing.digests))
            self._answer(Status.OK, seq, STAT.pack(backing.size, backing.generation, written, backing.frozen))
        elif not self.is_local or not may(handle.claims.rights, READ):
            self._answer(Status.DENIED, seq)
        else:
            self._out_fds.append(os.open(f"/proc/self/fd/{handle.backing.fd}", os.O_RDONLY | os.O_CLOEXEC))
            self._answer(Status.OK, seq)


_OPS = frozenset(Op)
_LONGEST: dict[int, int] = {Op.HELLO: NONCE + 2, Op.OPEN: LONGEST_OPEN, Op.SEVER: NONCE}
