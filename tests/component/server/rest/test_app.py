"""The HTTP server against slow and many clients: what arrives too slowly is cut off, and no peer takes all there is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from distributed_grid.posix.sockets import MAX_REFUSALS, LimitedListener
from distributed_grid.server.rest.app import UvicornServer

SOON = {"headers": 0.5, "body": 0.5}
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"


def small_app() -> Starlette:
    async def get(request: Request) -> JSONResponse:
        return JSONResponse({"said": "hello"})

    async def slow(request: Request) -> JSONResponse:
        await asyncio.sleep(1.5)
        return JSONResponse({"said": "at last"})

    async def post(request: Request) -> JSONResponse:
        return JSONResponse({"bytes": len(await request.body())})

    return Starlette(
        routes=[Route("/", get, methods=["GET"]), Route("/slow", slow), Route("/", post, methods=["POST"])]
    )


@asynccontextmanager
async def serving(max_per_peer: int = 100) -> AsyncIterator[int]:
    listener = LimitedListener.of(socket.create_server(("127.0.0.1", 0)), max_per_peer)
    port: int = listener.getsockname()[1]
    server = UvicornServer(listener, small_app(), agent_endpoint=asyncio.Protocol, tls=None, arrival_seconds=SOON)
    server.start()
    try:
        yield port
    finally:
        await server.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    """Status and body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def cut_off(reader: asyncio.StreamReader) -> None:
    """Wait until the connection is ended, without an answer."""
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""


async def trickle(writer: asyncio.StreamWriter) -> None:
    for _ in range(99):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "after another"])
@pytest.mark.parametrize("begun", [GET[:20], POST, POST + b"x" * 50], ids=["headers", "no body", "half a body"])
def test_a_request_that_does_not_arrive_is_cut_off(before: bytes, begun: bytes) -> None:
    async def scenario() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(before)
            if before:
                assert (await answer_of(reader))[0] == 200
            started = time.monotonic()
            writer.write(begun)
            await cut_off(reader)
            assert time.monotonic() - started < 4
            writer.close()

    run(scenario)


def test_a_body_that_trickles_in_is_cut_off_too() -> None:
    async def scenario() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST)
            trickling = asyncio.create_task(trickle(writer))
            await cut_off(reader)
            assert not trickling.done() or isinstance(trickling.exception(), ConnectionError)
            trickling.cancel()
            writer.close()

    run(scenario)


def test_what_arrives_in_time_is_answered_however_long_that_takes() -> None:
    async def scenario() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for part in (POST, b"x" * 50, b"y" * 50):
                writer.write(part)
                await asyncio.sleep(0.1)
            assert await answer_of(reader) == (200, {"bytes": 100})
            writer.write(GET.replace(b"/ ", b"/slow "))
            assert await answer_of(reader) == (200, {"said": "at last"})
            writer.close()

    run(scenario)


def test_a_peer_with_too_many_connections_is_refused_and_let_in_again_later() -> None:
    async def scenario() -> None:
        async with serving(max_per_peer=3) as port:
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for reader, writer in kept:
                writer.write(GET)
                assert (await answer_of(reader))[0] == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            status, body = await answer_of(reader)
            assert status == 429
            assert "127.0.0.1 has 3 connections already, which is the limit" in json.dumps(body)
            assert await reader.read() == b""
            writer.close()
            for reader, writer in kept:  # those it has still work
                writer.write(GET)
                assert (await answer_of(reader))[0] == 200
            kept.pop()[1].close()
            await asyncio.sleep(0.1)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            assert (await answer_of(reader))[0] == 200
            for _, one in (*kept, (reader, writer)):
                one.close()

    run(scenario)


def test_a_flood_of_one_peer_leaves_room_for_others() -> None:
    async def scenario() -> None:
        async with serving(max_per_peer=5) as port:
            flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5 + MAX_REFUSALS + 50)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            writer.write(GET)
            assert (await answer_of(reader))[0] == 200
            for _, one in (*flood, (reader, writer)):
                one.close()

    run(scenario)
