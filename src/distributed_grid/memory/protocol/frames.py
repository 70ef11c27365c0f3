"""Frames of the data protocol between clients and memory servers.

Little-endian headers of fixed size, and payloads whose length the header gives: a reader knows from the header alone
how many bytes follow, and refuses more than it is ready for. Answers come in the order of the requests; a client may
send many before it reads the first answer. A READ or WRITE stays within one chunk, so that each has one digest and is
done whole or not at all.

A ticket is the right to use one copy until a time, as claims with a secret. The secret is derived from the server's key
and the claims, so a server needs no list of tickets. Times are milliseconds of the lender's CLOCK_BOOTTIME: the server
compares them with its own clock alone. TLS certificates are checked by their fingerprint.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import socket
import ssl
import struct
from enum import IntEnum
from typing import Final

import msgspec
import xxhash
from msgspec import Struct

from distributed_grid.domain.blocks import MAX_BLOCK_BYTES
from distributed_grid.errors import GridError, ProtocolError
from distributed_grid.wire import Endpoint, Ticket

CHUNK_BYTES: Final = 256 * 1024
MAGIC: Final = 0x6D47
ANSWER_MAGIC: Final = 0x6D61
VERSION: Final = 1
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
MAX_HANDLES: Final = 4096

# magic, op, flags, handle, seq, length, wire length, offset, digest. `length` is that of the data, `wire` the bytes
# that follow the header.
REQUEST: Final = struct.Struct("<HBBIIIIQQ")
# magic, status, flags, seq, wire length, digest
ANSWER: Final = struct.Struct("<HBBIIQ")
OPENED: Final = struct.Struct("<IQQB")  # handle, generation, size, whether the copy is complete
STAT: Final = struct.Struct("<QQQB")  # size, generation, chunks written, whether it is frozen

COMPRESSED: Final = 1  # of a WRITE: the payload is an lz4 block; of a READ: the answer may be one
STEADY: Final = 4  # of a READ: a consistent snapshot, also during a write
ZEROS: Final = 2  # of an answer: the data are zeros, and none follow

MAX_OPEN_BYTES: Final = 2 + 1024 + PROOF_BYTES


class Op(IntEnum):
    """Operation of a request."""

    HELLO = 1
    OPEN = 2
    READ = 3
    WRITE = 4
    FILL_END = 5
    MAP = 6
    STAT = 7
    CLOSE = 8
    SEVER = 9  # end another connection of mine, so that nothing sent on it is done after this


class FrameStatus(IntEnum):
    """Outcome of a request."""

    OK = 0
    DENIED = 1  # not permitted; deliberately without a reason
    EXPIRED = 2  # the ticket has run out
    WRONG_INCARNATION = 3  # the ticket is for another incarnation of this server
    STALE = 4  # the copies of the block have changed since the ticket was issued
    MOVED = 5  # the copy is not here any more
    FROZEN = 6  # not now: the copy is being moved, or is not filled yet
    CORRUPT = 7  # the digest does not match
    BAD = 8  # the request is invalid
    FULL = 9  # no room


class StatusError(GridError):
    """The server refused a request."""

    def __init__(self, status: FrameStatus) -> None:
        super().__init__(f"the memory server answered: {status.name.lower()}")
        self.status = status


def digest_of(data: bytes | bytearray | memoryview) -> int:
    """XXH3 of a chunk or a part of one; never 0, which stands for "never written"."""
    return xxhash.xxh3_64_intdigest(data) or 1


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
    """True if this can name a copy; such a name is also safe as a file's."""
    return _COPY_ID.fullmatch(text) is not None


def issue_ticket(key: bytes, claims: TicketClaims) -> Ticket:
    packed = _encoder.encode(claims)
    return Ticket(claims=packed, secret=derive_secret(key, packed))


def derive_secret(key: bytes, packed: bytes) -> bytes:
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
    return hmac.digest(secret, b"client" + client_nonce + server_nonce + packed, hashlib.sha256)


def server_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes, packed: bytes) -> bytes:
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
