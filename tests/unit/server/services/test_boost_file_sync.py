"""The file of boosts beside the ledger: always as the ledger is, and what a new ledger learns from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.boost_file import ResourceBoostPersistence, StoredBoost, StoredClaim
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked, LeaseExtended, LeaseReleased, NodeDeclared
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.states import LeaseState
from distributed_grid.server.services.boost_file_sync import BoostFileSync, claim_of
from tests.support.builders import a_node, a_request
from tests.unit.server.in_process_grid import InProcessGrid

OFFSET_MS = 5_000
"""The wall clock is ahead of the grid's time."""


class BoostFileGrid(InProcessGrid):
    """A cluster with two nodes, of which none has been heard, and its file of boosts."""

    def __init__(self, folder: Path, store: InMemoryStore | None = None) -> None:
        super().__init__()
        if store is not None:
            self.grid = Grid(store, self.clock)
        self.file = ResourceBoostPersistence(state_dir=folder)
        self.sync = BoostFileSync(self.grid, self.file, offset_ms=lambda: OFFSET_MS)

    async def begin(self, *, heard: bool = True) -> None:
        await self.grid.start()
        for name in ("gpu1", "gpu2"):
            await self.grid.handle(NodeDeclared(a_node(name, cores=4, gpus=2)))
        await self.sync.recover()
        if heard:
            await self.hear()

    async def hear(self) -> None:
        for name in ("gpu1", "gpu2"):
            await self.grid.handle(HeartbeatReceived(name=name, usage=Usage()))

    async def boost(self, name: str, **asked: Any) -> None:
        request = a_request(name, target="gpu1", anti_affinity=("gpu1",), duration_s=600, **asked)
        await self.grid.handle(LeaseAsked(request))

    async def lease(self, name: str) -> Lease:
        return await self.grid.read(lambda ledger, now: ledger.leases[name])

    def names(self) -> list[str]:
        return [boost.boost_id for boost in self.file.load()]


def run_scenarios(folder: Path, *scenarios: Callable[[BoostFileGrid], Awaitable[None]]) -> None:
    """Each scenario in a cluster with a new ledger, all with the same file."""

    async def run() -> None:
        for scenario in scenarios:
            await BoostFileGrid(folder).run(scenario)

    asyncio.run(run())


async def boosts(cluster: BoostFileGrid) -> None:
    """Two boosts, written down."""
    await cluster.begin()
    await cluster.boost("b1", cores=2, priority="high", team="lab")
    await cluster.boost("b2", gpus=1)
    await cluster.sync.write()


def test_the_file_is_as_the_ledger_is(tmp_path: Path) -> None:
    async def scenario(cluster: BoostFileGrid) -> None:
        await cluster.begin()
        assert not cluster.file.path.exists(), "nobody has ever asked for a boost"
        await boosts(cluster)
        assert cluster.names() == ["b1", "b2"]
        await cluster.grid.handle(LeaseAsked(a_request("plain")))
        await cluster.grid.handle(LeaseReleased("b1", "ada"))
        await cluster.sync.write()
        assert cluster.names() == ["b2"]
        before = cluster.file.load()
        await cluster.grid.handle(LeaseExtended("b2", "ada", 60_000))
        await cluster.sync.write()
        assert cluster.file.load()[0].expires_at != before[0].expires_at

    run_scenarios(tmp_path, scenario)


def test_it_is_written_by_itself_when_a_boost_changes(tmp_path: Path) -> None:
    async def scenario(cluster: BoostFileGrid) -> None:
        await cluster.begin()
        task = asyncio.create_task(cluster.sync.run())
        await cluster.boost("b1")
        while not cluster.file.path.exists():
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        assert cluster.names() == ["b1"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_scenarios(tmp_path, scenario)


def test_a_new_ledger_recovers_what_the_file_has(tmp_path: Path) -> None:
    old: dict[str, Lease] = {}

    async def before(cluster: BoostFileGrid) -> None:
        await boosts(cluster)
        old.update({name: await cluster.lease(name) for name in ("b1", "b2")})

    async def after(cluster: BoostFileGrid) -> None:
        await cluster.begin(heard=False)
        for name, lease in old.items():
            claimed = await cluster.lease(name)
            assert (claimed.state, claimed.recovered) == (LeaseState.RESERVING, True)
            assert (claimed.node, claimed.claim, claimed.fence) == (lease.node, lease.claim, lease.fence)
            assert (claimed.granted_at_ms, claimed.ends_at_ms) == (lease.granted_at_ms, lease.ends_at_ms)
            for field in ("id", "user", "team", "priority", "target"):
                assert getattr(claimed.request, field) == getattr(lease.request, field)
            assert claimed.request.ask.gpu_milli == lease.request.ask.gpu_milli
        await cluster.hear()
        assert {(await cluster.lease(name)).state for name in old} == {LeaseState.ACTIVE}
        assert cluster.names() == ["b1", "b2"]

    run_scenarios(tmp_path, before, after)


def test_a_start_that_died_before_it_had_read_the_file_reads_it_the_next_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        dead = BoostFileGrid(tmp_path)
        await dead.grid.start()
        await dead.grid.handle(NodeDeclared(a_node("gpu2")))
        await dead.grid.stop()
        again = BoostFileGrid(tmp_path, dead.store)
        await again.begin()
        assert (await again.lease("b1")).state is LeaseState.ACTIVE
        await again.grid.handle(LeaseReleased("b1", "ada"))
        await again.sync.recover()
        assert again.names() == ["b2"], "what is over does not come back"
        await again.grid.stop()

    run_scenarios(tmp_path, boosts)
    asyncio.run(scenario())


def test_what_was_being_given_back_does_not_come_back(tmp_path: Path) -> None:
    async def scenario(cluster: BoostFileGrid) -> None:
        one, two = cluster.file.load()
        cluster.file.save([replace(one, state="releasing", is_active=False), two], one.machine_id)
        await cluster.begin()
        assert set(await cluster.grid.read(lambda ledger, now: dict(ledger.leases))) == {"b2"}

    run_scenarios(tmp_path, boosts, scenario)


def test_another_machines_boosts_are_not_ours(tmp_path: Path) -> None:
    async def scenario(cluster: BoostFileGrid) -> None:
        (one, *_) = cluster.file.load()
        rows = [replace(one, machine_id="elsewhere")]
        cluster.file.path.unlink()
        cluster.file.save(rows, "elsewhere")
        await cluster.begin()
        assert not await cluster.grid.read(lambda ledger, now: dict(ledger.leases))
        assert cluster.names() == ["b1"]

    run_scenarios(tmp_path, boosts, scenario)


def test_a_corrupt_file_is_set_aside_told_of_and_written_anew(tmp_path: Path) -> None:
    async def scenario(cluster: BoostFileGrid) -> None:
        await boosts(cluster)
        cluster.file.path.write_text('{"version": 1, "boosts": [')
        await cluster.boost("b3")
        await cluster.sync.write()
        assert cluster.names() == ["b1", "b2", "b3"]
        (warning,) = cluster.sync.warnings()
        assert warning.startswith("Persistence file corrupted: ")
        aside = tmp_path / "resource_boosts.json.corrupt-1"
        assert str(aside) in warning
        aside.unlink()
        assert cluster.sync.warnings() == [], "whoever removes it has seen it"

    run_scenarios(tmp_path, scenario)


def test_a_file_that_was_removed_comes_back(tmp_path: Path) -> None:
    async def scenario(cluster: BoostFileGrid) -> None:
        await boosts(cluster)
        cluster.file.path.unlink()
        await cluster.sync.write()
        assert cluster.names() == ["b1", "b2"]

    run_scenarios(tmp_path, scenario)


def test_a_file_that_cannot_be_written_is_a_warning_until_it_can(tmp_path: Path) -> None:
    async def scenario(cluster: BoostFileGrid) -> None:
        cluster.file.path.mkdir()
        await boosts(cluster)
        (warning,) = cluster.sync.warnings()
        assert warning.startswith("Boosts not persisting across CLI commands: ")
        assert "s a directory" in warning
        cluster.file.path.rmdir()
        await cluster.sync.write()
        assert (cluster.sync.warnings(), cluster.names()) == ([], ["b1", "b2"])

    run_scenarios(tmp_path, scenario)


def test_a_claim_says_what_the_file_says() -> None:
    claim = claim_of(BOOST, OFFSET_MS)
    assert (claim.node, claim.request.target, claim.request.anti_affinity) == ("gpu2", "gpu1", ("gpu1",))
    assert (claim.granted_at_ms, claim.ends_at_ms) == (1_777_629_600_000 - OFFSET_MS, 0)


BOOST = StoredBoost(
    boost_id="b1",
    source_node="gpu2",
    target_node="gpu1",
    resource_type="cpu",
    amount=1.0,
    allocated_at="2026-05-01T10:00:00.000Z",
    expires_at=None,
    is_active=True,
    user="ada",
    priority="low",
    fence=1,
    claim=StoredClaim(1000),
    machine_id="here",
)
