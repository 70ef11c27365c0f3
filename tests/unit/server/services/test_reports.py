"""The lending ledger adds up to what was really held, whoever looks and whenever history is folded."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.reports import LentTotals
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked, LeaseReleased, NodeDeclared
from distributed_grid.domain.nodes import Usage
from distributed_grid.ports import Store
from distributed_grid.server.services.reports import DAY_MS, lending_report
from tests.support.builders import GB, a_node, a_request

HOUR_MS = 3_600_000
BEGIN_MS = 20_000 * DAY_MS


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.ms = BEGIN_MS

    def now_ms(self) -> int:
        return self.ms


class Held(Struct):
    """Holdings of one lease, recorded beside the grid."""

    user: str
    node: str
    target: str
    cores: float
    memory_gb: float
    gpus: float
    began_ms: int
    ended_ms: int = 0


class Scenario:
    """Leases of three users on two nodes, some over and some held; the same facts in the grid and in a plain list."""

    def __init__(self, store: Store, seed: int) -> None:
        self.clock, self.dice = Clock(), random.Random(seed)
        self.grid = Grid(store, self.clock)
        self.held: dict[str, Held] = {}

    async def happen(self, leases: int) -> None:
        await self.grid.start()
        for name in ("ash", "birch"):
            await self.grid.handle(NodeDeclared(a_node(name, cores=500, memory_gb=4_000, gpus=200)))
            await self.grid.handle(HeartbeatReceived(name=name, usage=Usage()))
        for number in range(leases):
            self.clock.ms += self.dice.randrange(1, 2 * HOUR_MS)
            await self._ask(f"r{number}")
            going_on = [name for name, one in self.held.items() if not one.ended_ms]
            if self.dice.random() < 0.8:
                await self._release(self.dice.choice(going_on))

    async def _ask(self, name: str) -> None:
        dice = self.dice
        one = Held(
            dice.choice(("ann", "bob", "eve")),
            dice.choice(("ash", "birch")),
            dice.choice(("", "ash")),
            dice.choice((0.5, 2, 4)),
            dice.choice((0.0, 1.5, 70.0)),
            dice.choice((0.0, 0.5, 2)),
            self.clock.ms,
        )
        request = a_request(
            name, cores=one.cores, memory_gb=one.memory_gb, gpus=one.gpus, user=one.user, require=(one.node,)
        )
        await self.grid.handle(HeartbeatReceived(name=one.node, usage=Usage()))
        await self.grid.handle(LeaseAsked(replace(request, target=one.target)))
        self.held[name] = one

    async def _release(self, name: str) -> None:
        self.clock.ms += self.dice.randrange(1, HOUR_MS)
        await self.grid.handle(LeaseReleased(name, "ann"))
        self.held[name].ended_ms = self.clock.ms

    def by_hand(self, since_ms: int, *keys: str) -> dict[tuple[Any, ...], list[int]]:
        """Leases, amounts times milliseconds, and leases still held, one lease after the other, in whole numbers."""
        sums: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * 5)
        for one in self.held.values():
            end_ms = one.ended_ms or self.clock.ms
            if end_ms < since_ms:
                continue
            ms = end_ms - max(one.began_ms, since_ms)
            facts = {"node_id": one.node, "user": one.user, "target_node": one.target or None, "day": end_ms // DAY_MS}
            into = sums[tuple(facts[key] for key in keys)]
            for at, amount in enumerate(
                (round(1000 * one.cores), round(one.memory_gb * GB), round(1000 * one.gpus)), 1
            ):
                into[at] += amount * ms
            into[0] += 1
            into[4] += not one.ended_ms
        return sums


def a_store(kind: str, folder: Path) -> Store:
    return InMemoryStore() if kind == "memory" else SqliteStore(folder / "grid.db")


def amounts(row: LentTotals) -> list[float]:
    return [getattr(row, name) for name in ("leases", "core_hours", "gb_hours", "gpu_hours", "held_leases")]


def in_hours(sums: list[int]) -> list[float]:
    """Exact sums as they are shown."""
    leases, cpu, memory, gpu, held = sums
    return [leases, cpu / 1000 / HOUR_MS, memory / GB / HOUR_MS, gpu / 1000 / HOUR_MS, held]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_the_sum_of_its_leases(kind: str, seed: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        store = a_store(kind, tmp_path)
        history = Scenario(store, seed)
        await history.happen(60)
        viewer = Viewer(0)
        for since_ms in (BEGIN_MS, history.clock.ms - 30 * HOUR_MS):
            for by, keys in (
                ("", ("node_id", "user", "target_node")),
                ("user", ("user",)),
                ("node", ("node_id",)),
            ):
                found = await lending_report(history.grid, viewer, since_ms=since_ms, by=by)
                expected = history.by_hand(since_ms, *keys)
                shown = {tuple(getattr(row, key) for key in keys): amounts(row) for row in found.rows}
                assert shown == {key: in_hours(sums) for key, sums in expected.items()}
                assert amounts(found.total) == in_hours(history.by_hand(since_ms)[()])
        await history.grid.stop()
        store.close()

    asyncio.run(scenario())


def test_by_day_each_lease_is_on_the_day_it_ended_and_what_is_held_is_todays() -> None:
    async def scenario() -> None:
        history = Scenario(InMemoryStore(), 7)
        await history.happen(40)
        found = await lending_report(history.grid, Viewer(0), since_ms=BEGIN_MS, by="day")
        expected = history.by_hand(BEGIN_MS, "day")
        days = [str(row.day) for row in found.rows]
        assert days == sorted(days)
        assert [amounts(row) for row in found.rows] == [in_hours(expected[key]) for key in sorted(expected)]
        await history.grid.stop()

    asyncio.run(scenario())


def test_folding_history_changes_no_sum_of_whole_days() -> None:
    async def scenario() -> None:
        store = InMemoryStore()
        history = Scenario(store, 8)
        await history.happen(60)
        before = await lending_report(history.grid, Viewer(0), since_ms=BEGIN_MS, by="")
        while store.summarise(before_ms=history.clock.ms - DAY_MS):
            pass
        assert store.summaries()
        assert await lending_report(history.grid, Viewer(0), since_ms=BEGIN_MS, by="") == before
        await history.grid.stop()

    asyncio.run(scenario())


def test_what_is_held_is_told_in_the_amounts_of_now() -> None:
    async def scenario() -> None:
        clock = Clock()
        grid = Grid(InMemoryStore(), clock)
        await grid.start()
        await grid.handle(NodeDeclared(a_node("ash", cores=4, memory_gb=16, gpus=2)))
        await grid.handle(HeartbeatReceived(name="ash", usage=Usage()))
        await grid.handle(LeaseAsked(a_request("r1", cores=1.5, memory_gb=2, gpus=1)))
        clock.ms += 2 * HOUR_MS
        (row,) = (await lending_report(grid, Viewer(0), since_ms=BEGIN_MS - DAY_MS, by="")).rows
        assert to_builtins(row) == {
            "node_id": "ash",
            "user": "ada",
            "target_node": None,
            "leases": 1,
            "core_hours": 3.0,
            "gb_hours": 4.0,
            "gpu_hours": 2.0,
            "held_leases": 1,
            "held_cores": 1.5,
            "held_gb": 2.0,
            "held_gpus": 1.0,
        }
        await grid.stop()

    asyncio.run(scenario())


def test_who_only_waited_had_nothing() -> None:
    async def scenario() -> None:
        grid = Grid(InMemoryStore(), Clock())
        await grid.start()
        await grid.handle(NodeDeclared(a_node("ash", cores=4)))
        await grid.handle(LeaseAsked(a_request("r1", cores=1)))
        await grid.handle(LeaseReleased("r1", "ada"))
        await grid.handle(LeaseAsked(a_request("r2", cores=1)))
        found = await lending_report(grid, Viewer(0), since_ms=1, by="")
        assert (found.rows, found.total.leases) == ([], 0)
        await grid.stop()

    asyncio.run(scenario())
