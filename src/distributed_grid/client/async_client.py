"""The grid as seen from a program with an event loop: the same socket, the same promises as `client`.

How a façade finds its grid: the files of a state directory, and the config it insists on.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self

from distributed_grid.api.framing import JSON, BrokenFrame, Unpacker, frame
from distributed_grid.client.client import (
    MAX_ATTEMPTS,
    RETRY_SECONDS,
    Client,
    ClientConfig,
    check_peer,
    checked,
    greeting,
)
from distributed_grid.errors import Unreachable
from distributed_grid.posix.unix_sockets import short_path
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:
    from distributed_grid.config import ClusterConfig


_LOST = (ConnectionError, FileNotFoundError, EOFError, BrokenFrame)


class AsyncClient:
    """Asks the control plane; every call has a connection of its own, so calls never wait for each other."""

    def __init__(self, places: StateDir, config: ClientConfig) -> None:
        self._places = places
        self._config = config

    async def start(self) -> None:
        """Make sure that a control plane runs and takes our config."""
        with Client(self._places, self._config) as client:
            await asyncio.to_thread(client.call, "get_daemon_info")

    async def greet(self) -> dict[str, Any]:
        """What the control plane says of itself and its nodes when it is met."""
        return await self._with_a_line(_welcome_of)

    async def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One question, one answer; asked again when the control plane went away before it answered."""

        async def ask(line: _FramedStream) -> dict[str, Any]:
            line.send({"op": op, **arguments})
            _, body = await line.next()
            return checked(json.loads(body))

        return await self._with_a_line(ask)

    async def _with_a_line(self, use: Callable[[_FramedStream], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        for _ in range(MAX_ATTEMPTS):
            try:
                async with _FramedStream(self._places, self._config) as line:
                    return await use(line)
            except _LOST:
                await asyncio.sleep(RETRY_SECONDS)
                await self.start()
        raise Unreachable("the control plane does not answer; see `grid daemon status`")

    async def stream(self, op: str, **arguments: Any) -> AsyncIterator[tuple[bytes, bytes | dict[str, Any]]]:
        """The frames of a long answer as they come; the last one is the JSON message with `"done": true`."""
        try:
            async with _FramedStream(self._places, self._config) as line:
                line.send({"op": op, **arguments})
                while True:
                    kind, body = await line.next()
                    if kind != JSON:
                        yield kind, body
                        continue
                    message = checked(json.loads(body))
                    yield kind, message
                    if message.get("done"):
                        return
        except _LOST as lost:
            await self.start()
            raise Unreachable("the connection to the control plane was lost") from lost


async def _welcome_of(line: _FramedStream) -> dict[str, Any]:
    return line.welcome


class _FramedStream:
    """One connection, greeted."""

    def __init__(self, places: StateDir, config: ClientConfig) -> None:
        self._places = places
        self._config = config
        self._frames: list[tuple[bytes, bytes]] = []
        self._unpacker = Unpacker()
        self.welcome: dict[str, Any] = {}

    async def __aenter__(self) -> _FramedStream:
        with short_path(self._places.socket) as path:
            self._reader, self._writer = await asyncio.open_unix_connection(path)
        try:
            check_peer(self._writer.get_extra_info("socket"))
            self.send(greeting(self._config))
            _, body = await self.next()
            self.welcome = checked(json.loads(body))
            if self.welcome.get("handing_over"):
                raise ConnectionResetError
        except BaseException:
            self._writer.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def send(self, message: dict[str, Any]) -> None:
        self._writer.write(frame(JSON, json.dumps(message).encode()))

    async def next(self) -> tuple[bytes, bytes]:
        while not self._frames:
            chunk = await self._reader.read(1 << 18)
            if not chunk:
                raise EOFError
            self._frames += self._unpacker.feed(chunk)
        return self._frames.pop(0)


def locate_grid(
    config: ClusterConfig | None, state_dir: str | os.PathLike[str] | None
) -> tuple[StateDir, ClientConfig]:
    """Where the control plane of this config is reached; without a config it is whichever one runs."""
    places = StateDir(state_dir)
    path = config.file_for(places.state_dir / "configs") if config is not None else None
    return places, ClientConfig(path, explicit=path is not None)


class GridSession:
    """What holds the way to the control plane and nothing else; in an `async with` it is started and stopped."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`ssh_manager` may be left out: the control plane holds the SSH connections."""
        self.config = cluster_config
        self._places, self._wanted = locate_grid(cluster_config, state_dir)
        self._client = AsyncClient(self._places, self._wanted)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Attach to the control plane, starting one where none runs. Safe to call twice."""
        await self._client.start()

    async def stop(self) -> None:
        """Let go of the grid; what was borrowed stays borrowed until it is given back or its time is over."""
