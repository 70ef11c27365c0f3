"""Being let into a Ray cluster: natively where a node of it runs on this machine, else as Ray's client.

Asking at a Ray cluster's door before going in: whether somebody is there, wants a token, and which Ray it is.

Ray itself tries for half a minute before it says "failed to connect", whatever the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

from msgspec import Struct

from distributed_grid.adapters.ray.messages import Connect, Connected

REACH_SECONDS = 5.0
GCS = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CLIENT_SERVER = "/ray.rpc.RayletDriver/ClusterInfo"


class ProbeResult(Struct, frozen=True):
    """What was said at the door: `asks` for a token (None: it did not say), accepts ours, and its version of Ray."""

    asks: bool | None = None
    accepts: bool = True
    ray: str = ""


def own_token() -> str:
    """The token that Ray would use in this process; empty where there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return ""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    try:
        return Path(path).expanduser().read_text().strip()
    except OSError:
        return ""


def reach(host: str, port: int) -> str:
    """Why nobody is there; empty where somebody is."""
    try:
        socket.create_connection((host, port), timeout=REACH_SECONDS).close()
    except OSError as failure:
        return f"nothing answers at {host}:{port}: {failure.strerror or failure}"
    return ""


def knock(host: str, port: int, *, client: bool) -> ProbeResult:
    """Ask without a token, and with ours where one is wanted."""
    if importlib.util.find_spec("grpc") is None or os.environ.get("RAY_USE_TLS") == "1":
        return ProbeResult()
    method = CLIENT_SERVER if client else GCS
    code, answer = _probe_request(host, port, method, "")
    if code == "UNAUTHENTICATED":
        code, answer = _probe_request(host, port, method, own_token())
        return ProbeResult(True, code != "UNAUTHENTICATED", _version(answer))
    return ProbeResult(False if code in ("OK", "NOT_FOUND") else None, ray=_version(answer))


def _probe_request(host: str, port: int, method: str, token: str) -> tuple[str, bytes]:
    grpc: Any = importlib.import_module("grpc")
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        call = channel.unary_unary(method)
        try:
            metadata = [("authorization", f"Bearer {token}")] if token else None
            return "OK", bytes(call(b"", timeout=REACH_SECONDS, metadata=metadata))
        except grpc.RpcError as refusal:
            return str(refusal.code().name), b""


def _version(answer: bytes) -> str:
    found = re.search(rb"(\d+\.\d+\.\d+)", answer)
    return found[1].decode() if found else ""


GCS_PORT, CLIENT_PORT = 6379, 10001
CLIENT = "ray://"
AUTO = "auto"
TO_INSTALL = "Ray is not installed here; type: make ray (or pip install 'distributed-grid[ray]')"


class RayConnectError(Exception):
    """Why Ray cannot be used; `final`: trying again will not help by itself."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


def connect(order: Connect) -> Connected:
    """Connect this process with the cluster; blocks. Raises NotLetIn with one line that says why."""
    if importlib.util.find_spec("ray") is None:
        raise RayConnectError(TO_INSTALL, final=True)
    os.environ.update({**order.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"})
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call on a connection that is gone must not start a Ray of its own
    address, door = _admitted(order.address)
    ray: Any = importlib.import_module("ray")
    if door.ray and door.ray != ray.__version__:
        raise RayConnectError(
            f"Ray at {address} is {door.ray}, here it is {ray.__version__}: they must be the same", final=True
        )
    try:
        ray.init(
            address=address,
            namespace=order.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except Exception as failure:  # Ray raises what it likes: each is one reason not to be in
        raise _told(address, failure) from failure
    authenticated = bool(own_token()) if door.asks is None else door.asks
    return Connected("", ray.__version__, platform.python_version(), authenticated)


def is_connected() -> bool:
    """Whether this process is still in; Ray's client does not come back by itself when it was away for long."""
    ray: Any = importlib.import_module("ray")
    return bool(ray.is_initialized())


def _admitted(address: str) -> tuple[str, ProbeResult]:
    """The address by which this machine can speak to the cluster, and what was said at its door."""
    if address == AUTO:
        if not _runs_a_node():
            raise RayConnectError(
                "no Ray runs on this machine; give the address of a cluster, for instance ray://HOST:10001"
            )
        return address, ProbeResult()
    if address.startswith(CLIENT):
        return address, _asked(address, *_parts(address.removeprefix(CLIENT), CLIENT_PORT), client=True)
    host, port = _parts(address, GCS_PORT)
    door = _asked(address, host, port, client=False)
    if _runs_a_node():
        return address, door
    if reach(host, CLIENT_PORT):
        raise RayConnectError(
            f"this machine is no node of the Ray cluster at {address}, and that has no client server on port "
            f"{CLIENT_PORT}; join it with `ray start --address={address}`, or give ray://HOST:PORT"
        )
    return f"{CLIENT}{host}:{CLIENT_PORT}", door


def _asked(address: str, host: str, port: int, *, client: bool) -> ProbeResult:
    """What is said at the door; raises where nobody is there, or our token is not the right one."""
    silent = reach(host, port)
    if silent:
        raise RayConnectError(silent)
    door = knock(host, port, client=client)
    if not door.accepts:
        why = "does not accept this token" if own_token() else "asks for a token"
        raise RayConnectError(
            f"Ray at {address} {why}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, and try again", final=True
        )
    return door


def _runs_a_node() -> bool:
    """Whether a Ray node runs on this machine: a program that is no client needs one."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if comm.read_text().strip() == "raylet":
                return True
    return False


def _parts(place: str, port: int) -> tuple[str, int]:
    host, colon, number = place.rpartition(":")
    if not colon:
        return place, port
    if not number.isdecimal() or not 0 < int(number) < 65536:
        raise RayConnectError(f"{place!r} is no address; write HOST:PORT, ray://HOST:{CLIENT_PORT} or auto", final=True)
    return host.strip("[]"), int(number)


def _told(address: str, failure: Exception) -> RayConnectError:
    words = " ".join(str(failure).split())
    low = words.lower()
    if "authentication" in low or "unauthenticated" in low or "auth token" in low:
        return RayConnectError(
            f"Ray at {address} did not accept the token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH and try again",
            final=True,
        )
    if "version mismatch" in low or "python version" in low:
        return RayConnectError(f"Ray at {address} has other versions than this machine: {words[:300]}", final=True)
    return RayConnectError(f"Ray at {address} does not let us in: {type(failure).__name__}: {words[:300]}")
