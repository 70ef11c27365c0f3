"""By which address the nodes of Ray reach one another: the one in the config, or what another node takes it for."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterable

from distributed_grid.adapters.ssh.messages import SshTarget
from distributed_grid.adapters.ssh.process import SshProcess
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.errors import GridError, Refused


class RayAddresses:
    """Finds out addresses; remembers none, since machines move."""

    def __init__(self, config: ClusterConfig, shells: SshProcess, target: Callable[[str], SshTarget]) -> None:
        self._nodes = {node.name: node for node in config.nodes}
        self._shells = shells
        self._target = target

    async def of(self, names: Iterable[str]) -> dict[str, str]:
        """By which address the others reach each node."""
        found = await asyncio.gather(*(self._address(self._nodes[name], [*names]) for name in names))
        return dict(zip(names, found, strict=True))

    async def _address(self, node: NodeConfig, names: list[str]) -> str:
        others = [self._nodes[name] for name in names if name != node.name]
        host = node.ray_address or node.host
        if node.is_local and not node.ray_address:
            return _own_address_towards(next((one.ray_address or one.host for one in others), ""))
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host.strip("[]")))
        asked = next(iter(others), node)  # another machine's word: its own name may mean loopback to a machine itself
        try:
            found = str(
                (await self._shells.ask("resolve-address", self._target(asked.name), {"host": host}))["address"]
            )
        except GridError as failure:
            raise Refused(f"{node.name}: {failure}; set `ray_address` of this node") from failure
        if ipaddress.ip_address(found).is_loopback and others:
            raise Refused(f"{node.name}: {host} is a loopback address on {asked.name}; set `ray_address` of this node")
        return found


def bracketed(address: str) -> str:
    """An address as it stands before a port."""
    return f"[{address}]" if ":" in address else address


def _own_address_towards(host: str) -> str:
    """The address this machine has in the eyes of another; loopback where there is no other."""
    if host in ("", "local"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent: the kernel only chooses the way
            return str(probe.getsockname()[0])
        except OSError as failure:
            raise Refused(f"which address this machine has for {host} is not known: {failure}") from failure
