"""Handles of a connection: what its tickets have opened.

Both sides prove that they know the ticket's secret, with nonces of this connection, so what was overheard is of no use
on another one. A handle is checked anew with every request: its copy may have moved, and its time may be over.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple, Protocol

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.authentication import (
    TicketClaims,
    client_proof,
    derive_secret,
    read_claims,
    server_proof,
)
from distributed_grid.memory.protocol.frames import MAX_HANDLES, NONCE_BYTES, OPENED, VERSION, FrameStatus
from distributed_grid.memory.server.copy_file import CopyFile
from distributed_grid.memory.server.copy_store import CopyStore, permits
from distributed_grid.memory.server.stream import ConnectionClosed
from distributed_grid.posix.boot_clock import boot_ms


class ServerCallbacks(Protocol):
    """What a connection needs of its server besides the store."""

    def hold_elsewhere(self, backing: CopyFile) -> bool:
        """Have the supervisor hold a new copy, too; False where that is not possible just now."""

    def sever(self, nonce: bytes) -> None:
        """End the connection with this nonce; where there is none, nothing happens."""


class Handle(NamedTuple):
    """What an authenticated ticket opened, as it was then."""

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
        """The server's nonce; nobody but the client of this connection knows it."""
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
            return self._denial_of(packed), b""
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

    def _denial_of(self, packed: bytes) -> FrameStatus:
        try:
            is_other = read_claims(packed).incarnation != self._store.incarnation
        except ProtocolError:
            is_other = False
        return FrameStatus.WRONG_INCARNATION if is_other else FrameStatus.DENIED

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
        """Close a handle; one that is not open is no error."""
        self._opened.pop(number, None)

    def clear(self) -> None:
        """Close all handles."""
        self._opened.clear()
