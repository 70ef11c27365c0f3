"""Transitions of moves: the room on the target, waiting for it, and failures in a row."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.moves import AutoOffloadState, MoveEnd
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.states import JobState, LeaseState, MoveState, Step
from distributed_grid.errors import GridError, Refused
from distributed_grid.reactor.effects import StopAttempt, attempt_effects, move_effects
from distributed_grid.reactor.offloading.move_transitions import (
    MAX_FAILURES,
    WAIT_FOR_TARGET_MS,
    advance_move,
    count_failure,
    move_record,
)
from tests.support.builders import a_node, a_request
from tests.unit.reactor.offloading.move_builders import THREE, a_job_move, answered, end_of, request_move, submit_job


@pytest.fixture
def scenario(new_scenario):
    return new_scenario(*THREE)


def test_room_is_kept_before_the_job_is_stopped(scenario):
    submit_job(scenario)
    move = answered(request_move(scenario, "r1"))
    lease = scenario.ledger.leases[move.lease_id]
    assert (lease.node, lease.request.user, lease.state) == ("gpu2", GRID_USER, LeaseState.ACTIVE)
    assert scenario.ledger.moves["move-1"].state is MoveState.DECIDED
    assert [type(one) for one in attempt_effects(scenario.ledger)] == [StopAttempt]
    assert scenario.job("r1").stop.ending is Ending.MOVED
    assert move_effects(scenario.ledger) == []


def test_somebody_who_waits_does_not_take_the_room_or_the_turn_of_what_is_moved(scenario):
    submit_job(scenario)
    request_move(scenario, "r1")
    for number in range(6):
        scenario.submit(a_request(f"w{number}", cores=2))
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    assert scenario.job("r1").attempt.node == "gpu2"


def test_a_full_target_is_refused_with_its_reasons(scenario):
    submit_job(scenario)
    scenario.ask(a_request("r2", cores=3, require=("gpu2",)))
    with pytest.raises(Refused, match="gpu2: 1 core") as refused:
        request_move(scenario, "r1")
    assert refused.value.reasons


@pytest.mark.parametrize(
    "loss",
    [
        lambda: events.LeaseReclaimed("move-1", "its owner is back"),
        lambda: events.NodeStopped("gpu2"),
        lambda: events.LeaseLost("move-1", "gone"),
    ],
)
def test_room_that_is_lost_after_the_decision_leaves_the_job_to_the_queue(scenario, loss):
    submit_job(scenario)
    request_move(scenario, "r1")
    scenario.handle(loss())
    assert scenario.ledger.moves["move-1"].lease_id == ""
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    job = scenario.job("r1")
    assert job.state is JobState.ASSIGNED
    scenario.start("r1")
    assert not scenario.ledger.moves
    assert scenario.job("r1").state is JobState.RUNNING


def test_kept_room_is_not_released_as_a_lease(scenario):
    submit_job(scenario)
    request_move(scenario, "r1")
    with pytest.raises(Refused, match="grid offload cancel move-1"):
        scenario.release("move-1")


def test_moved_work_goes_into_the_automatic_boost_of_the_node_that_it_leaves(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    submit_job(scenario)
    boost = a_request("auto-1", cores=4, user=GRID_USER, target="gpu1", anti_affinity=("gpu1",), priority="low")
    scenario.ask(boost)
    assert scenario.ledger.leases["auto-1"].node == "gpu2"
    request_move(scenario, "r1")
    assert scenario.ledger.leases["move-1"].carved_from == ("auto-1",)
    assert scenario.ledger.leases["auto-1"].claim.cpu_milli == 2000
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    assert scenario.lease_of("r1").carved_from == ("auto-1",)
    assert scenario.job("r1").attempt.node == "gpu2"


def test_automatic_leases_of_other_nodes_make_room_for_what_is_moved(scenario):
    submit_job(scenario)
    boost = a_request("auto-1", cores=4, user=GRID_USER, target="gpu3", anti_affinity=("gpu3", "gpu1"), priority="low")
    scenario.ask(boost)
    request_move(scenario, "r1")
    assert "auto-1" not in scenario.ledger.leases
    assert scenario.ledger.leases["move-1"].node == "gpu2"


def test_a_job_is_left_alone_while_nothing_may_start_on_its_target(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    submit_job(scenario)
    bound = replace(scenario.ledger.nodes["gpu2"], engine="ray", engine_node="n2")
    scenario.ledger.apply([bound])
    request_move(scenario, "r1")
    scenario.handle(events.HeartbeatReceived(name="gpu2", usage=Usage(), yields=True))
    (binding,) = scenario.ledger.bindings
    scenario.handle(events.GroupBound(binding, 0))
    assert scenario.ledger.moves["move-1"].state is MoveState.RESERVED
    assert scenario.job("r1").state is JobState.RUNNING
    scenario.now += WAIT_FOR_TARGET_MS + 1
    scenario.heartbeat("gpu1")
    scenario.handle(events.HeartbeatReceived(name="gpu2", usage=Usage(), yields=True))
    assert end_of(scenario.handle(events.TimePassed())) is MoveEnd.FAILED
    assert scenario.job("r1").state is JobState.RUNNING


def test_the_third_failure_in_a_row_stops_automatic_offloading_and_says_so_once():
    state, told = AutoOffloadState(), []
    for number in range(1, MAX_FAILURES + 3):
        state, records = count_failure(state, f"move-{number} failed")
        told.append(len(records))
    assert told == [0] * (MAX_FAILURES - 1) + [1] + [0, 0]
    assert state.failures == MAX_FAILURES + 2
    assert state.stopped_why.endswith(f"after {MAX_FAILURES} failures in a row, the last one: move-3 failed")


def test_an_advance_is_recorded_with_the_state_that_it_leads_to_and_an_illegal_one_raises():
    move = a_job_move("r1")
    decided, records = advance_move(move, Step.RESERVE, Step.COMMIT, now=7)
    assert (decided.state, decided.state_at_ms) == (MoveState.DECIDED, 7)
    assert [(record.type, record.data["state"]) for record in records] == [("move-advanced", "decided")]
    assert advance_move(move, now=9, problem="late") == (replace(move, problem="late"), [])
    with pytest.raises(GridError):
        advance_move(decided, Step.COMMIT, now=9)


def test_a_record_of_a_move_says_what_goes_from_where_to_where():
    record = move_record("move-requested", a_job_move("r1"), "gpu1 is full", extra=1)
    assert (record.user, record.subject, record.node, record.reason) == ("ada", "move-1", "gpu1", "gpu1 is full")
    assert record.data == {
        "from": "gpu1",
        "to": "gpu2",
        "way": "restart",
        "automatic": False,
        "job": "r1",
        "job_id": "",
        "extra": 1,
    }
