"""Memory queries of programs go over the agent's link, and the control plane's replies come back."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from distributed_grid.agent.lent_memory import HEADER, MemoryQueryProxy
from distributed_grid.wire import MAX_CHUNK_BYTES, MAX_QUERY_BYTES, MemoryQuery, MemoryReply


class SentQueries(list[MemoryQuery]):
    """The questions that would go over the link."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def send(self, question: MemoryQuery) -> None:
        self.append(question)
        self.came.set()

    async def next(self) -> MemoryQuery:
        async with asyncio.timeout(5):
            await self.came.wait()
        self.came.clear()
        return self[-1]


@asynccontextmanager
async def a_proxy(folder: Path) -> AsyncIterator[tuple[MemoryQueryProxy, SentQueries]]:
    queries = SentQueries()
    made = MemoryQueryProxy(folder / "memory" / "query.sock", queries.send, check_seconds=0.1)
    await made.start()
    try:
        yield made, queries
    finally:
        await made.stop()
        await made.stop()


async def send(
    proxy: MemoryQueryProxy, body: bytes, kind: bytes = b"J"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(proxy.path)
    writer.write(HEADER.pack(len(body), kind) + body)
    return reader, writer


async def received(reader: asyncio.StreamReader) -> dict:
    async with asyncio.timeout(5):
        length, kind = HEADER.unpack(await reader.readexactly(HEADER.size))
        assert kind == b"J"
        return json.loads(await reader.readexactly(length))


def test_a_question_goes_over_the_link_as_it_is_and_its_answer_comes_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_proxy(tmp_path) as (proxy, queries):
            reader, writer = await send(proxy, b'{"op": "list_blocks"}')
            question = await queries.next()
            assert question.body == b'{"op": "list_blocks"}'
            proxy.deliver(MemoryReply(question.number, b'{"blocks": []}'))
            proxy.deliver(MemoryReply(question.number, b'{"again": true}'))
            proxy.deliver(MemoryReply(999, b"{}"))
            assert await received(reader) == {"blocks": []}
            writer.close()
            assert proxy.path.stat().st_mode & 0o777 == 0o600
        assert not proxy.path.exists()

    asyncio.run(story())


def test_an_answer_in_parts_is_passed_on_as_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_proxy(tmp_path) as (proxy, queries):
            reader, writer = await send(proxy, b"{}")
            question = await queries.next()
            body = json.dumps({"blocks": ["x" * 600_000]}).encode()
            parts = [body[at : at + MAX_CHUNK_BYTES] for at in range(0, len(body), MAX_CHUNK_BYTES)]
            for part in parts:
                proxy.deliver(MemoryReply(question.number, part, part is not parts[-1]))
            assert await received(reader) == json.loads(body)
            writer.close()

    asyncio.run(story())


def test_several_programs_get_each_their_own_answer(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_proxy(tmp_path) as (proxy, queries):
            lines = []
            for number in range(5):
                lines.append(await send(proxy, f'{{"n": {number}}}'.encode()))
                await queries.next()
            for question in reversed(queries):
                proxy.deliver(MemoryReply(question.number, question.body))
            for number, (reader, writer) in enumerate(lines):
                assert await received(reader) == {"n": number}
                writer.close()

    asyncio.run(story())


def test_a_link_that_breaks_is_told_as_unreachable_so_that_the_program_asks_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_proxy(tmp_path) as (proxy, queries):
            reader, writer = await send(proxy, b"{}")
            await queries.next()
            proxy.fail_pending()
            assert (await received(reader))["error"]["type"] == "Unreachable"
            writer.close()

    asyncio.run(story())


@pytest.mark.parametrize(("length", "kind"), [(MAX_QUERY_BYTES + 1, b"J"), (2, b"O")])
def test_what_is_no_question_ends_its_connection_and_no_other(tmp_path: Path, length: int, kind: bytes) -> None:
    async def story() -> None:
        async with a_proxy(tmp_path) as (proxy, queries):
            reader, writer = await asyncio.open_unix_connection(proxy.path)
            writer.write(HEADER.pack(length, kind) + b"{}")
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
            reader, writer = await send(proxy, b"{}")
            proxy.deliver(MemoryReply((await queries.next()).number, b"{}"))
            assert await received(reader) == {}
            writer.close()
            assert len(queries) == 1

    asyncio.run(story())


def test_a_socket_that_another_agent_left_is_replaced(tmp_path: Path) -> None:
    async def story() -> None:
        left = tmp_path / "memory" / "query.sock"
        left.parent.mkdir(mode=0o700)
        left.write_text("left behind")
        async with a_proxy(tmp_path) as (proxy, _):
            assert not proxy.path.is_file()

    asyncio.run(story())


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_socket_that_is_gone_is_made_anew_and_who_is_connected_stays_so(tmp_path: Path, replaced: bool) -> None:
    async def story() -> None:
        async with a_proxy(tmp_path) as (proxy, queries):
            early, writer = await send(proxy, b"{}")
            first = await queries.next()
            keeping = asyncio.create_task(proxy.keep_listening())
            proxy.path.unlink()
            if replaced:
                proxy.path.write_text("somebody else's")
            async with asyncio.timeout(30):
                while not proxy.path.is_socket():
                    await asyncio.sleep(0.05)
            late, another = await send(proxy, b"{}")
            second = await queries.next()
            for number, reader in ((first.number, early), (second.number, late)):
                proxy.deliver(MemoryReply(number, b'{"answer": 1}'))
                assert await received(reader) == {"answer": 1}
            for one in (writer, another):
                one.close()
            keeping.cancel()

    asyncio.run(story())


def test_a_proxy_that_stops_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_proxy(tmp_path) as (proxy, _), a_proxy(tmp_path) as (successor, _):
            await proxy.stop()
            assert successor.path.is_socket()

    asyncio.run(story())


def test_a_path_longer_than_the_kernel_takes_is_no_hindrance(tmp_path: Path) -> None:
    async def story() -> None:
        deep = tmp_path / ("long-" * 20) / ("longer-" * 10)
        deep.mkdir(parents=True)
        async with a_proxy(deep) as (proxy, _):
            assert len(os.fsencode(proxy.path)) > 108
            assert proxy.path.is_socket()

    asyncio.run(story())
