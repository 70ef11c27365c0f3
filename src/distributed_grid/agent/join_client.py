"""Client of the join protocol: a node without SSH exchanges a join token for a node key, over a pinned connection.

The control plane proves to be the one the token names before anything is sent, and is trusted by the fingerprint of
its certificate alone, not by names and clocks. The key never leaves the node: the control plane gets its hash.
It is on disk before the exchange, so a lost answer can be asked for again.

Afterwards the agent connects to the Unix socket of the control plane where that is on this machine under this login,
as the kernel says, and else by TLS to the addresses it knows. Since both prove who answers, any address can be tried.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import os
import secrets
import socket
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.errors import BadInput, GridError, Refused, Unreachable
from distributed_grid.posix.private_files import write_private
from distributed_grid.posix.sockets import peer_uid, short_path
from distributed_grid.state_dir import StateDir
from distributed_grid.wire import MAX_MESSAGE_BYTES, ControlPlaneAddress

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

PREFIX = "gridjoin1_"
EXIT_VARIABLE = "GRID_WORKER_EXIT_SECONDS"
"""In the environment of a worker's agent: after how long without a control plane it ends, its jobs included."""
TIMEOUT_SECONDS = 15.0
MAX_ANSWER_BYTES = 65536
AGENT_SOCKET = "agents.sock"
"""In the folder of this machine in a state directory: the socket for agents of the same login."""
_IGNORE_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME: a pinned certificate is good on a machine whose clock is not."""


class OtherControlPlane(Refused):
    """Another control plane answers at that address; nothing was sent there."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A join token: addresses, fingerprint of the certificate, id and secret."""

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
    """File of a joined node (0600): address and certificate of the control plane, its own name and key.

    A node that joined with a plain connection, which earlier versions had, has neither fingerprint nor certificate.
    """

    address: str  # where it joined, or was connected last
    fingerprint: str
    node: str
    key: str = field(repr=False)
    certificate: str = field(default="", repr=False)
    addresses: tuple[str, ...] = ()  # all that the control plane has named
    socket: str = ""  # for agents on its machine

    @property
    def bearer(self) -> str:
        return f"{self.node}.{self.key}"


async def join(address: str | None, token: str, node: str | None, directory: Path) -> JoinedKey:
    """Join with a token, and keep the key in `directory`; joining again with the same token gives the same key.
    `address` and `node` replace those of the token and the machine."""
    return await asyncio.to_thread(_join, address, token, node, directory)


def read_joined_key(directory: Path) -> JoinedKey | None:
    """Key of an earlier `join`, if any."""
    fields = _read(directory / "joined.json")
    if fields is None:
        return None
    try:
        return JoinedKey(**{**fields, "addresses": tuple(fields.get("addresses", ()))})
    except TypeError:
        raise GridError(f"{directory / 'joined.json'} cannot be used; join again") from None


def store_address(directory: Path, named: ControlPlaneAddress) -> None:
    """Store the control plane's new address."""
    joined = read_joined_key(directory)
    if joined is None or _fingerprint_of(named.certificate) != named.fingerprint:
        return
    known = replace(
        joined,
        fingerprint=named.fingerprint,
        certificate=named.certificate,
        addresses=named.addresses,
        socket=named.socket,
    )
    if known != joined:
        _write(directory / "joined.json", asdict(known))


async def open_websocket(joined: JoinedKey, directory: Path | None = None) -> ClientConnection:
    """A WebSocket to the control plane that was joined; the key is sent to no other. In `directory` the address that
    answered is kept."""
    connection = await _open_over_socket(joined)
    if connection is not None:
        return connection
    # Trust the joined certificate and no other, with any name and at any date.
    if not joined.fingerprint:
        raise Refused(
            f"{joined.node} joined without a certificate, so that any program at {joined.address} could pose as its "
            "control plane; join again"
        )
    if _fingerprint_of(joined.certificate) != joined.fingerprint:
        raise GridError("the stored certificate does not match its fingerprint; join again")
    der = ssl.PEM_cert_to_DER_cert(joined.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _IGNORE_TIME
    context.load_verify_locations(cadata=der)
    losses: list[GridError] = []
    for address in dict.fromkeys((joined.address, *joined.addresses)):
        try:
            connection = await _open_over_tls(joined, address, context)
        except (Unreachable, OtherControlPlane) as lost:
            losses.append(lost)
            continue
        if directory is not None and address != joined.address:
            _write(directory / "joined.json", asdict(replace(joined, address=address)))
        return connection
    raise _whole(losses)


async def _open_over_socket(joined: JoinedKey) -> ClientConnection | None:
    """A WebSocket over the Unix socket of a control plane of this login on this machine; None where there is none, or
    it does not know the key."""
    from websockets.asyncio.client import unix_connect
    from websockets.exceptions import InvalidHandshake

    path = joined.socket or str(StateDir().host_dir / AGENT_SOCKET)
    plain = socket.socket(socket.AF_UNIX)
    try:
        plain.setblocking(False)  # a listener with a full backlog refuses instead
        with short_path(path) as name:
            plain.connect(name)
        if peer_uid(plain) != os.geteuid():
            raise PermissionError(path)
        return await unix_connect(
            sock=plain,
            uri="ws://control-plane/v1/agent",
            additional_headers=_authorization(joined),
            compression=None,
            ping_interval=None,
            open_timeout=TIMEOUT_SECONDS,
            max_size=MAX_MESSAGE_BYTES,
        )
    except (OSError, EOFError, InvalidHandshake, TimeoutError):
        plain.close()
        return None


async def _open_over_tls(joined: JoinedKey, address: str, context: ssl.SSLContext) -> ClientConnection:
    """A WebSocket to one address; nothing is sent to a server with another certificate."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    try:
        return await connect(
            f"wss://{address}/v1/agent",
            ssl=context,
            additional_headers=_authorization(joined),
            compression=None,
            ping_interval=None,
            open_timeout=TIMEOUT_SECONDS,
            max_size=MAX_MESSAGE_BYTES,
            proxy=None,
        )
    except ssl.SSLCertVerificationError:
        raise OtherControlPlane(
            f"{address} is not the control plane that was joined: its certificate is another"
        ) from None
    except InvalidStatus as answer:
        if answer.response.status_code in (401, 403):
            raise Refused(f"{address} does not know the key of {joined.node} (any more); join again") from None
        raise Unreachable(f"{address} answered {answer.response.status_code}") from answer
    except (OSError, EOFError, InvalidHandshake, TimeoutError) as lost:
        raise Unreachable(f"{address} cannot be reached: {lost}") from lost


def _authorization(joined: JoinedKey) -> dict[str, str]:
    return {"Authorization": f"Bearer {joined.bearer}"}


def _whole(losses: Sequence[GridError]) -> GridError:
    """Common error of addresses that all failed."""
    message = "; ".join(map(str, losses))
    return Refused(message) if all(isinstance(loss, OtherControlPlane) for loss in losses) else Unreachable(message)


def _join(address: str | None, text: str, node: str | None, directory: Path) -> JoinedKey:
    token = JoinToken.parse(text)
    if not token.fingerprint:
        raise Refused(
            "the join token is of a control plane without a certificate, which nobody can tell from another: create a "
            "new one with: grid daemon join-token create"
        )
    addresses: Sequence[str] = [address] if address else token.addresses
    if not addresses:
        raise BadInput("the token names no address; give one with --address HOST:PORT")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failure:
        raise GridError(f"cannot use {directory}: {failure.strerror}") from failure
    attempt = _read(directory / "joining.json") or {}
    if attempt.get("id") != token.id:
        attempt = {"id": token.id, "key": secrets.token_urlsafe(32)}
        _write(directory / "joining.json", attempt)
    name = socket.gethostname().partition(".")[0]
    asked = {
        "token": text.strip(),
        "node": node or "",
        "hostname": (
            "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name).strip("-")[:63]
            or "node"
        ),
        "key_hash": hashlib.sha256(attempt["key"].encode()).hexdigest(),
    }
    losses: list[GridError] = []
    for joined_address in addresses:
        try:
            answer, certificate = _exchange(joined_address, token.fingerprint, asked)
        except (Unreachable, OtherControlPlane) as lost:  # another address may well be the right one
            losses.append(lost)
            continue
        joined = JoinedKey(
            address=joined_address,
            fingerprint=token.fingerprint,
            node=str(answer["node"]),
            key=attempt["key"],
            certificate=certificate,
            addresses=token.addresses,
            socket=str(answer.get("agent_socket") or ""),
        )
        _write(directory / "joined.json", asdict(joined))
        return joined
    raise _whole(losses)


def _exchange(address: str, fingerprint: str, asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Exchange the token; returns the answer and the certificate of the control plane."""
    from http.client import HTTPException, HTTPSConnection

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BadInput(f"{address!r} is not an address: expected HOST:PORT")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # verified below, by its fingerprint
    connection = HTTPSConnection(host.strip("[]"), int(port), timeout=TIMEOUT_SECONDS, context=context)
    try:
        connection.connect()
        der = connection.sock.getpeercert(binary_form=True) or b""
        if not secrets.compare_digest(hashlib.sha256(der).hexdigest(), fingerprint):
            raise OtherControlPlane(f"{address} is not the control plane the token is for: its certificate is another")
        certificate = ssl.DER_cert_to_PEM_cert(der)
        connection.request("POST", "/v1/join", json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        fields = json.loads(answer.read(MAX_ANSWER_BYTES))
    except (OSError, HTTPException, ValueError) as lost:
        raise Unreachable(f"{address} cannot be reached: {lost}") from lost
    finally:
        connection.close()
    if answer.status >= 500:
        raise Unreachable(f"{address} answered {answer.status}")
    if answer.status != 200 or not isinstance(fields, dict) or not isinstance(fields.get("node"), str):
        error = fields.get("error") if isinstance(fields, dict) else None
        raise Refused(
            (str(error.get("message", ""))[:500] if isinstance(error, dict) else "")
            or f"{address} answered {answer.status}"
        )
    return fields, certificate


def _fingerprint_of(certificate: str) -> str:
    """The fingerprint of a certificate in PEM; empty where it is none."""
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
    except ValueError:
        return ""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as failure:
        raise GridError(f"cannot read {path}: {failure}") from failure
    return content if isinstance(content, dict) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole, readable by its owner only, and durable."""
    try:
        write_private(path, json.dumps(content).encode())
    except OSError as failure:
        raise GridError(f"cannot write {path}: {failure.strerror}") from failure
