"""Lists of nodes, offers and leases, page by page; a status with a bounded part of the jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.errors import BadInput
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import AnswerRenderer
from distributed_grid.server.services.nodes import MAX_STATUS_ROWS, NodeService
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid

ADMIN = Caller("owner", admin=True)
NAMES = [f"n{number}" for number in range(7)]


class Cluster(InProcessGrid):
    """Some nodes, and the service."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = NodeService(self.grid, self.get_viewer, AnswerRenderer(self.grid.slices))

    async def walk(self, ask: Callable[[Any, Caller], Awaitable[Any]], kind: type[Any], limit: int) -> list[Any]:
        """The pages of a list."""
        pages: list[Any] = []
        cursor: str | None = ""
        while cursor is not None:
            pages.append((await ask(kind(limit=limit, cursor=cursor), ADMIN)).decode())
            cursor = pages[-1]["next"]
        assert [page["more"] for page in pages] == [True] * (len(pages) - 1) + [False]
        return pages


def run(story: Callable[[Cluster], Awaitable[None]]) -> None:
    async def whole() -> None:
        cluster = Cluster()
        await cluster.open(*(a_node(name, cores=4) for name in reversed(NAMES)))
        await cluster.run(story)

    asyncio.run(whole())


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 8, 1000])
def test_every_node_and_offer_is_in_one_page_by_name(limit: int) -> None:
    async def story(cluster: Cluster) -> None:
        pages = await cluster.walk(cluster.nodes.list, requests.ListNodes, limit)
        assert [node["node_id"] for page in pages for node in page["nodes"]] == NAMES
        assert {page["total"] for page in pages} == {len(NAMES)}
        assert max(len(page["nodes"]) for page in pages) <= limit
        pages = await cluster.walk(cluster.nodes.offers, requests.ListOffers, limit)
        offers = [(offer["node_id"], offer["resource_type"]) for page in pages for offer in page["offers"]]
        assert offers == [(name, kind) for name in NAMES for kind in ("cpu", "memory")]
        for page in pages:
            names = [offer["node_id"] for offer in page["offers"]]
            assert len(names) <= max(limit, 2), "both offers of a node are in one page"
            assert all(names.count(name) == 2 for name in names)

    run(story)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_every_lease_is_in_one_page_the_oldest_first(limit: int) -> None:
    async def story(cluster: Cluster) -> None:
        for number in range(5):
            cluster.clock.ms += 1
            await cluster.ask(f"held{number}", duration_seconds=600)
        pages = await cluster.walk(cluster.nodes.allocations, requests.ListLeases, limit)
        ids = [lease["allocation_id"] for page in pages for lease in page["allocations"]]
        assert ids == [f"held{number}" for number in range(5)]
        assert {page["total"] for page in pages} == {5}

    run(story)


def test_a_list_that_is_empty_has_one_page() -> None:
    async def story(cluster: Cluster) -> None:
        for ask, kind, rows in (
            (cluster.nodes.recommendations, requests.ListRecommendations, "recommendations"),
            (cluster.nodes.allocations, requests.ListLeases, "allocations"),
        ):
            (page,) = await cluster.walk(ask, kind, 3)
            assert page == {rows: [], "total": 0, "more": False, "next": None, "omitted": 0}

    run(story)


def test_a_cursor_of_another_list_is_refused() -> None:
    async def story(cluster: Cluster) -> None:
        cursor = (await cluster.nodes.list(requests.ListNodes(limit=1), ADMIN)).decode()["next"]
        with pytest.raises(BadInput, match="this is no cursor of the list of offers"):
            await cluster.nodes.offers(requests.ListOffers(cursor=cursor), ADMIN)

    run(story)


def test_a_status_shows_some_jobs_and_counts_all() -> None:
    async def story(cluster: Cluster) -> None:
        jobs = MAX_STATUS_ROWS + 30
        await asyncio.gather(*(cluster.submit(f"j{number:03}", wait_seconds=None) for number in range(jobs)))
        status = (await cluster.nodes.status(requests.GetStatus(), ADMIN)).decode()
        assigned = 4 * len(NAMES)
        assert status["jobs_total"] == jobs
        assert status["job_states"] == {"assigned": assigned, "queued": jobs - assigned}
        assert [job["state"] for job in status["jobs"]] == ["assigned"] * assigned + ["queued"] * (
            MAX_STATUS_ROWS - assigned
        )
        assert status["omitted"] == {"nodes": 0, "offers": 0, "recommendations": 0, "allocations": 0, "jobs": 30}

    run(story)


def test_the_rows_of_a_page_of_jobs_are_taken_in_one_read() -> None:
    class CountedGrid(Grid):
        reads = 0

        async def read(self, question: Callable[[Any, int], Any]) -> Any:
            self.reads += 1
            return await super().read(question)

    async def whole() -> None:
        setting = InProcessGrid()
        setting.grid = grid = CountedGrid(setting.store, setting.clock)
        setting.compose()
        await setting.open(a_node("gpu1", cores=4))
        await setting.submit("j1")
        grid.reads = 0
        answer = (await setting.jobs.list(requests.ListJobs(), ADMIN)).decode()
        assert len(answer["jobs"]) == 1
        assert grid.reads == 1
        await grid.stop()

    asyncio.run(whole())
