"""Clients of the control plane's socket that façades build on: for an event loop, and for plain methods in threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from distributed_grid.client.client import Client, check_peer
from distributed_grid.client.conversation import (
    LOST,
    MAX_ATTEMPTS,
    READ_BYTES,
    RETRY_SECONDS,
    ClientConfig,
    Conversation,
    JsonObject,
    Part,
    ReconnectBackoff,
    answer_of,
    connection_lost,
    encode,
    hello,
    is_last,
    no_answer,
)
from distributed_grid.client.operations import AsyncOperations, Operations, keeps_config
from distributed_grid.client.transports import Transport
from distributed_grid.errors import GridError, Unreachable
from distributed_grid.posix.sockets import short_path
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:
    from distributed_grid.client.operations import ReadLogsFields
    from distributed_grid.config import ClusterConfig

T = TypeVar("T")
_LOST = (*LOST, FileNotFoundError)


class AsyncClient(AsyncOperations):
    """Client of the control plane; every call has a connection of its own, so calls never wait for each other."""

    def __init__(self, state_dir: StateDir, config: ClientConfig, connect: Callable[[], Client] | None = None) -> None:
        """`connect` makes the blocking client that starts a control plane where none runs."""
        self._state_dir = state_dir
        self._config = config
        self._connect = connect or partial(Client, state_dir, config)

    async def start(self) -> None:
        """Make sure that a control plane runs and has our config."""
        with self._connect() as client:
            await asyncio.to_thread(client.get_daemon_info)

    async def greet(self) -> JsonObject:
        """The control plane's answer to our hello: its version, its config and its nodes."""
        return await self._exchange(None, any_config=False)

    async def call(self, op: str, **arguments: Any) -> JsonObject:
        """One request, one answer; sent again when the control plane went away before it answered."""
        return await self._exchange(encode({"op": op, **arguments}), any_config=keeps_config(op))

    async def _exchange(self, request: bytes | None, *, any_config: bool) -> JsonObject:
        for _ in range(MAX_ATTEMPTS):
            try:
                async with _Connection(self._state_dir, self._config, any_config=any_config) as connection:
                    if request is None:
                        return connection.welcome
                    connection.send(request)
                    return answer_of((await connection.next_part())[1])
            except _LOST:
                await asyncio.sleep(RETRY_SECONDS)
                await self.start()
        raise no_answer()

    async def stream(self, op: str, **arguments: Any) -> AsyncIterator[tuple[bytes, Part]]:
        """The frames of a long answer as they come; the last one is the JSON message with `"done": true`."""
        try:
            any_config = keeps_config(op)
            async with _Connection(self._state_dir, self._config, any_config=any_config) as connection:
                connection.send(encode({"op": op, **arguments}))
                while True:
                    kind, part = await connection.next_part()
                    yield kind, part
                    if is_last(part):
                        return
        except _LOST as lost:
            await self.start()
            raise connection_lost() from lost


class AsyncioTransport(Transport):
    """The grid for coroutines of the running event loop."""

    def __init__(self, client: AsyncClient, state_dir: StateDir) -> None:
        super().__init__(state_dir)
        self._client = client

    async def greet(self) -> JsonObject:
        return await self._client.greet()

    async def call(self, op: str, **arguments: Any) -> JsonObject:
        return await self._client.call(op, **arguments)

    async def follow_logs(self, position: Callable[[], ReadLogsFields]) -> AsyncIterator[tuple[bytes, Part]]:
        backoff = ReconnectBackoff()
        while True:
            try:
                async for kind, part in self._client.read_logs(**position()):
                    backoff.reset()
                    yield kind, part
                return
            except Unreachable as loss:  # the control plane went away: the next one knows the job
                await asyncio.sleep(backoff.delay_after(loss))

    async def withdraw(self, *, job: str = "", lease: str = "") -> None:
        with contextlib.suppress(GridError):
            if job:
                await asyncio.shield(self._client.cancel_job(job_id=job))
            else:
                await asyncio.shield(self._client.release_lease(allocation_id=lease, exact=True))

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)


class _Connection:
    """One connection to the control plane; entering it connects and exchanges hellos."""

    def __init__(self, state_dir: StateDir, config: ClientConfig, *, any_config: bool) -> None:
        self._state_dir = state_dir
        self._config = config
        self._any_config = any_config
        self._conversation = Conversation()

    @property
    def welcome(self) -> JsonObject:
        return self._conversation.welcome

    async def __aenter__(self) -> Self:
        with short_path(self._state_dir.socket) as path:
            self._reader, self._writer = await asyncio.open_unix_connection(path)
        try:
            check_peer(self._writer.get_extra_info("socket"))
            self.send(encode(hello(self._config, any_config=self._any_config)))
            self._conversation.accept_welcome((await self.next_part())[1])
        except BaseException:
            self._writer.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def send(self, request: bytes) -> None:
        self._writer.write(request)

    async def next_part(self) -> tuple[bytes, Part]:
        while (part := self._conversation.next_part()) is None:
            self._conversation.receive(await self._reader.read(READ_BYTES))
        return part


def locate_grid(
    config: ClusterConfig | None, state_dir: str | os.PathLike[str] | None
) -> tuple[StateDir, ClientConfig]:
    """The state directory and client config of a grid; without a config it is the one that runs."""
    directory = StateDir(state_dir)
    path = config.file_for(directory.root / "configs") if config is not None else None
    return directory, ClientConfig(path, explicit=path is not None)


class GridSession:
    """Base of the façades: a client of the control plane and nothing else; `async with` starts and stops it."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`ssh_manager` may be left out: the control plane holds the SSH connections."""
        self.config = cluster_config
        self._state_dir, self._client_config = locate_grid(cluster_config, state_dir)
        self._client = AsyncClient(self._state_dir, self._client_config)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Attach to the control plane, starting one where none runs. Safe to call twice."""
        await self._client.start()

    async def stop(self) -> None:
        """Detach from the grid; leases stay until they are released or expire."""


class BlockingSession(Operations):
    """Calls the control plane from any thread, starting one where none runs. Each thread has a client of its own, so
    that a long call delays no other."""

    def __init__(
        self, cluster_config: ClusterConfig | None = None, *, state_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._place = locate_grid(cluster_config, state_dir)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._clients: list[Client] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, op: str, **arguments: Any) -> JsonObject:
        """One request, one answer; sent again when the control plane went away before it answered."""
        return self._client().call(op, **arguments)

    def stream(self, op: str, **arguments: Any) -> Iterator[tuple[bytes, Part]]:
        """The frames of a long answer as they come; the last one is the JSON message with `"done": true`."""
        return self._client().stream(op, **arguments)

    def _client(self) -> Client:
        """The client of this thread."""
        client: Client | None = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = Client(*self._place)
            with self._lock:
                self._clients.append(client)
        return client

    def async_client(self) -> AsyncClient:
        """A client of the same control plane for an event loop."""
        return AsyncClient(*self._place)

    def close(self) -> None:
        """Disconnect; a later call connects again. Safe to call twice."""
        with self._lock:
            clients, self._clients, self._local = self._clients, [], threading.local()
        for client in clients:
            client.close()
