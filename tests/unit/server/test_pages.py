"""Pages of lists: every row that is kept during a walk is in exactly one page, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.api import requests
from distributed_grid.control.grid import LoopSlices
from distributed_grid.domain.events import JobCancelled
from distributed_grid.errors import BadInput
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.pages import EndedPlace, LivingPlace, RowPlace, place_of, select_page
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid

ADMIN = Caller("owner", admin=True)
ACTIONS = st.sampled_from(["submit", "submit later", "end oldest", "end newest", "end any", "page"])


@settings(max_examples=60, deadline=None)
@given(
    before=st.lists(ACTIONS, max_size=12),
    during=st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=20),
    limit=st.integers(1, 4),
)
def test_a_job_that_is_kept_during_the_whole_walk_is_in_exactly_one_page(
    before: list[str], during: list[tuple[str, int]], limit: int
) -> None:
    async def scenario(setting: InProcessGrid) -> None:
        await setting.open(a_node("gpu1", cores=1))
        await setting.ask("holder")
        names: list[str] = []
        pages: list[list[str]] = []
        cursor: str | None = ""

        async def act(action: str, number: int = 0) -> None:
            nonlocal cursor
            living = await setting.grid.read(lambda ledger, now: list(ledger.jobs))
            if action.startswith("submit"):
                setting.clock.ms += 5 if action == "submit later" else 0
                names.append(f"j{len(names) * 7919 % 1000:03}")
                await setting.submit(names[-1], wait_seconds=None)
            elif action == "page":
                if cursor is not None:
                    op = requests.ListJobs(limit=limit, cursor=cursor)
                    answer = (await setting.jobs.list(op, ADMIN)).decode()
                    assert len(answer["jobs"]) <= limit
                    assert answer["total"] == sum(answer["by_state"].values()) == len(names)
                    pages.append([job["uid"] for job in answer["jobs"]])
                    cursor = answer["next"]
            elif living:
                position = {"end oldest": 0, "end newest": -1}.get(action, number % len(living))
                await setting.grid.handle(JobCancelled(living[position], "ann"))

        for action in before:
            await act("submit" if action == "page" else action)
        kept = list(names)
        await act("page")
        for action, number in during:
            await act(action, number)
        while cursor is not None:
            await act("page")
        shown = Counter(name for page in pages for name in page)
        assert set(kept) <= shown.keys() <= set(names)
        assert set(shown.values()) <= {1}

    asyncio.run(InProcessGrid().run(scenario))


def test_jobs_come_the_newest_first_page_by_page_and_the_newest_last_in_each() -> None:
    async def scenario(setting: InProcessGrid) -> None:
        await setting.open(a_node("gpu1", cores=1))
        await setting.ask("holder")
        for number in range(6):
            setting.clock.ms += 1
            await setting.submit(f"j{number}", wait_seconds=None)
        for name in ("j3", "j0"):
            setting.clock.ms += 1
            await setting.grid.handle(JobCancelled(name, "ann"))

        async def walk(**fields: Any) -> list[list[str]]:
            pages: list[list[str]] = []
            cursor: str | None = ""
            while cursor is not None:
                answer = (await setting.jobs.list(requests.ListJobs(cursor=cursor, **fields), ADMIN)).decode()
                pages.append([job["uid"] for job in answer["jobs"]])
                cursor = answer["next"]
            return pages

        assert await walk(limit=3) == [["j2", "j4", "j5"], ["j3", "j0", "j1"]]
        assert await walk(limit=10) == [["j3", "j0", "j1", "j2", "j4", "j5"]]
        assert await walk(limit=2) == [["j4", "j5"], ["j1", "j2"], ["j3", "j0"]]
        assert await walk(limit=1, state="ended") == [["j0"], ["j3"]]
        assert await walk(limit=2, state="queued") == [["j4", "j5"], ["j1", "j2"]]
        assert await walk(limit=2, user="bob") == [[]]

    asyncio.run(InProcessGrid().run(scenario))


@settings(max_examples=100, deadline=None)
@given(rows=st.sets(st.tuples(st.integers(0, 5), st.text("ab", max_size=3))), limit=st.integers(1, 5), data=st.data())
def test_a_walk_through_rows_in_order_has_every_row_that_stays_once(
    rows: set[tuple[int, str]], limit: int, data: st.DataObject
) -> None:
    async def walk() -> None:
        current, kept = set(rows), set(rows)
        shown: list[tuple[int, str]] = []
        cursor: str | None = ""
        while cursor is not None:
            listed = data.draw(st.permutations(sorted(current)))
            page = await select_page(LoopSlices(), listed, lambda row: row, name="rows", cursor=cursor, limit=limit)
            assert list(page.rows) == sorted(page.rows)
            assert len(page.rows) <= limit
            shown += page.rows
            cursor = page.next()
            gone = data.draw(st.sets(st.sampled_from(sorted(current)))) if current else set()
            current -= gone
            kept -= gone
            current |= data.draw(st.sets(st.tuples(st.integers(0, 5), st.text("ab", max_size=3)), max_size=2))
        assert shown == sorted(set(shown))
        assert kept <= set(shown)

    asyncio.run(walk())


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "é",
        "====",
        "7",
        RowPlace("nodes", 0, "gpu1").cursor(),
        EndedPlace("moves", 1, 2, 3).cursor(),
        base64.urlsafe_b64encode(b'["living","jobs",1,-1,0,""]').decode(),
        base64.urlsafe_b64encode(b'["ended","jobs",1,99999999999999999999999,0]').decode(),
        LivingPlace("jobs", 1, 1).cursor()[:-2],
    ],
)
def test_a_cursor_of_another_list_or_of_none_is_refused_in_one_line(cursor: str) -> None:
    with pytest.raises(BadInput) as refusal:
        place_of(cursor, "jobs", LivingPlace | EndedPlace)
    assert str(refusal.value) == "this is no cursor of the list of jobs: give the `next` of an earlier page"


def test_a_cursor_names_the_place_that_it_was_made_of() -> None:
    for place in (LivingPlace("jobs", 1, 2), LivingPlace("jobs", 1, 2, 3, "é-key"), EndedPlace("jobs", 1, 2, 3)):
        assert place_of(place.cursor(), "jobs", LivingPlace | EndedPlace) == place
    assert place_of("", "jobs", LivingPlace) is None
