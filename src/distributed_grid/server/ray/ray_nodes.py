"""Ray on single nodes, by SSH: its credentials, its ports, its address, its versions, and the options of `ray start`.

Between machines the ports are those of the config, for firewalls and for people who type them. On simulated nodes
several Rays share one machine, perhaps with another clone's: there a default port of the head that is taken is replaced
by the next free one, once when the cluster is started, and all ports that nobody types are free ones. Until Ray listens
there, and while it is restarted, a name in the kernel's table of Unix sockets keeps other clones from choosing the same
port.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import platform
import secrets
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_script_ray import HEAD_ANSWERS, RECORD_NAME, ray_dir
from distributed_grid.adapters.ssh.process import SshProcess, SshTarget
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.config.sections import Ray
from distributed_grid.control.grid import Grid
from distributed_grid.domain.resources import NOTHING, Capacity
from distributed_grid.errors import GridError, Refused
from distributed_grid.posix.private_files import write_private

OWN = "control-plane"
HEAD_PORTS = ("port", "client_port", "dashboard_port")
MAX_TRIES = 100
DEFAULTS = Ray()
CONTROL_PLANE = "the control plane"
RAY_MISSING = "the control plane's own environment has no Ray to speak to it with; type: make ray"
RayState = dict[str, Any]
"""State of a node's Ray, as the script there reports it."""
Versions = tuple[str, str]
"""Of Python and of Ray."""


class RayCredentials:
    """Token and certificates of the grid's own Ray, in files of the state directory (0600) that are made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.token_path = folder / "token"

    def token(self) -> str:
        """The token; made on first use."""
        if not self.token_path.exists():
            self._write("token", secrets.token_hex(32).encode())
        return self.token_path.read_text().strip()

    def certificates(self, name: str, addresses: tuple[str, ...]) -> dict[str, str]:
        """The certificate of a node for these addresses, its key and the authority that both sides trust, in PEM."""
        made = self._folder / f"{name}.pem"
        note = "\n".join(addresses)
        noted = self._folder / f"{name}.names"
        if not made.exists() or not noted.exists() or noted.read_text() != note:
            from distributed_grid.server.access.tls import PemCertificate, make_certificate

            authority_pem, authority_key = (self._folder / f"authority.{suffix}" for suffix in ("pem", "key"))
            if not authority_pem.exists():
                new_authority = make_certificate("grid's Ray", ())
                self._write(authority_key.name, new_authority.key)
                self._write(authority_pem.name, new_authority.certificate)
            signer = PemCertificate(authority_pem.read_bytes(), authority_key.read_bytes())
            signed = make_certificate(name, ("127.0.0.2", *addresses), signer)
            self._write(f"{name}.key", signed.key)
            self._write(f"{name}.pem", signed.certificate)
            self._write(f"{name}.names", note.encode())
        key, authority = (self._folder / f"{name}.key").read_text(), (self._folder / "authority.pem").read_text()
        return {"cert": made.read_text(), "key": key, "ca": authority}

    def environ(self, *, auth: str, tls: bool) -> dict[str, str]:
        """Environment of a program on this machine: the paths of the secrets, not the secrets."""
        environ = {"RAY_AUTH_MODE": "disabled", "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
        if auth == "token":
            self.token()
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_path)}
        if tls:
            self.certificates(OWN, ("127.0.0.1",))
            environ |= {
                "RAY_USE_TLS": "1",
                "RAY_TLS_SERVER_CERT": str(self._folder / f"{OWN}.pem"),
                "RAY_TLS_SERVER_KEY": str(self._folder / f"{OWN}.key"),
                "RAY_TLS_CA_CERT": str(self._folder / "authority.pem"),
            }
        return environ

    def _write(self, name: str, content: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._folder / name, content)


class RayPorts:
    """Ports of the grid's own Ray; chosen ones are kept in a file."""

    def __init__(self, config: ClusterConfig, path: Path) -> None:
        self._config = config
        self._path = path
        self._reserved: dict[int, socket.socket] = {}

    @property
    def settings(self) -> Ray:
        """The section `ray`, with the ports chosen for this machine instead of the defaults."""
        ray = self._config.ray
        if not self._config.is_simulated(self._config.head):
            return ray
        chosen = {name: port for name, port in self._read().items() if _is_default(ray, name)}
        return replace(ray, **chosen)

    def choose(self) -> bool:
        """Choose the head's ports for a cluster that is about to be started; those that the config names stay. False if
        they are the same as before."""
        ray, before = self._config.ray, self.settings
        if self._config.is_simulated(self._config.head):
            names = [name for name in HEAD_PORTS if _is_default(ray, name)]
            chosen = {name: next_free_port(getattr(ray, name), self._reserve) for name in names}
            self.release(besides=chosen.values())
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path, json.dumps(chosen).encode())
        return self.settings != before

    def reserve(self) -> None:
        """Keep other clones from choosing those of these ports that none of them has."""
        if self._config.is_simulated(self._config.head):
            for port in self._read().values():
                self._reserve(port)

    def release(self, besides: Collection[int] = ()) -> None:
        """Let others choose the ports. Safe to call twice."""
        for port in [port for port in self._reserved if port not in besides]:
            self._reserved.pop(port).close()

    def _reserve(self, port: int) -> bool:
        """True if no other clone has chosen a port: the name is free again when this process ends."""
        if port not in self._reserved:
            held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                held.bind(f"\0distributed-grid-ray-port-{port}")
            except OSError:
                held.close()
                return False
            self._reserved[port] = held
        return True

    def _read(self) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError):
            ports = json.loads(self._path.read_bytes())
            return {name: int(ports[name]) for name in HEAD_PORTS if name in ports}
        return {}


def _is_default(ray: Ray, name: str) -> bool:
    return bool(getattr(ray, name) == getattr(DEFAULTS, name))


def next_free_port(first: int, reserve: Callable[[int], bool] = lambda port: True) -> int:
    """The first port from `first` on that is free at every address of this machine and can be reserved."""
    for port in range(first, first + MAX_TRIES):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended do not count
            probe.bind(("", port))
            if reserve(port):
                return port
    raise Refused(f"no port from {first} to {first + MAX_TRIES - 1} is free on this machine")


def worker_ports(ray: Ray, place: int, nodes: int) -> tuple[int, int]:
    """Port range of the workers of one of several nodes on a machine; 0 means any free port."""
    if _is_default(ray, "min_worker_port") and _is_default(ray, "max_worker_port"):
        return 0, 0
    ports_each = (ray.max_worker_port - ray.min_worker_port + 1) // nodes
    if ports_each < 1:
        raise Refused(f"ray.min_worker_port to ray.max_worker_port are too few ports for {nodes} nodes on one machine")
    first = ray.min_worker_port + place * ports_each
    return first, first + ports_each - 1


class RayNodes:
    """Installs, starts, inspects and stops Ray on one node at a time."""

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
        """Install Ray in this control plane's version, unless the config names an interpreter with Ray."""
        own_versions()
        if python := self.python(name):
            return f"Ray is that of {python}"
        return await self._ssh.run("ray-install", self._target(name), say)

    async def inspect(self, name: str, *, versions: bool = True) -> RayState:
        request: dict[str, Any] = {"python": self.python(name), "versions": versions}
        if versions and name == self._config.head.name and not self.is_simulated(name):
            request["ports"] = head_ports(self._ports.settings)
        return await self._ssh.ask("ray-inspect", self._target(name), request)

    async def start_head(self, addresses: dict[str, str], say: Say, joinable: asyncio.Event, *, replace: bool) -> str:
        """Start the head; its session. `joinable` is set as soon as workers can join, which is earlier."""

        def on_step(step: str) -> None:
            say(step)
            if step == HEAD_ANSWERS:
                joinable.set()

        head = self._config.head.name
        say("starting Ray's head")
        fields = {"ports": head_ports(self._ports.settings), "replace": replace}
        await self._start(head, addresses, "", fields, on_step)
        return str(self.states[head]["session"])

    async def start_worker(
        self, name: str, addresses: dict[str, str], say: Say, session: str, *, replace: bool = False
    ) -> None:
        """Start Ray on a node as a worker of the head; with `replace` a Ray of ours that runs there is restarted."""
        say("starting Ray")
        head = f"{bracketed(addresses[self._config.head.name])}:{self._ports.settings.port}"
        await self._start(name, addresses, head, {"session": session, "replace": replace}, say)

    async def _start(
        self, name: str, addresses: dict[str, str], head: str, fields: Mapping[str, Any], on_step: Say
    ) -> None:
        """Run the script that starts Ray on a node; secrets travel inside the SSH connection."""
        ray = self._ports.settings
        simulated = [node.name for node in self._config.nodes if self._config.is_simulated(node)]  # share this machine
        has = await self._grid.read(lambda ledger, now: node.capacity if (node := ledger.nodes.get(name)) else NOTHING)
        options = start_options(name, addresses[name], head, ray, has)
        if name in simulated:
            options += shared_machine_options(ray, simulated.index(name), len(simulated))
        request = {
            "role": "worker" if head else "head",
            "options": options,
            "memory_bytes": has.memory_bytes,
            "simulated": len(simulated) if name in simulated else 0,
            "python": self.python(name),
            "auth": ray.auth,
            **fields,
        }
        if ray.auth == "token":
            request["token"] = self._credentials.token()
        if ray.tls:
            request["tls"] = self._credentials.certificates(name, (addresses[name],))
        self.states[name] = await self._ssh.ask("ray-start", self._target(name), request, on_step)

    async def stop(self, name: str, say: Say, *, purge: bool) -> None:
        """Stop Ray on a node, and with `purge` remove its files. A second time is harmless."""
        say("stopping Ray")
        await self._ssh.ask("ray-stop", self._target(name), {"purge": purge}, say)
        self.states.pop(name, None)

    def session(self, name: str) -> str:
        """Session of the head that a node's Ray belongs to; empty if unknown."""
        return str(self.states.get(name, {}).get("session", ""))

    def is_behind(self, name: str, session: str) -> bool:
        """True if a node's Ray does not run, or runs with a head that is gone."""
        state = self.states.get(name, {}).get("state")
        return state in ("stopped", "broken") or (state == "running" and self.session(name) != session)

    def is_known(self, name: str) -> bool:
        return name in self._nodes

    def is_local(self, name: str) -> bool:
        return self._nodes[name].is_local

    def is_simulated(self, name: str) -> bool:
        return self._config.is_simulated(self._nodes[name])

    def python(self, name: str) -> str:
        """Interpreter with Ray: the node's, the cluster's, or this machine's own; empty: the installed one."""
        own = sys.executable if self._nodes[name].is_local else ""
        return self._nodes[name].ray_python or self._config.ray.python or own

    async def addresses(self, names: Iterable[str]) -> dict[str, str]:
        """Address of each node for the others; resolved each time, since machines move."""
        addresses = await asyncio.gather(*(self._address(self._nodes[name], [*names]) for name in names))
        return dict(zip(names, addresses, strict=True))

    async def _address(self, node: NodeConfig, names: list[str]) -> str:
        """The address in the config, or the one that another node resolves the host to."""
        others = [self._nodes[name] for name in names if name != node.name]
        host = node.ray_address or node.host
        if node.is_local and not node.ray_address:
            far = next((other.ray_address or other.host for other in others if not other.is_local), "")
            if not far:
                return "127.0.0.1"
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((far, 9))  # nothing is sent: the kernel only chooses the route
                    return str(probe.getsockname()[0])
                except OSError as failure:
                    raise Refused(f"which address this machine has for {far} is not known: {failure}") from failure
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host.strip("[]")))
        asked = next(iter(others), node)  # another machine: its own name may mean loopback to a machine itself
        try:
            answer = await self._ssh.ask("resolve-address", self._target(asked.name), {"host": host})
        except GridError as failure:
            raise Refused(f"{node.name}: {failure}; set `ray_address` of this node") from failure
        address = str(answer["address"])
        if ipaddress.ip_address(address).is_loopback and others:
            raise Refused(f"{node.name}: {host} is a loopback address on {asked.name}; set `ray_address` of this node")
        return address


def record_path(grid_id: str, name: str) -> Path:
    """Record of the start of Ray on a node of this machine, also on one that left the config."""
    return Path(ray_dir({"grid": grid_id, "node": name}), RECORD_NAME)


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def own_versions() -> Versions:
    """Versions of this environment; Refused with the command to type if it has no Ray."""
    from importlib import metadata

    try:
        return platform.python_version(), metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise Refused(RAY_MISSING) from None


def check_versions(versions: Mapping[str, Versions]) -> None:
    """Refused with a line for each node if they differ; Python's last number may."""
    kinds = {(python.rpartition(".")[0], ray) for python, ray in versions.values()}
    if len(kinds) > 1:
        lines = [f"{name}: Python {python}, Ray {ray}" for name, (python, ray) in versions.items()]
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
    """Further options of one of several Ray nodes on a machine: ports that no other has."""
    first, last = worker_ports(ray, place, nodes)
    free = ("--node-manager-port", "--object-manager-port", "--dashboard-agent-listen-port")
    ports = {**dict.fromkeys(free, 0), "--min-worker-port": first, "--max-worker-port": last}
    return [word for pair in ports.items() for word in map(str, pair)]


def head_ports(ray: Ray) -> dict[str, int]:
    """Ports that have to be free on the head, by the names of their keys."""
    return {"port": ray.port, "client_port": ray.client_port, "dashboard_port": ray.dashboard_port}


def security_risk(ray: Ray) -> str | None:
    if ray.auth == "none":
        return "Ray asks nobody for a token: whoever reaches its ports can run anything as you; set `ray.auth: token`"
    return None
