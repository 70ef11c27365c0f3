"""Boosts as both doors see them: asked for, refused in the guides' words, listed, extended, given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.api import requests
from distributed_grid.api.answers.boosts import BoostRow
from distributed_grid.control.boost_file import ResourceBoostPersistence
from distributed_grid.domain.events import LeaseAsked, NodeDrained, PullWorkerRegistered
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import PULL_HOST, Node, Usage
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import Ambiguous, BadInput, NotFound, Refused, TimedOut
from distributed_grid.server.access.tokens import Caller, Forbidden
from distributed_grid.server.services.boost_file_sync import BoostFileSync
from distributed_grid.server.services.boosts import BoostService
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid

ANN = Caller("ann")
ADMIN = Caller("owner", admin=True)


async def no_ray(node: str) -> dict[str, str]:
    return {}


class BoostGrid(InProcessGrid):
    """A small cluster with three nodes, where boosts are asked for."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        persistence = ResourceBoostPersistence(state_dir=folder)
        self.boosts = BoostService(
            self.grid,
            self.get_viewer,
            self.leases,
            BoostFileSync(self.grid, persistence, offset_ms=lambda: 0),
            sharing_enabled=self.sharing_enabled,
            ray_environment=no_ray,
            is_stopping=self.stopping,
        )

    async def boost(self, name: str, caller: Caller = ANN, **fields: Any) -> BoostRow:
        message = {"request_id": name, "target": "master", "resource_type": "cpu", "amount": 1, **fields}
        answer = await self.boosts.request_and_wait(requests.convert(message, requests.RequestBoost), caller)
        assert answer.boost is not None
        return answer.boost

    async def names(self, node: str = "") -> list[str]:
        return [boost.boost_id for boost in (await self.boosts.list(requests.ListBoosts(node), ADMIN)).boosts]


Scenario = Callable[[BoostGrid], Awaitable[None]]


@pytest.fixture
def run_scenario(tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario in a cluster of three nodes with four cores each."""

    def run_whole(scenario: Scenario, **options: Any) -> None:
        async def run() -> None:
            cluster = BoostGrid(tmp_path, **options)
            await cluster.open(a_node("master", cores=4), a_node("ash", cores=4, gpus=1), a_node("birch", cores=4))
            await cluster.run(scenario)

        asyncio.run(run())

    return run_whole


def test_a_pull_worker_is_no_other_node_that_could_lend_a_boost(tmp_path: Path) -> None:
    async def run() -> None:
        cluster = BoostGrid(tmp_path)
        await cluster.open(a_node("master", cores=4))
        has = Capacity(4000, 8 << 30)
        pull = Node(name="browser", capacity=has, host=PULL_HOST, joined=True, hold_ms=60_000, incarnation="one")
        await cluster.grid.handle(PullWorkerRegistered(pull, Usage()))

        async def scenario(cluster: BoostGrid) -> None:
            with pytest.raises(Refused, match="it is the only node: add another one"):
                await cluster.boost("b1")

        await cluster.run(scenario)

    asyncio.run(run())


def test_a_boost_comes_from_another_node_and_lasts_an_hour(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        boost = await cluster.boost("b1", amount=2.5, priority="critical")
        assert boost.source_node in ("ash", "birch")
        assert (boost.target_node, boost.amount, boost.priority) == ("master", 2.5, "urgent")
        assert (boost.state, boost.is_active, boost.enforced_by) == ("active", True, "grid")
        assert boost.placement_group is None
        lease = await cluster.grid.read(lambda ledger, now: ledger.leases["b1"])
        assert lease.ends_at_ms - lease.granted_at_ms == 3_600_000
        assert await cluster.boost("b1", amount=2.5, priority="critical") == boost, "the same id is the same boost"

    run_scenario(scenario)


def test_where_the_preferred_source_is_full_another_node_lends_and_the_reason_is_told(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        await cluster.boost("b1", source="birch", amount=3)
        fields = {"target": "master", "resource_type": "cpu", "amount": 2, "source": "birch"}
        op = requests.convert({"request_id": "b2", **fields}, requests.RequestBoost)
        answer = await cluster.boosts.request_and_wait(op, ANN)
        assert answer.boost.source_node == "ash"
        assert answer.note == "ash lends it instead of birch: 1 core free, 2 cores asked"
        preferred = requests.convert({"request_id": "b3", **fields, "amount": 1}, requests.RequestBoost)
        assert (await cluster.boosts.request_and_wait(preferred, ANN)).note is None
        dry = requests.convert({"request_id": "b4", **fields, "dry_run": True}, requests.RequestBoost)
        assert (await cluster.boosts.request_and_wait(dry, ANN)).note == "ash lends it instead of birch"
        with pytest.raises(BadInput, match="name one"):
            await cluster.boost("b5", only=True)

    run_scenario(scenario)


def test_the_source_is_honoured_or_the_reason_told(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        assert (await cluster.boost("b1", source="birch", amount=3)).source_node == "birch"
        with pytest.raises(
            Refused, match=r"^No nodes have sufficient available resources: birch: 1 core free, 2 cores"
        ):
            await cluster.boost("b2", source="birch", amount=2, only=True)
        with pytest.raises(NotFound, match=r"^the source cedar is no node of this cluster: the nodes are: ash, birch"):
            await cluster.boost("b3", source="cedar")
        with pytest.raises(Refused, match="cannot be its own source"):
            await cluster.boost("b4", source="master")
        await cluster.handle(NodeDrained("birch", cooling=True))
        with pytest.raises(Refused, match=r"resources: birch: cooling down"):
            await cluster.boost("b5", source="birch", only=True)

    run_scenario(scenario)


def test_a_refusal_begins_with_the_guides_words_and_names_every_node(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        with pytest.raises(Refused) as never:
            await cluster.boost("b1", amount=99)
        assert str(never.value).startswith("No nodes have sufficient available resources: ")
        for node in ("ash: 4 cores at most, 99 cores asked", "birch: ", "master: it is the borrower"):
            assert node in str(never.value)
        with pytest.raises(NotFound, match=r"^Target node not found in cluster: no node is called x; the nodes are: "):
            await cluster.boost("b2", target="x")
        with pytest.raises(NotFound, match=r"^Target node not found in cluster: "):
            await cluster.names("x")
        with pytest.raises(BadInput, match="more than zero"):
            await cluster.boost("b3", amount=0)
        refusals = [row for row in cluster.store.events(limit=100) if row.type == "refused"]
        assert {row.subject for row in refusals} == {"b1", "b2", "b3"}

    run_scenario(scenario)


def test_sharing_that_is_off_refuses(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        with pytest.raises(Refused, match=r"^Resource sharing not enabled: "):
            await cluster.boost("b1")

    run_scenario(scenario, sharing_enabled=False)


def test_who_stands_in_line_gets_it_or_hears_why_not(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        await cluster.boost("b1", resource_type="gpu")
        waiting = asyncio.create_task(cluster.boost("b2", resource_type="gpu", wait_seconds=60))
        vain = asyncio.create_task(cluster.boost("b3", resource_type="gpu", wait_seconds=5))
        while await cluster.grid.read(lambda ledger, now: len(ledger.waiting)) < 2:
            await asyncio.sleep(0)
        await cluster.later(6)
        with pytest.raises(TimedOut, match=r"^No nodes have sufficient available resources: waited 5 s: .*ash: 0 GPUs"):
            await vain
        await cluster.boosts.release(requests.ReleaseBoost("b1"), ANN)
        assert (await waiting).boost_id == "b2"

    run_scenario(scenario)


def test_a_boost_that_ends_before_it_can_be_used_is_refused(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        await cluster.submit("r1", resource_type="gpu", priority="low")
        await cluster.starts("r1")
        await cluster.later(30)
        asked = asyncio.create_task(cluster.boost("b1", resource_type="gpu", priority="critical"))
        while not await cluster.grid.read(lambda ledger, now: "b1" in ledger.leases):
            await asyncio.sleep(0)
        assert (await cluster.boosts.get(requests.GetBoost("b1"), ADMIN)).boost.state == "reserving", (
            "its victim has not gone yet"
        )
        await cluster.handle(NodeDrained("ash", "ash is wanted back", cooling=True))
        with pytest.raises(Refused, match=r"^No nodes have sufficient available resources: ash: ash is wanted back"):
            await asked
        again = await cluster.boost("b1", resource_type="gpu", priority="critical")
        assert (again.state, again.reason) == ("ended", "reclaimed"), "asked again, it is what it was"

    run_scenario(scenario)


def test_a_boost_whose_client_went_away_is_given_back(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        await cluster.boost("b1", resource_type="gpu")
        waiting = asyncio.create_task(cluster.boost("b2", resource_type="gpu", wait_seconds=60))
        while not await cluster.grid.read(lambda ledger, now: ledger.waiting):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert "b2" not in await cluster.grid.read(lambda ledger, now: set(ledger.leases))

    run_scenario(scenario)


def test_boosts_are_listed_and_summed_up_and_other_leases_are_not(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        await cluster.ask("plain")
        await cluster.boost("b1", amount=1.5)
        await cluster.boost("b2", resource_type="memory", amount=2)
        await cluster.boost("b3", amount=0.25, target="ash")
        found = await cluster.boosts.list(requests.ListBoosts(), ADMIN)
        assert (found.active_boosts, found.totals) == (3, {"cpu": 1.75, "memory": 2.0})
        assert found.warnings == []
        assert await cluster.names("ash") == ["b3"]
        with pytest.raises(NotFound, match="no boost is called 'plain'"):
            await cluster.boosts.get(requests.GetBoost("plain"), ADMIN)

    run_scenario(scenario)


def test_any_unique_prefix_names_a_boost_and_releasing_twice_is_harmless(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        for name in ("aaaa1", "aaaa2", "bbbb1"):
            await cluster.boost(name)
        with pytest.raises(Ambiguous, match="'aaaa' fits several: aaaa1, aaaa2"):
            await cluster.boosts.release(requests.ReleaseBoost("aaaa"), ANN)
        for _ in range(2):
            over = (await cluster.boosts.release(requests.ReleaseBoost("bbbb"), ANN)).boost
            assert (over.boost_id, over.state, over.reason) == ("bbbb1", "ended", "released")
        await cluster.boosts.release(requests.ReleaseBoost("aaaa2"), ANN)
        assert (await cluster.boosts.get(requests.GetBoost("aaaa"), ADMIN)).boost.boost_id == "aaaa1", (
            "living ones come first"
        )
        for short in ("", "a", "aaa"):
            with pytest.raises(NotFound, match="the beginning of an id needs 4 characters of its own"):
                await cluster.boosts.release(requests.ReleaseBoost(short), ANN)
        with pytest.raises(NotFound, match=r"no boost is called 'zzzz'$"):
            await cluster.boosts.release(requests.ReleaseBoost("zzzz"), ANN)
        with pytest.raises(Forbidden, match="belongs to ann, not to bob"):
            await cluster.boosts.release(requests.ReleaseBoost("aaaa1"), Caller("bob"))

    run_scenario(scenario)


def test_a_boost_is_extended_and_expires_without_anybody_asking(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        first = await cluster.boost("b1", duration_seconds=10)
        longer = (await cluster.boosts.extend(requests.ExtendBoost("e1", "b1", 20), ANN)).boost
        assert str(longer.expires_at) > str(first.expires_at)
        await cluster.later(29)
        assert await cluster.names() == ["b1"]
        await cluster.later(2)
        assert await cluster.names() == []
        assert (await cluster.boosts.get(requests.GetBoost("b1"), ADMIN)).boost.reason == "expired"
        with pytest.raises(NotFound):
            await cluster.boosts.extend(requests.ExtendBoost("e1", "b1", 20), ANN)

    run_scenario(scenario)


def test_a_dry_run_says_who_would_lend_and_lends_nothing(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        op = requests.RequestBoost(request_id="b1", target="master", resource_type="gpu", amount=1, dry_run=True)
        answer = await cluster.boosts.request_and_wait(op, ANN)
        assert (answer.boost, answer.decision.node_id) == (None, "ash")
        assert await cluster.names() == []

    run_scenario(scenario)


def test_rest_does_not_wait(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        await cluster.boost("b1", resource_type="gpu")
        op = requests.RequestBoost(request_id="b2", target="master", resource_type="gpu", amount=1, wait_seconds=60)
        answer = await cluster.boosts.request(op, ANN)
        assert (answer.boost.state, answer.boost.is_active) == (str(LeaseState.ASKED), False)

    run_scenario(scenario)


def test_what_the_rebalancer_holds_is_a_boost_that_everybody_may_use_and_nobody_may_release(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        ask, apart = Amounts(cpu_milli=2000), ("master",)
        request = Request(
            id="auto-master-cpu-1", user=GRID_USER, ask=ask, wait_ms=0, target="master", anti_affinity=apart
        )
        await cluster.grid.handle(LeaseAsked(request))
        assert await cluster.names("master") == ["auto-master-cpu-1"]
        carved = await cluster.submit("aaaa1", amount=0.5, target="master")
        assert carved.decision.reasoning[0].endswith("carved out of auto-master-cpu-1")
        (found,) = (await cluster.boosts.list(requests.ListBoosts(), ADMIN)).boosts
        assert (found.automatic, found.amount, found.used_amount) == (True, 1.5, 0.5)
        with pytest.raises(Forbidden):
            await cluster.boosts.release(requests.ReleaseBoost("auto-master-cpu-1"), ANN)
        ran = await cluster.boosts.run(
            requests.RunInBoost(request_id="bbbb1", boost_id="auto-mast", argv=("true",)), ANN
        )
        assert (ran.job.user, ran.job.node_id) == ("ann", found.source_node)
        assert (await cluster.boosts.get(requests.GetBoost("auto-mast"), ADMIN)).boost.used_amount == 2.0
        with pytest.raises(Refused, match="in use by"):
            await cluster.boosts.run(requests.RunInBoost(request_id="cccc1", boost_id="auto-mast", argv=("true",)), ANN)
        own = await cluster.boost("dddd1")
        assert (own.automatic, own.used_amount) == (False, None)

    run_scenario(scenario)


def test_a_job_for_a_node_is_no_boost_of_it(run_scenario: Any) -> None:
    async def scenario(cluster: BoostGrid) -> None:
        await cluster.submit("aaaa1", target="master", anti_affinity=["master"])
        assert await cluster.names() == []

    run_scenario(scenario)
