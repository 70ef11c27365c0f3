"""What the tickets of one connection have opened.

Rule 1. Both sides prove that they know the ticket's secret, with nonces of this connection: what was overheard is of
        no use on another one.
Rule 2. A handle is looked at anew with every request: what it opened may have moved, and its time may be over.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple, Protocol

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.frames import MAX_HANDLES, NONCE_BYTES, OPENED, VERSION, FrameStatus
from distributed_grid.memory.protocol.ticket import (
    TicketClaims,
    client_proof,
    derive_secret,
    read_claims,
    server_proof,
)
from distributed_grid.memory.server.copy_file import CopyFile
from distributed_grid.memory.server.copy_store import CopyStore, may
from distributed_grid.memory.server.stream import ConnectionClosed
from distributed_grid.posix.boot_clock import boot_ms


class ServerCallbacks(Protocol):
    """What a connection needs of its server besides the shelf."""

    def secure(self, backing: CopyFile) -> bool:
        """Have somebody else know of this new copy, and hold it too; False where that is not possible just now."""

    def sever(self, nonce: bytes) -> None:
        """End the connection that was greeted with this nonce; where there is none, nothing happens."""


class Handle(NamedTuple):
    """What a proven ticket opened, as it was then."""

    backing: CopyFile
    claims: TicketClaims
    generation: int


class Handles:
    """The nonces of a connection, and what was opened with them."""

    def __init__(self, shelf: CopyStore, keeping: ServerCallbacks) -> None:
        self._shelf = shelf
        self._keeping = keeping
        self._nonces: tuple[bytes, bytes] | None = None
        self._opened: dict[int, Handle] = {}
        self._next = 1
        self.proven = False  # whether a ticket was

    @property
    def nonce(self) -> bytes:
        """What this side said in its greeting; nobody but the client on the other side knows it."""
        return self._nonces[1] if self._nonces is not None else b""

    def greet(self, payload: bytes) -> tuple[FrameStatus, bytes]:
        """The answer to a greeting; nonces are new with each."""
        if len(payload) != NONCE_BYTES + 2 or int.from_bytes(payload[NONCE_BYTES:], "little") != VERSION:
            return FrameStatus.BAD, b""
        self._nonces = (payload[:NONCE_BYTES], secrets.token_bytes(NONCE_BYTES))
        return FrameStatus.OK, self._nonces[1] + VERSION.to_bytes(2, "little")

    def open(self, payload: bytes) -> tuple[FrameStatus, bytes]:
        """The answer to a ticket and the proof that its secret is known. Who has not greeted is not answered."""
        if self._nonces is None:
            raise ConnectionClosed
        letters = int.from_bytes(payload[:2], "little")
        packed, proof = payload[2 : 2 + letters], payload[2 + letters :]
        secret = derive_secret(self._shelf.key, packed)
        if not hmac.compare_digest(proof, client_proof(secret, *self._nonces, packed)):
            # A ticket of another life has another key; which life it is of is no secret, and helps an honest client.
            return self._why_unproven(packed), b""
        try:
            claims = read_claims(packed)
        except ProtocolError:
            return FrameStatus.DENIED, b""
        if len(self._opened) >= MAX_HANDLES:
            return FrameStatus.BAD, b""
        status, backing, is_new = self._shelf.open(claims, boot_ms())
        if backing is not None and is_new and not self._keeping.secure(backing):
            self._shelf.discard(backing)
            status, backing = FrameStatus.FROZEN, None
        self.proven = True
        if backing is None:
            return status, b""
        number = self._next
        self._next = number % 0xFFFFFFFF + 1
        self._opened[number] = Handle(backing, claims, backing.generation)
        body = OPENED.pack(number, backing.generation, backing.size, backing.complete)
        return status, body + server_proof(secret, *self._nonces, packed)

    def _why_unproven(self, packed: bytes) -> FrameStatus:
        try:
            other_life = read_claims(packed).incarnation != self._shelf.incarnation
        except ProtocolError:
            other_life = False
        return FrameStatus.WRONG_INCARNATION if other_life else FrameStatus.DENIED

    def usable(self, number: int, right: int) -> tuple[FrameStatus, Handle | None]:
        """What this number opened, where it may be used so now; or why not."""
        handle = self._opened.get(number)
        if handle is None:
            return FrameStatus.BAD, None
        if handle.backing.fd < 0:
            return FrameStatus.MOVED, None
        if handle.claims.expires_boot_ms <= boot_ms():
            return FrameStatus.EXPIRED, None
        if handle.generation < handle.backing.generation:
            return FrameStatus.STALE, None
        if right and not handle.claims.rights & right and not may(handle.claims.rights, right):
            return FrameStatus.DENIED, None
        return FrameStatus.OK, handle

    def close(self, number: int) -> None:
        """Forget what this number opened; nothing is no error."""
        self._opened.pop(number, None)

    def clear(self) -> None:
        """Forget everything."""
        self._opened.clear()
