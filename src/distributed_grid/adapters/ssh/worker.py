"""The SSH child of the control plane: keeps the links it is told to keep, does the deeds it is told to do."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from distributed_grid.adapters.node import installation
from distributed_grid.adapters.node.agent_link import AgentLink
from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.local_session import talking_here
from distributed_grid.adapters.node.messages import (
    LARGEST_LINE,
    AgentLinkChanged,
    DropAgentLink,
    Forward,
    KeepAgentLink,
    NodeFacts,
    Order,
    Report,
    RunFinished,
    RunOnNode,
    RunRayDriver,
    Settings,
    StepDone,
    Target,
    line_of,
    order_in,
)
from distributed_grid.adapters.node.ray_installation import install_ray
from distributed_grid.adapters.node.script_session import DEEDS, ray_script
from distributed_grid.adapters.ssh.port_forward import forward
from distributed_grid.adapters.ssh.ray_driver_tunnel import drive
from distributed_grid.adapters.ssh.script_process import ScriptProcess
from distributed_grid.adapters.ssh.shared_connection import SharedSshConnection

MOST_AT_ONCE = 32
log = logging.getLogger(__name__)


async def serve(end: socket.socket) -> None:
    """Do what is asked on this socket until it closes."""
    reader, writer = await asyncio.open_unix_connection(sock=end, limit=LARGEST_LINE)
    child = SshWorker(lambda report: writer.write(line_of(report)))
    while line := await reader.readline():
        child.take(order_in(line))


class SshWorker:
    """Holds connections, and nothing that is not told again by the next control plane."""

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._auth_sock = ""
        self._supplies = installation.InstallSources()
        self._doors: dict[str, tuple[Target, SharedSshConnection]] = {}
        self._links: dict[str, tuple[Target, AgentLink, asyncio.Task[None]]] = {}
        self._deeds: set[asyncio.Task[None]] = set()
        self._forwards: dict[str, tuple[Forward, asyncio.Task[None]]] = {}
        self._driving: tuple[RunRayDriver, asyncio.Task[None]] | None = None
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    def take(self, order: Order) -> None:
        """Begin what an order asks for."""
        match order:
            case Settings():
                self._use(order.auth_sock)
                self._supplies.environ = order.environ or self._supplies.environ
                self._supplies.cache = Path(order.wheels)
            case KeepAgentLink():
                self._keep(order.target)
            case DropAgentLink():
                self._drop(order.node)
            case Forward():
                self._forward(order)
            case RunRayDriver():
                self._drive(order)
            case RunOnNode():
                deed = asyncio.create_task(self._do(order))
                self._deeds.add(deed)
                deed.add_done_callback(self._deeds.discard)

    def _use(self, auth_sock: str) -> None:
        if auth_sock and auth_sock != self._auth_sock:
            self._auth_sock = auth_sock
            for _, link, _ in self._links.values():
                link.nudge()

    def _door(self, target: Target) -> SharedSshConnection:
        known = self._doors.get(target.name)
        if known is None or known[0] != target:
            known = self._doors[target.name] = (target, SharedSshConnection(target, lambda: self._auth_sock))
        return known[1]

    def _keep(self, target: Target) -> None:
        kept = self._links.get(target.name)
        if kept is not None and kept[0] == target:
            kept[1].nudge()
            return
        self._drop(target.name)
        link = AgentLink(target.name, self._door(target).way, self._report, socket=target.local_socket)
        self._links[target.name] = (target, link, asyncio.create_task(self._guarded(link, target.name)))

    async def _guarded(self, link: AgentLink, node: str) -> None:
        while True:
            try:
                await link.keep()
            except Exception as bug:  # the outermost loop of a link: it is told, and begun again
                log.exception("the link to %s failed", node)
                self._report(AgentLinkChanged(node, "down", f"a bug: {type(bug).__name__}: {bug}"))
                await asyncio.sleep(5)

    def _drop(self, node: str) -> None:
        kept = self._links.pop(node, None)
        if kept is not None:
            kept[2].cancel()
            self._report(AgentLinkChanged(node, "down", "not wanted"))

    def _drive(self, order: RunRayDriver) -> None:
        if self._driving is not None:
            if self._driving[0] == order:
                return
            self._driving[1].cancel()
            self._driving = None
        if order.data:
            self._driving = (order, asyncio.create_task(drive(order, self._door(order.target))))

    def _forward(self, order: Forward) -> None:
        kept = self._forwards.get(order.target.name)
        if kept is not None and kept[0] == order:
            return
        if kept is not None:
            self._forwards.pop(order.target.name)[1].cancel()
        if order.ports:
            task = asyncio.create_task(forward(order, self._door(order.target), self._report))
            self._forwards[order.target.name] = (order, task)

    async def _do(self, order: RunOnNode) -> None:
        """One deed, told step by step; whatever happens, it is told as finished."""

        def say(step: str) -> None:
            self._report(StepDone(order.number, step))

        try:
            async with self._places:
                finished = await self._done(order, say)
        except NodeOperationFailed as failure:
            self._report(RunFinished(order.number, problem=str(failure)))
        except Exception as bug:  # the outermost place of a deed
            log.exception("%s on %s failed", order.deed, order.target.name)
            self._report(RunFinished(order.number, problem=f"a bug: {type(bug).__name__}: {bug}"))
        else:
            self._report(finished)

    async def _done(self, order: RunOnNode, say: Callable[[str], None]) -> RunFinished:
        if order.deed in DEEDS and order.target.hop.host == "local":
            async with talking_here(order.target, ray_script()) as here:
                return RunFinished(order.number, data=await here.ask(order.deed, say=say, **order.data))
        door = self._door(order.target)
        if not door.is_open:
            say("connecting")
        if order.deed in DEEDS:
            async with door.talking(ray_script()) as talk:
                if order.deed == "ray-install":
                    supplies = self._supplies
                    return RunFinished(
                        order.number, data=await install_ray(talk, supplies.cache, supplies.environ, say)
                    )
                return RunFinished(order.number, data=await talk.ask(order.deed, say=say, **order.data))
        async with door.talking() as talk:
            facts, words = await self._perform(order, talk, say)
        if order.deed in ("end", "purge"):
            await door.close()
        return RunFinished(order.number, words=words, facts=facts)

    async def _perform(
        self, order: RunOnNode, talk: ScriptProcess, say: Callable[[str], None]
    ) -> tuple[NodeFacts, str]:
        match order.deed:
            case "install":
                return await installation.install(talk, self._supplies, say)
            case "look":
                return await installation.look(talk), ""
            case "end":
                return await installation.end(talk, say)
            case "purge":
                return await installation.purge(talk, say)
        raise NodeOperationFailed(f"there is no deed called {order.deed!r}")
