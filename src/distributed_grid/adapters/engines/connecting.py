"""Being let into a Ray cluster: natively where a node of it runs on this machine, else as Ray's client."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import platform
from pathlib import Path
from typing import Any

from distributed_grid.adapters.engines.knocking import Door, knock, own_token, reach
from distributed_grid.adapters.engines.messages import Connect, Connected

GCS_PORT, CLIENT_PORT = 6379, 10001
CLIENT = "ray://"
AUTO = "auto"
TO_INSTALL = "Ray is not installed here; type: make ray (or pip install 'distributed-grid[ray]')"


class NotLetIn(Exception):
    """Why Ray cannot be used; `final`: trying again will not help by itself."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


def connect(order: Connect) -> Connected:
    """Connect this process with the cluster; blocks. Raises NotLetIn with one line that says why."""
    if importlib.util.find_spec("ray") is None:
        raise NotLetIn(TO_INSTALL, final=True)
    os.environ.update({**order.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"})
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call on a connection that is gone must not start a Ray of its own
    address, door = _admitted(order.address)
    ray: Any = importlib.import_module("ray")
    if door.ray and door.ray != ray.__version__:
        raise NotLetIn(
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


def _admitted(address: str) -> tuple[str, Door]:
    """The address by which this machine can speak to the cluster, and what was said at its door."""
    if address == AUTO:
        if not _runs_a_node():
            raise NotLetIn("no Ray runs on this machine; give the address of a cluster, for instance ray://HOST:10001")
        return address, Door()
    if address.startswith(CLIENT):
        return address, _asked(address, *_parts(address.removeprefix(CLIENT), CLIENT_PORT), client=True)
    host, port = _parts(address, GCS_PORT)
    door = _asked(address, host, port, client=False)
    if _runs_a_node():
        return address, door
    if reach(host, CLIENT_PORT):
        raise NotLetIn(
            f"this machine is no node of the Ray cluster at {address}, and that has no client server on port "
            f"{CLIENT_PORT}; join it with `ray start --address={address}`, or give ray://HOST:PORT"
        )
    return f"{CLIENT}{host}:{CLIENT_PORT}", door


def _asked(address: str, host: str, port: int, *, client: bool) -> Door:
    """What is said at the door; raises where nobody is there, or our token is not the right one."""
    silent = reach(host, port)
    if silent:
        raise NotLetIn(silent)
    door = knock(host, port, client=client)
    if not door.accepts:
        why = "does not accept this token" if own_token() else "asks for a token"
        raise NotLetIn(f"Ray at {address} {why}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, and try again", final=True)
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
        raise NotLetIn(f"{place!r} is no address; write HOST:PORT, ray://HOST:{CLIENT_PORT} or auto", final=True)
    return host.strip("[]"), int(number)


def _told(address: str, failure: Exception) -> NotLetIn:
    words = " ".join(str(failure).split())
    low = words.lower()
    if "authentication" in low or "unauthenticated" in low or "auth token" in low:
        return NotLetIn(
            f"Ray at {address} did not accept the token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH and try again",
            final=True,
        )
    if "version mismatch" in low or "python version" in low:
        return NotLetIn(f"Ray at {address} has other versions than this machine: {words[:300]}", final=True)
    return NotLetIn(f"Ray at {address} does not let us in: {type(failure).__name__}: {words[:300]}")
