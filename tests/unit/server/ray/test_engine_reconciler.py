"""The engine knows when each lease ends: at once, acknowledged, and again when it was away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import EngineRegistered, HeartbeatReceived, LeaseAsked, NodeDeclared
from distributed_grid.domain.nodes import Usage
from distributed_grid.errors import Unreachable
from distributed_grid.ports import EngineView
from distributed_grid.reactor.effects import EngineEffect
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.ray.engine_reconciler import EngineReconciler
from distributed_grid.server.services.leases import LeaseService, RequestConverter
from tests.support.builders import a_node, a_request
from tests.support.local_engine import LocalEngine
from tests.unit.server.in_process_grid import Clock

ADA = Caller("ada")
ROOM = EngineResources(4000, 1 << 34, 0)


async def ignore(view: EngineView) -> None:
    pass


class RayGrid:
    """A grid with one node, which an engine in memory has, too."""

    def __init__(self, engine_seconds: float) -> None:
        self.engine = LocalEngine({"ash": ROOM})
        self.clock = Clock()
        self.grid = Grid(InMemoryStore(), self.clock)
        self.reconciler = EngineReconciler(self.grid, self.engine, hold_seconds=3600)
        self.grid.perform_with({EngineEffect: self.reconciler.perform})
        converter = RequestConverter(self.grid, sharing_enabled=True, custom_resources=frozenset())
        self.leases = LeaseService(
            self.grid, lambda: Viewer(0), converter, is_stopping=lambda: False, engine_seconds=engine_seconds
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.01)

    def is_bound(self) -> bool:
        return any(binding.bound_at_ms for binding in self.grid.ledger.bindings.values())

    @property
    def term_seconds(self) -> float:
        (left,) = self.engine.terms.values()
        return left

    async def extend(self, request_id: str, seconds: float) -> str:
        op = requests.ExtendLease(request_id, "r1", seconds)
        return str((await self.leases.extend(op, ADA)).allocation.expires_at)


def run(scenario: Callable[[RayGrid], Awaitable[None]], engine_seconds: float = 5.0) -> None:
    """Run it on a grid that waits so long for the engine's word."""

    async def run_whole() -> None:
        made = RayGrid(engine_seconds)
        await made.grid.start()
        await made.grid.handle(NodeDeclared(a_node("ash", cores=4)))
        await made.grid.handle(HeartbeatReceived(name="ash", usage=Usage()))
        await made.grid.handle(EngineRegistered(name="ray", mode="attached", address="head"))
        made.reconciler.start(on_view=ignore)
        await made.until(lambda: bool(made.grid.ledger.nodes["ash"].engine_node))
        await made.grid.handle(LeaseAsked(a_request("r1", duration_s=60)))
        await made.until(made.is_bound)
        try:
            await scenario(made)
        finally:
            await made.reconciler.stop()
            await made.grid.stop()

    asyncio.run(asyncio.wait_for(run_whole(), 60))


def test_a_group_is_made_with_its_term() -> None:
    async def scenario(ray: RayGrid) -> None:
        assert ray.term_seconds == pytest.approx(60, abs=1)
        (binding,) = ray.grid.ledger.bindings.values()
        assert binding.term_ms == ray.grid.ledger.leases["r1"].ends_at_ms

    run(scenario)


def test_an_extension_is_said_when_the_engine_knows_it_and_a_retry_counts_once() -> None:
    async def scenario(ray: RayGrid) -> None:
        later = await ray.extend("e1", 30)
        assert ray.term_seconds == pytest.approx(90, abs=1)
        assert await ray.extend("e1", 30) == later
        assert ray.term_seconds == pytest.approx(90, abs=1)
        await asyncio.gather(*(ray.extend(f"more{number}", 10) for number in range(5)))
        assert ray.term_seconds == pytest.approx(140, abs=1)

    run(scenario)


def test_an_engine_that_is_away_hears_of_it_when_it_is_back_and_until_then_nobody_says_so() -> None:
    async def scenario(ray: RayGrid) -> None:
        ray.engine.away = True
        extending = asyncio.create_task(ray.extend("e1", 30))
        await ray.until(lambda: bool(ray.grid.ledger.leases["r1"].extensions))
        await asyncio.sleep(0.2)
        assert not extending.done()
        ray.engine.away = False
        ray.reconciler.compare_soon()
        await extending
        assert ray.term_seconds == pytest.approx(90, abs=1)

    run(scenario)


def test_a_group_that_is_gone_is_made_again_with_the_longer_term() -> None:
    async def scenario(ray: RayGrid) -> None:
        (old,) = ray.grid.ledger.bindings.values()
        ray.engine.terms.clear()
        await ray.engine.free(old.group)  # the engine thought that its time was over
        ray.clock.ms += 5
        await ray.extend("e1", 30)
        (new,) = ray.grid.ledger.bindings.values()
        assert new.fence > old.fence
        assert ray.term_seconds == pytest.approx(90, abs=1)

    run(scenario)


def test_without_an_answer_the_error_says_that_it_is_extended_all_the_same() -> None:
    async def scenario(ray: RayGrid) -> None:
        ray.engine.away = True
        with pytest.raises(Unreachable, match=r"ray has not acknowledged it within .* ends at .*hears of it when"):
            await ray.extend("e1", 30)
        assert len(ray.grid.ledger.leases["r1"].extensions) == 1

    run(scenario, engine_seconds=0.2)
