"""Client of the join protocol: a node without SSH exchanges a join token for a node key, over a pinned connection.

The control plane proves to be the one the token names before anything is sent, and is trusted by the fingerprint of
its certificate alone, whatever names and clocks say. The key never leaves the node: the control plane gets its hash.
It is on disk before the exchange, so a lost answer can be asked for again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import secrets
import socket
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.errors import BadInput, GridError, Refused, Unreachable
from distributed_grid.posix.private_files import write_private
from distributed_grid.wire import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

PREFIX = "gridjoin1_"
EXIT_VARIABLE = "GRID_WORKER_EXIT_SECONDS"
"""In the environment of a worker's agent: after how long without a control plane it ends, its jobs included."""
TIMEOUT_SECONDS = 15.0
MAX_ANSWER_BYTES = 65536
_IGNORE_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME: a pinned certificate is good on a machine whose clock is not."""


class OtherControlPlane(Refused):
    """Somebody else answers at that address; nothing was sent there."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A join token: addresses, fingerprint of the certificate (empty: a plain connection), id and secret."""

    addresses: tuple[str, ...]
    fingerprint: str
    id: str
    secret: str = field(repr=False)

    def text(self) -> str:
        """The token on one line, safe in a URL and on a command line."""
        packed = json.dumps([self.addresses, self.fingerprint, self.id, self.secret], separators=(",", ":"))
        return PREFIX + base64.urlsafe_b64encode(packed.encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """The token in a text; BadInput for anything else."""
        text = text.strip()
        try:
            if not text.startswith(PREFIX):
                raise ValueError
            packed = text.removeprefix(PREFIX).encode("ascii")
            addresses, fingerprint, token_id, secret = json.loads(
                base64.b64decode(packed + b"=" * (-len(packed) % 4), altchars=b"-_", validate=True)
            )
            if not all(isinstance(word, str) for word in (*addresses, fingerprint, token_id, secret)):
                raise ValueError
            return cls(tuple(addresses), fingerprint, token_id, secret)
        except (ValueError, TypeError, binascii.Error, RecursionError):
            raise BadInput("not a join token; create one with: grid daemon join-token create") from None


@dataclass(frozen=True, slots=True)
class JoinedKey:
    """What a joined node keeps (0600): address and certificate of the control plane, its own name and key."""

    address: str
    fingerprint: str
    node: str
    key: str = field(repr=False)
    certificate: str = field(default="", repr=False)

    @property
    def bearer(self) -> str:
        """The token that authenticates this node."""
        return f"{self.node}.{self.key}"


async def join(address: str | None, token: str, node: str | None, directory: Path) -> JoinedKey:
    """Join with a token, and keep the key in `directory`; joining again with the same token gives the same key.

    `address` and `node` overrule what the token and the machine call themselves.
    """
    return await asyncio.to_thread(_join, address, token, node, directory)


def read_joined_key(directory: Path) -> JoinedKey | None:
    """What an earlier `join` stored, if there was one."""
    found = _read(directory / "joined.json")
    if found is None:
        return None
    try:
        return JoinedKey(**found)
    except TypeError:
        raise GridError(f"{directory / 'joined.json'} cannot be used; join again") from None


async def open_websocket(found: JoinedKey) -> ClientConnection:
    """A WebSocket to the control plane that was joined; the key is sent to no other."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    context = _pinned_context(found)
    scheme = "wss" if context else "ws"
    try:
        return await connect(
            f"{scheme}://{found.address}/v1/agent",
            ssl=context,
            additional_headers={"Authorization": f"Bearer {found.bearer}"},
            compression=None,
            ping_interval=None,
            open_timeout=TIMEOUT_SECONDS,
            max_size=MAX_MESSAGE_BYTES,
            proxy=None,
        )
    except ssl.SSLCertVerificationError:
        raise Refused(f"{found.address} is not the control plane that was joined: its certificate is another") from None
    except InvalidStatus as answer:
        if answer.response.status_code in (401, 403):
            raise Refused(f"{found.address} does not know the key of {found.node} (any more); join again") from None
        raise Unreachable(f"{found.address} answered {answer.response.status_code}") from answer
    except (OSError, EOFError, InvalidHandshake, TimeoutError) as lost:
        raise Unreachable(f"{found.address} cannot be reached: {lost}") from lost


def _join(address: str | None, text: str, node: str | None, directory: Path) -> JoinedKey:
    token = JoinToken.parse(text)
    addresses: Sequence[str] = [address] if address else token.addresses
    if not addresses:
        raise BadInput("the token names no address; give one with --address HOST:PORT")
    _make_directory(directory)
    attempt = _read(directory / "joining.json") or {}
    if attempt.get("id") != token.id:
        attempt = {"id": token.id, "key": secrets.token_urlsafe(32)}
        _write(directory / "joining.json", attempt)
    asked = {
        "token": text.strip(),
        "node": node or "",
        "hostname": _default_node_name(),
        "key_hash": _hash(attempt["key"]),
    }
    losses: list[GridError] = []
    for at in addresses:
        try:
            answer, certificate = _exchange(at, token.fingerprint, asked)
        except (Unreachable, OtherControlPlane) as lost:  # another address may well be the right one
            losses.append(lost)
            continue
        found = JoinedKey(at, token.fingerprint, str(answer["node"]), attempt["key"], certificate)
        _write(directory / "joined.json", asdict(found))
        return found
    whole = "; ".join(map(str, losses))
    raise Refused(whole) if all(isinstance(one, OtherControlPlane) for one in losses) else Unreachable(whole)


def _exchange(address: str, fingerprint: str, asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Exchange the token; returns the answer and the certificate of the control plane."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    host, port = _split(address)
    connection: HTTPConnection
    if fingerprint:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # verified below, by its fingerprint
        connection = HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)
    else:
        connection = HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.connect()
        certificate = _verify_certificate(connection.sock, fingerprint, address) if fingerprint else ""
        connection.request("POST", "/v1/join", json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read(MAX_ANSWER_BYTES))
    except (OSError, HTTPException, ValueError) as lost:
        raise Unreachable(f"{address} cannot be reached: {lost}") from lost
    finally:
        connection.close()
    if answer.status >= 500:
        raise Unreachable(f"{address} answered {answer.status}")
    if answer.status != 200 or not isinstance(found, dict) or not isinstance(found.get("node"), str):
        raise Refused(_message(found) or f"{address} answered {answer.status}")
    return found, certificate


def _verify_certificate(connection: Any, fingerprint: str, address: str) -> str:
    """The certificate of the other side; refuses one that the token does not name."""
    der = connection.getpeercert(binary_form=True) or b""
    if not secrets.compare_digest(hashlib.sha256(der).hexdigest(), fingerprint):
        raise OtherControlPlane(f"{address} is not the control plane the token is for: its certificate is another")
    return ssl.DER_cert_to_PEM_cert(der)


def _pinned_context(found: JoinedKey) -> ssl.SSLContext | None:
    """A context that trusts the joined certificate and no other, whatever name it has and whatever the date is."""
    if not found.fingerprint:
        return None
    der = ssl.PEM_cert_to_DER_cert(found.certificate) if found.certificate else b""
    if hashlib.sha256(der).hexdigest() != found.fingerprint:
        raise GridError("the stored certificate does not match its fingerprint; join again")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _IGNORE_TIME
    context.load_verify_locations(cadata=der)
    return context


def _message(found: Any) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    return str(error.get("message", ""))[:500] if isinstance(error, dict) else ""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BadInput(f"{address!r} is not an address: expected HOST:PORT")
    return host.strip("[]"), int(port)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _default_node_name() -> str:
    """This machine's host name, reduced to what a node name may hold."""
    name = socket.gethostname().partition(".")[0]
    return (
        "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name).strip("-")[:63] or "node"
    )


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failure:
        raise GridError(f"cannot use {directory}: {failure.strerror}") from failure


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as failure:
        raise GridError(f"cannot read {path}: {failure}") from failure
    return found if isinstance(found, dict) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole, readable by its owner only, and durable."""
    try:
        write_private(path, json.dumps(content).encode())
    except OSError as failure:
        raise GridError(f"cannot write {path}: {failure.strerror}") from failure
