"""The certificate of a memory server: what TLS needs of it, and the fingerprint by which clients know it."""

from __future__ import annotations

import hashlib
import os
import ssl


def tls_context(certificate: bytes, private_key: bytes) -> ssl.SSLContext:
    """A context with this certificate; both go through memory, never through a file on disk."""
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
