"""The agent's end of a link: a control plane that lies, hangs up or says nothing neither breaks nor hangs it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed

from distributed_grid import wire
from distributed_grid.agent.uplink import EndpointUnknown, Timing, Uplink
from distributed_grid.domain.nodes import Usage

WELCOME = wire.Welcome(protocol=wire.PROTOCOL, version="0.2.0", epoch=1, hold_ms=60_000, heartbeat_ms=2_000)
HASTY = Timing(greeting=0.3, silence=0.3, first_pause=0.01, max_pause=0.05, refused_pause=0.05)
Behave = Callable[[ServerConnection], Awaitable[None]]


class Agent:
    """Remembers what it was told."""

    nodes = ("gpu1",)

    def __init__(self) -> None:
        self.welcomes = 0
        self.unlinks = 0
        self.received: list[wire.ToAgent] = []

    def greeting(self, node: str) -> list[wire.AgentHello]:
        return [wire.AgentHello(protocol=wire.PROTOCOL, version="0.2.0", node=node)]

    def welcomed(self, welcome: wire.Welcome) -> None:
        self.welcomes += 1

    def close(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, message: wire.ToAgent) -> None:
        self.received.append(message)

    def unlinked(self) -> None:
        self.unlinks += 1


def play(path: Path, behave: Behave, until: Callable[[Agent], bool], timing: Timing = HASTY) -> Agent:
    """Run a link against a control plane that behaves like this, until something is true; it must come."""

    async def story() -> Agent:
        agent = Agent()

        async def dial() -> ClientConnection:
            if not path.exists():
                raise EndpointUnknown
            return await unix_connect(str(path), "ws://grid/v1/agent", compression=None, ping_interval=None)

        link = Uplink("gpu1", dial, timing)
        running = asyncio.create_task(link.run(agent))
        await asyncio.sleep(0.05)
        async with unix_serve(behave, str(path), compression=None, ping_interval=None):
            async with asyncio.timeout(20):
                while not until(agent):
                    link.received(wire.Heartbeat(node="gpu1", usage=Usage(), beat=5), agent)
                    assert not running.done()
                    await asyncio.sleep(0.02)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return agent

    return asyncio.run(story())


def test_it_waits_for_a_way_greets_and_passes_orders_on(tmp_path: Path) -> None:
    async def behave(link: ServerConnection) -> None:
        hello = wire.decode_from_agent(await link.recv(decode=False))
        assert isinstance(hello, wire.AgentHello)
        await link.send(wire.encode(WELCOME))
        beat = wire.decode_from_agent(await link.recv(decode=False))
        assert isinstance(beat, wire.Heartbeat)
        await link.send(wire.encode(wire.HeartbeatReply(beat=beat.beat, hold_ms=60_000)))
        await link.wait_closed()

    agent = play(tmp_path / "s", behave, lambda agent: wire.HeartbeatReply(beat=5, hold_ms=60_000) in agent.received)
    assert agent.welcomes == 1


def test_a_link_that_breaks_is_made_again(tmp_path: Path) -> None:
    async def behave(link: ServerConnection) -> None:
        await link.recv()
        await link.send(wire.encode(WELCOME))
        link.transport.abort()

    agent = play(tmp_path / "s", behave, lambda agent: agent.welcomes >= 3)
    assert agent.unlinks >= 2


def test_a_control_plane_that_says_nothing_is_not_there(tmp_path: Path) -> None:
    async def mute(link: ServerConnection) -> None:
        await link.recv()
        await link.send(wire.encode(WELCOME))
        await link.wait_closed()

    play(tmp_path / "s", mute, lambda agent: agent.unlinks >= 2)


def test_one_that_never_welcomes_is_asked_again(tmp_path: Path) -> None:
    came = []

    async def mute(link: ServerConnection) -> None:
        came.append(link)
        await link.wait_closed()

    agent = play(tmp_path / "s", mute, lambda agent: len(came) >= 2)
    assert agent.welcomes == 0


@pytest.mark.parametrize(
    "answer",
    [
        wire.RejectAgent("no node is called gpu1"),
        wire.HeartbeatReply(beat=1, hold_ms=1),
        wire.Welcome(protocol=wire.PROTOCOL + 1, version="9", epoch=1, hold_ms=0, heartbeat_ms=2000),
    ],
    ids=["refused", "not welcomed", "another protocol"],
)
def test_a_refusal_is_logged_and_asked_again(
    tmp_path: Path, answer: wire.ToAgent, caplog: pytest.LogCaptureFixture
) -> None:
    came = []

    async def refuse(link: ServerConnection) -> None:
        came.append(link)
        await link.send(wire.encode(answer))
        await link.wait_closed()

    agent = play(tmp_path / "s", refuse, lambda agent: len(came) >= 2)
    assert agent.welcomes == 0
    assert any(word in caplog.text for word in ("no node is called", "did not welcome", "upgrade"))


def test_who_is_refused_after_a_welcome_does_not_hammer(tmp_path: Path) -> None:
    came: list[float] = []

    async def refuse(link: ServerConnection) -> None:
        came.append(time.monotonic())
        await link.recv()
        await link.send(wire.encode(WELCOME))
        await link.recv()
        await link.send(wire.encode(wire.RejectAgent("that cannot be true")))
        await link.wait_closed()

    timing = Timing(first_pause=0.01, max_pause=0.01, refused_pause=0.5)
    agent = play(tmp_path / "s", refuse, lambda agent: len(came) >= 3, timing)
    assert agent.welcomes >= 2
    assert min(later - earlier for earlier, later in itertools.pairwise(came)) >= 0.35


def test_garbage_ends_the_link_and_nothing_else(tmp_path: Path) -> None:
    draw = random.Random(3)

    async def babble(link: ServerConnection) -> None:
        await link.recv()
        if draw.random() < 0.8:
            await link.send(wire.encode(WELCOME))
        for _ in range(3):
            await link.send(draw.randbytes(draw.randrange(1, 200)))
        await link.wait_closed()

    agent = play(tmp_path / "s", babble, lambda agent: agent.welcomes >= 20)
    assert agent.unlinks >= 19


def test_a_link_that_breaks_while_something_is_sent_is_no_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def behave(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):  # the agent leaves first: a slow greeting, or the end of the test
            await connection.recv()
            await connection.send(wire.encode(WELCOME))
            connection.transport.write(b"\x82\x7f" + b"\x7f" + b"\xff" * 7)  # a frame beyond all measure
            connection.transport.pause_reading()  # what the agent says to that is not heard
            await asyncio.sleep(0.1)
            connection.transport.abort()

    play(tmp_path / "s", behave, lambda agent: agent.unlinks >= 12)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
