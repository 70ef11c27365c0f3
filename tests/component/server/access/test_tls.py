"""TLS at the server's end, against real clients: whole messages of any size, and an end for whoever breaks off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from distributed_grid.server.access.tls import BUFFER_BYTES, TlsConnection, ensure_certificate, server_context

LARGE = bytes(range(256)) * 20_000


class Echo(asyncio.Protocol):
    """Sends back what it gets, and reads on only in turns where `in_turns`."""

    def __init__(self, *, in_turns: bool = False) -> None:
        self.in_turns = in_turns
        self.received = 0
        self.ends: list[str] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        assert self.transport.is_reading()
        self.received += len(data)
        self.transport.write(data)
        if self.in_turns:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(0.001, self.transport.resume_reading)

    def eof_received(self) -> None:
        self.ends.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append("lost")


class Serving:
    def __init__(self, port: int, trust: ssl.SSLContext, protocol: Echo) -> None:
        self.port = port
        self.trust = trust
        self.protocol = protocol

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trust)


@asynccontextmanager
async def serving(folder: Path, *, in_turns: bool = False, handshake_seconds: float = 15.0) -> AsyncIterator[Serving]:
    made = ensure_certificate(folder, [])
    context, protocol = server_context(made.certificate, made.key), Echo(in_turns=in_turns)
    server = await asyncio.get_running_loop().create_server(
        lambda: TlsConnection(context, protocol, memoryview(bytearray(BUFFER_BYTES)), handshake_seconds), "127.0.0.1", 0
    )
    trust = ssl.create_default_context(cafile=made.certificate)
    try:
        yield Serving(server.sockets[0].getsockname()[1], trust, protocol)
    finally:
        server.close()


async def end(writer: asyncio.StreamWriter) -> None:
    """Close a connection, whatever the other end has done to it."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_large_messages_come_back_whole(tmp_path: Path, in_turns: bool, version: ssl.TLSVersion) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, in_turns=in_turns) as server:
            server.trust.minimum_version = server.trust.maximum_version = version
            reader, writer = await server.connect()
            for message in (b"x", b"hello", LARGE):
                writer.write(message)
                assert await reader.readexactly(len(message)) == message
            await end(writer)
            while "lost" not in server.protocol.ends:
                await asyncio.sleep(0.01)

    run(scenario)


def test_a_close_is_said_in_tls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(b"x")
            await reader.readexactly(1)
            assert server.protocol.transport is not None
            server.protocol.transport.write(LARGE)
            server.protocol.transport.close()
            server.protocol.transport.close()
            assert await reader.read(-1) == LARGE  # a truncation would raise
            await end(writer)
            while "lost" not in server.protocol.ends:
                await asyncio.sleep(0.01)

    run(scenario)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(300), b"\0" * 100_000])
def test_another_protocol_is_ended_and_reaches_nobody(tmp_path: Path, noise: bytes) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(noise)
            with contextlib.suppress(ConnectionError):
                await reader.read(-1)
            await end(writer)
            assert server.protocol.transport is None

    run(scenario)


def test_a_handshake_that_is_not_made_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, handshake_seconds=0.1) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read(-1) == b""
            await end(writer)

    run(scenario)


def test_damaged_records_end_the_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(b"x")
            await reader.readexactly(1)
            os.write(writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
            while "lost" not in server.protocol.ends:
                await asyncio.sleep(0.01)
            assert server.protocol.received == 1
            await end(writer)

    run(scenario)
