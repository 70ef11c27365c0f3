"""The agents' door: whatever comes in, it neither breaks nor hangs, and lets in only who may."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from distributed_grid import wire
from distributed_grid.adapters.clock import GridClock
from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.grid import Grid
from distributed_grid.domain.nodes import Usage
from distributed_grid.server.access.agent_sockets import MAX_CONNECTIONS, MAX_STRANGERS, AgentConnections, AgentSockets
from distributed_grid.server.access.agent_websocket import AgentWebSocket

HELLO = wire.AgentHello(protocol=wire.PROTOCOL, version="0.2.0", node="gpu1")


class Reception:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[wire.FromAgent] = []
        self.lost: list[wire.AgentSide] = []
        self.refused: list[str] = []
        self.via: wire.AgentSide | None = None

    def received(self, message: wire.FromAgent, via: wire.AgentSide) -> None:
        self.heard.append(message)
        self.via = via
        if isinstance(message, wire.Heartbeat):
            via.send(wire.HeartbeatReply(beat=message.beat, hold_ms=0))

    def rejected(self, why: str, via: wire.AgentSide) -> None:
        self.refused.append(why)

    def gone(self, via: wire.AgentSide) -> None:
        self.lost.append(via)


def admit(path: str, headers: Mapping[str, str]) -> str | None:
    return "gpu1" if headers.get("authorization") == "Bearer right" else None


@asynccontextmanager
async def a_door(hello_seconds: float = 15) -> AsyncIterator[tuple[Reception, int]]:
    reception = Reception()
    server = await asyncio.get_running_loop().create_server(
        lambda: AgentWebSocket(reception, admit, hello_seconds=hello_seconds), "127.0.0.1", 0
    )
    try:
        yield reception, server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def a_link(port: int, key: str = "right") -> ClientConnection:
    headers = {"Authorization": f"Bearer {key}"}
    return await connect(f"ws://127.0.0.1:{port}/v1/agent", additional_headers=headers, compression=None, proxy=None)


def test_a_greeted_agent_is_heard_and_answered() -> None:
    async def story() -> None:
        async with a_door() as (reception, port), await a_link(port) as link:
            await link.send(wire.encode(HELLO))
            await link.send(wire.encode(wire.Heartbeat(node="gpu1", usage=Usage(), beat=7)))
            assert wire.decode_to_agent(await link.recv(decode=False)) == wire.HeartbeatReply(beat=7, hold_ms=0)
            assert reception.heard[0] == HELLO
            assert reception.via.nodes == ("gpu1",)
        await asyncio.sleep(0.05)
        assert len(reception.lost) == 1

    asyncio.run(story())


def test_who_has_no_key_is_not_let_in() -> None:
    async def story() -> None:
        async with a_door() as (reception, port):
            with pytest.raises(InvalidStatus) as refused:
                await a_link(port, "wrong")
            assert refused.value.response.status_code == 401
            assert reception.heard == []

    asyncio.run(story())


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (wire.encode(wire.Heartbeat(node="gpu1", usage=Usage())), "does not speak|greets"),
        (wire.encode(wire.AgentHello(protocol=99, version="9", node="gpu1")), "upgrade"),
        (wire.encode(wire.AgentHello(protocol=wire.PROTOCOL, version="0", node="gpu2")), "gpu1's, not gpu2's"),
        (b"", "does not speak"),
        (b"\xff" * 5000, "does not speak"),
    ],
)
def test_a_wrong_greeting_is_refused_with_a_sentence(first: bytes, says: str) -> None:
    async def story() -> None:
        async with a_door() as (reception, port), await a_link(port) as link:
            await link.send(first)
            refusal = wire.decode_to_agent(await link.recv(decode=False))
            assert isinstance(refusal, wire.RejectAgent)
            assert any(word in refusal.message for word in says.split("|")), refusal
            with pytest.raises(ConnectionClosed):
                await link.recv()
            assert reception.heard == []
            assert reception.refused == [refusal.message]

    asyncio.run(story())


def test_greeting_twice_ends_the_link() -> None:
    async def story() -> None:
        async with a_door() as (_, port), await a_link(port) as link:
            await link.send(wire.encode(HELLO))
            await link.send(wire.encode(HELLO))
            assert isinstance(wire.decode_to_agent(await link.recv(decode=False)), wire.RejectAgent)

    asyncio.run(story())


def test_a_message_in_fragments_counts_and_one_without_end_does_not() -> None:
    async def story() -> None:
        async with a_door() as (reception, port), await a_link(port) as link:
            raw = wire.encode(HELLO)
            await link.send([raw[:3], raw[3:9], raw[9:]])
            await asyncio.sleep(0.05)
            assert reception.heard == [HELLO]

            async def endless():
                for _ in range(200):
                    yield b"\0" * 100_000

            async def talk_on() -> None:
                await link.send(endless())
                await link.recv()

            with pytest.raises(ConnectionClosed):
                await talk_on()

    asyncio.run(story())


def test_random_bytes_neither_break_nor_hang_the_door() -> None:
    """Before the upgrade, and after it; whoever comes next is served."""

    async def throw(port: int, data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        try:
            async with asyncio.timeout(5):
                await reader.read()
        except ConnectionError:
            pass
        writer.close()

    async def story() -> None:
        draw = random.Random(7)
        failures: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        upgrade = (
            b"GET /v1/agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Authorization: Bearer right\r\n\r\n"
        )
        async with a_door() as (_, port):
            for _ in range(150):
                await throw(port, draw.randbytes(draw.randrange(300)))
                await throw(port, upgrade + draw.randbytes(draw.randrange(300)))
                await throw(port, upgrade[: draw.randrange(len(upgrade))])
            async with await a_link(port) as link:
                await link.send(wire.encode(HELLO))
                await link.send(wire.encode(wire.Heartbeat(node="gpu1", usage=Usage(), beat=9)))
                assert wire.decode_to_agent(await link.recv(decode=False)) == wire.HeartbeatReply(beat=9, hold_ms=0)
        assert failures == []

    asyncio.run(story())


def test_who_never_greets_is_shown_out() -> None:
    async def story() -> None:
        async with a_door(hello_seconds=0.2) as (_, port), await a_link(port) as link:
            with pytest.raises(ConnectionClosed):
                async with asyncio.timeout(5):
                    await link.recv()

    asyncio.run(story())


def test_who_does_not_read_is_cut_off() -> None:
    async def story() -> None:
        async with a_door() as (reception, port):
            raw = socket.create_connection(("127.0.0.1", port))
            raw.setblocking(False)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link = await connect(
                f"ws://127.0.0.1:{port}/v1/agent", sock=raw, proxy=None, compression=None, max_queue=1,
                additional_headers={"Authorization": "Bearer right"},
            )  # fmt: skip
            await link.send(wire.encode(HELLO))
            await asyncio.sleep(0.05)
            link.transport.pause_reading()
            for number in range(400):
                reception.via.send(wire.FetchedChunk(number, b"x" * wire.MAX_CHUNK_BYTES))
            async with asyncio.timeout(10):
                while not reception.lost:
                    await asyncio.sleep(0.02)
            link.transport.abort()

    asyncio.run(story())


def test_of_the_connections_of_one_node_the_newest_stay() -> None:
    async def story() -> None:
        connections = AgentConnections()
        server = await asyncio.get_running_loop().create_server(
            lambda: AgentWebSocket(Reception(), admit, on_admitted=connections.add, on_close=connections.discard),
            "127.0.0.1",
            0,
        )
        port = server.sockets[0].getsockname()[1]
        links = [await a_link(port) for _ in range(MAX_CONNECTIONS + 2)]
        for oldest in links[:2]:
            with pytest.raises(ConnectionClosed, match="more than 4 connections of gpu1"):
                await asyncio.wait_for(oldest.recv(), 5)
        for link in links[2:]:
            await (await link.ping())
        connections.close("gpu1", "revoked")
        for link in links[2:]:
            with pytest.raises(ConnectionClosed, match="revoked"):
                await asyncio.wait_for(link.recv(), 5)
        server.close()

    asyncio.run(story())


def test_a_nodes_socket_takes_so_many_strangers_and_says_so_to_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        sockets = AgentSockets(tmp_path / "links", AgentGateway(Grid(InMemoryStore(), GridClock())))
        await sockets.open(["gpu1", "gpu2"])
        path = str(sockets.path_of("gpu1"))
        silent = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS + MAX_STRANGERS)]
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_unix_connection(path)
        answer = (await asyncio.wait_for(reader.read(), 5)).decode()
        assert answer.startswith("HTTP/1.1 429 ")
        assert answer.endswith("too many connections to the socket of gpu1\n")
        writer.close()
        other, its_writer = await asyncio.open_unix_connection(str(sockets.path_of("gpu2")))
        its_writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not (await asyncio.wait_for(other.readline(), 5)).startswith(b"HTTP/1.1 429")
        for _, one in (*silent, (other, its_writer)):
            one.close()
        await sockets.close()

    asyncio.run(story())
