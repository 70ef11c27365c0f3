"""TLS of the control plane: its certificate, and the TLS layer between a socket and the protocol of a connection.

The certificate is made once, kept 0600, and trusted by its fingerprint rather than by a name. It never expires. Without
the two files a new one is made; nodes, which trust the old one, have to join again. `cryptography` is imported where a
certificate is made: a control plane that has its certificate never loads it.

asyncio's own TLS has two buffers, callbacks of the loop and an exception for the end of each read. `TlsConnection`
decrypts a message and passes it on in the call that received it, and sends a message with one write to the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed_grid.errors import GridError
from distributed_grid.posix.private_files import write_private

if TYPE_CHECKING:
    from cryptography import x509

VALID_FROM, VALID_UNTIL = datetime(1970, 1, 2, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Not from the wall clock: a wrong one at that moment would make the certificate invalid later."""
HANDSHAKE_SECONDS = 15.0
RECORD_BYTES = 16 * 1024  # of one TLS record
BUFFER_BYTES = 128 * 1024


class Certificate(NamedTuple):
    """Files of a certificate and its key, and the SHA-256 of the certificate as it travels."""

    certificate: Path
    key: Path
    fingerprint: str
    pem: str


def ensure_certificate(folder: Path, names: Iterable[str]) -> Certificate:
    """The certificate in this folder; where there is none, one for these names is made."""
    certificate, key = folder / "certificate.pem", folder / "certificate.key"
    if not (certificate.exists() and key.exists()):
        made = make_certificate(f"grid {socket.gethostname()}", names)
        write_private(key, made.key)
        write_private(certificate, made.certificate)
    return load_certificate(certificate, key)


def load_certificate(certificate: Path, key: Path) -> Certificate:
    """The certificate in these files, checked: it can be read and the key fits."""
    try:
        server_context(certificate, key)
        text, end, _ = certificate.read_text().partition("-----END CERTIFICATE-----")
        der = ssl.PEM_cert_to_DER_cert(text[max(text.find("-----BEGIN CERTIFICATE-----"), 0) :] + end)
    except (OSError, ValueError) as failure:  # ssl.SSLError is an OSError
        raise GridError(f"cannot use the certificate {certificate}: {failure}") from failure
    return Certificate(certificate, key, fingerprint_of(der), ssl.DER_cert_to_PEM_cert(der))


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context for the listening side; `OSError` where the files cannot be used.

    Without session tickets: an agent connects seldom and then stays, and a REST client needs no resumption.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0
    context.load_cert_chain(certificate, key)
    return context


def fingerprint_of(der: bytes) -> str:
    """The SHA-256 of a certificate, as hexadecimal digits."""
    return hashlib.sha256(der).hexdigest()


class PemCertificate(NamedTuple):
    certificate: bytes
    key: bytes


def make_certificate(title: str, names: Iterable[str], signer: PemCertificate | None = None) -> PemCertificate:
    """A new certificate for this machine and these names; without a signer it signs itself, and may sign others."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title[:64])])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if signer is None else x509.load_pem_x509_certificate(signer.certificate).subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
        .add_extension(x509.SubjectAlternativeName([*_alternatives(names)]), critical=False)
    )
    if signer is None:
        signing_key = private
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    else:
        loaded = serialization.load_pem_private_key(signer.key, None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signing_key = loaded
    clear = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    made = builder.sign(signing_key, hashes.SHA256())
    return PemCertificate(made.public_bytes(serialization.Encoding.PEM), clear)


def _alternatives(names: Iterable[str]) -> Iterable[x509.GeneralName]:
    from cryptography import x509

    for name in dict.fromkeys(["localhost", "127.0.0.1", *names]):
        try:
            yield x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            with contextlib.suppress(ValueError):  # a name that no certificate can hold is left out
                yield x509.DNSName(name)


class TlsConnection(asyncio.Transport, asyncio.BufferedProtocol):
    """The protocol of a socket's transport, and the transport of the protocol inside."""

    def __init__(
        self,
        context: ssl.SSLContext,
        protocol: asyncio.Protocol,
        buffer: memoryview,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Connections of one event loop can share the `buffer`, which is empty between two callbacks."""
        super().__init__()
        self._context = context
        self._buffer = buffer
        self._protocol: asyncio.BaseProtocol = protocol
        self._handshake_seconds = handshake_seconds
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_open = False  # the handshake is done, and the protocol inside has been told
        self._is_paused = False

    # ------------------------------------------------------------------ the protocol of the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(self._handshake_seconds, self.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._buffer[:nbytes])
        if self._is_open or self._shake_hands():
            self._read()

    def eof_received(self) -> None:
        """There is no half-closed TLS: the connection ends."""
        if self._is_open and isinstance(self._protocol, asyncio.Protocol):
            self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._is_open:
            self._is_open = False
            self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._is_open:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._is_open:
            self._protocol.resume_writing()

    def _shake_hands(self) -> bool:
        """Continue the handshake; True once it is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError:
            self._flush()  # the alert says why
            self._end()
            return False
        self._flush()
        self._cancel_deadline()
        self._is_open = True
        self._protocol.connection_made(self)
        return True

    def _read(self) -> None:
        """Pass on decrypted data, without a read in vain after a whole message."""
        while self._is_open and not self._is_paused and not self.is_closing():
            try:
                data = self._tls.read(RECORD_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:  # damaged or forged
                self._flush()
                self._end()
                return
            if not data:  # the other end has closed
                self.eof_received()
                self.close()
                return
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.data_received(data)
            if not self._incoming.pending and not self._tls.pending():
                break
        if self._outgoing.pending:
            self._flush()

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    def _end(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # ------------------------------------------------------------------ the transport of the protocol inside

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing() or not data:
            return
        try:
            sent = self._tls.write(data)
            while sent < len(data):
                sent += self._tls.write(memoryview(data)[sent:])
        except ssl.SSLError:  # the peer has broken the session
            self._end()
            return
        self._flush()

    def close(self) -> None:
        """Send the closing alert, and close when everything is sent. Safe twice."""
        if self.is_closing():
            return
        if self._is_open:
            with contextlib.suppress(ssl.SSLError):  # the peer's closing alert is not awaited
                self._tls.unwrap()
            self._flush()
        self._end()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._context
        if name == "ssl_object":
            return self._tls
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_reading(self) -> bool:
        return not self._is_paused

    def pause_reading(self) -> None:
        self._is_paused = True
        if self._transport is not None and not self.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._transport is not None and not self.is_closing():
            self._transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._read)  # data that arrived meanwhile

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return False
