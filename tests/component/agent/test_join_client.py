"""A join token's text, the certificate it pins, and the node's end of the exchange against a real TLS server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.server
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.agent.join_client import JoinedKey, JoinToken, open_websocket, read_joined_key, store_address
from distributed_grid.agent.join_client import join as join_async
from distributed_grid.errors import BadInput, GridError, Refused, Unreachable
from distributed_grid.server.access.tls import Certificate, ensure_certificate
from distributed_grid.wire import ControlPlaneAddress

WORDS = st.text(max_size=30)


@given(st.lists(WORDS, max_size=3).map(tuple), WORDS, WORDS, WORDS)
def test_a_join_token_reads_as_it_was_written_and_is_safe_in_a_url(
    addresses: tuple[str, ...], fingerprint: str, token_id: str, secret: str
) -> None:
    token = JoinToken(addresses, fingerprint, token_id, secret)
    assert JoinToken.parse(f" {token.text()}\n") == token
    assert all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in token.text())


@given(st.one_of(st.text(), st.text(alphabet='abcXYZ019-_=[]"').map(lambda text: f"gridjoin1_{text}")))
def test_anything_else_is_no_join_token(text: str) -> None:
    with pytest.raises(BadInput, match="not a join token"):
        JoinToken.parse(text)


def test_secrets_are_not_in_what_is_printed_by_accident() -> None:
    assert "hush" not in repr(JoinToken((), "", "id", "hush"))


def test_a_certificate_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    first = ensure_certificate(tmp_path, ["10.0.0.1", "box", "no name\n"])
    assert ensure_certificate(tmp_path, []) == first
    assert first.key.stat().st_mode & 0o777 == 0o600
    der = ssl.PEM_cert_to_DER_cert(first.certificate.read_text())
    assert first.fingerprint == hashlib.sha256(der).hexdigest()


def test_a_certificate_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    found = ensure_certificate(tmp_path, [])
    found.key.write_text("nonsense")
    with pytest.raises(GridError, match="cannot use the certificate"):
        ensure_certificate(tmp_path, [])


class Exchange(http.server.BaseHTTPRequestHandler):
    """A control plane's /v1/join: remembers what it hears and answers what it was told to."""

    heard: ClassVar[list[dict[str, Any]]] = []
    answers: ClassVar[list[tuple[int, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        self.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, answer = self.answers.pop(0)
        if not status:
            self.connection.close()  # the answer is lost
            return
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    folder = tmp_path / "server"
    folder.mkdir()
    return ensure_certificate(folder, [])


@pytest.fixture
def address(certificate: Certificate) -> Iterator[str]:
    Exchange.heard.clear()
    Exchange.answers.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def join(address: str | None, token: JoinToken, node: str | None, folder: Path) -> Any:
    return asyncio.run(join_async(address, token.text(), node, folder))


def test_joining_keeps_a_key_that_never_left_the_node(tmp_path: Path, address: str, certificate: Certificate) -> None:
    Exchange.answers.append((200, {"node": "gpu1"}))
    found = join(None, JoinToken((address,), certificate.fingerprint, "id", "secret"), "gpu1", tmp_path / "node")
    assert Exchange.heard[0]["key_hash"] == hashlib.sha256(found.key.encode()).hexdigest()
    assert found.key not in json.dumps(Exchange.heard)
    assert read_joined_key(tmp_path / "node") == found
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "node").iterdir()} == {0o600}


def test_an_answer_that_was_lost_is_asked_for_again_with_the_same_key(
    tmp_path: Path, address: str, certificate: Certificate
) -> None:
    token = JoinToken((address,), certificate.fingerprint, "id", "secret")
    Exchange.answers += [(0, {}), (200, {"node": "gpu1"})]
    with pytest.raises(Unreachable):
        join(None, token, "gpu1", tmp_path / "node")
    assert read_joined_key(tmp_path / "node") is None
    join(None, token, "gpu1", tmp_path / "node")
    first, second = Exchange.heard
    assert first == second


def test_somebody_else_hears_nothing(tmp_path: Path, address: str) -> None:
    with pytest.raises(Refused, match="certificate is another"):
        join(None, JoinToken((address,), "0" * 64, "id", "secret"), "gpu1", tmp_path / "node")
    assert Exchange.heard == []


def test_a_refusal_is_told_as_it_is(tmp_path: Path, address: str, certificate: Certificate) -> None:
    Exchange.answers.append((403, {"error": {"message": "the join token has expired"}}))
    with pytest.raises(Refused, match="the join token has expired"):
        join(None, JoinToken((address,), certificate.fingerprint, "id", "secret"), None, tmp_path / "node")
    assert read_joined_key(tmp_path / "node") is None


def test_the_next_address_is_tried_where_one_does_not_answer(
    tmp_path: Path, address: str, certificate: Certificate
) -> None:
    Exchange.answers.append((200, {"node": "gpu1"}))
    token = JoinToken(("127.0.0.1:1", address), certificate.fingerprint, "id", "secret")
    assert join(None, token, "gpu1", tmp_path / "node").address == address


def test_a_channel_to_somebody_else_is_refused_before_the_key_is_said(
    tmp_path: Path, address: str, certificate: Certificate
) -> None:
    Exchange.answers.append((200, {"node": "gpu1"}))
    found = join(None, JoinToken((address,), certificate.fingerprint, "id", "secret"), "gpu1", tmp_path / "node")
    (tmp_path / "other").mkdir()
    other = ensure_certificate(tmp_path / "other", [])
    (tmp_path / "node/joined.json").write_text(
        json.dumps(
            json.loads((tmp_path / "node/joined.json").read_text())
            | {"fingerprint": other.fingerprint, "certificate": other.certificate.read_text()}
        )
    )
    trusting_another = read_joined_key(tmp_path / "node")
    assert trusting_another is not None
    with pytest.raises(Refused, match="not the control plane that was joined"):
        asyncio.run(open_websocket(trusting_another))
    with pytest.raises(Unreachable):  # the right one, which only knows how to join
        asyncio.run(open_websocket(found))


def test_a_token_without_a_certificate_is_refused_before_anything_is_sent(tmp_path: Path, address: str) -> None:
    with pytest.raises(Refused, match="without a certificate"):
        join(None, JoinToken((address,), "", "id", "secret"), "gpu1", tmp_path / "node")
    assert Exchange.heard == []


def test_a_node_that_joined_without_a_certificate_sends_its_key_to_nobody(tmp_path: Path, address: str) -> None:
    old = JoinedKey(address, "", "gpu1", "hush", socket=str(tmp_path / "none.sock"))
    with pytest.raises(Refused, match="joined without a certificate"):
        asyncio.run(open_websocket(old))


def test_an_address_is_kept_only_with_the_certificate_that_it_names(tmp_path: Path, certificate: Certificate) -> None:
    node = tmp_path / "node"
    node.mkdir()
    (node / "joined.json").write_text(json.dumps({"address": "a:1", "fingerprint": "", "node": "gpu1", "key": "hush"}))
    before = read_joined_key(node)
    store_address(node, ControlPlaneAddress(("b:2",), "0" * 64, certificate.pem, "/s"))
    assert read_joined_key(node) == before
    store_address(node, ControlPlaneAddress(("b:2",), certificate.fingerprint, certificate.pem, "/s"))
    after = read_joined_key(node)
    assert after == JoinedKey("a:1", certificate.fingerprint, "gpu1", "hush", certificate.pem, ("b:2",), "/s")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to listen as another user")
def test_a_socket_of_another_user_gets_no_key(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agents.sock"))
        with as_user(65534):
            listener.listen()  # the kernel keeps whose process listens
        listener.settimeout(0.2)

        def serve() -> None:
            with contextlib.suppress(TimeoutError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(2)
                        heard.append(connection.recv(65536))

        thread = threading.Thread(target=serve)
        thread.start()
        joined = JoinedKey("127.0.0.1:1", "", "gpu1", "hush", socket=str(tmp_path / "agents.sock"))
        with pytest.raises(Refused, match="joined without a certificate"):
            asyncio.run(open_websocket(joined))
        thread.join()
    assert heard == [b""]


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Act as another user, and be root again."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def test_nobody_there_is_told_as_unreachable(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 cannot be reached"):
        join("127.0.0.1:1", JoinToken((), "0" * 64, "id", "secret"), None, tmp_path / "node")
