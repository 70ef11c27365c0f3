"""The certificate of a memory server: what TLS needs of it, and the fingerprint by which clients know it.

A memory server on the network is who its endpoint says: proven by the fingerprint of its certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl

from distributed_grid.wire import Endpoint


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


def proven(sock: socket.socket, endpoint: Endpoint) -> ssl.SSLSocket:
    """TLS over this socket, with the one that has the certificate; OSError where another one answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # proven by its fingerprint instead
    wrapped = context.wrap_socket(sock, server_hostname=endpoint.host)
    der = wrapped.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(der).hexdigest(), endpoint.fingerprint):
        wrapped.close()
        raise OSError("the memory server has another certificate than it should")
    return wrapped
