"""One client's connection to the socket: requests in, answers out, in order, with back-pressure."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from distributed_grid.api.framing import JSON, BrokenFrame, Unpacker, frame
from distributed_grid.errors import GridError, error_view
from distributed_grid.posix.unix_sockets import is_own_peer, peer_uid

MAX_REQUEST_BYTES = 8 * 1024 * 1024
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class Connection(asyncio.Protocol):
    """Answers one client, one request after the other; a client that hangs up cancels the request being answered."""

    def __init__(self, serve: Callable[[Connection, bytes], Awaitable[None]], connections: set[Connection]) -> None:
        self._serve = serve
        self._connections = connections
        self._unpacker = Unpacker(MAX_REQUEST_BYTES)
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer: socket.socket = transport.get_extra_info("socket")
        if not is_own_peer(peer):
            log.warning("a connection of uid %d was refused", peer_uid(peer))
            transport.abort()
            return
        self._connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            for kind, body in self._unpacker.feed(data):
                if kind != JSON:
                    raise BrokenFrame(f"clients send JSON, not {kind!r}")
                self._messages.put_nowait(body)
        except BrokenFrame as broken:
            log.warning("a client broke the protocol: %s", broken)
            self.close()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @property
    def has_unanswered(self) -> bool:
        """Whether a request has not been answered yet."""
        return self._busy or not self._messages.empty()

    async def _run(self) -> None:
        while True:
            body = await self._messages.get()
            self._busy = True
            try:
                await self._serve(self, body)
            except GridError as error:
                self.send({"error": error_view(error)})
            except Exception:  # the outermost loop of a client: a bug is reported and logged, the other clients go on
                log.exception("a request failed")
                self.send({"error": {"type": "Bug", "message": "the control plane has a bug; see its log"}})
            finally:
                self._busy = False

    def send(self, message: Any) -> None:
        """Send a JSON message."""
        self.send_frame(JSON, encode_answer(message))

    def send_frame(self, kind: bytes, body: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(kind, body))

    async def drain(self) -> None:
        """Wait until the client has received what was sent."""
        await self._writable.wait()


def encode_answer(message: Any) -> bytes:
    """A message as JSON."""
    return _encoder.encode(message)
