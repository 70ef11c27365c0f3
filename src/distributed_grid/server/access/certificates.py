"""Certificate of the control plane: made once, kept 0600, and trusted by its fingerprint rather than by a name.

It never expires. Deleting the two files makes a new one; nodes, which trust the old one, have to join again.
`cryptography` is imported where one is made: a control plane that has its certificate never loads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distributed_grid.errors import GridError
from distributed_grid.posix.private_files import write_private

if TYPE_CHECKING:
    from cryptography import x509

VALID_FROM, VALID_UNTIL = datetime(1970, 1, 2, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Not from the wall clock: a wrong one at that moment would make the certificate invalid later."""


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
    """A certificate and its key, as PEM."""

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
