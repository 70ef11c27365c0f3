"""HTTP on a socket that listens already, inside the daemon's own event loop; agents' WebSockets go to their door."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from distributed_grid.server.context import DaemonContext
from distributed_grid.server.rest.app import make_app

FIRST_WORD_SECONDS = 15.0
LEAVE_SECONDS = 0.5
MOST_AT_ONCE = 2000
OpenDoor = Callable[[], asyncio.Protocol]


class UvicornServer:
    """Serves until it is stopped; `stop` is safe to call twice and takes about a second at most."""

    def __init__(
        self,
        listener: socket.socket,
        house: DaemonContext,
        *,
        is_known_host: Callable[[str], bool],
        open_door: OpenDoor,
        certificate: tuple[Path, Path] | None,
    ) -> None:
        def connection(**given: Any) -> asyncio.Protocol:
            return _Connection(self._server.transports, **given)

        def door(**_: Any) -> asyncio.Protocol:
            return open_door()

        config = uvicorn.Config(
            cast(Any, make_app(house, is_known_host)),
            http=cast(type[asyncio.Protocol], connection),
            ws=cast(type[asyncio.Protocol], door),
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=MOST_AT_ONCE,
            ssl_certfile=certificate[0] if certificate else None,
            ssl_keyfile=str(certificate[1]) if certificate else None,
        )
        self._listener = listener
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        gc.freeze()

    async def stop(self) -> None:
        """Let nobody new in, give answers under way a moment, cut streams and agents off."""
        self._server.ending.set()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=4 * LEAVE_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is under way, such as a stream somebody follows."""
        return bool(self._server.server_state.tasks)


class _Server(uvicorn.Server):
    """uvicorn without its own signals, clock and manner of leaving."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()
        self.transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        """The connections made so far, those of agents included."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LEAVE_SECONDS)
        for transport in list(self.transports):
            transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LEAVE_SECONDS)


class _Connection(H11Protocol):
    """A connection that is remembered, and that has to ask something within a while."""

    def __init__(self, known: weakref.WeakSet[asyncio.Transport], **given: Any) -> None:
        super().__init__(**given)
        self._known = known

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._known.add(transport)
        self.loop.call_later(FIRST_WORD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        asked: object = self.cycle
        if asked is None and self in self.connections:
            self.transport.abort()
