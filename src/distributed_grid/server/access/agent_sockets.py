"""Sockets for agents: one private Unix socket for each node on another machine, and the connections over them.

SSH or the Ray node actor forwards to such a socket, and it serves only its own node. Agents that joined come over TCP
(`rest/listener.py`), or over one socket for all of them where they have the login of the control plane on its machine.
The class of a connection (`agent_websocket.py`) is loaded with the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distributed_grid.control.agents import AgentGateway
from distributed_grid.posix.sockets import short_path
from distributed_grid.wire import AgentSide, FromAgent, ToAgent

if TYPE_CHECKING:
    from distributed_grid.server.access.agent_websocket import AgentWebSocket

MAX_CONNECTIONS = 4  # of one node; the newest stay, since its agent may not know yet that an older one is dead
MAX_STRANGERS = 16  # connections to one node's socket before their upgrade
BACKLOG = 64
MAX_WAITING = 1024  # backlog of the socket for all agents that joined
log = logging.getLogger(__name__)


class AgentMessageSink(Protocol):
    def received(self, message: FromAgent, via: AgentSide) -> None: ...
    def rejected(self, why: str, via: AgentSide) -> None:
        """The agent broke the protocol, and is being disconnected."""

    def gone(self, via: AgentSide) -> None:
        """The connection has ended; a second call changes nothing."""


class AgentConnections:
    """The connections of agents that were admitted; of each node the newest few."""

    def __init__(self) -> None:
        self._of_node: dict[str, list[AgentWebSocket]] = {}

    def add(self, websocket: AgentWebSocket) -> None:
        """Add a connection of its node; beyond the limit the oldest is closed."""
        (node,) = websocket.nodes
        connections = self._of_node.setdefault(node, [])
        connections.append(websocket)
        if len(connections) > MAX_CONNECTIONS:
            log.warning("%s has more than %d connections: the oldest is closed", node, MAX_CONNECTIONS)
            connections[0].close(f"more than {MAX_CONNECTIONS} connections of {node}")

    def discard(self, websocket: AgentWebSocket) -> None:
        """A connection has ended; harmless for one that was never admitted."""
        for node in websocket.nodes:
            left = [other for other in self._of_node.pop(node, ()) if other is not websocket]
            if left:
                self._of_node[node] = left

    def close(self, node: str, why: str) -> None:
        for websocket in list(self._of_node.get(node, ())):
            websocket.close(why)

    def close_all(self, why: str) -> None:
        for node in list(self._of_node):
            self.close(node, why)

    def send_all(self, message: ToAgent) -> None:
        for websocket in itertools.chain.from_iterable([*self._of_node.values()]):
            websocket.send(message)


class AgentSockets:
    """The sockets of a daemon's nodes on other machines, below one folder."""

    def __init__(self, folder: Path, agents: AgentGateway) -> None:
        self._folder = folder
        self._agents = agents
        self._servers: dict[str, asyncio.Server] = {}
        self._websockets: dict[str, set[AgentWebSocket]] = {}
        self._admitted = AgentConnections()

    def path_of(self, node: str) -> Path:
        return self._folder / f"{node}.sock"

    async def open(self, nodes: Iterable[str]) -> None:
        """Listen for each node; sockets of an earlier daemon are replaced."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        for left in self._folder.glob("*.sock"):
            left.unlink(missing_ok=True)
        for node in nodes:
            await self.add(node)

    async def add(self, node: str) -> None:
        """Listen for another node; a second time changes nothing."""
        if node not in self._servers:
            listener = _bind_private(self.path_of(node))
            self._servers[node] = await asyncio.get_running_loop().create_unix_server(
                partial(self._accept, node), sock=listener, backlog=BACKLOG
            )

    def remove(self, node: str) -> None:
        """Close the socket of a node; an unknown node is harmless."""
        server = self._servers.pop(node, None)
        if server is not None:
            server.close()
            self.path_of(node).unlink(missing_ok=True)

    def _accept(self, node: str) -> AgentWebSocket:
        from distributed_grid.server.access.agent_websocket import AgentWebSocket

        here = self._websockets.setdefault(node, set())
        is_full = len(here) >= MAX_CONNECTIONS + MAX_STRANGERS

        def closed(websocket: AgentWebSocket) -> None:
            here.discard(websocket)
            self._admitted.discard(websocket)

        websocket = AgentWebSocket(
            self._agents,
            lambda path, headers: node,
            on_admitted=self._admitted.add,
            on_close=closed,
            refusal=f"too many connections to the socket of {node}" if is_full else "",
        )
        here.add(websocket)
        return websocket

    async def close(self) -> None:
        """Stop listening and close every connection. Safe to call twice."""
        for server in self._servers.values():
            server.close()
        self._servers = {}
        for websocket in list(itertools.chain.from_iterable(self._websockets.values())):
            websocket.close("the control plane is leaving")
        for left in self._folder.glob("*.sock"):
            with contextlib.suppress(OSError):
                left.unlink()


class JoinedAgentSocket:
    """The private socket for agents that joined and run on this machine under the login of the control plane.

    Both ends know the other's user from the kernel, so nothing is encrypted; the node key says which node it is.
    """

    def __init__(self, path: Path, accept: Callable[[], AgentWebSocket]) -> None:
        self.path = path
        self._accept = accept
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen; the socket of an earlier daemon is replaced."""
        self.path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accept, sock=_bind_private(self.path), backlog=MAX_WAITING)

    async def close(self) -> None:
        """Listen no more. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self.path.unlink(missing_ok=True)


def _bind_private(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        with short_path(path) as name:
            listener.bind(name)
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener
