"""The token and the certificates of the grid's own Ray."""

from __future__ import annotations

import ssl
from pathlib import Path

from distributed_grid.server.ray.ray_nodes import RayCredentials


def test_the_token_is_made_once_for_its_owner_alone_and_is_not_in_the_environment(tmp_path: Path) -> None:
    credentials = RayCredentials(tmp_path / "ray")
    token = credentials.token()
    assert len(token) == 64
    assert RayCredentials(tmp_path / "ray").token() == token
    assert credentials.token_path.stat().st_mode & 0o777 == 0o600
    environ = credentials.environ(auth="token", tls=False)
    assert environ["RAY_AUTH_TOKEN_PATH"] == str(credentials.token_path)
    assert token not in environ.values()
    assert credentials.environ(auth="none", tls=False)["RAY_AUTH_MODE"] == "disabled"


def test_every_node_has_a_certificate_for_its_address_that_the_others_trust(tmp_path: Path) -> None:
    credentials = RayCredentials(tmp_path / "ray")
    first = credentials.certificates("gpu1", ("10.0.0.1",))
    assert credentials.certificates("gpu1", ("10.0.0.1",)) == first
    assert credentials.certificates("gpu1", ("10.0.0.9",))["cert"] != first["cert"]
    other = credentials.certificates("gpu2", ("10.0.0.2",))
    assert other["ca"] == first["ca"]
    for name, text in other.items():
        (tmp_path / name).write_text(text)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cadata=other["ca"])
    server.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(inward, outward, server_side=True)
    here = client.wrap_bio(outward, inward, server_hostname="10.0.0.2")
    for _ in range(4):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert here.getpeercert() is not None
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "ray").iterdir()}
    assert modes == {0o600}
