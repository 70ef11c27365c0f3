"""A lease's id as a name: one lease at a time, and again after it is over; and found by nothing but that name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked, LeaseReleased, NodeDeclared
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.nodes import Usage
from distributed_grid.errors import Conflict, NotFound
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.server.services.records import find_lease
from tests.support.builders import a_node, a_request


class Standing:
    """A clock that stands still."""

    def now_ms(self) -> int:
        return 1_000_000


def run(scenario: Callable[[Grid], Awaitable[None]]) -> None:
    async def run_whole() -> None:
        grid = Grid(InMemoryStore(), Standing())
        await grid.start()
        await grid.handle(NodeDeclared(a_node("here", cores=4)))
        await grid.handle(HeartbeatReceived("here", Usage()))
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
