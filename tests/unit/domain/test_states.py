"""Lives are tables: listed steps happen, others raise and change nothing."""

from __future__ import annotations

from itertools import product

import pytest

from distributed_grid.domain.states import (
    JOB_TRANSITIONS,
    LEASE_TRANSITIONS,
    MOVE_TRANSITIONS,
    NODE_TRANSITIONS,
    WORKER_TRANSITIONS,
    JobState,
    LeaseState,
    MoveState,
    NodeState,
    Step,
    WorkerState,
    advance_job,
    advance_lease,
    advance_move,
    advance_node,
    advance_worker,
)
from distributed_grid.errors import GridError, IllegalStep

LIVES = (
    ("node", NodeState, NODE_TRANSITIONS, advance_node),
    ("lease", LeaseState, LEASE_TRANSITIONS, advance_lease),
    ("job", JobState, JOB_TRANSITIONS, advance_job),
    ("worker", WorkerState, WORKER_TRANSITIONS, advance_worker),
    ("move", MoveState, MOVE_TRANSITIONS, advance_move),
)
every_life = pytest.mark.parametrize(("noun", "states", "life", "advance"), LIVES, ids=[life[0] for life in LIVES])


@every_life
def test_a_pair_in_the_table_leads_to_its_state(noun, states, life, advance):
    assert [pair for pair, after in life.items() if advance(*pair) is not after] == []


@every_life
def test_a_pair_that_is_not_in_the_table_raises(noun, states, life, advance):
    for state, step in sorted({*product(states, Step)} - life.keys()):
        with pytest.raises(IllegalStep, match=f"^a {noun} that is {state} cannot {step}$"):
            advance(state, step)


def test_an_illegal_step_is_an_error_the_grid_has_a_name_for():
    assert issubclass(IllegalStep, GridError)


@pytest.mark.parametrize(
    ("life", "last"),
    [
        (LEASE_TRANSITIONS, LeaseState.ENDED),
        (JOB_TRANSITIONS, JobState.ENDED),
        (WORKER_TRANSITIONS, WorkerState.GONE),
        (MOVE_TRANSITIONS, MoveState.ENDED),
    ],
)
def test_what_has_ended_goes_nowhere(life, last):
    assert not [step for state, step in life if state is last]


def test_a_node_that_left_can_only_join_again():
    assert [step for state, step in NODE_TRANSITIONS if state is NodeState.LEFT] == [Step.JOIN]


@pytest.mark.parametrize(
    ("life", "states"),
    [(life, states) for _, states, life, _ in LIVES],
)
def test_every_state_can_be_reached_from_the_first(life, states):
    reached = {next(iter(states))}
    for _ in life:
        reached |= {after for (state, _), after in life.items() if state in reached}
    assert reached == set(states)


def test_the_lease_of_the_design_runs_from_asked_to_ended():
    state = LeaseState.ASKED
    for step in (Step.GRANT, Step.BIND, Step.RELEASE, Step.END):
        state = advance_lease(state, step)
    assert state is LeaseState.ENDED


def test_a_lease_that_holds_something_cannot_end_without_being_released():
    with pytest.raises(IllegalStep):
        advance_lease(LeaseState.ACTIVE, Step.END)


def test_a_move_can_end_in_every_state_and_is_dead_only_once_it_is_decided():
    assert {state for state, step in MOVE_TRANSITIONS if step is Step.END} == {*MoveState} - {MoveState.ENDED}
    assert [state for state, step in MOVE_TRANSITIONS if step is Step.DIE] == [MoveState.DECIDED]
    assert [state for state, step in MOVE_TRANSITIONS if step is Step.START] == [MoveState.DEAD]
