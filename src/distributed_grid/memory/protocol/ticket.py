"""Tickets: the right to use one copy, until when, as claims with a secret.

The secret is derived from the server's key and the claims, so a server needs no list of tickets. Times are milliseconds
of the lender's CLOCK_BOOTTIME: the server compares them with its own clock alone.
"""

from __future__ import annotations

import hashlib
import hmac
import re

import msgspec
from msgspec import Struct

from distributed_grid.domain.blocks import MAX_BLOCK_BYTES
from distributed_grid.errors import ProtocolError
from distributed_grid.wire import Ticket

READ, WRITE, FILL = 1, 2, 4
MAX_CLAIMS_BYTES = 1024
TICKET_LIFE_MS = 600_000  # the issuer keeps to this; a freed copy is remembered for twice as long
_MAX_NUMBER = 2**62
_COPY_ID = re.compile(r"[A-Za-z0-9:_-]{1,200}")
_WORD = re.compile(r"[A-Za-z0-9_-]{0,128}")


class TicketClaims(Struct, frozen=True, array_like=True):
    """The right to use one copy. `ends_boot_ms` is when its block ends (0: open), `expires_boot_ms` when this does."""

    copy: str
    generation: int
    size: int
    rights: int
    expires_boot_ms: int
    ends_boot_ms: int
    incarnation: str
    on_disk: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TicketClaims)


def is_copy_id(text: str) -> bool:
    """Whether this can name a copy; such a name is also safe as a file's."""
    return _COPY_ID.fullmatch(text) is not None


def issue_ticket(key: bytes, claims: TicketClaims) -> Ticket:
    """The ticket for these claims at the server with this key."""
    packed = _encoder.encode(claims)
    return Ticket(claims=packed, secret=derive_secret(key, packed))


def derive_secret(key: bytes, packed: bytes) -> bytes:
    """The secret of the ticket with these packed claims."""
    return hmac.digest(key, packed, hashlib.sha256)


def read_claims(packed: bytes) -> TicketClaims:
    """Decode and check claims from outside; ProtocolError where they are not valid."""
    if len(packed) > MAX_CLAIMS_BYTES:
        raise ProtocolError(f"claims of {len(packed)} bytes are too long")
    try:
        claims = _decoder.decode(packed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ProtocolError("the claims cannot be decoded") from None
    if not is_copy_id(claims.copy) or not _WORD.fullmatch(claims.incarnation):
        raise ProtocolError("the claims have an invalid name")
    if not 1 <= claims.size <= MAX_BLOCK_BYTES:
        raise ProtocolError(f"the claims are for a block of {claims.size} bytes")
    if not 0 <= claims.rights <= READ | WRITE | FILL:
        raise ProtocolError("the claims name unknown rights")
    if not all(
        0 <= number < _MAX_NUMBER for number in (claims.generation, claims.expires_boot_ms, claims.ends_boot_ms)
    ):
        raise ProtocolError("the claims have a number out of range")
    return claims


def client_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes, packed: bytes) -> bytes:
    """Proof to the server that the client knows the secret."""
    return hmac.digest(secret, b"client" + client_nonce + server_nonce + packed, hashlib.sha256)


def server_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes, packed: bytes) -> bytes:
    """Proof to the client that the server can derive the secret."""
    return hmac.digest(secret, b"server" + server_nonce + client_nonce + packed, hashlib.sha256)
