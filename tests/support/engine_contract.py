"""The promises of the `Engine` port, as tests: subclass `EngineContract` and say how to get an engine.

@pytest.fixture
def engine() -> Engine: ...

class TestMyEngine(EngineContract):
    def run(self, deed): ...

The engine is used in one loop, `run` runs something in it. It has at least one place with two idle cores.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import pytest

from distributed_grid.domain.engines import GROUP_PREFIX
from distributed_grid.domain.events import EngineNode
from distributed_grid.errors import Refused
from distributed_grid.ports import Engine, EngineGroup

SECONDS = 2.0


class EngineContract(ABC):
    """What every engine keeps."""

    @abstractmethod
    def run(self, deed: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine, in the engine's loop."""

    def meet_again(self, engine: Engine) -> None:
        """Have the engine usable after it was cleared; most are anyway."""
        return

    def place(self, engine: Engine) -> EngineNode:
        """The place with the most free cores."""
        found: EngineNode = max(self.run(engine.observe(full=False)).nodes, key=lambda node: node.room.cpu_milli)
        return found

    def group(self, engine: Engine, *, cpu_milli: int = 500, name: str = "") -> EngineGroup:
        """A group with a name of its own."""
        return EngineGroup(GROUP_PREFIX + (name or f"{uuid.uuid4().hex}-1"), self.place(engine).id, cpu_milli=cpu_milli)

    def names(self, engine: Engine) -> dict[str, str]:
        return dict(self.run(engine.observe(full=True)).groups)

    def test_what_is_reserved_is_there_until_it_is_freed(self, engine: Engine) -> None:
        group = self.group(engine)
        self.run(engine.reserve(group, seconds=SECONDS))
        assert self.names(engine)[group.name] == group.place
        self.run(engine.free(group.name))
        assert group.name not in self.names(engine)

    def test_reserving_twice_takes_it_once(self, engine: Engine) -> None:
        most = self.place(engine).room.cpu_milli
        group = self.group(engine, cpu_milli=most)
        self.run(engine.reserve(group, seconds=SECONDS))
        self.run(engine.reserve(group, seconds=SECONDS))
        assert group.name in self.names(engine)
        self.run(engine.free(group.name))

    def test_what_is_reserved_is_nobody_elses(self, engine: Engine) -> None:
        place = self.place(engine)
        first, second = (self.group(engine, cpu_milli=place.room.cpu_milli) for _ in range(2))
        self.run(engine.reserve(first, seconds=SECONDS))
        with pytest.raises(Refused):
            self.run(engine.reserve(second, seconds=0.5))
        assert second.name not in self.names(engine)
        self.run(engine.free(first.name))
        self.run(engine.reserve(second, seconds=SECONDS))
        self.run(engine.free(second.name))

    def test_what_a_place_has_for_us_counts_what_we_have_of_it(self, engine: Engine) -> None:
        before = self.place(engine)
        group = self.group(engine, cpu_milli=1000)
        self.run(engine.reserve(group, seconds=SECONDS))
        places = {node.id: node for node in self.run(engine.observe(full=False)).nodes}
        assert places[before.id].room.cpu_milli == before.room.cpu_milli
        self.run(engine.free(group.name))

    def test_more_than_a_place_has_is_refused_at_once(self, engine: Engine) -> None:
        group = self.group(engine, cpu_milli=10_000_000)
        with pytest.raises(Refused):
            self.run(engine.reserve(group, seconds=60))
        assert group.name not in self.names(engine)

    def test_a_place_that_is_not_there_is_refused(self, engine: Engine) -> None:
        group = EngineGroup(GROUP_PREFIX + "nowhere-1", "0" * 56, cpu_milli=100)
        with pytest.raises(Refused):
            self.run(engine.reserve(group, seconds=SECONDS))

    def test_freeing_what_is_not_there_is_harmless(self, engine: Engine) -> None:
        self.run(engine.free(GROUP_PREFIX + "never-1"))

    def test_extending_the_hold_says_which_groups_are_not_there(self, engine: Engine) -> None:
        group = self.group(engine)
        self.run(engine.reserve(group, seconds=SECONDS))
        gone = GROUP_PREFIX + "never-1"
        assert list(self.run(engine.extend_hold(60, {group.name: 60, gone: 60}))) == [gone]
        self.run(engine.free(group.name))
        assert list(self.run(engine.extend_hold(60, {group.name: 60}))) == [group.name]

    def test_many_at_once_are_all_there(self, engine: Engine) -> None:
        groups = [self.group(engine, cpu_milli=1) for _ in range(50)]

        async def all_of_them() -> None:
            await asyncio.gather(*(engine.reserve(group, seconds=10) for group in groups))

        self.run(all_of_them())
        assert {group.name for group in groups} <= set(self.names(engine))

        async def none_of_them() -> None:
            await asyncio.gather(*(engine.free(group.name) for group in groups))

        self.run(none_of_them())
        assert not {group.name for group in groups} & set(self.names(engine))

    def test_clearing_leaves_nothing_and_may_be_done_twice(self, engine: Engine) -> None:
        self.run(engine.reserve(self.group(engine), seconds=SECONDS))
        self.run(engine.clear())
        self.run(engine.clear())
        self.meet_again(engine)
        assert self.names(engine) == {}
