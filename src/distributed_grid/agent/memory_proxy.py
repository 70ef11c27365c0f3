"""Where programs of this node ask about memory: a socket that passes their questions on to the control plane.

A node has no other way to the control plane than its agent's link, and nothing but the memory pool can be asked for on
it. Questions and answers are frames as on the control plane's own socket: four bytes of length, a letter, JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

from distributed_grid.posix.unix_sockets import is_own_peer, short_path
from distributed_grid.wire import MAX_QUERY_BYTES, MemoryQuery, MemoryReply

ANSWER_SECONDS = 60.0
MOST_AT_ONCE = 256
HEAD = struct.Struct(">I1s")


class MemoryQueryProxy:
    """Serves the programs of one login; `tell` is where their questions go."""

    def __init__(self, path: Path, tell: Callable[[MemoryQuery], None]) -> None:
        self.path = path
        self._tell = tell
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; what another agent left of the socket is replaced."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.unlink(missing_ok=True)
        with short_path(self.path) as name:
            self._server = await asyncio.start_unix_server(self._serve, name)
        self.path.chmod(0o600)

    async def stop(self) -> None:
        """Listen no more; safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self.path.unlink(missing_ok=True)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def answered(self, answer: MemoryReply) -> None:
        """Pass an answer on; one that nobody waits for any more is dropped."""
        waiting = self._waiting.pop(answer.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.body)

    def unlinked(self) -> None:
        """The link is gone, and with it the answers: whoever waits may ask again."""
        for number in tuple(self._waiting):
            self.answered(MemoryReply(number, _no_answer("the link to the control plane was lost")))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= MOST_AT_ONCE and is_own_peer(writer.get_extra_info("socket")):
                await self._talk(reader, writer)
        except (OSError, EOFError):
            pass  # the program went away, or did not speak our language
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            length, kind = HEAD.unpack(await reader.readexactly(HEAD.size))
            if length > MAX_QUERY_BYTES or kind != b"J":
                return
            body = await self._asked(await reader.readexactly(length))
            writer.write(HEAD.pack(len(body), b"J") + body)
            await writer.drain()

    async def _asked(self, body: bytes) -> bytes:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._tell(MemoryQuery(number, body))
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._waiting[number]
        except TimeoutError:
            return _no_answer("the control plane did not answer")
        finally:
            self._waiting.pop(number, None)


def _no_answer(why: str) -> bytes:
    return json.dumps({"error": {"type": "Unreachable", "message": why, "exit_code": 3}}).encode()
