"""The shared SSH connection to a node: sessions with the script there, and the agent's socket forwarded through it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncssh

from distributed_grid.adapters.node.node_messages import NodeOperationFailed
from distributed_grid.adapters.node.node_worker import Listener, NodeConnection, NodeTransport, ServeConnection
from distributed_grid.adapters.node.script_session import BOOT, SCRIPT, ScriptSession
from distributed_grid.adapters.ssh.process import SshTarget
from distributed_grid.adapters.ssh.ssh_connection import SshConnection, connect
from distributed_grid.supervision import start_logged

IDLE_SECONDS = 3.0
OPEN_SECONDS = 15.0
NO_PYTHON, NOT_THIS_PYTHON = 97, 98
# The first line of the input is the interpreter that the config names (or nothing), the second those to look for.
# No newline and no `!`, so that it passes every login shell unharmed. The script needs nothing that is installed there,
# and what packages have the interpreter do at its start (-S) may take longer than all else.
COMMAND = (
    "exec /bin/sh -c '"
    "IFS= read -r wanted; IFS= read -r names; "
    f'boot="{BOOT}"; '
    'case $wanted in "~/"*) wanted=$HOME/${wanted#??};; esac; '
    'if [ -n "$wanted" ]; then command -v "$wanted" >/dev/null || exit 98; exec "$wanted" -I -S -c "$boot"; fi; '
    "PATH=$PATH:/usr/local/bin:$HOME/.local/bin; "
    'for name in $names; do if "$name" -I -S -c "" </dev/null >/dev/null 2>&1; '
    'then exec "$name" -I -S -c "$boot"; fi; done; '
    "command -v python3 >/dev/null || exit 97; "
    'exec python3 -I -S -c "$boot"'
    "'"
)


def interpreters() -> list[str]:
    """The interpreters to look for, ours first: what is installed here then fits there."""
    names = [f"python{major}.{minor}" for major, minor in ((3, 13), (3, 12), (3, 11))]
    ours = "python{}.{}".format(*sys.version_info[:2])
    return [ours, *(name for name in names if name != ours)]


class SshScriptSession(ScriptSession):
    """A session with the script on a node, on a channel of an SSH connection."""

    def __init__(self, process: asyncssh.SSHClientProcess[bytes], target: SshTarget) -> None:
        super().__init__(target.grid, target.name)
        self._process = process
        self._python = target.python

    @property
    def streams(self) -> tuple[Any, Any]:
        """What comes from the program that the script has become, and where to write to it."""
        return self._process.stdout, self._process.stdin

    async def send_script(self, script: bytes) -> None:
        """Say which interpreter to use, and send it the script."""
        await self._write(f"{self._python}\n{' '.join(interpreters())}\n{len(script)}\n".encode() + script)

    def close(self) -> None:
        """End the session; the script ends with it. Safe to call twice."""
        self._process.close()

    async def _write(self, data: bytes) -> bool:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (OSError, asyncssh.Error):
            return False
        return True

    async def _read_line(self) -> bytes:
        try:
            line = await self._process.stdout.readline()
        except (OSError, ValueError, asyncssh.Error) as failure:
            raise NodeOperationFailed(f"the connection was lost: {failure}", final=False) from failure
        if not line:
            raise NodeOperationFailed(await self._last_words())
        return line

    async def _last_words(self) -> str:
        """Why the script is over without an answer."""
        said = (await self._process.stderr.read(64 * 1024)).decode(errors="replace").strip().splitlines()
        done = await self._process.wait()
        if done.exit_status == NO_PYTHON:
            return "it has no Python; install Python 3.11 or newer there, or set `python:` for this node"
        if done.exit_status == NOT_THIS_PYTHON:
            return f"it has no {self._python} (`python:` of this node)"
        if done.exit_status is None:
            return "the connection was lost while it worked"
        return f"its shell ended with {done.exit_status}" + (f": {said[-1][:300]}" if said else "")


async def start_session(connection: SshConnection, target: SshTarget, script: bytes | None = None) -> SshScriptSession:
    """A script on a node, running until the session is closed; by default the one for agents."""
    if "\n" in target.python:
        raise NodeOperationFailed("the name of an interpreter has no line breaks")
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            process = await connection.ssh.create_process(
                COMMAND, encoding=None, request_pty=False, env={}, send_env=()
            )
    except TimeoutError:
        raise NodeOperationFailed(f"its shell did not start within {OPEN_SECONDS:g} s", final=False) from None
    except (asyncssh.Error, OSError) as failure:
        raise NodeOperationFailed(f"its shell could not be started: {failure}", final=False) from failure
    session = SshScriptSession(process, target)
    await session.send_script(script or SCRIPT.read_bytes())
    return session


@asynccontextmanager
async def script_session(
    connection: SshConnection, target: SshTarget, script: bytes | None = None
) -> AsyncIterator[SshScriptSession]:
    """A script on a node, running for as long as this lasts."""
    session = await start_session(connection, target, script)
    try:
        yield session
    finally:
        session.close()


class SharedSshConnection(NodeConnection):
    """The one connection to a node: opened when somebody needs it, shared, closed when nobody does any more."""

    def __init__(self, target: SshTarget, auth_sock: Callable[[], str]) -> None:
        self._target = target
        self._auth_sock = auth_sock
        self._connection: SshConnection | None = None
        self._opening = asyncio.Lock()
        self._users = 0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[SshConnection]:
        """The connection, for as long as this lasts; raises NodeOperationFailed where it cannot be made."""
        self._users += 1
        try:
            async with self._opening:
                if self._connection is None or self._connection.is_closed:
                    self._connection = await connect(self._target, self._auth_sock())
                connection = self._connection
            yield connection
        finally:
            self._users -= 1
            if not self._users:
                asyncio.get_running_loop().call_later(IDLE_SECONDS, self._close_unused)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[NodeTransport]:
        async with self.connected() as connection:
            yield SshTransport(connection, self._target)

    @asynccontextmanager
    async def session(self, script: bytes | None = None) -> AsyncIterator[SshScriptSession]:
        """A session with the node; a connection that has died without a word is found out here, and replaced."""
        was_open = self.is_open
        async with self.connected() as connection:
            try:
                session = await start_session(connection, self._target, script)
            except NodeOperationFailed:
                if not was_open:
                    raise
                await connection.close()
            else:
                try:
                    yield session
                finally:
                    session.close()
                return
        async with self.connected() as connection, script_session(connection, self._target, script) as session:
            yield session

    @property
    def is_open(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    async def close(self) -> None:
        """Close it now, unless somebody uses it; safe to call twice."""
        if not self._users and self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    def _close_unused(self) -> None:
        start_logged(self.close(), f"the end of an unused connection to {self._target.name}")


class SshTransport(NodeTransport):
    """What an agent's link needs of an SSH connection."""

    def __init__(self, connection: SshConnection, target: SshTarget) -> None:
        self._connection = connection
        self._target = target

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    async def wait_closed(self) -> None:
        await self._connection.wait_closed()

    def session(self) -> AbstractAsyncContextManager[SshScriptSession]:
        return script_session(self._connection, self._target)

    async def listen(self, path: str, serve: ServeConnection) -> Listener:
        try:
            return await self._connection.ssh.start_unix_server(lambda: serve, path)
        except (asyncssh.ChannelListenError, asyncssh.ChannelOpenError, OSError) as failure:
            raise NodeOperationFailed(
                "its sshd does not forward Unix sockets: allow it there (AllowStreamLocalForwarding yes, "
                f"DisableForwarding no): {failure}"
            ) from failure
