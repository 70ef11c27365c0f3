"""A house of one grid for tests: the deeds as both doors see them, a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from distributed_grid.adapters.stores.in_memory import MemoryStore
from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import Viewer
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    HeartbeatReceived,
    NodeDeclared,
    TimePassed,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.server.services.jobs import Caller, JobService

BEGIN_MS = 1_700_000_000_000


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.ms = BEGIN_MS

    def now_ms(self) -> int:
        return self.ms


class SmallHouse:
    """What the deeds need of a daemon."""

    def __init__(self, *, sharing_enabled: bool = True) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.grid = Grid(self.store, self.clock)
        self.viewer = Viewer(0)
        self.sharing_enabled = sharing_enabled
        self.custom_resources = frozenset({"fpga"})
        self.is_leaving = False
        self.deeds = JobService(self)  # type: ignore[arg-type]

    async def open(self, *nodes: Node) -> SmallHouse:
        await self.grid.start()
        for node in nodes:
            await self.grid.handle(NodeDeclared(node))
            await self.grid.handle(HeartbeatReceived(node.name, Usage()))
        return self

    async def live_through(self, story: Callable[[Any], Awaitable[None]]) -> None:
        """A story that happens here; afterwards the ledger holds its laws, and the house is closed."""
        try:
            await asyncio.wait_for(story(self), 30)
            (await self.grid.read(lambda ledger, now: ledger)).check()
        finally:
            await self.grid.stop()

    async def later(self, seconds: float) -> None:
        """Time passes, and every node is heard at its end."""
        self.clock.ms += round(1000 * seconds)
        for name in await self.grid.read(lambda ledger, now: list(ledger.nodes)):
            await self.grid.handle(HeartbeatReceived(name, Usage()))
        await self.grid.handle(TimePassed())

    async def submit(self, request_id: str, user: str = "ann", **fields: Any) -> dict[str, Any]:
        op = requests.convert({"request_id": request_id, "argv": ["true"], **fields}, requests.SubmitJob)
        return await self.deeds.submit(op, Caller(user))

    async def ask(self, request_id: str, user: str = "ann", **fields: Any) -> dict[str, Any]:
        message = {"request_id": request_id, "resource_type": "cpu", "amount": 1, **fields}
        return await self.deeds.ask(requests.convert(message, requests.RequestLease), Caller(user))

    async def starts(self, uid: str) -> None:
        """The agent runs the current attempt."""
        number, fence = await self._attempt(uid)
        await self.grid.handle(AttemptStarted(uid, number, fence, 4242))

    async def ends(self, uid: str, ending: Ending = Ending.EXITED, detail: str = "") -> None:
        """The agent proves the current attempt over."""
        number, fence = await self._attempt(uid)
        code = 0 if ending is Ending.EXITED else None
        await self.grid.handle(AttemptEnded(uid, number, fence, Outcome(ending, exit_code=code, detail=detail)))

    async def _attempt(self, uid: str) -> tuple[int, int]:
        job = await self.grid.read(lambda ledger, now: ledger.jobs[uid])
        return job.attempts[-1].number, job.attempts[-1].fence

    async def explain(self, name: str, kind: str = "") -> dict[str, Any]:
        return await self.deeds.explain(requests.Explain(name, kind))  # type: ignore[arg-type]

    async def handle(self, event: Event) -> None:
        await self.grid.handle(event)

    def events(self) -> int:
        """How many events the audit trail has."""
        return self.store.load().last_event_seq
