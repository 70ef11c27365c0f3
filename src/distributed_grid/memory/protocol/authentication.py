"""Authentication between clients and memory servers: tickets, and TLS certificates checked by their fingerprint.

A ticket is the right to use one copy, until when, as claims with a secret. The secret is derived from the server's key
and the claims, so a server needs no list of tickets. Times are milliseconds of the lender's CLOCK_BOOTTIME: the server
compares them with its own clock alone.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import socket
import ssl

import msgspec
from msgspec import Struct

from distributed_grid.domain.blocks import MAX_BLOCK_BYTES
from distributed_grid.errors import ProtocolError
from distributed_grid.wire import Endpoint, Ticket

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


def tls_context(certificate: bytes, private_key: bytes) -> ssl.SSLContext:
    """A server's context with this certificate; both go through memory, never through a file on disk."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    fd = os.memfd_create("grid-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, certificate + b"\n" + private_key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of the first certificate in this PEM text, in hex; ValueError where there is none."""
    text = certificate.decode("ascii")
    start, end = text.find("-----BEGIN CERTIFICATE-----"), text.find("-----END CERTIFICATE-----")
    if start < 0 or end < start:
        raise ValueError("the certificate is not in PEM form")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[start:end] + "-----END CERTIFICATE-----")).hexdigest()


def connect_tls(sock: socket.socket, endpoint: Endpoint) -> ssl.SSLSocket:
    """Start TLS on a connected socket; OSError where the peer's certificate has another fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # checked by its fingerprint instead
    wrapped = context.wrap_socket(sock, server_hostname=endpoint.host)
    der = wrapped.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(der).hexdigest(), endpoint.fingerprint):
        wrapped.close()
        raise OSError("the memory server has another certificate than it should")
    return wrapped
