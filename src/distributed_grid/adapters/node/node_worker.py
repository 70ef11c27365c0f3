"""Links to the agents of nodes and operations on nodes, in both children of the control plane: over SSH and over Ray.

A link that breaks is opened again at growing intervals, and an agent that does not connect is started again; agents
continue while their link is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from distributed_grid.adapters.child_process import Say, StepDone
from distributed_grid.adapters.node.installation import facts_of, inspect
from distributed_grid.adapters.node.node_messages import (
    AgentLinkChanged,
    NodeFacts,
    NodeOperationFailed,
    NodeTarget,
    RunFinished,
)
from distributed_grid.adapters.node.script_session import ScriptSession
from distributed_grid.posix.sockets import short_path
from distributed_grid.supervision import start_logged, start_restarted

FIRST_PAUSE, MAX_PAUSE, FINAL_PAUSE = 0.5, 15.0, 60.0
QUIET_SECONDS, MAX_QUIET_SECONDS = 1.5, 60.0
CHUNK_BYTES = 1 << 16
log = logging.getLogger(__name__)
ServeConnection = Callable[[Any, Any], Awaitable[None]]
"""Serves one connection of the agent: its reader and its writer, as asyncio has them."""


class Listener(Protocol):
    """Accepts connections on a node until it is closed."""

    def close(self) -> None: ...


class NodeTransport(Protocol):
    """An open connection to a node: SSH's, or an actor in a Ray cluster."""

    @property
    def is_closed(self) -> bool: ...
    async def wait_closed(self) -> None:
        """Return when it has ended, by itself or not."""

    def session(self) -> AbstractAsyncContextManager[ScriptSession]:
        """A session with the script on the node."""

    async def listen(self, path: str, serve: ServeConnection) -> Listener:
        """Accept the agent's connections on this Unix socket of the node; raises NodeOperationFailed."""


class NodeConnection(Protocol):
    """Connection to one node: opened at the first use, shared, opened again after a loss."""

    def open(self) -> AbstractAsyncContextManager[NodeTransport]:
        """Transport of the node within the context; raises NodeOperationFailed if there is none."""


Prepare = Callable[[NodeTarget, ScriptSession], Awaitable[None]]


class AgentLink:
    """Keeps the connection of one node's agent open, and reports its state; `prepare` runs on each new transport."""

    def __init__(
        self,
        target: NodeTarget,
        connection: NodeConnection,
        report: Callable[[AgentLinkChanged], None],
        prepare: Prepare | None = None,
    ) -> None:
        self._target = target
        self._connection = connection
        self._report = report
        self._prepare = prepare
        self._channels = 0
        self._hurry = asyncio.Event()

    def retry_now(self) -> None:
        """Cut short a pause: its reason may be gone."""
        self._hurry.set()

    async def _pause(self, seconds: float) -> None:
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def run(self) -> None:
        """Keep the link until cancelled."""
        pause = FIRST_PAUSE
        while True:
            self._report_state("connecting")
            try:
                async with self._connection.open() as transport:
                    await self._serve(transport)
                pause, failure = FIRST_PAUSE, NodeOperationFailed("the connection was lost", final=False)
            except NodeOperationFailed as raised:
                failure = raised
            self._report_state("down", str(failure), final=failure.final)
            await self._pause(FINAL_PAUSE if failure.final else pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, MAX_PAUSE)

    async def _serve(self, transport: NodeTransport) -> None:
        """Listen for the agent, supervise it, and return when the transport has ended."""
        async with transport.session() as session:
            if self._prepare is not None:
                await self._prepare(self._target, session)
            path = str((await session.ask("link"))["socket"])
            listener = await transport.listen(path, self._relay)
            await self._launch(session, path)
        supervising = asyncio.create_task(self._supervise(transport, path))
        closed = asyncio.create_task(transport.wait_closed())
        try:
            await asyncio.wait((supervising, closed), return_when=asyncio.FIRST_COMPLETED)
            if supervising.done() and not closed.done():
                supervising.result()
        finally:
            listener.close()
            for task in (supervising, closed):
                task.cancel()
            await asyncio.gather(supervising, closed, return_exceptions=True)

    async def _launch(self, session: ScriptSession, path: str) -> None:
        """Have the agent running and knowing its socket; where that fails, the link is of no use."""
        try:
            launched = await session.ask("launch", socket=path, linger=self._target.linger)
            facts = facts_of(await inspect(session))
        except NodeOperationFailed as failure:
            self._report_state("down", f"the agent does not run: {failure}", final=True)
        else:
            waiting = "the agent was started" if launched["started"] else "the agent has not connected yet"
            self._report_state("up", "" if self._channels else waiting, facts=facts)

    async def _supervise(self, transport: NodeTransport, path: str) -> None:
        """Start the agent again whenever it has not been connected for a while."""
        quiet = QUIET_SECONDS
        while not transport.is_closed:
            await self._pause(quiet)
            if self._channels:
                quiet = QUIET_SECONDS
                continue
            with contextlib.suppress(NodeOperationFailed):  # the transport is going, which `_serve` notices
                async with transport.session() as session:
                    await self._launch(session, path)
            quiet = min(2 * quiet, MAX_QUIET_SECONDS)

    async def _relay(self, reader: Any, writer: Any) -> None:
        """One connection of the agent, relayed to the control plane's socket."""
        self._channels += 1
        self._report_state("up")
        try:
            with short_path(self._target.local_socket) as path:
                ours_in, ours_out = await asyncio.open_unix_connection(path)
            try:
                await relay(reader, writer, ours_in, ours_out)
            finally:
                ours_out.close()
        except OSError:
            pass  # nobody listens on our side just now; the agent tries again
        finally:
            self._channels -= 1
            writer.close()

    def _report_state(
        self, state: str, detail: str = "", *, final: bool = False, facts: NodeFacts | None = None
    ) -> None:
        self._report(AgentLinkChanged(self._target.name, state, detail, final, facts))


async def relay(reader: Any, writer: Any, other_reader: Any, other_writer: Any) -> None:
    """Copy between two connections in both directions, until either ends."""
    copies = [asyncio.create_task(_copy(reader, other_writer)), asyncio.create_task(_copy(other_reader, writer))]
    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    for copy in copies:
        copy.cancel()
    for ended in await asyncio.gather(*copies, return_exceptions=True):
        if isinstance(ended, Exception):
            log.warning("a relayed connection broke off: %s: %s", type(ended).__name__, ended)


async def _copy(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError):
        while chunk := await source.read(CHUNK_BYTES):
            target.write(chunk)
            await target.drain()


Node = TypeVar("Node", bound=NodeTarget)
Connection = TypeVar("Connection", bound=NodeConnection)


class NodeWorker(Generic[Node, Connection]):
    """Connections, links and running operations of a child; the next control plane orders all of them again.

    At most `max_operations` operations such as installations run at once, each with one of the `slots`.
    """

    def __init__(
        self,
        connect: Callable[[Node], Connection],
        report: Callable[[AgentLinkChanged | StepDone | RunFinished], None],
        *,
        max_operations: int,
        prepare: Prepare | None = None,
    ) -> None:
        self._connect = connect
        self._report = report
        self._prepare = prepare
        self._connections: dict[str, tuple[Node, Connection]] = {}
        self._links: dict[str, tuple[Node, AgentLink, asyncio.Task[None]]] = {}
        self.slots = asyncio.Semaphore(max_operations)

    def connection_to(self, target: Node) -> Connection:
        """The one connection to a node; another one where the target has changed."""
        known = self._connections.get(target.name)
        if known is None or known[0] != target:
            known = self._connections[target.name] = (target, self._connect(target))
        return known[1]

    def pop_connection(self, target: Node) -> Connection:
        """Unused connection to exactly this target; an existing one if possible."""
        known = self._connections.get(target.name)
        if known is None or known[0] != target:
            return self._connect(target)
        return self._connections.pop(target.name)[1]

    def keep_link(self, target: Node) -> None:
        """Keep the link to this node until it is dropped; one that is kept already is only tried again at once."""
        kept = self._links.get(target.name)
        if kept is not None and kept[0] == target:
            kept[1].retry_now()
            return
        self.drop_link(target.name)
        link = AgentLink(target, self.connection_to(target), self._report, self._prepare)
        task = start_restarted(partial(self._run_link, link, target.name), f"the link to {target.name}")
        self._links[target.name] = (target, link, task)

    def retry_links(self) -> None:
        for _, link, _ in self._links.values():
            link.retry_now()

    def drop_link(self, node: str, target: Node | None = None) -> None:
        """Drop a link, if it is to exactly this `target`. Dropping an unknown link is harmless."""
        kept = self._links.get(node)
        if kept is not None and target in (None, kept[0]):
            self._links.pop(node)[2].cancel()
            self._report(AgentLinkChanged(node, "down", "not wanted"))

    async def _run_link(self, link: AgentLink, node: str) -> None:
        try:
            await link.run()
        except Exception as bug:  # it is reported, and begun again
            self._report(AgentLinkChanged(node, "down", f"a bug: {type(bug).__name__}: {bug}"))
            raise

    def run(self, number: int, name: str, operation: Callable[[Say], Awaitable[RunFinished]]) -> None:
        """Run an operation in the background; its steps and its end are reported."""
        start_logged(self._run(number, name, operation), name)

    async def _run(self, number: int, name: str, operation: Callable[[Say], Awaitable[RunFinished]]) -> None:
        try:
            finished = await operation(lambda step: self._report(StepDone(number, step)))
        except NodeOperationFailed as failure:
            finished = RunFinished(number, problem=str(failure))
        except Exception as bug:  # the outermost place of an operation
            log.exception("%s failed", name)
            finished = RunFinished(number, problem=f"a bug: {type(bug).__name__}: {bug}")
        self._report(finished)
