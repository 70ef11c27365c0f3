"""Requests about workers against a scripted provider: plans, repeated requests, offers, prefixes, who may ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.config import ClusterConfig
from distributed_grid.config_mapping import worker_rules
from distributed_grid.control.agent_files import AttemptFiles, RemoteFiles
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptStarted,
    HeartbeatReceived,
    NodeDeclared,
    WorkerRulesSet,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.workers import WorkerRules
from distributed_grid.errors import BadInput, GridError, NotFound, Refused
from distributed_grid.reactor.effects import WorkerEffect
from distributed_grid.server.access.admission import Admission, AdvertisedAddress
from distributed_grid.server.access.tokens import Caller, Forbidden, TokenStore
from distributed_grid.server.purge_guard import PurgeGuard
from distributed_grid.server.services.daemon import is_unused
from distributed_grid.server.services.workers import WorkerService
from distributed_grid.server.workers.provider_calls import OfferCatalog
from distributed_grid.server.workers.provider_registry import ProviderRegistry
from distributed_grid.server.workers.worker_reconciler import WorkerJoinTokens, WorkerReconciler
from tests.support.builders import a_node, a_request, a_submission
from tests.support.scripted_provider import CloudFile, plug_in

OWNER = Caller("ada", admin=True)


class RealClock:
    """Milliseconds that never go back."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class Parts:
    """The services of a control plane that has to do with workers."""

    def __init__(self, folder: Path, *, budget: float) -> None:
        self.alarms: list[str] = []
        self.cloud = CloudFile(folder / "cloud.json")
        config = ClusterConfig.from_mapping(
            {
                "providers": {"scripted": {"state_file": "${CLOUD_FOLDER}/cloud.json"}},
                "scaling": {"budget_per_hour": budget},
                "workers": {"consistency_seconds": 0.1, "call_seconds": 1},
            }
        )
        self.grid = Grid(InMemoryStore(), RealClock())

        async def advertise() -> AdvertisedAddress:
            return AdvertisedAddress(("127.0.0.1:7433",), "0" * 64)

        admission = Admission(
            TokenStore(folder),
            configured=[],
            advertise=advertise,
            disconnect=lambda node: None,
        )
        catalog = OfferCatalog(ProviderRegistry(config), self.grid, call_seconds=1)
        tokens = WorkerJoinTokens(folder, admission)
        self.reconciler = WorkerReconciler(
            self.grid,
            catalog,
            tokens,
            rules=worker_rules(config),
            grid_id=lambda: "grid-1",
            on_alarm=lambda about, why: self.alarms.append(why),
        )
        self.grid.perform_with({WorkerEffect: self.reconciler.perform})
        files = RemoteFiles({})
        guard = PurgeGuard(self.grid, AttemptFiles(folder, files, lambda name: False), files, folder)
        self.service = WorkerService(self.grid, lambda: Viewer(0), catalog, tokens, guard)

    async def state(self, worker_id: str) -> str:
        return str((await self.service.get(requests.GetWorker(worker_id), OWNER)).worker.state)

    async def until(self, worker_id: str, state: str) -> None:
        async with asyncio.timeout(20):
            while await self.state(worker_id) != state:
                await asyncio.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.syspath_prepend(plug_in(tmp_path / "plug"))
    monkeypatch.setenv("CLOUD_FOLDER", str(tmp_path))

    def scenario(story: Callable[[Parts], Awaitable[None]], budget: float = 1.0) -> None:
        async def told() -> None:
            parts = Parts(tmp_path, budget=budget)
            await parts.grid.start()
            await parts.reconciler.start()
            try:
                await story(parts)
            finally:
                await parts.reconciler.stop()
                await parts.grid.stop()

        asyncio.run(told())

    return scenario


def test_a_repeated_request_starts_each_worker_once_also_when_it_is_gone(run: Callable[..., None]) -> None:
    async def story(parts: Parts) -> None:
        op = requests.CreateWorkers(worker_ids=("worker-aaaa1111",))
        await parts.service.create(op, OWNER)
        await parts.until("worker-aaaa1111", "booting")
        again = await parts.service.create(op, OWNER)
        assert again.workers[0].state == "booting"
        await parts.service.terminate(requests.TerminateWorkers(("worker-aaaa",)), OWNER)
        await parts.until("worker-aaaa1111", "gone")
        late = await parts.service.create(op, OWNER)
        assert late.workers[0].state == "gone"
        assert len(parts.cloud.calls("create")) == 1
        ended = await parts.service.terminate(requests.TerminateWorkers(("worker-aaaa1111",)), OWNER)
        assert ended.workers[0].state == "gone"

    run(story)


def test_none_of_several_is_started_where_the_budget_does_not_allow_all(run: Callable[..., None]) -> None:
    async def story(parts: Parts) -> None:
        with pytest.raises(Refused, match="budget_per_hour"):
            await parts.service.create(
                requests.CreateWorkers(worker_ids=("worker-1111", "worker-2222", "worker-3333")), OWNER
            )
        assert (await parts.service.list(requests.ListWorkers(), OWNER)).workers == []
        plan = await parts.service.create(requests.CreateWorkers(worker_ids=("worker-1111",), dry_run=True), OWNER)
        assert plan.budget.per_hour == pytest.approx(0.1)
        assert not parts.cloud.calls("create")

    run(story, budget=0.25)


def test_what_no_offer_has_is_refused_with_each_offer_and_its_problem(run: Callable[..., None]) -> None:
    async def story(parts: Parts) -> None:
        with pytest.raises(Refused, match=r"small-a: it has 2 cores, not 64; small-b: it has 2 cores"):
            await parts.service.create(requests.CreateWorkers(worker_ids=("worker-1111",), cpu=64), OWNER)
        with pytest.raises(BadInput, match="no tpu workers; it has: cpu, gpu"):
            await parts.service.create(requests.CreateWorkers(worker_ids=("worker-1111",), worker_type="tpu"), OWNER)
        with pytest.raises(BadInput, match="no provider 'gcp' in the config"):
            await parts.service.offers(requests.ListWorkerOffers("gcp"), OWNER)
        with pytest.raises(NotFound):
            await parts.service.get(requests.GetWorker("worker-none"), OWNER)

    run(story)


def test_only_the_owner_of_the_grid_spends_money(run: Callable[..., None]) -> None:
    async def story(parts: Parts) -> None:
        guest = Caller("bob")
        with pytest.raises(Forbidden):
            await parts.service.create(requests.CreateWorkers(worker_ids=("worker-1111",)), guest)
        with pytest.raises(Forbidden):
            await parts.service.terminate(requests.TerminateWorkers(("worker-1111",)), guest)

    run(story)


def test_a_provider_that_throttles_and_loses_answers_gets_one_machine_in_the_end(run: Callable[..., None]) -> None:
    async def story(parts: Parts) -> None:
        parts.cloud.script(create=["throttle", "lose_after"], list=["fail", "lose_before"])
        await parts.service.create(requests.CreateWorkers(worker_ids=("worker-1111",)), OWNER)
        await parts.until("worker-1111", "booting")
        assert list(parts.cloud.existing()) == ["worker-1111"]

    run(story)


def test_a_variable_of_a_providers_settings_that_is_missing_is_named(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(parts: Parts) -> None:
        monkeypatch.delenv("CLOUD_FOLDER")
        with pytest.raises(GridError, match="CLOUD_FOLDER"):
            await parts.service.offers(requests.ListWorkerOffers("scripted"), OWNER)

    run(story)


def test_a_termination_that_fails_raises_an_alarm_and_is_made_again_until_it_is_gone(run: Callable[..., None]) -> None:
    async def story(parts: Parts) -> None:
        await parts.service.create(requests.CreateWorkers(worker_ids=("worker-1111",)), OWNER)
        await parts.until("worker-1111", "booting")
        parts.cloud.script(terminate=["fail", "lose_before"])
        await parts.service.terminate(requests.TerminateWorkers(("worker-1111",)), OWNER)
        await parts.until("worker-1111", "gone")
        assert len(parts.alarms) == 1
        assert "could not be terminated, it goes on costing money" in parts.alarms[0]
        assert not parts.cloud.existing()

    run(story)


def test_more_than_the_budget_allows_raises_an_alarm_once(run: Callable[..., None]) -> None:
    async def story(parts: Parts) -> None:
        await parts.service.create(requests.CreateWorkers(worker_ids=("worker-1111",)), OWNER)
        await parts.until("worker-1111", "booting")
        await parts.grid.handle(WorkerRulesSet(WorkerRules(budget_per_hour_micro=10_000)))
        async with asyncio.timeout(20):
            while not parts.alarms:
                await asyncio.sleep(0.01)
        assert parts.alarms == ["workers cost $0.10 an hour, and scaling.budget_per_hour is $0.01"]

    run(story)


def test_force_ends_no_worker_whose_results_nobody_has_fetched_unless_they_are_discarded(
    run: Callable[..., None],
) -> None:
    async def story(parts: Parts) -> None:
        worker = "worker-1111"
        await parts.service.create(requests.CreateWorkers(worker_ids=(worker,)), OWNER)
        await parts.until(worker, "booting")
        await parts.grid.handle(NodeDeclared(a_node(worker)))
        await parts.grid.handle(HeartbeatReceived(name=worker, usage=Usage()))
        await parts.until(worker, "joined")
        await parts.grid.handle(a_submission(a_request("r1", cores=1)))
        attempt = parts.grid.ledger.jobs["r1"].attempts[-1]
        await parts.grid.handle(AttemptStarted(uid="r1", number=attempt.number, fence=attempt.fence, pid=4242))
        await parts.grid.handle(
            AttemptEnded(uid="r1", number=attempt.number, fence=attempt.fence, outcome=Outcome(Ending.EXITED, 0))
        )
        forced = requests.TerminateWorkers((worker,), force=True)
        with pytest.raises(Refused, match=f"{worker} cannot be asked for the results of 1 job .* --discard-results"):
            await parts.service.terminate(forced, OWNER)
        assert await parts.state(worker) == "joined"
        await parts.service.terminate(replace(forced, discard_results=True), OWNER)
        await parts.until(worker, "gone")

    run(story)


def test_a_worker_that_is_not_proven_gone_keeps_the_daemon_from_leaving_when_idle(run: Callable[..., None]) -> None:
    async def story(parts: Parts) -> None:
        assert await parts.grid.read(is_unused)
        await parts.service.create(requests.CreateWorkers(worker_ids=("worker-1111",)), OWNER)
        assert not await parts.grid.read(is_unused)
        await parts.service.terminate(requests.TerminateWorkers(("worker-1111",)), OWNER)
        await parts.until("worker-1111", "gone")
        assert await parts.grid.read(is_unused)

    run(story)
