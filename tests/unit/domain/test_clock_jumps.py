"""Jumps of wall clocks are told from time that passes, and no clock makes anything old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.clock_jumps import (
    CONFIRM_MS,
    DAY_MS,
    HOUR_MS,
    MAX_CREDIT_MS,
    ClockReading,
    ClockState,
    jump_text,
    span_text,
)

JUMPS = [sign * size for size in (HOUR_MS, 40 * DAY_MS, 365 * DAY_MS) for sign in (1, -1)]
START_MS = 20_000 * DAY_MS


class Machine:
    """A machine with a wall clock that can be set, which is looked at now and then."""

    def __init__(self) -> None:
        self.boots, self.boot_ms, self.wall_ms = 0, 100_000, START_MS
        self.state = ClockState(self._reading())

    def _reading(self) -> ClockReading:
        return ClockReading(f"boot-{self.boots}", self.boot_ms, self.wall_ms)

    def look(self) -> ClockState:
        self.state = self.state.observe(self._reading())
        return self.state

    def passes(self, duration_ms: int) -> ClockState:
        self.boot_ms += duration_ms
        self.wall_ms += duration_ms
        return self.look()

    def set_clock(self, by_ms: int) -> ClockState:
        self.wall_ms += by_ms
        return self.look()

    def reboots(self, off_ms: int, wrong_by_ms: int = 0) -> ClockState:
        self.boots, self.boot_ms = self.boots + 1, 60_000
        self.wall_ms += off_ms + wrong_by_ms + 60_000
        return self.look()


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize("by_ms", JUMPS)
def test_a_jump_is_pending_until_the_clock_is_back(machine: Machine, by_ms: int) -> None:
    jumped = machine.set_clock(by_ms).jump
    assert jumped is not None
    assert jumped.by_ms == by_ms
    assert machine.passes(20_000).jump == jumped
    assert machine.set_clock(-by_ms).jump is None
    assert machine.state.age_ms == 20_000, "as much as the boot clock says"


@pytest.mark.parametrize("by_ms", JUMPS)
def test_a_second_look_hours_apart_confirms_a_jump(machine: Machine, by_ms: int) -> None:
    machine.set_clock(by_ms)
    assert machine.passes(CONFIRM_MS - 1).jump is not None
    assert machine.state.waits_ms == 1
    assert machine.passes(1).jump is None
    assert machine.state.waits_ms == 0


def test_another_jump_begins_the_wait_anew(machine: Machine) -> None:
    machine.set_clock(40 * DAY_MS)
    machine.passes(CONFIRM_MS - HOUR_MS)
    machine.set_clock(DAY_MS)
    assert machine.state.waits_ms == CONFIRM_MS
    assert machine.passes(2 * HOUR_MS).jump is not None


@pytest.mark.parametrize("off_ms", [0, HOUR_MS, DAY_MS, 6 * DAY_MS])
def test_time_switched_off_is_not_a_jump(machine: Machine, off_ms: int) -> None:
    assert machine.reboots(off_ms).jump is None
    assert machine.state.age_ms == 60_000 + min(off_ms, MAX_CREDIT_MS)


@pytest.mark.parametrize("by_ms", [40 * DAY_MS, 365 * DAY_MS, -HOUR_MS, -40 * DAY_MS, -365 * DAY_MS])
def test_a_reboot_under_a_wrong_clock_is_a_jump_that_ends_when_the_clock_is_right(machine: Machine, by_ms: int) -> None:
    assert machine.reboots(HOUR_MS // 2, by_ms).jump is not None
    machine.passes(60_000)
    assert machine.set_clock(-by_ms).jump is None
    assert machine.state.age_ms <= 120_000 + MAX_CREDIT_MS


def test_only_time_on_counts_towards_the_second_look(machine: Machine) -> None:
    machine.set_clock(40 * DAY_MS)
    assert machine.reboots(DAY_MS).jump is not None
    assert machine.state.waits_ms == CONFIRM_MS - 60_000


def test_a_machine_restored_from_a_snapshot_does_not_age(machine: Machine) -> None:
    machine.passes(HOUR_MS)
    machine.boot_ms -= HOUR_MS
    assert machine.look().age_ms == HOUR_MS


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.integers(0, DAY_MS)),
            st.tuples(st.just("set"), st.sampled_from(JUMPS)),
            st.tuples(st.just("reboot"), st.sampled_from([*JUMPS, 0])),
        ),
        max_size=30,
    )
)
def test_no_sequence_of_clocks_ages_by_more_than_the_time_on_and_a_day_for_each_boot(
    steps: list[tuple[str, int]],
) -> None:
    machine, on_ms, boots = Machine(), 0, 0
    for step, amount in steps:
        before = machine.state.age_ms
        if step == "pass":
            machine.passes(amount)
            on_ms += amount
            assert machine.state.age_ms == before + amount
        elif step == "set":
            machine.set_clock(amount)
            assert machine.state.age_ms == before
        else:
            machine.reboots(0, amount)
            on_ms, boots = on_ms + 60_000, boots + 1
        assert before <= machine.state.age_ms <= on_ms + boots * MAX_CREDIT_MS


def test_the_time_of_the_grid_at_an_age_is_known_across_steps_of_the_grids_time() -> None:
    machine = Machine()
    state = machine.state.with_grid_time(START_MS)
    machine.state = state
    machine.passes(10 * DAY_MS)
    assert machine.state.with_grid_time(START_MS + 10 * DAY_MS) == machine.state, "they passed evenly"
    machine.reboots(0, 365 * DAY_MS)
    machine.state = machine.state.with_grid_time(machine.wall_ms)
    age_ms = machine.state.age_ms
    assert machine.state.grid_time_of(age_ms) == machine.wall_ms
    assert machine.state.grid_time_of(3 * DAY_MS) == START_MS + 3 * DAY_MS
    assert machine.state.grid_time_of(-1) == 0, "nothing is known to be that old"


def test_a_grid_time_that_lags_makes_no_row_of_the_next_boot_old() -> None:
    machine = Machine()
    machine.state = machine.state.with_grid_time(START_MS)
    machine.passes(DAY_MS)
    machine.reboots(DAY_MS)
    machine.state = machine.state.with_grid_time(START_MS + DAY_MS)  # the time off was not counted there
    before_reboot = DAY_MS + HOUR_MS
    assert machine.state.grid_time_of(before_reboot) <= START_MS + DAY_MS


def test_points_that_nothing_needs_any_more_are_dropped() -> None:
    machine = Machine()
    for day in range(400):
        machine.passes(DAY_MS)
        machine.state = machine.state.with_grid_time(START_MS + 3 * day * DAY_MS)
    assert len(machine.state.points) < 110


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [(40 * DAY_MS, "+40 d"), (-HOUR_MS, "-1 h"), (90 * 60_000, "+1 h 30 min"), (1, "+1 min"), (0, "+0 min")],
)
def test_spans_are_shown_in_their_largest_units(duration_ms: int, text: str) -> None:
    assert span_text(duration_ms) == text


def test_a_pending_jump_says_what_to_do() -> None:
    assert jump_text("gpu1", 40 * DAY_MS, CONFIRM_MS) == (
        "the clock of gpu1 jumped by +40 d; nothing is deleted by age there for 6 h more; "
        "if the clock is right, type: grid daemon clock --confirm"
    )
