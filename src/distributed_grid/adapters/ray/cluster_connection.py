"""Connecting with a Ray cluster: natively where a node of it runs on this machine, else as Ray's client.

The cluster is probed first (does it answer, does it want a token, which Ray is it), because Ray itself tries for half a
minute before it says "failed to connect", whatever the reason.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import platform
import re
import socket
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from distributed_grid.adapters.probes.procfs import find_raylets
from distributed_grid.adapters.ray.driver_messages import Connect, Connected

PROBE_SECONDS = 5.0
RAYLET_SECONDS, POLL_SECONDS = 20.0, 0.1
GCS_PORT, CLIENT_PORT = 6379, 10001
CLIENT_SCHEME = "ray://"
AUTO = "auto"
RAY_MISSING = "Ray is not installed here; type: make ray (or pip install 'distributed-grid[ray]')"
GCS_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CLIENT_METHOD = "/ray.rpc.RayletDriver/ClusterInfo"
Endpoint = tuple[str, int]
"""Host and port of Ray's head, or of its client server."""


class ProbeResult(Struct, frozen=True):
    """Whether the cluster wants a token (None: it did not say), whether it accepts ours, and its version of Ray."""

    wants_token: bool | None = None
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


def _why_unreachable(host: str, port: int) -> str:
    """Why nothing answers there; empty where something does."""
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except OSError as failure:
        return f"nothing answers at {host}:{port}: {failure.strerror or failure}"
    return ""


def _probe(host: str, port: int, *, client: bool) -> ProbeResult:
    """Ask without a token, and with ours where one is wanted."""
    if importlib.util.find_spec("grpc") is None or os.environ.get("RAY_USE_TLS") == "1":
        return ProbeResult()
    method = CLIENT_METHOD if client else GCS_METHOD
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
            return "OK", bytes(call(b"", timeout=PROBE_SECONDS, metadata=metadata))
        except grpc.RpcError as refusal:
            return str(refusal.code().name), b""


def _version(answer: bytes) -> str:
    found = re.search(rb"(\d+\.\d+\.\d+)", answer)
    return found[1].decode() if found else ""


class RayConnectError(Exception):
    """Why Ray cannot be used; `final`: trying again will not help by itself."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


def connect(settings: Connect) -> tuple[Connected, Endpoint]:
    """Connect this process with the cluster, and say where that listens; blocks.

    Raises RayConnectError with one line that says why.
    """
    if importlib.util.find_spec("ray") is None:
        raise RayConnectError(RAY_MISSING, final=True)
    os.environ.update({**settings.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"})
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call on a connection that is gone must not start a Ray of its own
    address, probed = _usable_address(settings.address, await_raylet=settings.await_raylet)
    ray: Any = importlib.import_module("ray")
    if probed.ray and probed.ray != ray.__version__:
        raise RayConnectError(
            f"Ray at {address} is {probed.ray}, here it is {ray.__version__}: they must be the same", final=True
        )
    try:
        ray.init(
            address=address,
            namespace=settings.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except Exception as failure:  # Ray raises what it likes: each is one reason not to be connected
        raise _explain(address, failure) from failure
    authenticated = bool(own_token()) if probed.wants_token is None else probed.wants_token
    if address.startswith(CLIENT_SCHEME):
        endpoint = _host_and_port(address.removeprefix(CLIENT_SCHEME), CLIENT_PORT)
    else:
        endpoint = _host_and_port(ray.get_runtime_context().gcs_address, GCS_PORT)
    return Connected("", ray.__version__, platform.python_version(), authenticated), endpoint


def is_connected() -> bool:
    """Whether this process is still connected; Ray's client does not come back by itself when it was away for long."""
    ray: Any = importlib.import_module("ray")
    return bool(ray.is_initialized())


async def is_refused(endpoint: Endpoint, seconds: float) -> bool:
    """Whether nobody listens there any more. A machine that does not answer is no proof of that."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(*endpoint)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def _usable_address(address: str, *, await_raylet: bool) -> tuple[str, ProbeResult]:
    """The address by which this machine can speak to the cluster, and what probing it showed."""
    if address == AUTO:
        if not _runs_ray_node():
            raise RayConnectError(
                "no Ray of this user runs on this machine; give the address of a cluster, for instance ray://HOST:10001"
            )
        return address, ProbeResult()
    if address.startswith(CLIENT_SCHEME):
        return address, _probe_or_raise(
            address, *_host_and_port(address.removeprefix(CLIENT_SCHEME), CLIENT_PORT), client=True
        )
    host, port = _host_and_port(address, GCS_PORT)
    probed = _probe_or_raise(address, host, port, client=False)
    if _runs_ray_node() or (await_raylet and _wait_for_raylet()):
        return address, probed
    if _why_unreachable(host, CLIENT_PORT):
        raise RayConnectError(
            f"this machine is no node of the Ray cluster at {address}, and that has no client server on port "
            f"{CLIENT_PORT}; join it with `ray start --address={address}`, or give ray://HOST:PORT"
        )
    return f"{CLIENT_SCHEME}{host}:{CLIENT_PORT}", probed


def _probe_or_raise(address: str, host: str, port: int, *, client: bool) -> ProbeResult:
    """What probing shows; raises RayConnectError where nothing answers, or our token is not the right one."""
    silent = _why_unreachable(host, port)
    if silent:
        raise RayConnectError(silent)
    probed = _probe(host, port, client=client)
    if not probed.accepts:
        why = "does not accept this token" if own_token() else "asks for a token"
        raise RayConnectError(
            f"Ray at {address} {why}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, and try again", final=True
        )
    return probed


def _runs_ray_node() -> bool:
    """Whether a Ray node of this user runs on this machine: a program that is no client needs one."""
    return any(True for _ in find_raylets())


def _wait_for_raylet() -> bool:
    """Whether a Ray node of this user runs here before long: a head answers some seconds before its own node runs."""
    deadline = time.monotonic() + RAYLET_SECONDS
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if _runs_ray_node():
            return True
    return False


def _host_and_port(place: str, port: int) -> Endpoint:
    host, colon, number = place.rpartition(":")
    if not colon:
        return place, port
    if not number.isdecimal() or not 0 < int(number) < 65536:
        raise RayConnectError(f"{place!r} is no address; write HOST:PORT, ray://HOST:{CLIENT_PORT} or auto", final=True)
    return host.strip("[]"), int(number)


def _explain(address: str, failure: Exception) -> RayConnectError:
    words = " ".join(str(failure).split())
    low = words.lower()
    if "authentication" in low or "unauthenticated" in low or "auth token" in low:
        return RayConnectError(
            f"Ray at {address} did not accept the token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH and try again",
            final=True,
        )
    if "version mismatch" in low or "python version" in low:
        return RayConnectError(f"Ray at {address} has other versions than this machine: {words[:300]}", final=True)
    return RayConnectError(f"Ray at {address} does not accept the connection: {type(failure).__name__}: {words[:300]}")
