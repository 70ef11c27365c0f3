"""The guard of a move: it thaws by itself unless it has decided, it decides with a margin, and never takes it back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.agent.offloading.guard_core import (
    GUARD_TRANSITIONS,
    ContinueTree,
    GuardAction,
    GuardCore,
    GuardRecord,
    KillTree,
    StopTree,
    TreeView,
    WriteRecord,
)
from distributed_grid.domain.states import MoveState

LEASE_MS = 10_000
TREE = ((100, 7), (101, 8))
STILL = TreeView(True, True)


class Machine:
    """A tree and a journal in memory, and the guard that sees to them; it may be killed between any two steps."""

    def __init__(self) -> None:
        self.now = 1_000
        self.journal: list[GuardRecord] = []
        self.core = GuardCore()
        self.is_alive, self.is_still = True, False
        self.stands_still_since = 0
        self.has_room = self.stops = True
        self.killed_by_us = self.has_changed = False
        self.thawed: list[int] = []

    def view(self) -> TreeView:
        return TreeView(self.is_alive, self.is_still)

    def perform(self, actions: list[GuardAction], steps: int = 1000) -> None:
        """Perform actions, or only the first few: then the guard is killed."""
        waiting = list(actions)
        while waiting:
            if not steps:
                self.core = GuardCore(tuple(self.journal))
                return
            steps -= 1
            action = waiting.pop(0)
            match action:
                case WriteRecord(record, _) if self.has_room:
                    if record.step == "decided":
                        assert self.is_alive
                        assert self.is_still
                        assert self.steps()[-1] == "checked"
                        assert not self.has_changed
                    self.journal.append(record)
                    self.core.apply(record)
                case WriteRecord(record, _):
                    waiting = self.core.not_recorded(record, self.now, "no space")
                case StopTree(_):
                    self.is_still, self.stands_still_since = self.is_alive, self.now
                    waiting += (
                        self.core.stopped(self.now, TREE, ())
                        if self.stops
                        else self.core.not_stopped(self.now, "it does not stop")
                    )
                case ContinueTree():
                    if self.is_still:
                        self.thawed.append(self.now)
                    self.is_still = False
                case KillTree():
                    assert self.steps()[-1] == "decided"
                    self.is_alive = self.is_still = False
                    self.killed_by_us = True
                    waiting += self.core.killed(self.now)

    def freeze(self, ms: int = LEASE_MS) -> None:
        self.perform(self.core.freeze(self.now, ms, TREE, ()))

    def check(self, changes: str = "") -> None:
        self.perform(self.core.check(self.now, changes))

    def commit(self) -> None:
        self.perform(self.core.commit(self.now, self.view()))

    def wait(self, ms: int) -> None:
        self.now += ms
        self.perform(self.core.observe(self.now, self.view()))

    def take_over(self, *, same_boot: bool = True) -> None:
        """The guard is killed, and the next one reads the journal."""
        self.core = GuardCore(tuple(self.journal))
        self.perform(self.core.resume(self.now, self.view(), same_boot=same_boot))

    def steps(self) -> list[str]:
        return [str(record.step) for record in self.journal]


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_tree_that_is_committed_in_time_is_dead(machine: Machine) -> None:
    machine.freeze()
    machine.check()
    machine.wait(3_000)
    machine.commit()
    assert machine.steps() == ["freezing", "frozen", "checked", "decided", "dead"]
    assert machine.journal[-1].frozen_ms == 3_000
    assert not machine.is_alive


def test_it_goes_on_when_the_lease_ends_and_a_later_commit_is_refused(machine: Machine) -> None:
    machine.freeze()
    machine.wait(LEASE_MS)
    assert machine.steps()[-1] == "thawed"
    assert not machine.is_still
    machine.commit()
    machine.take_over()
    machine.commit()
    assert machine.steps()[-1] == "thawed"
    assert machine.is_alive


def test_a_decision_needs_a_margin_of_the_lease(machine: Machine) -> None:
    machine.freeze()
    machine.check()
    machine.wait(LEASE_MS - machine.core.margin_ms + 1)
    machine.commit()
    assert machine.steps()[-1] == "thawed"
    assert machine.is_alive


def test_what_was_continued_by_somebody_is_not_ended(machine: Machine) -> None:
    machine.freeze()
    machine.check()
    machine.is_still = False
    machine.commit()
    assert machine.steps()[-1] == "thawed"
    assert "continued" in machine.journal[-1].why


def test_a_tree_that_was_not_looked_at_again_is_not_ended(machine: Machine) -> None:
    machine.freeze()
    machine.commit()
    assert machine.steps()[-1] == "thawed"
    assert machine.journal[-1].why == "it was not looked at a second time"
    machine.check()
    machine.commit()
    assert machine.steps()[-1] == "thawed"


def test_a_tree_that_has_changed_goes_on_and_the_journal_names_the_change(machine: Machine) -> None:
    machine.freeze()
    machine.check("it holds a lock")
    assert machine.steps()[-1] == "thawed"
    assert machine.journal[-1].why == "it holds a lock"
    machine.check()
    machine.commit()
    assert machine.steps()[-1] == "thawed"
    assert machine.is_alive


def test_the_next_guard_decides_after_a_look_that_the_last_one_has_recorded(machine: Machine) -> None:
    machine.freeze()
    machine.check()
    machine.take_over()
    assert machine.is_still
    machine.commit()
    assert machine.steps()[-1] == "dead"


def test_a_look_that_cannot_be_recorded_lets_the_tree_go_on(machine: Machine) -> None:
    machine.freeze()
    machine.has_room = False
    machine.check()
    assert machine.core.phase is MoveState.THAWED
    assert not machine.is_still


def test_a_commit_of_what_was_never_frozen_is_refused_for_ever(machine: Machine) -> None:
    machine.commit()
    machine.freeze()
    assert machine.steps() == ["thawed"]
    assert not machine.is_still


def test_a_second_order_to_freeze_adds_no_time(machine: Machine) -> None:
    machine.freeze()
    machine.wait(LEASE_MS - 1)
    machine.freeze()
    machine.wait(1)
    assert machine.steps()[-1] == "thawed"


def test_a_decision_that_cannot_be_written_is_not_made(machine: Machine) -> None:
    machine.freeze()
    machine.check()
    machine.has_room = False
    machine.commit()
    assert machine.steps()[-1] == "checked"
    assert machine.core.phase is MoveState.THAWED
    assert machine.is_alive
    assert not machine.is_still


def test_a_death_that_cannot_be_written_is_written_later(machine: Machine) -> None:
    machine.freeze()
    machine.check()
    actions = machine.core.commit(machine.now, STILL)
    machine.perform(actions, steps=1)
    machine.has_room = False
    machine.take_over()
    assert not machine.is_alive
    assert machine.core.phase is MoveState.DECIDED
    machine.has_room = True
    machine.wait(1)
    assert machine.steps()[-1] == "dead"


def test_what_ends_while_it_is_frozen_lets_the_rest_of_its_tree_go_on(machine: Machine) -> None:
    machine.freeze()
    machine.is_alive = False
    machine.wait(1)
    assert machine.steps()[-1] == "gone"
    assert not machine.is_still


@pytest.mark.parametrize(
    ("before", "after"), [("opened", "gone"), ("frozen", "gone"), ("checked", "gone"), ("decided", "dead")]
)
def test_after_a_restart_of_the_machine_nothing_of_it_is_left(machine: Machine, before: str, after: str) -> None:
    if before != "opened":
        machine.freeze()
    if before in ("checked", "decided"):
        machine.check()
    if before == "decided":
        machine.perform(machine.core.commit(machine.now, STILL), steps=1)
    machine.is_alive = machine.is_still = False
    machine.now = 5
    machine.take_over(same_boot=False)
    assert machine.steps()[-1] == after


ORDERS = st.one_of(
    st.tuples(st.just("freeze"), st.integers(0, 70_000)),
    st.tuples(
        st.sampled_from(
            ["look", "change", "commit", "commit", "thaw", "die", "continue", "take_over", "room", "stops"]
        ),
        st.just(0),
    ),
    st.tuples(st.just("wait"), st.integers(0, 12_000)),
    st.tuples(st.just("kill"), st.integers(0, 3)),
)


@given(st.lists(ORDERS, max_size=30))
def test_whatever_happens_it_is_dead_by_decision_or_goes_on_within_one_lease(story: list[tuple[str, int]]) -> None:
    """Orders, time, kills of the guard after any step, a full disk, a tree that ends or is continued by somebody."""
    machine = Machine()
    killed_after: int | None = None
    for name, number in story:
        actions: list[GuardAction] = []
        match name:
            case "freeze":
                actions = machine.core.freeze(machine.now, number, TREE, ())
            case "commit":
                actions = machine.core.commit(machine.now, machine.view())
            case "look":
                actions = machine.core.check(machine.now, "changed" if machine.has_changed else "")
            case "change" if not machine.is_still:
                machine.has_changed = True
            case "thaw":
                actions = machine.core.thaw(machine.now, "given up")
            case "die":
                machine.is_alive = False
            case "continue":
                machine.is_still = False
            case "room":
                machine.has_room = not machine.has_room
            case "stops":
                machine.stops = not machine.stops
            case "take_over":
                machine.core = GuardCore(tuple(machine.journal))
                actions = machine.core.resume(machine.now, machine.view(), same_boot=True)
            case "wait":
                end = machine.now + number
                wakes = machine.core.wakes_at_ms
                if machine.now < wakes <= end:
                    machine.now = wakes
                    machine.perform(machine.core.observe(machine.now, machine.view()))
                machine.now = end
                actions = machine.core.observe(machine.now, machine.view())
            case "kill":
                killed_after = number
                continue
        machine.perform(actions, 1000 if killed_after is None else killed_after)
        if killed_after is not None:  # the standby is there at once
            machine.take_over()
            killed_after = None
        check(machine)
    machine.has_room = True
    machine.take_over()
    machine.wait(100_000)
    check(machine)
    assert not machine.is_still


def check(machine: Machine) -> None:
    steps = machine.steps()
    for before, after in zip(["opened", *steps], steps, strict=False):
        allowed: Any = GUARD_TRANSITIONS[MoveState(before)]
        assert after in allowed, steps
    if "decided" in steps:
        decided = next(record for record in machine.journal if record.step == "decided")
        frozen = next(record for record in machine.journal if record.step == "freezing")
        assert decided.until_ms - decided.at_ms >= min((frozen.until_ms - frozen.at_ms) // 10, 500)
        assert all(at <= decided.at_ms for at in machine.thawed)
    if machine.killed_by_us:
        assert "decided" in steps
    if machine.is_still:
        lease = max(record.until_ms - record.at_ms for record in machine.journal if record.step == "freezing")
        assert machine.now - machine.stands_still_since < lease
