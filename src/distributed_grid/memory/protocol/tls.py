"""TLS of memory servers: self-signed certificates, which clients check by the fingerprint in the endpoint."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl

from distributed_grid.wire import Endpoint


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
