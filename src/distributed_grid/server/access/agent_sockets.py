"""Where the agents of other machines come in: one private Unix socket each, to which SSH or a hand in Ray forwards.

A socket speaks only the agents' protocol, and only for its own node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from distributed_grid.control.agents import AgentGateway
from distributed_grid.posix.unix_sockets import short_path
from distributed_grid.server.access.agent_websocket import AgentWebSocket

BACKLOG = 64


class AgentSockets:
    """The sockets of a daemon's nodes on other machines, below one folder."""

    def __init__(self, folder: Path, links: AgentGateway) -> None:
        self._folder = folder
        self._links = links
        self._servers: dict[str, asyncio.Server] = {}
        self._doors: set[AgentWebSocket] = set()

    def path_of(self, node: str) -> Path:
        return self._folder / f"{node}.sock"

    async def open(self, nodes: Iterable[str]) -> None:
        """Listen for each node; what an earlier daemon left is replaced."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        for left in self._folder.glob("*.sock"):
            left.unlink(missing_ok=True)
        for node in nodes:
            await self.add(node)

    async def add(self, node: str) -> None:
        """Listen for one more node; adding one twice changes nothing."""
        if node not in self._servers:
            listener = _bound(self.path_of(node))
            self._servers[node] = await asyncio.get_running_loop().create_unix_server(
                partial(self._door, node), sock=listener, backlog=BACKLOG
            )

    def remove(self, node: str) -> None:
        """Listen for a node no more; removing one that is not there is harmless."""
        server = self._servers.pop(node, None)
        if server is not None:
            server.close()
            self.path_of(node).unlink(missing_ok=True)

    def _door(self, node: str) -> AgentWebSocket:
        door = AgentWebSocket(self._links, lambda path, headers: node)
        self._doors.add(door)
        door.on_close = self._doors.discard
        return door

    async def close(self) -> None:
        """Let nobody in any more, and hang up. Safe to call twice."""
        for server in self._servers.values():
            server.close()
        self._servers = {}
        for door in list(self._doors):
            door.close("the control plane is leaving")
        for left in self._folder.glob("*.sock"):
            with contextlib.suppress(OSError):
                left.unlink()


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        with short_path(path) as name:
            listener.bind(name)
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener
