"""What lets one into the grid's own Ray: a token, and certificates where TLS is on. Made once, kept 0600."""

from __future__ import annotations

import secrets
from pathlib import Path

from distributed_grid.posix.private_files import write_private

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
        from distributed_grid.server.access.certificates import PemCertificate, make_certificate

        certificate, key = (self._folder / f"authority.{suffix}" for suffix in ("pem", "key"))
        if not certificate.exists():
            authority = make_certificate("grid's Ray", ())
            self._write(key.name, authority.key)
            self._write(certificate.name, authority.certificate)
        signer = PemCertificate(certificate.read_bytes(), key.read_bytes())
        made = make_certificate(name, ("127.0.0.2", *addresses), signer)
        self._write(f"{name}.key", made.key)
        self._write(f"{name}.pem", made.certificate)
