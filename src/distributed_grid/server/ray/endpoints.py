"""How one reaches the grid's own Ray: the ways to its head, and the variables with which programs find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed_grid.adapters.ssh.messages import PortForward, SshTarget
from distributed_grid.adapters.ssh.process import SshProcess
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.engines import EngineRow
from distributed_grid.errors import Refused
from distributed_grid.server.ray.credentials import RayCredentials
from distributed_grid.server.ray.desired_state import DesiredRayCluster
from distributed_grid.server.ray.nodes import RayNodes
from distributed_grid.server.ray.start_options import risk_of

NEAR = {"dashboard": "127.0.0.1", "client": "127.0.0.1", "head": "127.0.0.2"}
"""Where the ways to another machine begin on this one. Ray takes 127.0.0.1 for the machine's outer address."""


class RayEndpoints:
    """Opens the ways to Ray's head, and tells where they begin."""

    def __init__(
        self,
        config: ClusterConfig,
        wanted: DesiredRayCluster,
        *,
        nodes: RayNodes,
        shells: SshProcess,
        target: Callable[[str], SshTarget],
        secrets: RayCredentials,
    ) -> None:
        self._config = config
        self._wanted = wanted
        self._nodes = nodes
        self._shells = shells
        self._target = target
        self._secrets = secrets

    def open_ways(self) -> None:
        """Have the dashboard, Ray's client and its head within reach of this machine, where they are on another."""
        head, ray = self._config.head, self._config.ray
        if not head.is_local:
            dashboard = "127.0.0.1" if ray.dashboard_host in ("local", "0.0.0.0") else ray.dashboard_host
            ports = {"dashboard": PortForward(NEAR["dashboard"], ray.dashboard_port, dashboard, ray.dashboard_port)}
            ports["client"] = PortForward(NEAR["client"], ray.client_port, "127.0.0.1", ray.client_port)
            ports["head"] = PortForward(NEAR["head"], ray.port, "127.0.0.1", ray.port)
            self._shells.forward_ports(self._target(head.name), ports)

    def close_ways(self) -> None:
        """Have none of them any more; closing what is not open is harmless."""
        self._shells.forward_ports(self._target(self._config.head.name), {})

    async def view(self) -> dict[str, Any] | None:
        """Where it is, how to get there, and what is dangerous about it; None where there is none."""
        row = await self._wanted.row()
        if row is None:
            return None
        ways = self._ways(row)
        states = {name: self._nodes.lives.get(name, {}).get("state", "unknown") for name in row.nodes}
        return {
            "mode": row.mode,
            "address": row.address,
            "session": row.session or None,
            "authenticated": self._config.ray.auth == "token",
            "tls": self._config.ray.tls,
            "nodes": states,
            "risk": risk_of(self._config.ray),
            **ways,
        }

    def _ways(self, row: EngineRow) -> dict[str, Any]:
        """How a program on this machine gets there; None while a way is not open."""
        ray, head = self._config.ray, self._config.head
        if head.is_local:
            dashboard = f"http://127.0.0.1:{ray.dashboard_port}"
            return {"dashboard": dashboard, "client": f"ray://127.0.0.1:{ray.client_port}", "head": row.address}
        ports = self._shells.forwarded.get(head.name, {})
        starts = {"dashboard": "http://", "client": "ray://", "head": ""}
        return {name: f"{start}{NEAR[name]}:{ports[name]}" if name in ports else None for name, start in starts.items()}

    async def environ(self, name: str | None = None) -> dict[str, str]:
        """The variables with which Ray's own commands and programs work, on this machine or on a node."""
        row = await self._wanted.row()
        if row is None:
            raise Refused("the grid has started no Ray; type: grid cluster start --ray")
        ray = self._config.ray
        if name is not None and not self._nodes.is_local(name):
            return await self._environ_there(name, row)
        ways = self._ways(row)
        environ = self._secrets.environ(auth=ray.auth, tls=ray.tls)
        if any(self._nodes.is_local(one) for one in row.nodes):
            environ["RAY_ADDRESS"] = row.address
        elif ways["client"]:
            environ["RAY_ADDRESS"] = ways["client"]
        if ways["dashboard"]:
            environ["RAY_API_SERVER_ADDRESS"] = ways["dashboard"]
        return environ

    async def drive(self, socket: str) -> tuple[dict[str, str], str]:
        """Have a program that speaks to Ray: its environment, and the socket it is behind, where it is on the head."""
        row = await self._wanted.row()
        if row is None:
            raise Refused("the grid has started no Ray")
        if any(self._nodes.is_local(one) for one in row.nodes):
            return await self.environ(), ""
        head = self._config.head.name
        environ = await self._environ_there(head, row)
        self._shells.run_ray_driver(
            self._target(head), socket, {"python": self._nodes.python(head), "environ": environ}
        )
        return environ, socket

    def stop_driving(self) -> None:
        """Have no such program any more."""
        self._shells.run_ray_driver(self._target(self._config.head.name), "", {})

    async def _environ_there(self, name: str, row: EngineRow) -> dict[str, str]:
        if name not in row.nodes:
            raise Refused(f"Ray does not run on {name}; it runs on {', '.join(row.nodes)}")
        ray, life = self._config.ray, await self._nodes.look(name, versions=False)
        environ = {"RAY_ADDRESS": row.address, "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
        if ray.auth == "token":
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(life["token_path"])}
        if ray.tls:
            folder = str(life["token_path"]).rpartition("/")[0]
            files = {"SERVER_CERT": "cert", "SERVER_KEY": "key", "CA_CERT": "ca"}
            environ |= {f"RAY_TLS_{what}": f"{folder}/tls-{file}.pem" for what, file in files.items()}
            environ["RAY_USE_TLS"] = "1"
        if name == self._config.head.name:
            environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ray.dashboard_port}"
        return environ
