"""State machines are tables: listed steps happen, others raise and change nothing."""

from __future__ import annotations

from itertools import product

import pytest

from distributed_grid.domain.states import (
    JOB_TRANSITIONS,
    LEASE_TRANSITIONS,
    MOVE_TRANSITIONS,
    NODE_TRANSITIONS,
    TRANSITIONS,
    WORKER_TRANSITIONS,
    JobState,
    LeaseState,
    MoveState,
    NodeState,
    Step,
    WorkerState,
    advance,
)
from distributed_grid.errors import GridError, IllegalStep

TABLES = [(noun, states, table) for states, (noun, table) in TRANSITIONS.items()]
AT_THE_SOURCE = {
    *(MoveState.OPENED, MoveState.FREEZING, MoveState.CHECKED, MoveState.THAWED, MoveState.GONE),
    *(MoveState.RETURNED, MoveState.FAILED),
}
every_noun = pytest.mark.parametrize(("noun", "states", "table"), TABLES, ids=[table[0] for table in TABLES])


def test_every_noun_with_states_has_a_table():
    assert [noun for noun, _, _ in TABLES] == ["node", "lease", "job", "worker", "move"]


@every_noun
def test_a_pair_in_the_table_leads_to_its_state(noun, states, table):
    assert [pair for pair, after in table.items() if advance(*pair) is not after] == []


@every_noun
def test_a_pair_that_is_not_in_the_table_raises(noun, states, table):
    for state, step in sorted({*product(states, Step)} - table.keys()):
        with pytest.raises(IllegalStep, match=f"^a {noun} that is {state} cannot {step}$"):
            advance(state, step)


def test_an_illegal_step_is_an_error_the_grid_has_a_name_for():
    assert issubclass(IllegalStep, GridError)


@pytest.mark.parametrize(
    ("table", "last"),
    [
        (LEASE_TRANSITIONS, LeaseState.ENDED),
        (JOB_TRANSITIONS, JobState.ENDED),
        (WORKER_TRANSITIONS, WorkerState.GONE),
        (MOVE_TRANSITIONS, MoveState.ENDED),
    ],
)
def test_an_ended_row_takes_no_step(table, last):
    assert not [step for state, step in table if state is last]


def test_a_node_that_left_can_only_join_again():
    assert [step for state, step in NODE_TRANSITIONS if state is NodeState.LEFT] == [Step.JOIN]


@every_noun
def test_every_state_can_be_reached_from_the_first(noun, states, table):
    reached = {next(iter(states))}
    for _ in table:
        reached |= {after for (state, _), after in table.items() if state in reached}
    assert reached == set(states) - (AT_THE_SOURCE if noun == "move" else set())


def test_the_lease_of_the_design_runs_from_asked_to_ended():
    state = LeaseState.ASKED
    for step in (Step.GRANT, Step.BIND, Step.RELEASE, Step.END):
        state = advance(state, step)
    assert state is LeaseState.ENDED


def test_a_lease_that_holds_something_cannot_end_without_being_released():
    with pytest.raises(IllegalStep):
        advance(LeaseState.ACTIVE, Step.END)


def test_a_move_can_end_in_every_state_and_is_dead_only_after_the_decision():
    assert {state for state, step in MOVE_TRANSITIONS if step is Step.END} == {*MoveState} - AT_THE_SOURCE - {
        MoveState.ENDED
    }
    assert [state for state, step in MOVE_TRANSITIONS if step is Step.DIE] == [MoveState.DECIDED]
    assert [state for state, step in MOVE_TRANSITIONS if step is Step.START] == [MoveState.DEAD]
