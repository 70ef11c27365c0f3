"""The link to one node: a connection kept for as long as it is wanted, and the channel of the agent inside it.

Rule 1: a connection that ends is made again, at growing intervals; agents do not notice.
Rule 2: an agent that does not come to the channel is looked after: started when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncssh

from distributed_grid.adapters.shells.dialing import Connection, dial
from distributed_grid.adapters.shells.failures import Failed
from distributed_grid.adapters.shells.installing import facts_of, look
from distributed_grid.adapters.shells.messages import Facts, Linked, Target
from distributed_grid.adapters.shells.remote import Session, open_session, session

FIRST_PAUSE, LAST_PAUSE, FINAL_PAUSE = 0.5, 15.0, 60.0
QUIET_SECONDS, LONGEST_QUIET = 1.5, 60.0
LINGER_SECONDS = 3.0
CHUNK = 1 << 16


class Door:
    """The one connection to a node: opened when somebody needs it, shared, closed when nobody does any more."""

    def __init__(self, target: Target, auth_sock: Callable[[], str]) -> None:
        self._target = target
        self._auth_sock = auth_sock
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._users = 0
        self._closings: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Connection]:
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
    async def talking(self) -> AsyncIterator[Session]:
        """A conversation with the node; a connection that has died without a word is found out here, and replaced."""
        was_open = self.is_open
        async with self.opened() as connection:
            try:
                talk = await open_session(connection.ssh, self._target)
            except Failed:
                if not was_open:
                    raise
                await connection.close()
            else:
                try:
                    yield talk
                finally:
                    talk.close()
                return
        async with self.opened() as connection, session(connection.ssh, self._target) as talk:
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


class Link:
    """Keeps the channel of one node's agent open, and reports how that goes."""

    def __init__(self, target: Target, door: Door, report: Callable[[Linked], None]) -> None:
        self._target = target
        self._door = door
        self._report = report
        self._channels = 0
        self._hurry = asyncio.Event()

    def nudge(self) -> None:
        """Do not wait any longer with whatever is waited with: things may have been mended."""
        self._hurry.set()

    async def _pause(self, seconds: float) -> None:
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def keep(self) -> None:
        """Be linked until cancelled."""
        pause = FIRST_PAUSE
        while True:
            self._tell("connecting")
            try:
                async with self._door.opened() as connection:
                    await self._stay_up(connection)
                pause, failure = FIRST_PAUSE, Failed("the connection was lost", final=False)
            except Failed as found:
                failure = found
            self._tell("down", str(failure), final=failure.final)
            await self._pause(FINAL_PAUSE if failure.final else pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, LAST_PAUSE)

    async def _stay_up(self, connection: Connection) -> None:
        """Make the channel, see to the agent, and return when the connection has ended."""
        async with session(connection.ssh, self._target) as talk:
            path = str((await talk.ask("link"))["socket"])
            listener = await self._listen(connection, path)
            await self._launch(talk, path)
        looking = asyncio.create_task(self._look_after(connection, path))
        closed = asyncio.create_task(connection.wait_closed())
        try:
            await asyncio.wait((looking, closed), return_when=asyncio.FIRST_COMPLETED)
            if looking.done() and not closed.done():
                looking.result()
        finally:
            listener.close()
            for task in (looking, closed):
                task.cancel()
            await asyncio.gather(looking, closed, return_exceptions=True)

    async def _launch(self, talk: Session, path: str) -> None:
        """Have the agent running and knowing its socket; where it does not, the link is of no use."""
        try:
            launched = await talk.ask("launch", socket=path)
            facts = facts_of(await look(talk))
        except Failed as failure:
            self._tell("down", f"the agent does not run: {failure}", final=True)
        else:
            waiting = "the agent was started" if launched["started"] else "the agent has not connected yet"
            self._tell("up", "" if self._channels else waiting, facts=facts)

    async def _listen(self, connection: Connection, path: str) -> asyncssh.SSHListener:
        try:
            return await connection.ssh.start_unix_server(lambda: self._pass_on, path)
        except (asyncssh.ChannelListenError, asyncssh.ChannelOpenError, OSError) as failure:
            raise Failed(
                "its sshd does not forward Unix sockets: allow it there (AllowStreamLocalForwarding yes, "
                f"DisableForwarding no): {failure}"
            ) from failure

    async def _look_after(self, connection: Connection, path: str) -> None:
        """Start the agent again whenever it has not been at the channel for a while."""
        patience = QUIET_SECONDS
        while not connection.is_closed:
            await self._pause(patience)
            if self._channels:
                patience = QUIET_SECONDS
                continue
            with contextlib.suppress(Failed):  # the connection is going: that is seen to elsewhere
                async with session(connection.ssh, self._target) as talk:
                    await self._launch(talk, path)
            patience = min(2 * patience, LONGEST_QUIET)

    async def _pass_on(self, reader: asyncssh.SSHReader[bytes], writer: asyncssh.SSHWriter[bytes]) -> None:
        """One connection of the agent, passed on to the control plane's socket until either end closes it."""
        self._channels += 1
        self._tell("up")
        try:
            with _short(self._target.local_socket) as path:
                ours_in, ours_out = await asyncio.open_unix_connection(path)
            try:
                copies = [asyncio.create_task(_copy(reader, ours_out)), asyncio.create_task(_copy(ours_in, writer))]
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
            finally:
                ours_out.close()
        except OSError:
            pass  # nobody listens on our side just now; the agent tries again
        finally:
            self._channels -= 1
            writer.close()

    def _tell(self, state: str, detail: str = "", *, final: bool = False, facts: Facts | None = None) -> None:
        self._report(Linked(self._target.name, state, detail, final, facts))


async def _copy(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while chunk := await source.read(CHUNK):
            target.write(chunk)
            await target.drain()


@contextlib.contextmanager
def _short(path: str) -> Any:
    """A name for a socket that fits the kernel's limit, however deep its folder is."""
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)
