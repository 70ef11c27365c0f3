"""From heartbeats to forecasts, rounds, and what is counted of them: on a real grid with a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.nodes import RecommendationRow
from distributed_grid.config.sections import Alerts
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import HeartbeatReceived, NodeDeclared
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import SHARING_POLICIES, Forecast, RebalanceRules, SharingMode
from distributed_grid.domain.resources import ResourceType
from distributed_grid.errors import StoreFailed
from distributed_grid.monitoring.monitor import Monitor
from distributed_grid.ports import Batch
from distributed_grid.scheduling.pressure.scan import automatic_leases
from distributed_grid.server.daemon import rebalance_forever, rebalance_once
from distributed_grid.server.services.records import held_leases
from tests.support.builders import GB, a_node
from tests.unit.monitoring.watched_grid import ManualClock


class Harness:
    """A grid of two machines, its monitor, and its balance."""

    def __init__(self, store: InMemoryStore) -> None:
        self.clock = ManualClock()
        self.grid = Grid(store, self.clock)
        self.monitor = Monitor(Alerts(), read=self.grid.read, store=store, offset_ms=lambda: 0)

    async def beat(self, seconds: float = 2, **memory_gb: float) -> None:
        """Time passes, and the nodes that are named are heard with so much memory in use."""
        self.clock.ms += round(1000 * seconds)
        for name, used in memory_gb.items():
            await self.grid.handle(
                HeartbeatReceived(
                    name=name,
                    usage=Usage(
                        cpu_busy_milli=100, cpu_outside_milli=100, memory_bytes=round(used * GB), memory_outside_bytes=0
                    ),
                )
            )
        await self.grid.read(self.monitor.poll)

    async def round(self, policy: str, mode: str = "dynamic_balancing") -> None:
        await rebalance_once(
            self.grid,
            self.monitor,
            RebalanceRules(mode=SharingMode(mode), policy=SHARING_POLICIES[policy], interval_ms=30_000),
        )


class SometimesFull(InMemoryStore):
    """A store on a disk that is full at times."""

    full = False
    refused = 0

    def commit(self, batch: Batch) -> None:
        if self.full:
            self.refused += 1
            raise StoreFailed("the disk is full")
        super().commit(batch)


def run(scenario: Callable[[Harness], Coroutine[Any, Any, None]], store: InMemoryStore | None = None) -> None:
    async def whole() -> None:
        harness = Harness(store or InMemoryStore())
        await harness.grid.start()
        for name in ("master", "gpu1"):
            await harness.grid.handle(NodeDeclared(replace(a_node(name, memory_gb=10), host=name)))
        try:
            await scenario(harness)
        finally:
            await harness.grid.stop()

    asyncio.run(asyncio.wait_for(whole(), 60))


async def held(harness: Harness) -> list[Lease]:
    """Leases that the grid holds for its nodes without an end."""
    return await harness.grid.read(lambda ledger, now: automatic_leases(ledger))


def test_steady_rise_and_steady_level_are_forecast() -> None:
    async def scenario(harness: Harness) -> None:
        for step in range(150):
            await harness.beat(master=3 + step / 50, gpu1=2)  # 0.6 GB, six points of a hundred, a minute
        rising, steady = await harness.monitor.readings(ahead_ms=300_000)
        ahead = rising.ahead(ResourceType.MEMORY)
        assert rising.memory == 598
        assert ahead is not None
        assert abs(ahead.level - 898) < 10
        assert ahead.reach < 50
        assert steady.ahead(ResourceType.MEMORY) == Forecast(200, 0)
        assert (await harness.monitor.readings())[0].memory_ahead is None

    run(scenario)


def test_predictive_borrows_before_the_mark_and_balanced_does_not() -> None:
    async def scenario(harness: Harness) -> None:
        for step in range(150):
            await harness.beat(master=3 + step / 50, gpu1=2)
        for policy, leases in (("balanced", 0), ("predictive", 1)):
            for _ in range(3):
                await harness.round(policy)
                await harness.beat(30, master=6, gpu1=2)
            assert len(await held(harness)) == leases

    run(scenario)


def test_rebalances_are_counted_for_people_and_for_prometheus() -> None:
    async def scenario(harness: Harness) -> None:
        nothing = await harness.monitor.rebalancing()
        assert set(nothing.values()) == {0}
        for master in (9, 1):
            for _ in range(2):
                await harness.beat(30, master=master, gpu1=1)
                await harness.round("aggressive")
        await harness.beat(30, master=9, gpu1=9)
        await harness.round("aggressive")
        assert await harness.monitor.rebalancing() == {
            "rebalances_per_hour": 2,
            "asked": 1,
            "refused": 2,
            "given_back": 1,
            "used": 0,
            "automatic_leases": 0,
            "recommendations": 0,
        }
        text = (await harness.monitor.prometheus()).decode()
        assert 'grid_rebalances_total{action="asked"} 1.0' in text
        assert 'grid_rebalances_total{action="refused"} 2.0' in text
        assert 'grid_rebalances_total{action="given_back"} 1.0' in text
        assert "grid_recommendations_total 1.0" in text
        harness.clock.ms += 3_700_000
        assert (await harness.monitor.rebalancing())["rebalances_per_hour"] == 0

    run(scenario)


def test_recommendations_are_shown() -> None:
    async def scenario(harness: Harness) -> None:
        await harness.beat(master=9, gpu1=1)
        await harness.round("aggressive", "offload_only")
        assert await harness.grid.read(lambda ledger, now: held_leases(ledger)) == []
        assert await harness.grid.read(lambda ledger, now: RecommendationRow.of_ledger(Viewer(0), ledger)) == [
            RecommendationRow(
                node_id="master",
                job_id=None,
                source_node="master",
                target_node="gpu1",
                cause="memory",
                reason="memory at 90 %, above the mark of 80 %; gpu1 is at 10 %, 7.0 GB to spare",
                since="2023-11-14T22:14:02.000Z",
            )
        ]
        assert (await harness.monitor.rebalancing())["recommendations"] == 1

    run(scenario)


def test_without_rules_nothing_is_ever_done() -> None:
    async def scenario(harness: Harness) -> None:
        await asyncio.wait_for(rebalance_forever(harness.grid, harness.monitor, lambda: None), 5)

    run(scenario)


def test_the_first_round_does_not_wait_for_a_long_interval() -> None:
    async def scenario(harness: Harness) -> None:
        rules = RebalanceRules(
            mode=SharingMode.SHARE_AND_OFFLOAD, policy=SHARING_POLICIES["aggressive"], interval_ms=86_400_000
        )
        await harness.beat(master=9, gpu1=1)
        keeping = asyncio.create_task(
            rebalance_forever(harness.grid, harness.monitor, lambda: rules, first_seconds=0.01)
        )
        async with asyncio.timeout(20):
            while not await held(harness):
                await asyncio.sleep(0.01)
        keeping.cancel()

    run(scenario)


def test_a_round_that_fails_does_not_end_the_rounds() -> None:
    store = SometimesFull()

    async def scenario(harness: Harness) -> None:
        await harness.beat(master=9, gpu1=1)
        store.full = True
        rules = RebalanceRules(
            mode=SharingMode.SHARE_AND_OFFLOAD, policy=SHARING_POLICIES["aggressive"], interval_ms=10
        )
        keeping = asyncio.create_task(rebalance_forever(harness.grid, harness.monitor, lambda: rules))
        async with asyncio.timeout(20):
            while not store.refused:
                await asyncio.sleep(0.01)
            assert await held(harness) == []
            store.full = False
            while not await held(harness):
                await harness.beat(master=9, gpu1=1)
                await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()

    run(scenario, store)
