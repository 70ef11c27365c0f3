"""Uplink of an agent: connects to the control plane, greets it, and connects again whenever the link breaks.

Nothing is lost with a link: unacknowledged reports stay in the agent's outbox and are sent again on the next one. A
control plane that does not answer heartbeats counts as gone, even with an open connection. One that rejects this agent
is dialled again, but seldom; the reason is in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec import Struct
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from distributed_grid import wire
from distributed_grid.errors import GridError, ProtocolError
from distributed_grid.supervision import start_logged

log = logging.getLogger(__name__)


class Timing(Struct, frozen=True):
    """Seconds: limits for an answer, and pauses before the next try."""

    greeting: float = 15.0
    silence: float = 10.0
    first_pause: float = 0.3
    max_pause: float = 5.0
    refused_pause: float = 15.0


class EndpointUnknown(Exception):
    """The address of the control plane is not known yet."""


Dial = Callable[[], Awaitable[ClientConnection]]
"""Opens a connection to the control plane; raises EndpointUnknown, OSError or a WebSocketException."""


class UplinkClient(Protocol):
    """The agent behind the link."""

    def greeting(self, node: str) -> Sequence[wire.FromAgent]:
        """First messages on a link, beginning with the hello."""

    def welcomed(self, welcome: wire.Welcome) -> None: ...
    def send(self, message: wire.ToAgent) -> None: ...
    def unlinked(self) -> None:
        """The link is gone: drop all state of it."""


class Uplink:
    """Keeps one node connected to its control plane for as long as `run` runs."""

    def __init__(self, node: str, dial: Dial, timing: Timing = Timing()) -> None:  # noqa: B008 (it never changes)
        self._node = node
        self._timing = timing
        self._dial = dial
        self._outbox: deque[bytes] = deque()
        self._waiting = asyncio.Event()
        self._is_up = False
        self._last_up = time.monotonic()

    @property
    def seconds_disconnected(self) -> float:
        return 0.0 if self._is_up else time.monotonic() - self._last_up

    def received(self, message: wire.FromAgent, via: wire.AgentSide) -> None:
        """Send a message; without a link it is dropped, because everything important is repeated."""
        if self._is_up and not isinstance(message, wire.AgentHello | wire.AttemptsPage):
            self._outbox.append(wire.encode(message))
            self._waiting.set()

    async def run(self, agent: UplinkClient) -> None:
        """Connect, serve, connect again; ends only when cancelled."""
        timing = self._timing
        pause = timing.first_pause
        while True:
            refused = False
            try:
                async with await self._dial() as connection:
                    await self._serve(connection, agent)
            except EndpointUnknown:
                pause = timing.first_pause
            except ProtocolError as refusal:
                log.error("%s", refusal)
                refused = True
            except (OSError, WebSocketException, TimeoutError, GridError, EOFError) as failure:
                log.info("no link to the control plane: %s", str(failure) or type(failure).__name__)
            except Exception:  # a bug in the handling of one message: the next link may well do better
                log.exception("the link to the control plane failed")
            if self._is_up:
                pause = timing.first_pause
                self._is_up = False
                self._last_up = time.monotonic()
                agent.unlinked()
            if refused:  # also after a welcome: the next hello will be refused again
                pause = timing.refused_pause
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(1.5 * pause, max(pause, timing.max_pause))

    async def _serve(self, connection: ClientConnection, agent: UplinkClient) -> None:
        for part in agent.greeting(self._node):
            await connection.send(wire.encode(part))
        async with asyncio.timeout(self._timing.greeting):
            first = await connection.recv(decode=False)
        welcome = wire.decode_to_agent(first)
        if isinstance(welcome, wire.RejectAgent):
            raise ProtocolError(f"refused by the control plane: {welcome.message}")
        if not isinstance(welcome, wire.Welcome):
            raise ProtocolError("the control plane did not welcome this agent")
        wire.check_greeting(first, mine="this agent", theirs="the control plane")
        log.info("linked to a control plane of version %s, epoch %d", welcome.version, welcome.epoch)
        self._outbox.clear()
        self._is_up = True
        agent.welcomed(welcome)
        sender = start_logged(self._send_all(connection), "sending to the control plane")
        try:
            while True:
                async with asyncio.timeout(self._timing.silence):
                    data = await connection.recv(decode=False)
                message = wire.decode_to_agent(data)
                if isinstance(message, wire.RejectAgent):
                    raise ProtocolError(f"refused by the control plane: {message.message}")
                agent.send(message)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send_all(self, connection: ClientConnection) -> None:
        """Send messages until the link breaks; its receiver has the reason."""
        with contextlib.suppress(OSError, WebSocketException):
            while True:
                await self._waiting.wait()
                self._waiting.clear()
                while self._outbox:
                    await connection.send(self._outbox.popleft())
