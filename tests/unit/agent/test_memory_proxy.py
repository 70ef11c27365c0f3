"""The desk of an agent: programs of its machine ask about memory there, and get the control plane's answers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from distributed_grid.agent.memory_proxy import HEAD, MemoryQueryProxy
from distributed_grid.wire import MAX_QUERY_BYTES, MemoryQuery, MemoryReply


class Asked(list[MemoryQuery]):
    """The questions that would go over the link."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def tell(self, question: MemoryQuery) -> None:
        self.append(question)
        self.came.set()

    async def next(self) -> MemoryQuery:
        async with asyncio.timeout(5):
            await self.came.wait()
        self.came.clear()
        return self[-1]


@asynccontextmanager
async def a_desk(folder: Path) -> AsyncIterator[tuple[MemoryQueryProxy, Asked]]:
    asked = Asked()
    made = MemoryQueryProxy(folder / "memory" / "query.sock", asked.tell)
    await made.start()
    try:
        yield made, asked
    finally:
        await made.stop()
        await made.stop()


async def send(
    desk: MemoryQueryProxy, body: bytes, kind: bytes = b"J"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(desk.path)
    writer.write(HEAD.pack(len(body), kind) + body)
    return reader, writer


async def received(reader: asyncio.StreamReader) -> dict:
    async with asyncio.timeout(5):
        length, kind = HEAD.unpack(await reader.readexactly(HEAD.size))
        assert kind == b"J"
        return json.loads(await reader.readexactly(length))


def test_a_question_goes_over_the_link_as_it_is_and_its_answer_comes_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_desk(tmp_path) as (desk, asked):
            reader, writer = await send(desk, b'{"op": "list_blocks"}')
            question = await asked.next()
            assert question.body == b'{"op": "list_blocks"}'
            desk.answered(MemoryReply(question.number, b'{"blocks": []}'))
            desk.answered(MemoryReply(question.number, b'{"again": true}'))
            desk.answered(MemoryReply(999, b"{}"))
            assert await received(reader) == {"blocks": []}
            writer.close()
            assert desk.path.stat().st_mode & 0o777 == 0o600
        assert not desk.path.exists()

    asyncio.run(story())


def test_several_programs_get_each_their_own_answer(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_desk(tmp_path) as (desk, asked):
            lines = []
            for number in range(5):
                lines.append(await send(desk, f'{{"n": {number}}}'.encode()))
                await asked.next()
            for question in reversed(asked):
                desk.answered(MemoryReply(question.number, question.body))
            for number, (reader, writer) in enumerate(lines):
                assert await received(reader) == {"n": number}
                writer.close()

    asyncio.run(story())


def test_a_link_that_breaks_is_told_as_unreachable_so_that_the_program_asks_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_desk(tmp_path) as (desk, asked):
            reader, writer = await send(desk, b"{}")
            await asked.next()
            desk.unlinked()
            assert (await received(reader))["error"]["type"] == "Unreachable"
            writer.close()

    asyncio.run(story())


@pytest.mark.parametrize(("length", "kind"), [(MAX_QUERY_BYTES + 1, b"J"), (2, b"O")])
def test_what_is_no_question_ends_its_connection_and_no_other(tmp_path: Path, length: int, kind: bytes) -> None:
    async def story() -> None:
        async with a_desk(tmp_path) as (desk, asked):
            reader, writer = await asyncio.open_unix_connection(desk.path)
            writer.write(HEAD.pack(length, kind) + b"{}")
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
            reader, writer = await send(desk, b"{}")
            desk.answered(MemoryReply((await asked.next()).number, b"{}"))
            assert await received(reader) == {}
            writer.close()
            assert len(asked) == 1

    asyncio.run(story())


def test_a_socket_that_another_agent_left_is_replaced(tmp_path: Path) -> None:
    async def story() -> None:
        left = tmp_path / "memory" / "query.sock"
        left.parent.mkdir(mode=0o700)
        left.write_text("left behind")
        async with a_desk(tmp_path) as (desk, _):
            assert not desk.path.is_file()

    asyncio.run(story())


def test_a_path_longer_than_the_kernel_takes_is_no_hindrance(tmp_path: Path) -> None:
    async def story() -> None:
        deep = tmp_path / ("long-" * 20) / ("longer-" * 10)
        deep.mkdir(parents=True)
        async with a_desk(deep) as (desk, _):
            assert len(os.fsencode(desk.path)) > 108
            assert desk.path.is_socket()

    asyncio.run(story())
