"""Access to the grid's own Ray: its row in the ledger, forwarded ports of its head, the engine's connection to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from distributed_grid.adapters.ray.driver_messages import Connect
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.ssh.process import PortForward, SshProcess, SshTarget
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import SSH, EngineRow
from distributed_grid.domain.events import EngineRegistered, EngineRemoved
from distributed_grid.domain.ledger import Ledger
from distributed_grid.errors import GridError, Refused, Unreachable
from distributed_grid.server.ray.credentials import RayCredentials
from distributed_grid.server.ray.engine_reconciler import NAME, EngineReconciler
from distributed_grid.server.ray.ray_nodes import RayNodes, bracketed, security_risk
from distributed_grid.server.ray.ray_ports import RayPorts
from distributed_grid.state_dir import StateDir

POLL_SECONDS, CONNECT_SECONDS = 0.5, 45.0
LOCAL_HOSTS = {"dashboard": "127.0.0.1", "client": "127.0.0.1", "head": "127.0.0.2"}
"""Where forwarded ports listen on this machine. Ray takes 127.0.0.1 for the machine's outer address."""
RAY_PYTHON = "GRID_RAY_PYTHON"
"""Variable with the interpreter that has Ray on a node; its folder comes first on the PATH of a job in a Ray boost."""
log = logging.getLogger(__name__)


class DesiredRayCluster:
    """What the ledger has about the grid's own Ray: where its head is, and on which nodes it is to run."""

    def __init__(self, grid: Grid, ports: RayPorts) -> None:
        self._grid = grid
        self._ports = ports

    async def row(self) -> EngineRow | None:
        """The row; None while the grid is to run no Ray."""

        def find(ledger: Ledger, now: int) -> EngineRow | None:
            row = ledger.engines.get(NAME)
            return row if row is not None and row.mode == SSH else None

        return await self._grid.read(find)

    async def nodes(self) -> tuple[str, ...]:
        """Where it is to run."""
        row = await self.row()
        return row.nodes if row is not None else ()

    async def set(self, head: str, session: str, nodes: tuple[str, ...]) -> None:
        """It is to run on these nodes, with its head at this address."""
        address = f"{bracketed(head)}:{self._ports.settings.port}"
        await self._grid.handle(EngineRegistered(NAME, SSH, address, session=session, nodes=nodes))

    async def reduce(self, row: EngineRow, nodes: tuple[str, ...]) -> None:
        """It is to run as before, on these of its nodes only."""
        await self._grid.handle(EngineRegistered(NAME, SSH, row.address, row.namespace, row.session, nodes))

    async def clear(self, reason: str) -> None:
        """It is to run nowhere any more."""
        await self._grid.handle(EngineRemoved(NAME, reason))


class RayEndpoints:
    """Forwards the ports of Ray's head to this machine, and tells with which variables programs find Ray."""

    def __init__(
        self,
        config: ClusterConfig,
        desired: DesiredRayCluster,
        *,
        nodes: RayNodes,
        ssh: SshProcess,
        target: Callable[[str], SshTarget],
        credentials: RayCredentials,
        ports: RayPorts,
    ) -> None:
        self._config = config
        self._desired = desired
        self._nodes = nodes
        self._ssh = ssh
        self._target = target
        self._credentials = credentials
        self._ports = ports

    def open(self) -> None:
        """Have the dashboard, Ray's client and its head within reach of this machine, where they are on another."""
        head, ray = self._config.head, self._ports.settings
        if not head.is_local:
            dashboard = "127.0.0.1" if ray.dashboard_host in ("local", "0.0.0.0") else ray.dashboard_host
            ports = {"dashboard": (ray.dashboard_port, dashboard), "client": (ray.client_port, "127.0.0.1")}
            ports["head"] = (ray.port, "127.0.0.1")
            forwards = {name: PortForward(LOCAL_HOSTS[name], port, to, port) for name, (port, to) in ports.items()}
            self._ssh.forward_ports(self._target(head.name), forwards)

    def close(self) -> None:
        """Forward nothing any more; closing what is not open is harmless."""
        self._ssh.forward_ports(self._target(self._config.head.name), {})

    async def view(self) -> dict[str, Any] | None:
        """Where Ray is, how to get there, and what is dangerous about it; None where there is none."""
        row = await self._desired.row()
        if row is None:
            return None
        return {
            "mode": row.mode,
            "address": row.address,
            "session": row.session or None,
            "authenticated": self._config.ray.auth == "token",
            "tls": self._config.ray.tls,
            "nodes": {name: self._nodes.states.get(name, {}).get("state", "unknown") for name in row.nodes},
            "risk": security_risk(self._config.ray),
            **self._urls(row),
        }

    def _urls(self, row: EngineRow) -> dict[str, Any]:
        """How a program on this machine gets there; None while a port is not forwarded."""
        ray, head = self._ports.settings, self._config.head
        if head.is_local:
            dashboard = f"http://127.0.0.1:{ray.dashboard_port}"
            return {"dashboard": dashboard, "client": f"ray://127.0.0.1:{ray.client_port}", "head": row.address}
        ports = self._ssh.forwarded.get(head.name, {})
        schemes = {"dashboard": "http://", "client": "ray://", "head": ""}
        return {
            name: f"{scheme}{LOCAL_HOSTS[name]}:{ports[name]}" if name in ports else None
            for name, scheme in schemes.items()
        }

    async def environ(self, name: str | None = None) -> dict[str, str]:
        """The variables with which Ray's own commands and programs work, on this machine or on a node."""
        row = await self._desired.row()
        if row is None:
            raise Refused("the grid has started no Ray; type: grid cluster start --ray")
        if name is not None and not self._nodes.is_local(name):
            return await self._environ_on(name, row)
        urls, head = self._urls(row), self._config.head.name
        environ = self._credentials.environ(auth=self._config.ray.auth, tls=self._config.ray.tls)
        if name is not None:
            environ[RAY_PYTHON] = self._nodes.python(name)
        if any(self._nodes.is_local(one) for one in row.nodes):
            environ["RAY_ADDRESS"] = row.address
        elif urls["client"]:
            environ["RAY_ADDRESS"] = urls["client"]
        else:  # without an address, a program would start a Ray of its own here
            raise Unreachable(
                f"no port of Ray's head is forwarded to this machine now; see: grid cluster status {head}"
            )
        if urls["dashboard"]:
            environ["RAY_API_SERVER_ADDRESS"] = urls["dashboard"]
        return environ

    async def start_driver(self, row: EngineRow, socket: str) -> tuple[dict[str, str], str]:
        """Have a Ray driver: its environment, and the socket it is behind, where it is on the head."""
        if any(self._nodes.is_local(one) for one in row.nodes):
            return await self.environ(), ""
        head = self._config.head.name
        environ = await self._environ_on(head, row)
        data = {"python": self._nodes.python(head), "environ": environ}
        self._ssh.run_ray_driver(self._target(head), socket, data)
        return environ, socket

    def stop_driver(self) -> None:
        """Have no Ray driver on the head any more."""
        self._ssh.run_ray_driver(self._target(self._config.head.name), "", {})

    async def _environ_on(self, name: str, row: EngineRow) -> dict[str, str]:
        if name not in row.nodes:
            raise Refused(f"Ray does not run on {name}; it runs on {', '.join(row.nodes)}")
        ray, state = self._ports.settings, await self._nodes.inspect(name, versions=False)
        environ = {"RAY_ADDRESS": row.address, "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
        environ[RAY_PYTHON] = str(state.get("interpreter", ""))
        if ray.auth == "token":
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(state["token_path"])}
        if ray.tls:
            folder = str(state["token_path"]).rpartition("/")[0]
            files = {"SERVER_CERT": "cert", "SERVER_KEY": "key", "CA_CERT": "ca"}
            environ |= {f"RAY_TLS_{what}": f"{folder}/tls-{file}.pem" for what, file in files.items()}
            environ["RAY_USE_TLS"] = "1"
        if name == self._config.head.name:
            environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ray.dashboard_port}"
        return environ


class RayConnector:
    """Keeps the engine connected with the grid's own Ray, for as long as the ledger has it."""

    def __init__(
        self,
        config: ClusterConfig,
        state_dir: StateDir,
        *,
        engine: RayEngine,
        reconciler: EngineReconciler,
        desired: DesiredRayCluster,
        endpoints: RayEndpoints,
        grid_id: Callable[[], str],
    ) -> None:
        self._config = config
        self._wheels = str(state_dir.root / "wheels")
        self._socket = str(state_dir.host_dir / "links" / "ray-driver")
        self._engine = engine
        self._reconciler = reconciler
        self._desired = desired
        self._endpoints = endpoints
        self._grid_id = grid_id
        self._connected_to: tuple[str, tuple[str, ...]] | None = None

    async def run(self) -> None:
        """Connect whenever there is a cluster to connect with, until cancelled."""
        while True:
            try:
                await self._update()
            except GridError as failure:
                log.warning("no connection with Ray: %s", failure)
            await asyncio.sleep(POLL_SECONDS)

    async def _update(self) -> None:
        row = await self._desired.row()
        if row is None:
            if self._connected_to is not None:
                self._connected_to = None
                self._endpoints.stop_driver()
                await self._engine.stop()
            return
        if self._connected_to == (row.address, row.nodes) or not row.session:
            return  # known already, or not started yet
        environ, socket = await self._endpoints.start_driver(row, self._socket)
        environ.pop("RAY_ADDRESS", None)
        hold = self._config.hold_seconds
        settings = Connect(row.address, self._grid_id(), row.namespace, hold, environ, self._wheels, await_raylet=True)
        self._engine.connect(settings, socket)
        self._connected_to = (row.address, row.nodes)

    async def wait_until_connected(self) -> str:
        """Return when Ray's nodes are known to be the grid's; what keeps it from that, where that takes too long."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while self._engine.connected is None:
                    await asyncio.sleep(POLL_SECONDS / 5)
                await self._reconciler.compare(full=True)
        except TimeoutError:
            return f"the control plane is not connected with Ray yet: {self._engine.problem or 'no connection'}"
        except GridError as failure:
            return f"the control plane is not connected with Ray yet: {failure}"
        return ""
