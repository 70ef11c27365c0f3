"""Ray on single nodes, by SSH: its address, its versions, the options of `ray start`, and what it said last."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import platform
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_script_ray import HEAD_ANSWERS, RECORD_NAME, ray_dir
from distributed_grid.adapters.ssh.process import SshProcess, SshTarget
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.config.sections import Ray
from distributed_grid.control.grid import Grid
from distributed_grid.domain.resources import NOTHING, Capacity
from distributed_grid.errors import GridError, Refused
from distributed_grid.server.ray.credentials import RayCredentials
from distributed_grid.server.ray.ray_ports import RayPorts, worker_ports

CONTROL_PLANE = "the control plane"
RAY_MISSING = "the control plane's own environment has no Ray to speak to it with; type: make ray"
RayState = dict[str, Any]
"""What the script on a node says of its Ray."""
Versions = tuple[str, str]
"""Of Python and of Ray."""


class RayNodes:
    """Installs, starts, inspects and stops Ray on one node at a time; which and when is decided elsewhere."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        *,
        ssh: SshProcess,
        target: Callable[[str], SshTarget],
        credentials: RayCredentials,
        ports: RayPorts,
    ) -> None:
        self._grid = grid
        self._config = config
        self._nodes = {node.name: node for node in config.nodes}
        self._ssh = ssh
        self._target = target
        self._credentials = credentials
        self._ports = ports
        self.states: dict[str, RayState] = {}

    async def install(self, name: str, say: Say) -> str:
        """Have Ray on a node, in this control plane's version, where the config does not name one that is there."""
        own_versions()
        if python := self.python(name):
            return f"Ray is that of {python}"
        return await self._ssh.run("ray-install", self._target(name), say)

    async def inspect(self, name: str, *, versions: bool = True) -> RayState:
        """What a node says of its Ray now."""
        request: dict[str, Any] = {"python": self.python(name), "versions": versions}
        if versions and name == self._config.head.name and not self.is_simulated(name):
            request["ports"] = head_ports(self._ports.settings)
        return await self._ssh.ask("ray-inspect", self._target(name), request)

    async def start_head(self, addresses: dict[str, str], say: Say, joinable: asyncio.Event, *, replace: bool) -> str:
        """Have the head running; its session. `joinable` is set as soon as workers can join, which is earlier."""

        def on_step(step: str) -> None:
            say(step)
            if step == HEAD_ANSWERS:
                joinable.set()

        head = self._config.head.name
        say("starting Ray's head")
        request = await self._start_request(head, addresses, "")
        request |= {"ports": head_ports(self._ports.settings), "replace": replace}
        self.states[head] = state = await self._ssh.ask("ray-start", self._target(head), request, on_step)
        return str(state["session"])

    async def start_worker(
        self, name: str, addresses: dict[str, str], say: Say, session: str, *, replace: bool = False
    ) -> None:
        """Have a node in the head's cluster; with `replace` whatever Ray of ours runs there is started anew."""
        say("starting Ray")
        head = f"{bracketed(addresses[self._config.head.name])}:{self._ports.settings.port}"
        request = await self._start_request(name, addresses, head)
        request |= {"session": session, "replace": replace}
        self.states[name] = await self._ssh.ask("ray-start", self._target(name), request, say)

    async def stop(self, name: str, say: Say, *, purge: bool) -> None:
        """Have no Ray of ours on a node; with `purge` its files go, too. Stopping what does not run is harmless."""
        say("stopping Ray")
        await self._ssh.ask("ray-stop", self._target(name), {"purge": purge}, say)
        self.states.pop(name, None)

    async def _start_request(self, name: str, addresses: dict[str, str], head: str) -> dict[str, Any]:
        """What a node needs to know to start Ray; secrets travel inside the SSH connection."""
        ray, simulated = self._ports.settings, self._simulated()
        has = await self._grid.read(lambda ledger, now: node.capacity if (node := ledger.nodes.get(name)) else NOTHING)
        request: dict[str, Any] = {
            "role": "worker" if head else "head",
            "options": start_options(name, addresses[name], head, ray, has),
            "memory_bytes": has.memory_bytes,
            "simulated": len(simulated) if name in simulated else 0,
            "python": self.python(name),
            "auth": ray.auth,
        }
        if name in simulated:
            request["options"] += shared_machine_options(ray, simulated.index(name), len(simulated))
        if ray.auth == "token":
            request["token"] = self._credentials.token()
        if ray.tls:
            request["tls"] = self._credentials.certificates(name, (addresses[name],))
        return request

    def _simulated(self) -> list[str]:
        """The nodes of the config that share this machine."""
        return [node.name for node in self._config.nodes if self._config.is_simulated(node)]

    def session(self, name: str) -> str:
        """Which life of the head its Ray belongs to; empty where that is not known."""
        return str(self.states.get(name, {}).get("session", ""))

    def is_behind(self, name: str, session: str) -> bool:
        """Whether its Ray does not run, or runs with a head that is gone."""
        state = self.states.get(name, {}).get("state")
        return state in ("stopped", "broken") or (state == "running" and self.session(name) != session)

    def is_known(self, name: str) -> bool:
        """Whether the config has such a node."""
        return name in self._nodes

    def is_local(self, name: str) -> bool:
        """Whether a node is this machine."""
        return self._nodes[name].is_local

    def is_simulated(self, name: str) -> bool:
        """Whether a node stands for a machine, of which this one has several."""
        return self._config.is_simulated(self._nodes[name])

    def python(self, name: str) -> str:
        """The interpreter with Ray: the node's, the cluster's, this machine's own; empty is what was installed."""
        own = sys.executable if self._nodes[name].is_local else ""
        return self._nodes[name].ray_python or self._config.ray.python or own

    async def addresses(self, names: Iterable[str]) -> dict[str, str]:
        """By which address the others reach each node; found out each time, since machines move."""
        found = await asyncio.gather(*(self._address(self._nodes[name], [*names]) for name in names))
        return dict(zip(names, found, strict=True))

    async def _address(self, node: NodeConfig, names: list[str]) -> str:
        """The one in the config, or what another node takes its name for."""
        others = [self._nodes[name] for name in names if name != node.name]
        host = node.ray_address or node.host
        if node.is_local and not node.ray_address:
            return _own_address_towards(next((one.ray_address or one.host for one in others if not one.is_local), ""))
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host.strip("[]")))
        asked = next(iter(others), node)  # another machine's word: its own name may mean loopback to a machine itself
        try:
            answer = await self._ssh.ask("resolve-address", self._target(asked.name), {"host": host})
        except GridError as failure:
            raise Refused(f"{node.name}: {failure}; set `ray_address` of this node") from failure
        found = str(answer["address"])
        if ipaddress.ip_address(found).is_loopback and others:
            raise Refused(f"{node.name}: {host} is a loopback address on {asked.name}; set `ray_address` of this node")
        return found


def record_path(grid_id: str, name: str) -> Path:
    """The file in which the start of Ray on a node of this machine is recorded, also on one that left the config."""
    return Path(ray_dir({"grid": grid_id, "node": name}), RECORD_NAME)


def bracketed(address: str) -> str:
    """An address as it stands before a port."""
    return f"[{address}]" if ":" in address else address


def _own_address_towards(host: str) -> str:
    """The address this machine has in the eyes of another; loopback where there is no other."""
    if not host:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent: the kernel only chooses the route
            return str(probe.getsockname()[0])
        except OSError as failure:
            raise Refused(f"which address this machine has for {host} is not known: {failure}") from failure


def own_versions() -> Versions:
    """Those of this environment; Refused with what to type where it has no Ray."""
    from importlib import metadata

    try:
        return platform.python_version(), metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise Refused(RAY_MISSING) from None


def check_versions(found: Mapping[str, Versions]) -> None:
    """Refused with a line for each node where they differ; Python's last number may."""
    kinds = {(python.rpartition(".")[0], ray) for python, ray in found.values()}
    if len(kinds) > 1:
        lines = [f"{name}: Python {python}, Ray {ray}" for name, (python, ray) in found.items()]
        raise Refused(f"the versions differ, nothing was started: {'; '.join(lines)}", lines)


def start_options(name: str, address: str, head: str, ray: Ray, has: Capacity) -> list[str]:
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


def shared_machine_options(ray: Ray, place: int, nodes: int) -> list[str]:
    """What one of several Ray nodes on a machine is told besides: ports that no other has."""
    first, last = worker_ports(ray, place, nodes)
    free = ("--node-manager-port", "--object-manager-port", "--dashboard-agent-listen-port")
    ports = {**dict.fromkeys(free, 0), "--min-worker-port": first, "--max-worker-port": last}
    return [word for pair in ports.items() for word in map(str, pair)]


def head_ports(ray: Ray) -> dict[str, int]:
    """The ports that have to be free on the head, by the names of their keys."""
    return {"port": ray.port, "client_port": ray.client_port, "dashboard_port": ray.dashboard_port}


def security_risk(ray: Ray) -> str | None:
    """What is dangerous about the way Ray is configured, if anything."""
    if ray.auth == "none":
        return "Ray asks nobody for a token: whoever reaches its ports can run anything as you; set `ray.auth: token`"
    return None
