"""A grid inside the test process: its services, a store in memory, and a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.explanation import Explanation
from distributed_grid.api.answers.jobs import JobDetail
from distributed_grid.api.answers.leases import AllocationDetail
from distributed_grid.control.agent_files import AttemptFiles, RemoteFiles
from distributed_grid.control.grid import Grid
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
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import AnswerRenderer
from distributed_grid.server.prediction.job_runs import JobSizer
from distributed_grid.server.prediction.service import PredictionService
from distributed_grid.server.services.explanation import explain
from distributed_grid.server.services.jobs import JobService
from distributed_grid.server.services.leases import LeaseService, RequestConverter

BEGIN_MS = 1_700_000_000_000


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.ms = BEGIN_MS

    def now_ms(self) -> int:
        return self.ms


class InProcessGrid:
    """A grid and the services that the daemon would have."""

    def __init__(self, *, sharing_enabled: bool = True, prediction: PredictionService | None = None) -> None:
        self.clock = Clock()
        self.sizer = JobSizer(prediction) if prediction is not None else None
        self.store = InMemoryStore()
        self.grid = Grid(self.store, self.clock)
        self.viewer = Viewer(0)
        self.sharing_enabled = sharing_enabled
        self.is_stopping = False
        self.compose()

    def compose(self) -> None:
        """Make the services; again after the grid was replaced."""
        custom = frozenset({"fpga"})
        converter = RequestConverter(self.grid, sharing_enabled=self.sharing_enabled, custom_resources=custom)
        files = AttemptFiles(Path("unused"), RemoteFiles({}), lambda name: True)
        self.leases = LeaseService(self.grid, self.get_viewer, converter, is_stopping=self.stopping)
        self.jobs = JobService(
            self.grid, self.get_viewer, converter, files, AnswerRenderer(self.grid.slices), self.sizer
        )

    def get_viewer(self) -> Viewer:
        return self.viewer

    def stopping(self) -> bool:
        return self.is_stopping

    async def open(self, *nodes: Node) -> InProcessGrid:
        await self.grid.start()
        for node in nodes:
            await self.grid.handle(NodeDeclared(node))
            await self.grid.handle(HeartbeatReceived(name=node.name, usage=Usage()))
        return self

    async def run(self, scenario: Callable[[Any], Awaitable[None]]) -> None:
        """Run a scenario; afterwards the ledger is consistent, and the grid is stopped."""
        try:
            await asyncio.wait_for(scenario(self), 30)
            (await self.grid.read(lambda ledger, now: ledger)).check()
        finally:
            if self.sizer is not None:
                self.sizer.stop()
            await self.grid.stop()

    async def later(self, seconds: float) -> None:
        """Time passes, and every node is heard at its end."""
        self.clock.ms += round(1000 * seconds)
        for name in await self.grid.read(lambda ledger, now: list(ledger.nodes)):
            await self.grid.handle(HeartbeatReceived(name=name, usage=Usage()))
        await self.grid.handle(TimePassed())

    async def submit(self, request_id: str, user: str = "ann", **fields: Any) -> JobDetail:
        op = requests.convert({"request_id": request_id, "argv": ["true"], **fields}, requests.SubmitJob)
        return await self.jobs.submit(op, Caller(user))

    async def ask(self, request_id: str, user: str = "ann", **fields: Any) -> AllocationDetail:
        message = {"request_id": request_id, "resource_type": "cpu", "amount": 1, **fields}
        return await self.leases.request(requests.convert(message, requests.RequestLease), Caller(user))

    async def starts(self, uid: str) -> None:
        """The agent runs the current attempt."""
        number, fence = await self._attempt(uid)
        await self.grid.handle(AttemptStarted(uid=uid, number=number, fence=fence, pid=4242))

    async def ends(self, uid: str, ending: Ending = Ending.EXITED, detail: str = "", **used: Any) -> None:
        """The agent proves the current attempt over, and says what it used."""
        number, fence = await self._attempt(uid)
        code = 0 if ending is Ending.EXITED else None
        outcome = replace(Outcome(ending, exit_code=code, detail=detail), **used)
        await self.grid.handle(AttemptEnded(uid=uid, number=number, fence=fence, outcome=outcome))

    async def _attempt(self, uid: str) -> tuple[int, int]:
        job = await self.grid.read(lambda ledger, now: ledger.jobs[uid])
        return job.attempts[-1].number, job.attempts[-1].fence

    async def explain(self, name: str, kind: str = "") -> Explanation:
        return await explain(self.grid, self.viewer, name, kind=kind)

    async def handle(self, event: Event) -> None:
        await self.grid.handle(event)

    def events(self) -> int:
        """How many events the audit trail has."""
        return self.store.load().last_event_seq
