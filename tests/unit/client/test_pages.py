"""Pages of a list are asked for one after the other, until the last."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed_grid.client.conversation import JsonObject
from distributed_grid.client.pages import every_page, every_page_async, joined, whole_status, whole_status_async

ROWS = [*"abcdefg"]


class PagedList:
    """A list with pages of two rows, and a status that shows one row of it."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def list_nodes(self, cursor: str, **arguments: Any) -> JsonObject:
        self.asked.append(arguments)
        begin = int(cursor or 0)
        following = str(begin + 2) if begin + 2 < len(ROWS) else None
        return JsonObject(nodes=ROWS[begin : begin + 2], total=len(ROWS), more=following is not None, next=following)

    def get_status(self) -> JsonObject:
        omitted = JsonObject(nodes=6, offers=0, allocations=0, recommendations=0, jobs=3)
        return JsonObject(nodes=["a"], offers=["o"], allocations=[], recommendations=[], jobs=["j"], omitted=omitted)


class AsyncPagedList:
    """The same, of coroutines."""

    def __init__(self) -> None:
        self.list = PagedList()

    async def list_nodes(self, cursor: str, **arguments: Any) -> JsonObject:
        return self.list.list_nodes(cursor, **arguments)

    async def get_status(self) -> JsonObject:
        return self.list.get_status()


def test_all_pages_come_with_the_same_arguments() -> None:
    client = PagedList()
    assert [row for page in every_page(client.list_nodes, limit=2) for row in page.nodes] == ROWS
    assert client.asked == [{"limit": 2}] * 4

    async def walk() -> list[str]:
        return [row async for page in every_page_async(AsyncPagedList().list_nodes) for row in page.nodes]

    assert asyncio.run(walk()) == ROWS


def test_joined_pages_are_the_first_with_all_rows_and_no_next_one() -> None:
    assert joined(every_page(PagedList().list_nodes), "nodes") == {
        "nodes": ROWS, "total": len(ROWS), "more": False, "next": None,
    }  # fmt: skip


def test_a_whole_status_has_every_row_of_a_list_that_was_cut_and_the_jobs_of_the_status() -> None:
    clients: list[Any] = [PagedList(), AsyncPagedList()]
    for status in (whole_status(clients[0]), asyncio.run(whole_status_async(clients[1]))):
        answer: Any = status
        assert (answer["nodes"], answer["offers"], answer["jobs"]) == (ROWS, ["o"], ["j"])
        assert answer["omitted"] == {"nodes": 0, "offers": 0, "allocations": 0, "recommendations": 0, "jobs": 3}
