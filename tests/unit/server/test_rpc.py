"""One client's connection: malformed requests are refused, and the daemon's memory for a client is bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from distributed_grid.api.framing import JSON, MAX_FRAME_BYTES, Unpacker, frame
from distributed_grid.server.rpc import MAX_WAITING_BYTES, Connection

Serve = Callable[[Connection, list[bytes]], Awaitable[None]]


@asynccontextmanager
async def connected(serve: Serve) -> AsyncIterator[tuple[socket.socket, set[Connection]]]:
    """A client's end of a connection, and the connections that are open at the other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connections: set[Connection] = set()
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: Connection(serve, connections), theirs
    )
    try:
        yield ours, connections
    finally:
        ours.close()
        transport.abort()
        await asyncio.sleep(0)


async def flood(client: socket.socket, data: bytes) -> int:
    """Send this over and over until the other end hangs up; how many bytes that were."""
    sent = 0
    async with asyncio.timeout(60):
        while True:
            try:
                await asyncio.get_running_loop().sock_sendall(client, data)
            except ConnectionError:
                return sent
            sent += len(data)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_client_that_queues_requests_without_end_is_cut_off() -> None:
    async def scenario() -> None:
        async def never(client: Connection, bodies: list[bytes]) -> None:
            await asyncio.Event().wait()

        async with connected(never) as (client, connections):
            assert await flood(client, frame(JSON, b"x" * 100_000)) < 2 * MAX_WAITING_BYTES
            await until(lambda: not connections)

    asyncio.run(scenario())


def test_tiny_requests_count_too() -> None:
    async def scenario() -> None:
        async def never(client: Connection, bodies: list[bytes]) -> None:
            await asyncio.Event().wait()

        async with connected(never) as (client, _):
            assert await flood(client, frame(JSON, b"") * 10_000) < MAX_WAITING_BYTES

    asyncio.run(scenario())


def test_a_client_that_reads_no_answers_gets_no_more_of_them() -> None:
    async def scenario() -> None:
        answered = 0

        async def answer(client: Connection, bodies: list[bytes]) -> None:
            nonlocal answered
            for _ in bodies:
                answered += 1
                client.send({"answer": "y" * 100_000})
                await client.drain()

        async with connected(answer) as (client, _):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, frame(JSON, b"{}") * 1_000)
            await until(lambda: answered > 0)
            await asyncio.sleep(0.05)
            assert answered < 100
            unpacker, read = Unpacker(), 0
            async with asyncio.timeout(60):
                while read < 1_000:
                    read += len(list(unpacker.feed(await loop.sock_recv(client, 1 << 20))))
            assert answered == 1_000

    asyncio.run(scenario())


def test_an_answer_that_is_too_long_is_refused_in_one_line(tmp_path: Path) -> None:
    async def serve(client: Connection, bodies: list[bytes]) -> None:
        for body in bodies:
            client.send({"text": "x" * json.loads(body)})

    async def story() -> None:
        loop = asyncio.get_running_loop()
        path = str(tmp_path / "socket")
        server = await loop.create_unix_server(lambda: Connection(serve, set()), path)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame(JSON, str(MAX_FRAME_BYTES).encode()) + frame(JSON, b"3"))
        answers = Unpacker()
        found: list[dict[str, object]] = []
        while len(found) < 2:
            found += [json.loads(body) for _, body in answers.feed(await reader.read(1 << 20))]
        assert found[0]["error"]["type"] == "Refused"  # type: ignore[index]
        assert "ask for less" in found[0]["error"]["message"]  # type: ignore[index]
        assert found[1] == {"text": "xxx"}
        writer.close()
        server.close()

    asyncio.run(asyncio.wait_for(story(), 30))
