"""Moves in the simulated world: the laws hold whatever dies, and a guard that breaks one is caught."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.agent.offloading.guard_core import STILL_PHASES, GuardAction, GuardCore, TreeView
from distributed_grid.domain.states import MoveState
from tests.simulation.campaign import failure_text
from tests.simulation.faults import EVERYWHERE, Fault, FaultKind
from tests.simulation.guarded_process import SimulatedGuard
from tests.simulation.machine import Machine
from tests.simulation.scenario import Scenario
from tests.simulation.simulated_moves import PlannedMove, PlannedOriginal
from tests.simulation.world import World
from tests.unit.simulation.scenarios import a_fault, a_job, a_scenario

ORIGINAL = PlannedOriginal(1_000, "ash", 1001, 120_000)
MOVE = PlannedMove(20_000, 1, "birch", pid=1001, freeze_ms=10_000)


def a_move(faults: tuple[Fault, ...] = (), seed: int = 1, **plan: int) -> Scenario:
    """A process on ash that is to go to birch after twenty seconds."""
    return replace(a_scenario([], faults, seed=seed), originals=[ORIGINAL], moves=[replace(MOVE, **plan)])


def run(scenario: Scenario, machine: type[Machine] = Machine) -> World:
    """The world at its end, with every law held."""
    world = World(scenario, machine=machine)
    report = world.run()
    assert not report.violated, failure_text(report)
    return world


def test_a_process_that_is_moved_ends_here_and_runs_there_once() -> None:
    world = run(a_move())
    original = world.machines["ash"].originals[1001]
    assert original.ended == "killed"
    assert [*world.checker.ran] == ["moved-1.1"]
    assert world.checker.held["never two of what is moved"] == 1
    assert not world.machines["ash"].journals, "the move was closed at its source"


def moments() -> dict[str, int]:
    """When the move comes into which state where nothing goes wrong, in milliseconds after the beginning."""
    world = World(a_move(), keep_all=True)
    world.run()
    said = (line.split() for line in world.log.lines if " move-advanced move-1 " in line)
    found = {words[4]: round(1000 * float(words[0])) for words in said}
    return {state: found[state] for state in STATES}


STATES = ("reserved", "shipped", "frozen", "decided", "dead", "running")
KINDS = (
    FaultKind.AGENT_DIES,
    FaultKind.MACHINE_DIES,
    FaultKind.CONTROL_DIES,
    FaultKind.CUT,
    FaultKind.CUT_UP,
    FaultKind.CUT_DOWN,
    FaultKind.NODE_DISK_FULL,
    FaultKind.DISK_FULL,
    FaultKind.DIRECTORY_LOST,
)


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_the_laws_hold_when_something_dies_in_any_state(kind: FaultKind) -> None:
    """At every state of the table, on the source and on the target, with and without a second thought."""
    nodes = ("",) if kind in EVERYWHERE else ("ash", "birch")
    lasts = 0.001 if kind is FaultKind.DIRECTORY_LOST else 40
    for at_ms in moments().values():
        for node in nodes:
            for after_ms, cancels in ((1, 0), (30, at_ms - MOVE.at_ms + 40)):
                fault = a_fault(kind, (at_ms + after_ms) / 1000, lasts, node=node)
                world = run(a_move((fault,), cancel_ms=cancels))
                original = world.machines["ash"].originals[1001]
                began = [one for one in world.checker.ran if one.startswith("moved-")]
                assert began or original.ended != "killed" or world.control.ledger.moves


def test_a_guard_that_is_killed_is_replaced_wherever_it_was() -> None:
    for dies_ms in range(1, 3_000, 150):
        world = run(a_move(guard_dies_ms=dies_ms))
        assert world.machines["ash"].originals[1001].ended in ("killed", "by itself", "")


def test_a_process_that_changes_before_it_stands_still_goes_on_where_it_is() -> None:
    for change_ms in range(1, moments()["frozen"] - MOVE.at_ms, 100):
        world = run(a_move(change_ms=change_ms))
        assert world.machines["ash"].originals[1001].ended != "killed"
        assert not world.checker.ran


def test_a_process_that_changes_is_never_replaced_by_its_old_command_whatever_is_killed() -> None:
    for dies_ms in range(1, 3_000, 300):
        for change_ms in range(1, 3_000, 700):
            run(a_move(guard_dies_ms=dies_ms, change_ms=change_ms))


def test_a_job_that_is_moved_runs_on_the_other_machine() -> None:
    job = a_job(5, 60, on="", marks_ms=2_000)
    scenario = replace(a_scenario([job]), moves=[PlannedMove(30_000, 1, "birch", job="job")])
    world = run(scenario)
    nodes = {run.order.node for run in world.checker.ran.values()}
    assert len(world.checker.ran) == 2
    assert nodes == {"ash", "birch"}


# ------------------------------------------------------------------ the laws notice


def caught(scenario: Scenario, guard: type[SimulatedGuard]) -> tuple[str, str]:
    class Broken(Machine):
        guard_type = guard

    run(scenario)
    report = World(scenario, machine=Broken).run()
    return report.violated, report.detail


class NeverThaws(GuardCore):
    """Forgets its freeze lease."""

    def observe(self, now: int, view: TreeView) -> list[GuardAction]:
        frozen = self.phase in (MoveState.FREEZING, *STILL_PHASES)
        return [] if frozen and view.is_alive else super().observe(now, view)


class GuardWithoutThaw(SimulatedGuard):
    core_type = NeverThaws


def cut_while_frozen() -> Scenario:
    return a_move((a_fault(FaultKind.CUT, (moments()["frozen"] + 1) / 1000, 60),))


def test_a_guard_that_does_not_thaw_is_caught() -> None:
    violated, detail = caught(cut_while_frozen(), GuardWithoutThaw)
    assert violated == "never none for longer than a freeze lease"
    assert detail.startswith("move-1: process 1001 for ")


class Credulous(GuardCore):
    """Takes every second look for one without changes."""

    def check(self, now: int, changes: str) -> list[GuardAction]:
        return super().check(now, "")


class GuardWithoutCheck(SimulatedGuard):
    core_type = Credulous


def test_a_guard_that_ends_what_has_changed_is_caught() -> None:
    violated, detail = caught(a_move(change_ms=1), GuardWithoutCheck)
    assert violated == "what is ended is what was asked for"
    assert detail == "moved-1.1 is not what process 1001 was"


class HastyGuard(SimulatedGuard):
    """Says that all is dead before it is."""

    def _kill(self) -> None:
        original, self._original = self._original, None
        super()._kill()
        self._original = original


def test_a_death_that_is_told_before_it_happened_is_caught() -> None:
    assert caught(a_move(), HastyGuard) == ("never two of what is moved", "moved-1.1 begins beside process 1001")


class Relents(GuardCore):
    """Lets what is decided go on when its lease is over."""

    def observe(self, now: int, view: TreeView) -> list[GuardAction]:
        if self.phase is MoveState.DECIDED and now >= self.until_ms:
            self.phase = MoveState.FROZEN
        return super().observe(now, view)

    @property
    def wakes_at_ms(self) -> int:
        return self.until_ms if self.phase is MoveState.DECIDED else super().wakes_at_ms


class RelentingGuard(SimulatedGuard):
    core_type = Relents

    def _kill(self) -> None:
        """Take forever."""


def test_a_guard_that_thaws_what_is_decided_is_caught() -> None:
    violated, detail = caught(a_move(), RelentingGuard)
    assert violated == "everything comes to its end"
    assert "move-1 is decided" in detail
