"""Proxy for memory queries of programs on this node: a Unix socket whose requests go to the control plane.

A node has no other way to the control plane than its agent's link, and only the memory pool can be queried on it.
Requests and replies are frames as on the control plane's own socket: four bytes of length, a letter, JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path

from distributed_grid.posix.unix_sockets import is_own_peer, short_path
from distributed_grid.wire import MAX_QUERY_BYTES, MAX_REPLY_BYTES, MemoryQuery, MemoryReply

REPLY_SECONDS = 60.0
CHECK_SECONDS = 2.0
MAX_CONNECTIONS = 256
HEADER = struct.Struct(">I1s")
log = logging.getLogger(__name__)


class MemoryQueryProxy:
    """Serves the programs of one user; `send` is where their queries go."""

    def __init__(
        self, path: Path, send: Callable[[MemoryQuery], None], *, check_seconds: float = CHECK_SECONDS
    ) -> None:
        self.path = path
        self._check_seconds = check_seconds
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._parts: dict[int, bytearray] = {}
        self._server: asyncio.Server | None = None
        self._inode = 0  # of its socket; 0 where it has none
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; a socket that another agent left is replaced."""
        self._close()
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.unlink(missing_ok=True)
        with short_path(self.path) as name:
            self._server = await asyncio.start_unix_server(self._serve, name)
        self.path.chmod(0o600)
        self._inode = self.path.stat().st_ino

    async def keep_listening(self) -> None:
        """Listen anew whenever the socket is gone or somebody else's; who is connected stays so."""
        while True:
            await asyncio.sleep(self._check_seconds)
            if not self._is_there():
                log.warning("%s was removed or replaced: it is made anew", self.path)
                await self.start()

    async def stop(self) -> None:
        """Stop listening; safe to call twice."""
        self._close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_there(self) -> bool:
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def _close(self) -> None:
        """Stop accepting; the socket of another agent stays."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._is_there():
            self.path.unlink(missing_ok=True)
        self._inode = 0

    def deliver(self, reply: MemoryReply) -> None:
        """Pass a reply on when its last part is there; one that nobody waits for any more is dropped."""
        if reply.number not in self._waiting:
            return
        parts = self._parts.setdefault(reply.number, bytearray())
        parts += reply.body
        if reply.more and len(parts) <= MAX_REPLY_BYTES:
            return
        waiting = self._waiting.pop(reply.number)
        del self._parts[reply.number]
        if not waiting.done():
            waiting.set_result(_unreachable("the answer is too long") if reply.more else bytes(parts))

    def fail_pending(self) -> None:
        """The link is gone, and with it the replies: whoever waits may ask again."""
        self._parts.clear()
        for number in tuple(self._waiting):
            self.deliver(MemoryReply(number, _unreachable("the link to the control plane was lost")))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= MAX_CONNECTIONS and is_own_peer(writer.get_extra_info("socket")):
                await self._serve_queries(reader, writer)
        except (OSError, EOFError):
            pass  # the program went away, or does not speak this protocol
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve_queries(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            length, kind = HEADER.unpack(await reader.readexactly(HEADER.size))
            if length > MAX_QUERY_BYTES or kind != b"J":
                return
            body = await self._query(await reader.readexactly(length))
            writer.write(HEADER.pack(len(body), b"J") + body)
            await writer.drain()

    async def _query(self, body: bytes) -> bytes:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(MemoryQuery(number, body))
            async with asyncio.timeout(REPLY_SECONDS):
                return await self._waiting[number]
        except TimeoutError:
            return _unreachable("the control plane did not answer")
        finally:
            self._waiting.pop(number, None)
            self._parts.pop(number, None)


def _unreachable(why: str) -> bytes:
    return json.dumps({"error": {"type": "Unreachable", "message": why, "exit_code": 3}}).encode()
