"""Memory blocks in the simulated world: placed, moved, lost and freed, and what breaks that is caught."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distributed_grid.domain.events import BlockAsked, BlockReleased
from tests.simulation.campaign import failure_text
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.machine import Machine
from tests.simulation.scenario import UserRequest
from tests.simulation.simulated_memory import SimulatedMemory
from tests.simulation.world import BEGIN_MS, RunReport, World
from tests.unit.simulation.scenarios import GB, a_fault, a_scenario


def a_block(
    at_s: float, *, copies: int = 1, term_s: float = 60, prefer: str = "ash", home: str = "birch"
) -> UserRequest:
    asked = BlockAsked(
        id="block", user="ada", size_bytes=GB, term_ms=round(1000 * term_s), copies=copies, prefer=prefer, home=home
    )
    return UserRequest(round(1000 * at_s), asked)


def a_run(
    requests: Sequence[UserRequest], faults: Sequence[Fault] = (), *, machine: type[Machine] = Machine
) -> RunReport:
    return World(a_scenario(requests, faults), machine=machine, keep_all=True).run()


def held(world: World, at_s: float, into: dict[str, set[str]]) -> None:
    """Take down what each machine holds at a moment."""

    def look() -> None:
        into.update({name: set(one.memory.in_memory) for name, one in world.machines.items()})

    world.queue.at(BEGIN_MS + round(1000 * at_s), look)


def test_a_block_is_there_until_its_time_is_over_and_then_nothing_of_it() -> None:
    world = World(a_scenario([a_block(10, copies=2)]))
    seen: dict[str, set[str]] = {}
    held(world, 40, seen)
    report = world.run()
    assert not report.violated, failure_text(report)
    assert seen == {"ash": {"block:1"}, "birch": {"block:2"}}
    assert not any(one.memory.in_memory for one in world.machines.values())
    assert report.visited["block-expired"] == 1


def test_a_copy_that_is_lost_with_its_machine_is_made_again_from_the_other() -> None:
    report = a_run([a_block(10, copies=2, term_s=90)], [a_fault(FaultKind.MACHINE_DIES, 30, 10)])
    assert not report.violated, failure_text(report)
    assert report.visited["copy-lost"] == 1
    assert report.visited["block-moved"] >= 1
    assert "block-lost" not in report.visited


def test_a_block_with_one_copy_is_lost_with_its_machine_or_its_hold() -> None:
    for fault in (a_fault(FaultKind.MACHINE_DIES, 30, 10), a_fault(FaultKind.CUT, 30, 40)):
        report = a_run([a_block(10, term_s=90)], [fault])
        assert not report.violated, failure_text(report)
        assert report.visited["block-lost"] == 1
        assert report.checks["what is called lost is lost"] == 1


def test_a_drained_node_gives_its_copies_away() -> None:
    report = a_run([a_block(10, term_s=90)], [a_fault(FaultKind.DRAINED, 30, 30)])
    assert not report.violated, failure_text(report)
    assert report.visited["block-moved"] >= 1
    assert "block-lost" not in report.visited


def test_a_release_frees_every_copy_also_after_a_cut() -> None:
    released = UserRequest(32_000, BlockReleased("block", "ada"))
    report = a_run([a_block(10, copies=2, term_s=300), released], [a_fault(FaultKind.CUT, 31, 10)])
    assert not report.violated, failure_text(report)
    assert report.visited["block-released"] == 1


class NeverFrees(SimulatedMemory):
    """Says that copies are freed, and has them."""

    def free(self, copies: tuple[str, ...]) -> None:
        """Look away."""


class Hoards(Machine):
    """Has such a memory."""

    def __init__(self, *words: object) -> None:
        super().__init__(*words)  # type: ignore[arg-type]  # as any machine
        self.memory = NeverFrees(self.node.name)


def test_a_copy_that_stays_behind_is_caught() -> None:
    report = a_run([a_block(10)], machine=Hoards)
    assert (report.violated, report.detail) == ("everything comes to its end", "ash still holds block:1")


@pytest.mark.parametrize("again", range(3))
def test_what_was_freed_stays_so(again: int) -> None:
    memory = SimulatedMemory("ash")
    memory.serve()
    memory.put("block:1")
    for _ in range(again):
        memory.free(("block:1", "other:1"))
    memory.put("block:1")
    assert memory.in_memory == ({"block:1"} if not again else set())
