"""What `ray start` is told on each node, and whether the versions there go together."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib import metadata

from distributed_grid.config.sections import Ray
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import Refused

HERE = "the control plane"
TO_INSTALL = "the control plane's own environment has no Ray to speak to it with; type: make ray"
Versions = tuple[str, str]
"""Of Python and of Ray."""


def own_versions() -> Versions:
    """Those of this environment; Refused with what to type where it has no Ray."""
    try:
        return platform.python_version(), metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise Refused(TO_INSTALL) from None


def check_versions(found: Mapping[str, Versions]) -> None:
    """Refused with a line for each node where they differ; Python's last number may."""
    kinds = {(python.rpartition(".")[0], ray) for python, ray in found.values()}
    if len(kinds) > 1:
        told = [f"{name}: Python {python}, Ray {ray}" for name, (python, ray) in found.items()]
        raise Refused(f"the versions differ, nothing was started: {'; '.join(told)}", told)


def options_of(name: str, address: str, head: str, ray: Ray, has: Capacity) -> list[str]:
    """The options of `ray start` on a node, each followed by its value; `head` is empty on the head itself."""
    options: dict[str, object] = {
        "--node-name": name,
        "--node-ip-address": address,
        "--num-cpus": max(has.cpu_milli // 1000, 1),
        "--num-gpus": len(has.gpus),
        "--labels": f"grid-node={name}",
        "--min-worker-port": ray.min_worker_port,
        "--max-worker-port": ray.max_worker_port,
    }
    if has.memory_bytes:
        options["--memory"] = has.memory_bytes
    if has.custom:
        options["--resources"] = json.dumps(dict(has.custom))
    if ray.object_store_memory_bytes:
        options["--object-store-memory"] = ray.object_store_memory_bytes
    if head:
        options["--address"] = head
    else:
        options["--port"] = ray.port
        options["--ray-client-server-port"] = ray.client_port
        options["--include-dashboard"] = "true"
        options["--dashboard-host"] = "127.0.0.1" if ray.dashboard_host == "local" else ray.dashboard_host
        options["--dashboard-port"] = ray.dashboard_port
    words = [word for pair in options.items() for word in map(str, pair)]
    return words if head else ["--head", *words]


def head_ports(ray: Ray) -> dict[str, int]:
    """The ports that have to be free on the head, by the names of their keys."""
    return {"port": ray.port, "client_port": ray.client_port, "dashboard_port": ray.dashboard_port}


def risk_of(ray: Ray) -> str | None:
    """What is dangerous about the way Ray is configured, if anything."""
    if ray.auth == "none":
        return "Ray asks nobody for a token: whoever reaches its ports can run anything as you; set `ray.auth: token`"
    return None
