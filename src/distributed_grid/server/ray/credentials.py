"""What lets one into the grid's own Ray: a token, and certificates where TLS is on. Made once, kept 0600."""

from __future__ import annotations

import ipaddress
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from distributed_grid.posix.private_files import write_private

YEARS = 10
OWN = "control-plane"


class RayCredentials:
    """The files of one state directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.token_path = folder / "token"

    def token(self) -> str:
        """The token of this grid's Ray; made on first use."""
        if not self.token_path.exists():
            self._write("token", secrets.token_hex(32).encode())
        return self.token_path.read_text().strip()

    def certificates(self, name: str, addresses: tuple[str, ...]) -> dict[str, str]:
        """The certificate of a node for these addresses, its key and the authority that both sides trust, in PEM."""
        made = self._folder / f"{name}.pem"
        note = "\n".join(addresses)
        noted = self._folder / f"{name}.names"
        if not made.exists() or not noted.exists() or noted.read_text() != note:
            self._sign(name, addresses)
            self._write(f"{name}.names", note.encode())
        key, authority = (self._folder / f"{name}.key").read_text(), (self._folder / "authority.pem").read_text()
        return {"cert": made.read_text(), "key": key, "ca": authority}

    def environ(self, *, auth: str, tls: bool) -> dict[str, str]:
        """What a program on this machine needs in its environment; no secret is in it, only where they are."""
        environ = {"RAY_AUTH_MODE": "disabled", "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
        if auth == "token":
            self.token()
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_path)}
        if tls:
            self.certificates(OWN, ("127.0.0.1",))
            environ |= {
                "RAY_USE_TLS": "1",
                "RAY_TLS_SERVER_CERT": str(self._folder / f"{OWN}.pem"),
                "RAY_TLS_SERVER_KEY": str(self._folder / f"{OWN}.key"),
                "RAY_TLS_CA_CERT": str(self._folder / "authority.pem"),
            }
        return environ

    def _write(self, name: str, content: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._folder / name, content)

    def _sign(self, name: str, addresses: tuple[str, ...]) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        def subject(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])

        def clear(key: ec.EllipticCurvePrivateKey) -> bytes:
            form = serialization.PrivateFormat.PKCS8
            return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

        def begun(text: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
            now = datetime.now(UTC)
            return (
                x509.CertificateBuilder(subject_name=subject(text), issuer_name=subject("grid's Ray"))
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - timedelta(days=1))
                .not_valid_after(now + timedelta(days=365 * YEARS))
            )

        if not (self._folder / "authority.pem").exists():
            key = ec.generate_private_key(ec.SECP256R1())
            authority = begun("grid's Ray", key).add_extension(x509.BasicConstraints(True, 0), critical=True)
            self._write("authority.key", clear(key))
            self._write("authority.pem", authority.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        signer = serialization.load_pem_private_key((self._folder / "authority.key").read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        names = [
            x509.DNSName("localhost"),
            *(_general(one) for one in dict.fromkeys(("127.0.0.1", "127.0.0.2", *addresses))),
        ]
        own = ec.generate_private_key(ec.SECP256R1())
        made = begun(name, own).add_extension(x509.SubjectAlternativeName(names), critical=False)
        self._write(f"{name}.key", clear(own))
        self._write(f"{name}.pem", made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def _general(address: str):  # type: ignore[no-untyped-def]  # its type would load the library with this file
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)
