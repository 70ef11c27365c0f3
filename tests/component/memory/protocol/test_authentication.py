"""Encrypted connections: a certificate that is known by its fingerprint alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from distributed_grid.memory.client.block_client import BlockClient
from distributed_grid.memory.client.server_connection import ConnectionBroken, ServerConnection
from distributed_grid.memory.protocol.frames import CHUNK_BYTES
from distributed_grid.wire import Endpoint
from tests.component.memory.memory_servers import FakeDirectory, Lender, lenders, wait_for


def a_certificate() -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpu1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), private


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Lender]]:
    folder = tmp_path_factory.mktemp("memory")
    certificate, key = a_certificate()
    with lenders(folder / "one", folder / "two", certificate=certificate, private_key=key) as both:
        yield both


@pytest.fixture
def directory() -> FakeDirectory:
    directory = FakeDirectory()
    directory.use_path = False
    return directory


def test_everything_works_encrypted_through_a_crash_and_a_move(directory: FakeDirectory, two: list[Lender]) -> None:
    blocks = BlockClient(directory, retry_seconds=30)
    size = 5 * CHUNK_BYTES + 77
    data = os.urandom(size)
    directory.allocate("b", size, two[0])
    assert two[0].served.endpoint.fingerprint
    blocks.write("b", data)
    assert blocks.read("b", size) == data
    assert blocks.read("b", 4096, 3) == data[3:4099]
    two[0].kill_server()
    assert blocks.read("b", size) == data
    assert not directory.move("b", two[1]).problem
    blocks.write("b", b"!", CHUNK_BYTES)
    assert (
        blocks.read("b", 3, CHUNK_BYTES - 1)
        == data[CHUNK_BYTES - 1 : CHUNK_BYTES] + b"!" + data[CHUNK_BYTES + 1 : CHUNK_BYTES + 2]
    )
    assert blocks.read_many([("b", 100, at) for at in range(0, 50_000, 100)]) == [
        data[at : at + 100] for at in range(0, 50_000, 100)
    ]
    blocks.close()


def test_another_certificate_than_the_one_that_was_told_is_refused(two: list[Lender]) -> None:
    right = two[0].served.endpoint
    wrong = Endpoint(right.host, right.port, "0" * 64, "", right.incarnation)
    with pytest.raises(ConnectionBroken, match="certificate"):
        ServerConnection.connect(wrong, seconds=5)


def test_a_plain_client_gets_nothing_out_of_an_encrypted_server(two: list[Lender]) -> None:
    right = two[0].served.endpoint
    with pytest.raises(ConnectionBroken):
        ServerConnection.connect(Endpoint(right.host, right.port), seconds=5)
    assert wait_for(lambda: two[0].served) is not None


def test_the_private_key_is_in_no_file(two: list[Lender]) -> None:
    for path in Path(two[0].folder).rglob("*"):
        if path.is_file():
            assert b"PRIVATE KEY" not in path.read_bytes()


def test_a_server_is_started_again_when_the_network_is_trusted_no_more(
    tmp_path: Path, directory: FakeDirectory
) -> None:
    with lenders(tmp_path / "memory") as (lender,):
        blocks = BlockClient(directory, retry_seconds=30)
        directory.allocate("b", CHUNK_BYTES, lender)
        blocks.write("b", b"kept")
        assert not lender.served.endpoint.fingerprint
        lender._order = dict(zip(("certificate", "private_key"), a_certificate(), strict=True))
        assert lender.open().endpoint.fingerprint
        assert blocks.read("b", 5) == b"kept\0"
        blocks.close()
