"""The way to a node by SSH: one connection, shared by all who need it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import asyncssh

from distributed_grid.adapters.node.agent_link import Listener, NodeTransport, PassOn
from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import Target
from distributed_grid.adapters.ssh.connection import SshConnection, dial
from distributed_grid.adapters.ssh.script_process import ScriptProcess, open_session, session

LINGER_SECONDS = 3.0


class SharedSshConnection:
    """The one connection to a node: opened when somebody needs it, shared, closed when nobody does any more."""

    def __init__(self, target: Target, auth_sock: Callable[[], str]) -> None:
        self._target = target
        self._auth_sock = auth_sock
        self._connection: SshConnection | None = None
        self._opening = asyncio.Lock()
        self._users = 0
        self._closings: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[SshConnection]:
        """The connection, for as long as this lasts; raises Failed where it cannot be made."""
        self._users += 1
        try:
            async with self._opening:
                if self._connection is None or self._connection.is_closed:
                    self._connection = await dial(self._target, self._auth_sock())
                connection = self._connection
            yield connection
        finally:
            self._users -= 1
            if not self._users:
                asyncio.get_running_loop().call_later(LINGER_SECONDS, self._close_unused)

    @asynccontextmanager
    async def way(self) -> AsyncIterator[NodeTransport]:
        """The connection, as a link needs it."""
        async with self.opened() as connection:
            yield SshTransport(connection, self._target)

    @asynccontextmanager
    async def talking(self, script: bytes | None = None) -> AsyncIterator[ScriptProcess]:
        """A conversation with the node; a connection that has died without a word is found out here, and replaced."""
        was_open = self.is_open
        async with self.opened() as connection:
            try:
                talk = await open_session(connection.ssh, self._target, script)
            except NodeOperationFailed:
                if not was_open:
                    raise
                await connection.close()
            else:
                try:
                    yield talk
                finally:
                    talk.close()
                return
        async with self.opened() as connection, session(connection.ssh, self._target, script) as talk:
            yield talk

    @property
    def is_open(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    async def close(self) -> None:
        """Hang up now, unless somebody uses it; safe to call twice."""
        if not self._users and self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    def _close_unused(self) -> None:
        task = asyncio.ensure_future(self.close())
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)


class SshTransport(NodeTransport):
    """What a link needs of a connection."""

    def __init__(self, connection: SshConnection, target: Target) -> None:
        self._connection = connection
        self._target = target

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    async def wait_closed(self) -> None:
        await self._connection.wait_closed()

    def talk(self) -> AbstractAsyncContextManager[ScriptProcess]:
        return session(self._connection.ssh, self._target)

    async def listen(self, path: str, pass_on: PassOn) -> Listener:
        try:
            return await self._connection.ssh.start_unix_server(lambda: pass_on, path)
        except (asyncssh.ChannelListenError, asyncssh.ChannelOpenError, OSError) as failure:
            raise NodeOperationFailed(
                "its sshd does not forward Unix sockets: allow it there (AllowStreamLocalForwarding yes, "
                f"DisableForwarding no): {failure}"
            ) from failure
