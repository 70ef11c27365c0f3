"""Jobs: how long they wait for resources; shipped content within its bounds, and for as long as a job needs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import JobCancelled, NodeDeclared
from distributed_grid.domain.jobs import Command
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.services.jobs import trim_content
from distributed_grid.trees.content_store import ContentStore
from distributed_grid.trees.manifest import encode
from distributed_grid.trees.scan import scan_directory
from tests.support.builders import a_node, a_request, a_submission
from tests.unit.server.in_process_grid import InProcessGrid

ADMIN = Caller("owner", admin=True)


class Still:
    """A clock that stands still."""

    def now_ms(self) -> int:
        return 1_000_000


def ship(store: ContentStore, tree: Path, content: str) -> str:
    tree.mkdir()
    (tree / "file").write_text(content)
    return store.add(encode(scan_directory(tree, store).manifest))


def test_the_oldest_goes_but_nothing_that_a_living_job_is_to_find(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = ContentStore(tmp_path / "store")
        needed, left = ship(store, tmp_path / "a", "needed" * 100), ship(store, tmp_path / "b", "left over" * 100)
        grid = Grid(InMemoryStore(), Still())
        await grid.start()
        await grid.handle(NodeDeclared(a_node("gpu2", hold_s=60)))
        await grid.handle(a_submission(a_request("r1"), command=Command(("true",), workdir=needed)))
        assert await trim_content(grid, store, max_bytes=10**9, grace_seconds=0) == 0
        assert await trim_content(grid, store, max_bytes=0) == 0, "what was used just now stays"
        assert await trim_content(grid, store, max_bytes=0, grace_seconds=0) > 900
        with store.open(needed) as manifest:
            assert manifest.read()
        assert store.missing({left: 0}) == [left]
        assert len([path for path in Path(store.root).rglob("*") if path.is_file() and len(path.name) == 64]) == 2
        await grid.handle(JobCancelled("r1", "ada"))
        assert await trim_content(grid, store, max_bytes=0, grace_seconds=0) > 600
        await grid.stop()

    asyncio.run(scenario())


def test_a_job_without_a_wait_limit_is_still_queued_after_forty_days() -> None:
    async def scenario(setting: InProcessGrid) -> None:
        await setting.open(a_node("gpu1", cores=1))
        await setting.submit("holder")
        await setting.starts("holder")
        patient = await setting.submit("patient", wait_seconds=None)
        usual = await setting.submit("usual")
        assert (patient.job.wait_seconds, usual.job.wait_seconds) == (None, 300)
        assert (await setting.explain("patient")).waiting.gives_up_at is None
        assert (await setting.explain("usual")).waiting.gives_up_at is not None
        for _ in range(40):
            await setting.later(86_400)
        assert (await setting.jobs.get(requests.GetJob("usual"), ADMIN)).job.outcome == "waited_too_long"
        assert (await setting.jobs.get(requests.GetJob("patient"), ADMIN)).job.state == "queued"
        await setting.ends("holder")
        assert (await setting.jobs.get(requests.GetJob("patient"), ADMIN)).job.state == "assigned"

    asyncio.run(InProcessGrid().run(scenario))


def test_a_page_of_jobs_says_whether_there_are_more_and_how_many_in_each_state() -> None:
    async def scenario(setting: InProcessGrid) -> None:
        await setting.open(a_node("gpu1", cores=4))
        for number in range(3):
            await setting.submit(f"over{number}")
            await setting.starts(f"over{number}")
            await setting.ends(f"over{number}")
        await setting.submit("live", user="bob")
        listed = {
            limit: (await setting.jobs.list(requests.ListJobs(limit=limit, all=everything), ADMIN)).decode()
            for limit, everything in ((1, False), (3, False), (4, False), (2, True), (5, True))
        }
        assert {one["total"] for one in listed.values()} == {4}
        assert [one["by_state"] for one in listed.values()] == [{"assigned": 1, "ended": 3}] * 5
        of_ann = await setting.jobs.list(requests.ListJobs(limit=1, user="ann"), ADMIN)
        assert of_ann.decode()["total"] == 3
        assert {limit: (len(one["jobs"]), one["more"]) for limit, one in listed.items()} == {
            1: (1, True),
            3: (3, True),
            4: (4, False),
            2: (2, True),
            5: (4, False),
        }
        assert (await setting.jobs.list_live(requests.ListLiveJobs(), Caller("bob"))).uids == ["live"]
        assert (await setting.jobs.list_live(requests.ListLiveJobs(), Caller("ann"))).uids == []

    asyncio.run(InProcessGrid().run(scenario))


def test_a_job_that_is_not_placed_on_its_preferred_node_says_where_and_why() -> None:
    async def scenario() -> None:
        setting = InProcessGrid()
        await setting.open(a_node("ash", cores=1), a_node("elm", cores=4))
        taken = await setting.submit("r1", amount=2, resource_type="cpu", prefer=["ash"])
        assert taken.note == "placed on elm instead of ash (ash: 1 core at most, 2 cores asked)"
        assert (await setting.submit("r2", amount=1, resource_type="cpu", prefer=["ash"])).note is None
        assert (await setting.submit("r3", amount=1, resource_type="cpu")).note is None
        await setting.grid.stop()

    asyncio.run(scenario())
