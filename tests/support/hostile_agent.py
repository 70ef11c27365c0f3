"""An agent that lies: over a node's real link it says everything that its protocol has a type for, and falsely."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed

from distributed_grid import __version__, wire
from distributed_grid.domain.nodes import Usage
from tests.support.largest_messages import lies, members, typical

ANSWER_SECONDS = 20.0


class HostileAgent:
    """Speaks as `node`, through the socket of its link; `victims` are names of others: nodes, attempts, copies.

    `fence` is that of an attempt of a victim. Each lie is waited for, until the control plane has answered what came
    after it, or has hung up; then the next link begins with an honest greeting, unless that is the lie.
    """

    def __init__(self, link: Path, node: str, victims: tuple[str, ...], fence: int) -> None:
        self._link = link
        self._node = node
        self._victims = victims
        self._fence = fence
        self.heard: Counter[str] = Counter()
        self._beats = itertools.count(10**9)

    def all_lies(self) -> Iterator[tuple[type, str, bytes]]:
        """Every lie about every field of every type of message, once."""
        strings = {
            "node": self._node,
            "boot": "liar",
            "version": __version__,
            "lease_id": self._victims[-1],
            "attempts": self._victims[-1],
            "copies": "liar:1",
            "on_disk": "liar:2",
            "source": "liar:1",
            "host": "127.0.0.1",
            "digest": "0" * 64,
            "incarnation": "liar",
        }
        for kind in members(wire.FromAgent):
            honest = typical(kind, strings)
            if kind is wire.AgentHello:
                honest = replace(honest, protocol=wire.PROTOCOL, epoch=0)
            if hasattr(honest, "fence"):
                honest = replace(honest, fence=self._fence)
            told: set[bytes] = set()
            for field, lie in lies(honest, self._victims):
                if lie not in told:
                    told.add(lie)
                    yield kind, field, lie

    async def tell_all(self) -> None:
        """Say all of it."""
        link: ClientConnection | None = None
        for kind, field, lie in self.all_lies():
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    if link is None or kind is wire.AgentHello:
                        link = await self._greet(link, honestly=kind is not wire.AgentHello)
                    heard = await self._answer_to(link, lie)
            except TimeoutError:
                raise AssertionError(f"no answer after {kind.__name__}.{field}: {lie[:200]!r}") from None
            self.heard[heard] += 1
            if heard != "taken":
                await link.close()
                link = None
        if link is not None:
            await link.close()

    async def _greet(self, before: ClientConnection | None, *, honestly: bool) -> ClientConnection:
        if before is not None:
            await before.close()
        link = await self._connect()
        if honestly:
            await link.send(
                wire.encode(wire.AgentHello(protocol=wire.PROTOCOL, version=__version__, node=self._node, boot="liar"))
            )
            await link.send(wire.encode(wire.Heartbeat(node=self._node, usage=Usage(), beat=1)))
        return link

    async def _answer_to(self, link: ClientConnection, lie: bytes) -> str:
        beat = next(self._beats)
        try:
            await link.send(lie)
            await link.send(wire.encode(wire.Heartbeat(node=self._node, usage=Usage(), beat=beat)))
            while True:
                answer = wire.decode_to_agent(await link.recv(decode=False))
                if isinstance(answer, wire.RejectAgent):
                    return "rejected"
                if isinstance(answer, wire.HeartbeatReply) and answer.beat == beat:
                    return "taken"
        except ConnectionClosed:
            return "hung up"

    async def _connect(self) -> ClientConnection:
        folder = os.open(self._link.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            short = f"/proc/self/fd/{folder}/{self._link.name}"
            return await unix_connect(short, "ws://grid/v1/agent", compression=None, max_size=None, ping_interval=None)
        finally:
            os.close(folder)
