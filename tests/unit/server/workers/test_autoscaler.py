"""The autoscaler over a real ledger: the provider's offers are known, and problems are shown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from distributed_grid.adapters.stores.minute_store import MinuteStore
from distributed_grid.api import requests
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.events import LeaseAsked
from distributed_grid.domain.workers import ScalingRules
from distributed_grid.errors import Refused, Unreachable
from distributed_grid.ports import WorkerOffer
from distributed_grid.prediction.warm_pool import SLOT_MS
from distributed_grid.server.access.tokens import Caller, Forbidden
from distributed_grid.server.services.workers import ScalingService
from distributed_grid.server.workers.autoscaler import LOAD_ROW_BYTES, Autoscaler, ExpectedLoad
from distributed_grid.server.workers.provider_calls import OfferCatalog
from distributed_grid.server.workers.provider_registry import ProviderRegistry
from tests.support.builders import a_node, a_request
from tests.support.clouds.scripted import OFFERS
from tests.unit.server.in_process_grid import InProcessGrid

OWNER = Caller("ann", admin=True)


class FixedCatalog(OfferCatalog):
    """The offers of a provider that is somewhere else."""

    def __init__(self, grid: InProcessGrid) -> None:
        super().__init__(ProviderRegistry(ClusterConfig.from_text("name: lab")), grid.grid, call_seconds=1)
        self.found: Sequence[WorkerOffer] = OFFERS

    async def offers(self, provider: str) -> Sequence[WorkerOffer]:
        return self.found


class SilentCatalog(FixedCatalog):
    """The same of one that does not answer, unless it is told to."""

    answers = False

    async def offers(self, provider: str) -> Sequence[WorkerOffer]:
        if not self.answers:
            raise Unreachable(f"{provider} does not answer")
        return self.found


async def reachable(provider: str) -> None:
    """From everywhere."""


async def unreachable(provider: str) -> None:
    raise Refused(f"a worker of {provider} could not reach this control plane")


def run(scenario: Callable[[InProcessGrid], Awaitable[None]]) -> None:
    async def whole() -> None:
        grid = await InProcessGrid().open(a_node("home", cores=1))
        await grid.run(scenario)

    asyncio.run(whole())


RULES = ScalingRules(provider="scripted", window_ms=60_000)


def test_a_request_that_only_a_worker_could_serve_waits_once_the_offers_are_known() -> None:
    async def scenario(home: InProcessGrid) -> None:
        wide = a_request("wide", cores=2)
        with pytest.raises(Refused):
            await home.grid.handle(LeaseAsked(wide))
        scaler = Autoscaler(home.grid, FixedCatalog(home), RULES, check_reachable=reachable)
        await scaler.read_types()
        await home.grid.handle(LeaseAsked(wide))
        plan, started = await scaler.evaluate_now()
        assert (plan.action, plan.count, len(started)) == ("scale_up", 1, 1)
        assert home.grid.ledger.workers[started[0]].offer == "small-a"

    run(scenario)


def test_workers_that_could_not_reach_the_control_plane_are_never_started() -> None:
    async def scenario(home: InProcessGrid) -> None:
        scaler = Autoscaler(home.grid, FixedCatalog(home), RULES, check_reachable=unreachable)
        await scaler.read_types()
        with pytest.raises(Refused):
            await home.grid.handle(LeaseAsked(a_request("wide", cores=2)))
        assert "could not reach" in scaler.problem
        await home.grid.handle(LeaseAsked(a_request("all", cores=1)))
        await home.grid.handle(LeaseAsked(a_request("more", cores=1)))
        plan, started = await scaler.evaluate_now()
        assert (plan.action, started) == ("none", [])
        status = (await ScalingService(home.grid, scaler).status(requests.GetScaling(), OWNER)).scaling
        assert status.problem == scaler.problem

    run(scenario)


def test_looking_changes_nothing_and_only_an_admin_acts() -> None:
    async def scenario(home: InProcessGrid) -> None:
        scaler = Autoscaler(home.grid, FixedCatalog(home), RULES, check_reachable=reachable)
        service = ScalingService(home.grid, scaler)
        await home.grid.handle(LeaseAsked(a_request("all", cores=1)))
        await home.grid.handle(LeaseAsked(a_request("more", cores=1)))
        planned = (await service.plan(requests.PlanScaling(), OWNER)).plan
        assert (planned.decision.action, planned.decision.worker_type) == ("scale_up", "cpu")
        assert planned.cost_per_hour == pytest.approx(0.1)
        assert planned.budget.per_hour == pytest.approx(0.1)
        assert not home.grid.ledger.workers
        assert not home.grid.ledger.utilization.samples
        with pytest.raises(Forbidden):
            await service.run(requests.RunScaling(), Caller("eve"))
        done = await service.run(requests.RunScaling(), OWNER)
        assert list(home.grid.ledger.workers) == done.started
        assert done.plan.budget.per_hour == pytest.approx(0.1)

    run(scenario)


def test_until_a_provider_has_said_what_it_can_start_requests_wait() -> None:
    async def scenario(home: InProcessGrid) -> None:
        catalog = SilentCatalog(home)
        scaler = Autoscaler(home.grid, catalog, RULES, check_reachable=reachable)
        await scaler.start()
        await scaler.read_types()
        assert "does not answer" in scaler.problem
        await home.grid.handle(LeaseAsked(a_request("wide", cores=2)))
        catalog.answers = True
        await scaler.read_types()
        assert not scaler.problem
        catalog.answers = False
        await scaler.read_types()
        assert home.grid.ledger.scaling.types, "what could be started a while ago may still be"
        plan, _ = await scaler.evaluate_now()
        assert (plan.action, plan.count) == ("scale_up", 1)
        await Autoscaler(home.grid, catalog, RULES, check_reachable=reachable).start()
        assert home.grid.ledger.scaling.types, "a new control plane knows it, too"

    run(scenario)


def test_without_a_provider_rules_of_an_earlier_config_are_dropped() -> None:
    async def scenario(home: InProcessGrid) -> None:
        await Autoscaler(home.grid, FixedCatalog(home), RULES, check_reachable=reachable).read_types()
        assert home.grid.ledger.scaling.types
        nobody = Autoscaler(home.grid, FixedCatalog(home), ScalingRules(), check_reachable=reachable)
        await nobody.start()
        await nobody.run()
        assert home.grid.ledger.scaling == ScalingRules()
        with pytest.raises(Refused, match=r"scaling\.provider is not set"):
            await ScalingService(home.grid, nobody).run(requests.RunScaling(), OWNER)

    run(scenario)


def test_the_load_is_learned_and_known_again_after_a_restart(tmp_path: Path) -> None:
    async def scenario(home: InProcessGrid) -> None:
        scaler = Autoscaler(home.grid, FixedCatalog(home), RULES, check_reachable=reachable)
        await scaler.read_types()
        await home.grid.handle(LeaseAsked(a_request("all", cores=1)))
        await home.grid.handle(LeaseAsked(a_request("more", cores=1)))
        expected = ExpectedLoad(home.grid, MinuteStore(tmp_path / "load.db", row_bytes=LOAD_ROW_BYTES))
        for slot in range(300):
            assert await expected.sample(slot * SLOT_MS) in (0, 1)
        assert expected.expected_milli == pytest.approx(1000, abs=5), "two cores are one worker of the preferred type"
        kept = await expected.sample(300 * SLOT_MS)
        assert kept == 1, "the grid has half a worker itself"
        expected.close()
        again = ExpectedLoad(home.grid, MinuteStore(tmp_path / "load.db", row_bytes=LOAD_ROW_BYTES))
        await again.start(300 * SLOT_MS)
        assert again.expected_milli == expected.expected_milli
        again.close()

    run(scenario)
