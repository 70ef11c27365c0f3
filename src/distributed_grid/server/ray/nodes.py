"""Ray on single nodes: what each is told by SSH, and what each said of its Ray last."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.ssh.messages import SshTarget
from distributed_grid.adapters.ssh.process import SshProcess
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.resources import NOTHING, Capacity
from distributed_grid.server.ray.addresses import bracketed
from distributed_grid.server.ray.credentials import RayCredentials
from distributed_grid.server.ray.start_options import head_ports, options_of, own_versions

ANSWERS = "Ray's head answers"
"""What the script on the head says as soon as workers can join; see `on_node_ray.py`."""
Life = dict[str, Any]


class RayNodes:
    """Installs, starts, looks at and stops Ray on one node at a time; which and when is decided elsewhere."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        *,
        shells: SshProcess,
        target: Callable[[str], SshTarget],
        secrets: RayCredentials,
    ) -> None:
        self._grid = grid
        self._config = config
        self._nodes = {node.name: node for node in config.nodes}
        self._shells = shells
        self._target = target
        self._secrets = secrets
        self.lives: dict[str, Life] = {}

    async def install(self, name: str, say: Say) -> str:
        """Have Ray on a node, in this control plane's version, where the config does not name one that is there."""
        own_versions()
        if python := self.python(name):
            return f"Ray is that of {python}"
        return await self._shells.run("ray-install", self._target(name), say)

    async def look(self, name: str, *, versions: bool = True) -> Life:
        """What a node says of its Ray now."""
        order: dict[str, Any] = {"python": self.python(name), "versions": versions}
        if versions and name == self._config.head.name:
            order["ports"] = head_ports(self._config.ray)
        return await self._shells.ask("ray-inspect", self._target(name), order)

    async def start_head(self, addresses: dict[str, str], say: Say, joinable: asyncio.Event, *, replace: bool) -> str:
        """Have the head running; its session. `joinable` is set as soon as workers can join, which is earlier."""

        def told(step: str) -> None:
            say(step)
            if step == ANSWERS:
                joinable.set()

        head = self._config.head.name
        say("starting Ray's head")
        order = await self._order(head, addresses, "")
        order |= {"ports": head_ports(self._config.ray), "replace": replace}
        self.lives[head] = answer = await self._shells.ask("ray-start", self._target(head), order, told)
        return str(answer["session"])

    async def start_worker(
        self, name: str, addresses: dict[str, str], say: Say, session: str, *, replace: bool = False
    ) -> None:
        """Have a node in the head's cluster; with `replace` whatever Ray of ours runs there is started anew."""
        say("starting Ray")
        head = f"{bracketed(addresses[self._config.head.name])}:{self._config.ray.port}"
        order = await self._order(name, addresses, head)
        order |= {"session": session, "replace": replace}
        self.lives[name] = await self._shells.ask("ray-start", self._target(name), order, say)

    async def stop(self, name: str, say: Say, *, purge: bool) -> None:
        """Have no Ray of ours on a node; with `purge` its files go, too. Stopping what does not run is harmless."""
        say("stopping Ray")
        await self._shells.ask("ray-stop", self._target(name), {"purge": purge}, say)
        self.lives.pop(name, None)

    async def _order(self, name: str, addresses: dict[str, str], head: str) -> dict[str, Any]:
        """What a node needs to know to start Ray; secrets travel inside the SSH connection."""
        ray = self._config.ray
        has = await self._capacity(name)
        order: dict[str, Any] = {
            "role": "worker" if head else "head",
            "options": options_of(name, addresses[name], head, ray, has),
            "memory_bytes": has.memory_bytes,
            "python": self.python(name),
            "auth": ray.auth,
        }
        if ray.auth == "token":
            order["token"] = self._secrets.token()
        if ray.tls:
            order["tls"] = self._secrets.certificates(name, (addresses[name],))
        return order

    async def _capacity(self, name: str) -> Capacity:
        def known(ledger: Any, now: int) -> Capacity:
            node = ledger.nodes.get(name)
            return node.capacity if node is not None else NOTHING

        return await self._grid.read(known)

    def session(self, name: str) -> str:
        """Which life of the head its Ray belongs to; empty where that is not known."""
        return str(self.lives.get(name, {}).get("session", ""))

    def is_behind(self, name: str, session: str) -> bool:
        """Whether its Ray does not run, or runs with a head that is gone."""
        life = self.lives.get(name, {})
        return life.get("state") in ("stopped", "broken") or (
            life.get("state") == "running" and life.get("session") != session
        )

    def is_local(self, name: str) -> bool:
        """Whether a node is this machine."""
        return self._nodes[name].is_local

    def python(self, name: str) -> str:
        """The interpreter with Ray: the node's, the cluster's, this machine's own; empty is what was installed."""
        own = sys.executable if self._nodes[name].is_local else ""
        return self._nodes[name].ray_python or self._config.ray.python or own
