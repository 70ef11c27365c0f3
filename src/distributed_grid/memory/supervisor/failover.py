"""One server of a folder after another: the one that runs is taken over, else one is started.

Rule 1. A server is started only by who has its lock, and has that lock for as long as it lives: there is no second one.
Rule 2. Each gets what the one before held, and all that is not answered is asked of it again.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from distributed_grid.memory.protocol.control_messages import ControlSocket, Go, HeldCopy, batches
from distributed_grid.memory.supervisor.held_copies import HeldCopies, raise_limit
from distributed_grid.memory.supervisor.identity import ServerIdentity
from distributed_grid.memory.supervisor.pending_orders import PendingOrders
from distributed_grid.memory.supervisor.process import Launched, launch, lock, reach
from distributed_grid.memory.supervisor.server_link import ServerLink

SERVE_SECONDS: Final = 20.0


class ServerFailover:
    """Gets the server that a keeper's other parts speak of; `problem` is what the last one said was wrong."""

    def __init__(
        self, folder: Path, grip: ServerLink, *, identity: ServerIdentity, holding: HeldCopies, orders: PendingOrders
    ) -> None:
        self._folder = folder
        self._grip = grip
        self._identity = identity
        self._holding = holding
        self._orders = orders
        self.problem = ""

    async def adopt(self) -> bool:
        """Take over a server that runs; False where none does."""
        sock = reach(self._folder)
        if sock is None:
            return False
        self._connect(ControlSocket(sock), None)
        if await self._grip.until_serving(SERVE_SECONDS):
            return self._grip.serving is not None
        self.let_go()
        return False

    async def get(self) -> str:
        """Adopt or start one; why that did not work, or nothing."""
        deadline = asyncio.get_running_loop().time() + SERVE_SECONDS
        self.problem = "the memory server did not begin"
        while asyncio.get_running_loop().time() < deadline:
            if await self.adopt():
                return ""
            at = lock(self._folder / "server.lock")
            if at < 0:  # one is about to begin or to end
                await asyncio.sleep(0.05)
                continue
            try:
                launched = launch(self._folder, at)
            except OSError as error:
                return f"the memory server cannot be started: {error.strerror}"
            finally:
                os.close(at)
            self._introduce(launched)
            await self._grip.until_serving(deadline - asyncio.get_running_loop().time())
            if self._grip.serving is None:
                self.let_go()
                launched.kill()
                return self.problem
            return ""
        return self.problem

    def _introduce(self, launched: Launched) -> None:
        """Tell a fresh server who it is and what it holds."""
        raise_limit()
        begin = self._identity.begin()
        self._connect(ControlSocket(launched.sock), launched)
        self._grip.say(begin)
        for names in batches(self._holding.descriptors):
            self._grip.say(HeldCopy(names), [self._holding.descriptors[name] for name in names])
        self._grip.say(Go())

    def _connect(self, link: ControlSocket, launched: Launched | None) -> None:
        self._grip.take(link, launched)
        self._holding.begin_anew()
        self._orders.begin_anew()

    def let_go(self) -> None:
        """Leave the server to itself; safe twice."""
        self._grip.let_go()
        self._holding.stop_coming()

    def end(self) -> None:
        """End the server, and keep what it held."""
        self._grip.end()
        self._holding.stop_coming()
