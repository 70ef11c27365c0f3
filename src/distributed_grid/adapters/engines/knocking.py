"""Asking at a Ray cluster's door before going in: whether somebody is there, wants a token, and which Ray it is.

Ray itself tries for half a minute before it says "failed to connect", whatever the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import socket
from pathlib import Path
from typing import Any

from msgspec import Struct

REACH_SECONDS = 5.0
GCS = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CLIENT_SERVER = "/ray.rpc.RayletDriver/ClusterInfo"


class Door(Struct, frozen=True):
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


def knock(host: str, port: int, *, client: bool) -> Door:
    """Ask without a token, and with ours where one is wanted."""
    if importlib.util.find_spec("grpc") is None or os.environ.get("RAY_USE_TLS") == "1":
        return Door()
    method = CLIENT_SERVER if client else GCS
    code, answer = _asked(host, port, method, "")
    if code == "UNAUTHENTICATED":
        code, answer = _asked(host, port, method, own_token())
        return Door(True, code != "UNAUTHENTICATED", _version(answer))
    return Door(False if code in ("OK", "NOT_FOUND") else None, ray=_version(answer))


def _asked(host: str, port: int, method: str, token: str) -> tuple[str, bytes]:
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
