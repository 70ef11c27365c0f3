"""Checkpoint directories come here whole or not at all, from wherever the attempt ran, and stay while needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from distributed_grid import wire
from distributed_grid.agent.files.attempt_files import AttemptFileReader, StoredWorkDirs
from distributed_grid.agent.files.job_dir import CHECKPOINT_DIR, make_root
from distributed_grid.control.agent_files import AttemptFiles, RemoteFiles
from distributed_grid.domain.events import AttemptEnded, JobCancelled, NodeForgotten
from distributed_grid.domain.jobs import Ending, Job, Outcome
from distributed_grid.reactor.effects import ShipCheckpoint
from distributed_grid.server.checkpoint_shipping import CheckpointShipper
from distributed_grid.trees.content_store import ContentStore, ContentStores
from distributed_grid.trees.manifest import ManifestEntry, encode_listing_pages
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid

FAR = "far"


class FarAgent:
    """The agent of a far node: reads its files for the control plane, over a link that may break."""

    nodes = (FAR,)

    def __init__(self, root: Path) -> None:
        self.root = root
        make_root(str(root))
        self.agents: dict[str, wire.AgentSide] = {}
        self.files = RemoteFiles(self.agents)
        self.agents[FAR] = self
        self._reader = AttemptFileReader(root, self._answer)
        self.reads = 0
        self.breaks_after = 10**9
        self.lie: Callable[[wire.FileListing], wire.FileListing] | None = None

    def close(self, why: str) -> None:
        raise AssertionError(why)

    def _answer(self, message: wire.FileChunk | wire.FileListing) -> None:
        if self.lie is not None and isinstance(message, wire.FileListing):
            message = self.lie(message)
        self.files.received(message, self)

    def send(self, message: wire.ToAgent) -> None:
        assert isinstance(message, wire.ReadFile | wire.ReadCredit | wire.CloseStream | wire.ListFiles)
        self.reads += isinstance(message, wire.ReadFile)
        if self.reads > self.breaks_after:
            asyncio.get_running_loop().call_soon(self.files.gone, self)
            return
        asyncio.get_running_loop().call_soon(self._reader.received, message)


class Shipping:
    """A control plane with a shipper, and jobs that are displaced."""

    def __init__(self, grid: InProcessGrid, folder: Path) -> None:
        self.grid = grid
        self.agent = FarAgent(folder / "far")
        self.jobs = folder / "jobs"
        make_root(str(self.jobs))
        self.store = ContentStore(folder / "checkpoints")
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """A new shipper, as after a crash."""
        files = AttemptFiles(self.jobs, self.agent.files, lambda name: name != FAR)
        self.shipper = CheckpointShipper(self.grid.grid, files, self.store)
        self.grid.grid.perform_with({ShipCheckpoint: self.shipper.perform})
        self.task = asyncio.create_task(self.shipper.run())

    async def crash(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def displaced(self, uid: str, node: str = FAR) -> Path:
        """A job whose first attempt is over and has left something; where it is. Nothing is read before a yield."""
        view = await self.grid.submit(uid, resource_type="cpu", amount=1, require=[node])
        assert view.job.uid == uid
        await self.grid.starts(uid)
        left = (self.agent.root if node == FAR else self.jobs) / f"{uid}.1" / CHECKPOINT_DIR
        left.mkdir(parents=True)
        return left

    async def over(self, uid: str) -> None:
        job = await self.job(uid)
        attempt = job.attempts[-1]
        outcome = Outcome(Ending.PREEMPTED)
        event = AttemptEnded(
            uid=uid,
            number=attempt.number,
            fence=attempt.fence,
            outcome=outcome,
            nodes=(attempt.node,),
            has_checkpoint=True,
        )
        await self.grid.handle(event)

    async def job(self, uid: str) -> Job:
        return await self.grid.grid.read(lambda ledger, now: ledger.jobs[uid])

    async def settled(self, uid: str) -> Job:
        """The job, once its checkpoint is here or is not to be had."""
        while (job := await self.job(uid)).checkpoint_from:
            await asyncio.sleep(0.01)
        return job

    def stored(self) -> int:
        return len(list(Path(self.store.root).glob("??/*")))


Scenario = Callable[[Shipping], Awaitable[None]]


@pytest.fixture
def with_shipping(tmp_path: Path) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            grid = await InProcessGrid().open(a_node(FAR, hold_s=60), a_node("near"))
            shipping = Shipping(grid, tmp_path)
            try:
                await grid.run(lambda _: scenario(shipping))
            finally:
                await shipping.crash()

        asyncio.run(whole())

    return run


def fill(left: Path) -> None:
    (left / "step").mkdir()
    (left / "step" / "state").write_bytes(b"x" * 5_000_000)
    (left / "empty").touch()
    (left / "latest").symlink_to("step")


@pytest.mark.parametrize("node", [FAR, "near"])
def test_it_can_be_laid_out_as_it_was_and_is_removed_with_its_job(with_shipping, node: str) -> None:
    async def scenario(shipping: Shipping) -> None:
        fill(await shipping.displaced("j1", node))
        await shipping.over("j1")
        job = await shipping.settled("j1")
        assert (job.checkpoint_attempt, job.checkpoint_files, job.checkpoint_bytes) == (1, 3, 5_000_000)
        target = shipping.folder / "new"
        target.mkdir()
        await StoredWorkDirs(ContentStores(shipping.store)).lay_out(job.checkpoint, target)
        assert (target / "latest" / "state").read_bytes() == b"x" * 5_000_000
        assert sorted(path.name for path in target.iterdir()) == ["empty", "latest", "step"]
        assert shipping.stored() == 3
        await shipping.shipper.remove_unused()
        assert shipping.stored() == 3
        await shipping.grid.handle(JobCancelled("j1", "ann"))
        await shipping.grid.ends("j1", Ending.NEVER_STARTED)
        while shipping.stored():
            await asyncio.sleep(0.01)

    with_shipping(scenario)


def test_a_link_that_breaks_and_a_crash_only_delay_it(with_shipping) -> None:
    async def scenario(shipping: Shipping) -> None:
        fill(await shipping.displaced("j1"))
        shipping.agent.breaks_after = 1
        await shipping.over("j1")
        while shipping.agent.reads < 2:
            await asyncio.sleep(0.01)
        assert (await shipping.job("j1")).checkpoint_from == 1
        await shipping.crash()
        shipping.begin()
        await asyncio.sleep(0)
        assert (await shipping.job("j1")).checkpoint_from == 1
        shipping.agent.breaks_after = 10**9
        assert (await shipping.settled("j1")).checkpoint_files == 3

    with_shipping(scenario)


def test_a_directory_that_is_gone_or_holds_too_much_is_given_up_with_its_reason(with_shipping) -> None:
    async def scenario(shipping: Shipping) -> None:
        gone = await shipping.displaced("j1")
        gone.rmdir()
        large = await shipping.displaced("j2", "near")
        with open(large / "sparse", "wb") as file:
            file.truncate(5 << 30)
        await shipping.over("j1")
        await shipping.over("j2")
        assert "its directory is not there any more" in (await shipping.settled("j1")).checkpoint_problem
        assert "it holds more than 4,096 MB" in (await shipping.settled("j2")).checkpoint_problem
        assert shipping.stored() == 0

    with_shipping(scenario)


def test_a_node_that_is_gone_holds_up_nobody_who_has_a_place(with_shipping) -> None:
    async def scenario(shipping: Shipping) -> None:
        view = await shipping.grid.submit("j1", resource_type="cpu", amount=1, prefer=[FAR])
        assert view.job.node_id == FAR
        await shipping.grid.starts("j1")
        shipping.agent.agents.clear()
        await shipping.grid.handle(NodeForgotten(FAR))
        await shipping.over("j1")
        job = await shipping.settled("j1")
        assert job.attempts[-1].node == "near"
        assert job.checkpoint_problem == "attempt 1: far is not connected"

    with_shipping(scenario)


LIES = {
    "a file outside": ManifestEntry("../x", "file", 1),
    "a huge file": ManifestEntry("x", "file", 2**40),
    "more bytes than there are": ManifestEntry("empty", "file", 7),
    "a link outside": ManifestEntry("x", "link", target="../../x"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lying_agent_leads_nowhere(with_shipping, lie: ManifestEntry) -> None:
    async def scenario(shipping: Shipping) -> None:
        fill(await shipping.displaced("j1"))
        (files,) = encode_listing_pages([lie], 10_000)
        shipping.agent.lie = lambda listing: wire.FileListing(stream=listing.stream, files=files)
        await shipping.over("j1")
        assert (await shipping.settled("j1")).checkpoint_problem
        assert shipping.stored() == 0

    with_shipping(scenario)
