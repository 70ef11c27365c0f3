"""A keeper's grip on one server at a time: the link to it, what is said and heard over it, and its end.

Rule 1. That the server is gone is heard by reading, once for each link; saying something to one that is gone is no
        error.
Rule 2. Before a server serves, nothing but its introduction and a farewell is said to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.control_messages import (
    Begin,
    ControlSocket,
    Go,
    HeldCopy,
    Leave,
    Message,
    ServerReady,
)
from distributed_grid.memory.supervisor.process import Launched

TakeIn = Callable[[Message, list[int]], None]


class ServerLink:
    """The link to the server that runs, if one does. `take_in` is called with all it says, `gone` when it has ended."""

    def __init__(self, take_in: TakeIn, gone: Callable[[], None]) -> None:
        self._take_in = take_in
        self._gone = gone
        self._link: ControlSocket | None = None
        self._launched: Launched | None = None
        self._heard = asyncio.Event()
        self.serving: ServerReady | None = None

    @property
    def is_linked(self) -> bool:
        """Whether somebody is at the other end, for all that is known."""
        return self._link is not None

    def take(self, link: ControlSocket, launched: Launched | None) -> None:
        """Hear this server from now on; `launched` where this process started it."""
        self._link = link
        self._launched = launched
        self.serving = None
        asyncio.get_running_loop().add_reader(link.fileno(), self._hear, link)

    def let_go(self) -> None:
        """Hear it no more, and leave it to itself; safe twice."""
        if self._link is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._link.fileno())
            loop.remove_writer(self._link.fileno())
            self._link.close()
            self._link = None
        self.serving = None
        self._heard.set()

    def bury(self) -> None:
        """Collect a server that has ended, where this process started it."""
        if self._launched is not None:
            self._launched.bury()

    def end(self) -> None:
        """End the server that serves, and let go of it."""
        assert self.serving is not None
        pid = self.serving.pid
        self.let_go()
        if self._launched is not None:
            self._launched.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def say(self, message: Message, fds: list[int] | None = None) -> None:
        """Have the server hear this; nothing happens where there is none that could."""
        if self._link is None or (self.serving is None and not isinstance(message, Begin | HeldCopy | Go | Leave)):
            return
        with contextlib.suppress(OSError):  # the end is heard of by reading
            self._link.send(message, fds or [])
            if self._link.waits_to_send:
                asyncio.get_running_loop().add_writer(self._link.fileno(), self._go_on_sending, self._link)

    def _go_on_sending(self, link: ControlSocket) -> None:
        done = True
        with contextlib.suppress(OSError):
            done = link.flush()
        if done:
            asyncio.get_running_loop().remove_writer(link.fileno())

    def _hear(self, link: ControlSocket) -> None:
        try:
            for message, fds in link.receive():
                self._take_in(message, fds)
                self._heard.set()
        except (EOFError, OSError, ProtocolError):
            if link is self._link:
                self._gone()

    async def until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait for what the server says or does; whether it came in time."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                while not reached():
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            return reached()
        return True

    async def until_serving(self, seconds: float) -> bool:
        """Wait until it serves or is gone; False where neither came in time."""
        return await self.until(lambda: self.serving is not None or self._link is None, seconds)
