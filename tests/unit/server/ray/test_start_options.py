"""What Ray is told on each node, which versions go together, and what lets one in."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from distributed_grid.config.sections import Ray
from distributed_grid.errors import Refused
from distributed_grid.server.ray.credentials import RayCredentials
from distributed_grid.server.ray.start_options import check_versions, options_of, risk_of
from tests.support.builders import a_capacity

RAY = Ray(object_store_memory_bytes=123)


def told(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def test_the_head_is_told_its_ports_and_the_workers_where_it_is() -> None:
    has = a_capacity(cores=2.5, memory_gb=4, gpus=2, custom={"tpu": 3})
    first, *words = options_of("gpu1", "10.0.0.1", "", RAY, has)
    head = told(words)
    assert first == "--head"
    assert (head["--num-cpus"], head["--num-gpus"], head["--memory"]) == ("2", "2", str(4 * 1024**3))
    assert (head["--node-name"], head["--labels"], head["--resources"]) == ("gpu1", "grid-node=gpu1", '{"tpu": 3}')
    assert (head["--port"], head["--dashboard-host"], head["--ray-client-server-port"]) == (
        "6379",
        "127.0.0.1",
        "10001",
    )
    worker = told(options_of("gpu2", "10.0.0.2", "10.0.0.1:6379", RAY, a_capacity(cores=0.5)))
    assert (worker["--address"], worker["--num-cpus"]) == ("10.0.0.1:6379", "1")
    assert not {"--port", "--dashboard-host", "--include-dashboard"} & set(worker)


def test_versions_may_differ_in_pythons_last_number_and_nowhere_else() -> None:
    check_versions({"a": ("3.11.4", "2.60.0"), "b": ("3.11.9", "2.60.0")})
    for other in (("3.12.4", "2.60.0"), ("3.11.4", "2.59.0")):
        with pytest.raises(Refused, match=f"b: Python {other[0]}, Ray {other[1]}") as caught:
            check_versions({"a": ("3.11.4", "2.60.0"), "b": other})
        assert len(caught.value.reasons) == 2


def test_only_a_ray_without_a_token_is_a_risk() -> None:
    assert risk_of(Ray()) is None
    assert "whoever reaches its ports" in str(risk_of(Ray(auth="none")))


def test_the_token_is_made_once_for_its_owner_alone_and_is_not_in_the_environment(tmp_path: Path) -> None:
    secrets = RayCredentials(tmp_path / "ray")
    token = secrets.token()
    assert len(token) == 64
    assert RayCredentials(tmp_path / "ray").token() == token
    assert secrets.token_path.stat().st_mode & 0o777 == 0o600
    environ = secrets.environ(auth="token", tls=False)
    assert environ["RAY_AUTH_TOKEN_PATH"] == str(secrets.token_path)
    assert token not in environ.values()
    assert secrets.environ(auth="none", tls=False)["RAY_AUTH_MODE"] == "disabled"


def test_every_node_has_a_certificate_for_its_address_that_the_others_trust(tmp_path: Path) -> None:
    secrets = RayCredentials(tmp_path / "ray")
    first = secrets.certificates("gpu1", ("10.0.0.1",))
    assert secrets.certificates("gpu1", ("10.0.0.1",)) == first
    assert secrets.certificates("gpu1", ("10.0.0.9",))["cert"] != first["cert"]
    other = secrets.certificates("gpu2", ("10.0.0.2",))
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
