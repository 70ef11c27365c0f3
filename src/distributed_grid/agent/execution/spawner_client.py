"""Hands attempts over to a spawner, and sees to it that there is one.

Rule 1. One spawner at a time: the next begins when the last is gone, and the later, the more of them died young.
Rule 2. What is handed over to a spawner that dies is not lost: its channel ends, and whoever listens there asks again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from distributed_grid.agent.execution.spawner import SpawnerLink
from distributed_grid.errors import BadInput


class SpawnerClient:
    """The way from the one host of a root to its spawner; `do` runs what has to be done meanwhile."""

    def __init__(
        self, root: str, *, use_cgroups: bool, patience_s: float, do: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._root = root
        self._patience_s = patience_s
        self._do = do
        self._link = SpawnerLink(root, use_cgroups=use_cgroups)
        self._linked = asyncio.Event()

    @property
    def spawner_pid(self) -> int:
        return self._link.pid

    async def take_root(self) -> None:
        """Become the root's one host; `BadInput` where there is another, and stays."""
        try:  # a predecessor's spawner may need a moment to see that it is alone
            await asyncio.wait_for(until(self._link.take_root), self._patience_s)
        except TimeoutError as error:
            self._link.leave_root()
            raise BadInput(f"{self._root} is in use by another agent") from error

    def begin(self) -> None:
        """Start a spawner."""
        self._link.begin()
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._spawner_gone)
        self._linked.set()

    async def end(self) -> None:
        """End the spawner, wait until it is gone, and let go of the root; the shims go on."""
        if self._link.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._link.fileno())
        self._linked.clear()
        self._link.end()
        await until(self._link.ended)
        self._link.leave_root()

    async def give(self, attempt_id: str, telling: int) -> None:
        """Hand over an attempt with the writing end of its channel, which is closed here whatever happens."""
        try:
            await self._linked.wait()
            while not self._link.send(attempt_id, telling):
                await self._room_in_link()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the spawner just died: the channel ends with this block, and that leads back here (Rule 2)
        finally:
            os.close(telling)

    async def _room_in_link(self) -> None:
        loop = asyncio.get_running_loop()
        room: asyncio.Future[None] = loop.create_future()
        fd = self._link.fileno()
        loop.add_writer(fd, _resolve, room)
        try:
            await room
        finally:
            loop.remove_writer(fd)

    def _spawner_gone(self) -> None:
        """Its socket ended (it never speaks otherwise): start another."""
        asyncio.get_running_loop().remove_reader(self._link.fileno())
        self._linked.clear()
        self._link.end()
        self._do(self._begin_anew())

    async def _begin_anew(self) -> None:
        await until(self._link.ended)
        await asyncio.sleep(self._link.pause_s())
        self.begin()


async def until(true: Callable[[], bool]) -> None:
    """Wait for what nobody announces: that a lock is free, that a process is gone."""
    while not true():
        await asyncio.sleep(0.002)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
