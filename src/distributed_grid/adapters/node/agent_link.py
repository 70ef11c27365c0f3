"""The link to one node: kept for as long as it is wanted, by whichever way leads there, and the agent's channel in it.

Rule 1: a way that ends is opened again, at growing intervals; agents do not notice.
Rule 2: an agent that does not come to the channel is looked after: started when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.installation import facts_of, look
from distributed_grid.adapters.node.messages import AgentLinkChanged, NodeFacts
from distributed_grid.adapters.node.script_session import ScriptSession
from distributed_grid.posix.unix_sockets import short_path

FIRST_PAUSE, LAST_PAUSE, FINAL_PAUSE = 0.5, 15.0, 60.0
QUIET_SECONDS, LONGEST_QUIET = 1.5, 60.0
CHUNK = 1 << 16
PassOn = Callable[[Any, Any], Awaitable[None]]
"""Serves one connection of the agent: its reader and its writer, as asyncio has them."""


class Listener(Protocol):
    """Somebody who takes connections on a node, until closed."""

    def close(self) -> None: ...


class NodeTransport(Protocol):
    """What leads to a node, open: an SSH connection, or a hand in a Ray cluster."""

    @property
    def is_closed(self) -> bool: ...
    async def wait_closed(self) -> None:
        """Return when it has ended, by itself or not."""

    def talk(self) -> AbstractAsyncContextManager[ScriptSession]:
        """A conversation with the script on the node."""

    async def listen(self, path: str, pass_on: PassOn) -> Listener:
        """Take the agent's connections on this Unix socket of the node; raises Failed where that is not possible."""


class AgentLink:
    """Keeps the channel of one node's agent open, and reports how that goes.

    `opened` makes the way, `socket` is where the channel ends on our side; `prepare` is done whenever a way is open.
    An agent that has been without a link for `linger` seconds, and runs nothing, ends; 0 is never.
    """

    def __init__(
        self,
        node: str,
        opened: Callable[[], AbstractAsyncContextManager[NodeTransport]],
        report: Callable[[AgentLinkChanged], None],
        *,
        socket: str,
        prepare: Callable[[ScriptSession], Awaitable[object]] | None = None,
        linger: float = 0.0,
    ) -> None:
        self._node = node
        self._opened = opened
        self._report = report
        self._socket = socket
        self._prepare = prepare
        self._linger = linger
        self._channels = 0
        self._hurry = asyncio.Event()

    def nudge(self) -> None:
        """Do not wait any longer with whatever is waited with: things may have been mended."""
        self._hurry.set()

    async def _pause(self, seconds: float) -> None:
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def keep(self) -> None:
        """Be linked until cancelled."""
        pause = FIRST_PAUSE
        while True:
            self._tell("connecting")
            try:
                async with self._opened() as way:
                    await self._stay_up(way)
                pause, failure = FIRST_PAUSE, NodeOperationFailed("the connection was lost", final=False)
            except NodeOperationFailed as found:
                failure = found
            self._tell("down", str(failure), final=failure.final)
            await self._pause(FINAL_PAUSE if failure.final else pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, LAST_PAUSE)

    async def _stay_up(self, way: NodeTransport) -> None:
        """Make the channel, see to the agent, and return when the way has ended."""
        async with way.talk() as talk:
            if self._prepare is not None:
                await self._prepare(talk)
            path = str((await talk.ask("link"))["socket"])
            listener = await way.listen(path, self._pass_on)
            await self._launch(talk, path)
        looking = asyncio.create_task(self._look_after(way, path))
        closed = asyncio.create_task(way.wait_closed())
        try:
            await asyncio.wait((looking, closed), return_when=asyncio.FIRST_COMPLETED)
            if looking.done() and not closed.done():
                looking.result()
        finally:
            listener.close()
            for task in (looking, closed):
                task.cancel()
            await asyncio.gather(looking, closed, return_exceptions=True)

    async def _launch(self, talk: ScriptSession, path: str) -> None:
        """Have the agent running and knowing its socket; where it does not, the link is of no use."""
        try:
            launched = await talk.ask("launch", socket=path, linger=self._linger)
            facts = facts_of(await look(talk))
        except NodeOperationFailed as failure:
            self._tell("down", f"the agent does not run: {failure}", final=True)
        else:
            waiting = "the agent was started" if launched["started"] else "the agent has not connected yet"
            self._tell("up", "" if self._channels else waiting, facts=facts)

    async def _look_after(self, way: NodeTransport, path: str) -> None:
        """Start the agent again whenever it has not been at the channel for a while."""
        patience = QUIET_SECONDS
        while not way.is_closed:
            await self._pause(patience)
            if self._channels:
                patience = QUIET_SECONDS
                continue
            with contextlib.suppress(NodeOperationFailed):  # the way is going: that is seen to elsewhere
                async with way.talk() as talk:
                    await self._launch(talk, path)
            patience = min(2 * patience, LONGEST_QUIET)

    async def _pass_on(self, reader: Any, writer: Any) -> None:
        """One connection of the agent, passed on to the control plane's socket until either end closes it."""
        self._channels += 1
        self._tell("up")
        try:
            with short_path(self._socket) as path:
                ours_in, ours_out = await asyncio.open_unix_connection(path)
            try:
                copies = [asyncio.create_task(copy(reader, ours_out)), asyncio.create_task(copy(ours_in, writer))]
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for one in copies:
                    one.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
            finally:
                ours_out.close()
        except OSError:
            pass  # nobody listens on our side just now; the agent tries again
        finally:
            self._channels -= 1
            writer.close()

    def _tell(self, state: str, detail: str = "", *, final: bool = False, facts: NodeFacts | None = None) -> None:
        self._report(AgentLinkChanged(self._node, state, detail, final, facts))


async def copy(source: Any, target: Any) -> None:
    """Pass on what comes until it ends."""
    with contextlib.suppress(OSError):
        while chunk := await source.read(CHUNK):
            target.write(chunk)
            await target.drain()
