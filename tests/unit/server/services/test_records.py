"""A lease's id as a name: one lease at a time, and again after it is over; and found by nothing but that name."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Unpack

import msgspec
import pytest

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.reports import EventRecord
from distributed_grid.api.requests import ListEvents
from distributed_grid.control.grid import RECENT_JOBS, Grid
from distributed_grid.domain.events import (
    AttemptEnded,
    HeartbeatReceived,
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseReleased,
    NodeDeclared,
)
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.nodes import Usage
from distributed_grid.errors import Conflict, NotFound
from distributed_grid.ports import EndedFilters, EndedRow, EventFilters, EventRow
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.reactor.decision import RECORD_TYPES
from distributed_grid.server.services.records import (
    EVENTS_PER_PAGE,
    EVENTS_PER_SLICE,
    PUBLIC_EVENTS,
    event_record,
    find_job,
    find_lease,
    stream_events,
)
from tests.support.builders import a_node, a_request


class Standing:
    """A clock that stands still."""

    def now_ms(self) -> int:
        return 1_000_000


class CountingStore(InMemoryStore):
    """A store that notes in which thread its history is read."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[str] = []

    def events(self, *, limit: int = 1000, newest: bool = False, **filters: Unpack[EventFilters]) -> list[EventRow]:
        self.readers.append(threading.current_thread().name)
        return super().events(limit=limit, newest=newest, **filters)

    def ended(self, kind: str, *, limit: int = 100, **filters: Unpack[EndedFilters]) -> list[EndedRow]:
        self.readers.append(threading.current_thread().name)
        return super().ended(kind, limit=limit, **filters)


def run(scenario: Callable[[Grid], Awaitable[None]], store: InMemoryStore | None = None) -> None:
    async def run_whole() -> None:
        grid = Grid(store or InMemoryStore(), Standing())
        await grid.start()
        await grid.handle(NodeDeclared(a_node("here", cores=4)))
        await grid.handle(HeartbeatReceived(name="here", usage=Usage()))
        await scenario(grid)
        await grid.read(lambda ledger, now: ledger.check())
        await grid.stop()

    asyncio.run(asyncio.wait_for(run_whole(), 20))


async def ask(grid: Grid, name: str, *, cores: float = 1, again: bool = True) -> Lease:
    answer = await grid.handle(LeaseAsked(a_request(name, cores=cores), again))
    assert isinstance(answer, LeaseAnswer)
    return answer.lease


def test_a_name_is_one_lease_while_it_is_held() -> None:
    async def scenario(grid: Grid) -> None:
        first = await ask(grid, "task")
        assert await ask(grid, "task") == first
        with pytest.raises(Conflict):
            await ask(grid, "task", cores=2)

    run(scenario)


def test_a_name_can_be_used_again_when_its_lease_is_over() -> None:
    async def scenario(grid: Grid) -> None:
        first = await ask(grid, "task")
        await grid.handle(LeaseReleased("task", "ada"))
        second = await ask(grid, "task", cores=2)
        assert second.holds
        assert second.fence > first.fence
        assert (await find_lease(grid, "task")).fence == second.fence

    run(scenario)


def test_without_again_the_recorded_end_is_told() -> None:
    async def scenario(grid: Grid) -> None:
        await ask(grid, "task")
        await grid.handle(LeaseReleased("task", "ada"))
        assert (await ask(grid, "task", again=False)).is_over

    run(scenario)


def test_an_exact_name_is_not_the_beginning_of_another() -> None:
    async def scenario(grid: Grid) -> None:
        await ask(grid, "task-10")
        assert (await find_lease(grid, "task-1")).id == "task-10"
        with pytest.raises(NotFound):
            await find_lease(grid, "task-1", exact=True)
        await grid.handle(LeaseReleased("task-10", "ada"))
        with pytest.raises(NotFound):
            await find_lease(grid, "task-1", exact=True)
        assert (await find_lease(grid, "task-10", exact=True)).is_over

    run(scenario)


@pytest.mark.parametrize("name", ["", "j", "job", "job-", "job-abc", "abc"])
def test_the_only_thing_there_is_is_not_found_by_nearly_nothing(name: str) -> None:
    async def scenario(grid: Grid) -> None:
        await grid.handle(JobSubmitted(id="job-abcdef", command=Command(("true",)), request=a_request("abcdef")))
        await ask(grid, "abcxyz")
        for find in (find_job, find_lease):
            with pytest.raises(NotFound, match="the beginning of an id needs 4 characters of its own"):
                await find(grid, name)
        await grid.handle(JobCancelled("abcdef", "ada"))  # nor when it is over
        with pytest.raises(NotFound, match="the beginning of an id needs 4 characters of its own"):
            await find_job(grid, name)
        assert (await find_job(grid, "job-abcd")).uid == (await find_job(grid, "abcd")).uid == "abcdef"

    run(scenario)


def test_a_follower_reads_only_when_something_of_its_type_has_happened() -> None:
    store = CountingStore()

    async def scenario(grid: Grid) -> None:
        followed = stream_events(grid, Viewer(0), ListEvents(follow=True, types=("released",), limit=1))
        first = asyncio.ensure_future(anext(followed))
        while not store.readers:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        for number in range(20):
            await ask(grid, f"task{number}", cores=0.1)
        before = [name for name in store.readers if name.startswith("grid-reader")]
        await grid.handle(LeaseReleased("task7", "ada"))
        assert (await first).subject == "task7"
        again = asyncio.ensure_future(anext(followed))
        await grid.handle(LeaseReleased("task8", "ada"))
        assert (await again).subject == "task8"
        assert len(before) == 1
        await followed.aclose()

    run(scenario, store)


class PagedStore(InMemoryStore):
    """A store that remembers how many events it was asked for at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    def events(self, *, limit: int = 1000, newest: bool = False, **filters: Unpack[EventFilters]) -> list[EventRow]:
        self.limits.append(limit)
        return super().events(limit=limit, newest=newest, **filters)


@pytest.mark.parametrize("types", [(), ("granted", "released")])
def test_many_events_are_read_page_by_page_and_others_have_their_turn_meanwhile(types: tuple[str, ...]) -> None:
    store = PagedStore()

    async def scenario(grid: Grid) -> None:
        for number in range(EVENTS_PER_PAGE):
            await ask(grid, f"task{number}", cores=0.1)
            await grid.handle(LeaseReleased(f"task{number}", "ada"))
        expected = store.events(limit=10**6, types=types)[-2 * EVENTS_PER_PAGE + 300 :]
        store.limits.clear()
        turn = 0

        async def shown() -> list[tuple[int, int]]:
            listed = stream_events(grid, Viewer(0), ListEvents(limit=len(expected), types=types))
            return [(event.seq, turn) async for event in listed]

        listing = asyncio.ensure_future(shown())
        while not listing.done():
            turn += 1
            await asyncio.sleep(0)
        assert [seq for seq, _ in listing.result()] == [row.seq for row in expected]
        assert max(store.limits) == EVENTS_PER_PAGE
        assert max(Counter(turn for _, turn in listing.result()).values()) <= EVENTS_PER_SLICE

    run(scenario, store)


def test_a_job_that_has_just_ended_is_found_without_reading_history_and_an_older_one_in_another_thread() -> None:
    store = CountingStore()

    async def scenario(grid: Grid) -> None:
        for number in range(RECENT_JOBS + 1):
            await grid.handle(
                JobSubmitted(id=f"j{number}", command=Command(("true",)), request=a_request(f"u{number}", cores=1))
            )
            await grid.handle(JobCancelled(f"u{number}", "ada"))
            fence = grid.ledger.jobs[f"u{number}"].attempts[0].fence
            await grid.handle(AttemptEnded(uid=f"u{number}", number=1, fence=fence, outcome=Outcome(Ending.CANCELLED)))
        store.readers.clear()
        for name in (f"j{RECENT_JOBS}", f"u{RECENT_JOBS}"):
            assert (await find_job(grid, name)).uid == f"u{RECENT_JOBS}"
        assert store.readers == []
        assert (await find_job(grid, "j0")).uid == "u0"
        assert store.readers
        assert all(name.startswith("grid-reader") for name in store.readers)

    run(scenario, store)


def test_event_about_anothers_work_has_neither_reason_nor_details() -> None:
    def view(type_: str, user: str, reader: str | None) -> EventRecord:
        record = {"reason": "xyzzy", "data": {"job_id": "job-1", "variables": ["xyzzy"]}}
        subject = "python xyzzy.py" if type_ == "move-consent" else "r1"
        row = EventRow(7, 1_000, type_, user, subject, "gpu1", "", msgspec.json.encode(record))
        return event_record(row, Viewer(0).for_reader(reader))

    for type_ in RECORD_TYPES:
        for user in ("ann", ""):
            is_public = type_.startswith(PUBLIC_EVENTS)
            assert ("xyzzy" in str(view(type_, user, "bob"))) is is_public, type_
        assert "xyzzy" in str(view(type_, "ann", "ann"))
        assert "xyzzy" in str(view(type_, "ann", None))
    shown = view("stopped", "ann", "bob")
    assert (shown.user, shown.subject, shown.job_id) == ("ann", "r1", "job-1")
