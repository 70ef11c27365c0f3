"""Moves of jobs: room first, then the stop; the recorded end gives the job that room."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.followups import CheckMove
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MoveEnd, Way
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState, MoveState
from distributed_grid.errors import Refused
from distributed_grid.reactor.effects import StartAttempt, attempt_effects
from tests.support.builders import a_node, a_request, an_exit
from tests.unit.reactor.offloading.move_builders import (
    THREE,
    a_job_move,
    answered,
    end_of,
    ended,
    request_move,
    submit_job,
)


@pytest.fixture
def scenario(new_scenario):
    return new_scenario(*THREE)


def test_the_recorded_end_of_the_job_gives_it_the_room(scenario):
    submit_job(scenario)
    request_move(scenario, "r1")
    result = scenario.end("r1", Outcome(Ending.PREEMPTED))
    job = scenario.job("r1")
    assert (job.state, job.attempt.node, job.attempt.number) == (JobState.ASSIGNED, "gpu2", 2)
    assert job.attempts[0].outcome.ending is Ending.MOVED
    assert job.moved_at_ms == scenario.now
    assert "move-1" not in scenario.ledger.leases
    assert scenario.ledger.moves["move-1"].state is MoveState.DEAD
    assert [effect.node for effect in attempt_effects(scenario.ledger) if isinstance(effect, StartAttempt)] == ["gpu2"]
    states = [record.data["state"] for record in result.records if record.type == "move-advanced"]
    assert states == ["dead"]
    attempt = job.attempt
    result = scenario.handle(events.AttemptStarted(uid="r1", number=attempt.number, fence=attempt.fence, pid=7))
    assert end_of(result) is MoveEnd.DONE
    assert not scenario.ledger.moves


def test_a_moved_end_is_neither_a_reclaim_of_the_node_nor_a_preemption_of_the_job(scenario):
    submit_job(scenario)
    before = scenario.ledger.observations["gpu1"]
    request_move(scenario, "r1")
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    assert scenario.ledger.observations["gpu1"] == before
    assert not scenario.ledger.offers["gpu1"].withdrawn
    assert [one.outcome.ending for one in scenario.job("r1").attempts if one.outcome] == [Ending.MOVED]


@pytest.mark.parametrize(
    ("kwargs", "way", "why"),
    [
        ({"restartable": False}, Way.RESTART, "--restartable"),
        ({}, Way.CHECKPOINT_RESTART, r"\$GRID_CHECKPOINT"),
        ({}, Way.QUEUE_ELSEWHERE, "has started meanwhile"),
        ({}, Way.PROCESS_RESTART, "not a way for a job"),
        ({"require": ("gpu1", "gpu3")}, Way.RESTART, "submitted for gpu1, gpu3 only"),
        ({"anti_affinity": ("gpu2",)}, Way.RESTART, "gpu2: it must not be here"),
    ],
)
def test_what_may_not_be_moved_is_refused_with_its_cause(scenario, kwargs, way, why):
    submit_job(scenario, **kwargs)
    before = scenario.ledger.rows()
    with pytest.raises(Refused, match=why):
        request_move(scenario, "r1", way)
    assert scenario.ledger.rows() == before


def test_a_checkpoint_that_was_marked_allows_a_restart(scenario):
    submit_job(scenario, restartable=False, marks=True)
    request_move(scenario, "r1", Way.CHECKPOINT_RESTART)
    assert scenario.job("r1").state is JobState.STOPPING


def test_a_waiting_job_gets_the_target_at_once(scenario):
    for name in ("gpu1", "gpu2", "gpu3"):
        scenario.ask(a_request(f"full-{name}", cores=4, require=(name,)))
    submit_job(scenario, starts=False, restartable=False)
    over = replace(scenario.ledger.leases["full-gpu2"], state=LeaseState.ENDED, claim=None, end=LeaseEnd.RELEASED)
    scenario.ledger.apply([over])  # and nobody has scanned the queue since
    result = request_move(scenario, "r1", Way.QUEUE_ELSEWHERE)
    job = scenario.job("r1")
    assert (job.state, job.attempt.node) == (JobState.ASSIGNED, "gpu2")
    assert [one.data["state"] for one in result.records if one.type == "move-advanced"] == ["reserved", "dead"]
    scenario.start("r1")
    assert not scenario.ledger.moves


def test_a_job_that_waits_for_its_quota_or_for_room_everywhere_is_refused(scenario):
    for name in ("gpu1", "gpu2", "gpu3"):
        scenario.ask(a_request(f"full-{name}", cores=4, require=(name,)))
    submit_job(scenario, starts=False, restartable=False)
    scenario.handle(events.PolicySet(SchedulingPolicy(quotas=(Quota(name="ada", members=("ada",), cpu_milli=8000),))))
    assert scenario.job("r1").state is JobState.QUEUED
    with pytest.raises(Refused, match="quota"):
        request_move(scenario, "r1", Way.QUEUE_ELSEWHERE)
    scenario.handle(events.PolicySet(SchedulingPolicy()))
    with pytest.raises(Refused, match="gpu2: 0 cores"):
        request_move(scenario, "r1", Way.QUEUE_ELSEWHERE)


def test_a_job_that_is_assigned_but_not_started_goes_elsewhere(scenario):
    submit_job(scenario, starts=False, restartable=False)
    move = answered(request_move(scenario, "r1"))
    assert move.way is Way.QUEUE_ELSEWHERE
    assert scenario.job("r1").state is JobState.STOPPING
    scenario.end("r1", Outcome(Ending.NEVER_STARTED))
    assert scenario.job("r1").attempt.node == "gpu2"


def test_a_job_that_waits_for_its_victims_goes_elsewhere_without_a_stop(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    scenario.submit(a_request("v1", cores=4, priority="low", require=("gpu1",)), starts=True)
    scenario.ask(a_request("b1", cores=4, require=("gpu2",), priority="urgent"))
    scenario.advance(3600)
    scenario.submit(a_request("r1", cores=2, priority="urgent"))
    assert scenario.lease_of("r1").awaits == ("v1.1",)
    scenario.release("b1")
    result = request_move(scenario, "r1")
    job = scenario.job("r1")
    assert (job.state, job.attempt.node) == (JobState.ASSIGNED, "gpu2")
    assert job.attempts[0].outcome.ending is Ending.MOVED
    assert not [record for record in result.records if record.type == "stopped"]


def test_success_before_the_stop_arrives_ends_the_move_as_not_needed(scenario):
    submit_job(scenario)
    request_move(scenario, "r1")
    result = scenario.end("r1", an_exit(0))
    assert end_of(result) is MoveEnd.NOT_NEEDED
    assert scenario.ledger.is_empty


def test_a_job_cancelled_by_its_user_releases_the_room(scenario):
    submit_job(scenario)
    request_move(scenario, "r1")
    scenario.cancel("r1")
    result = scenario.end("r1", Outcome(Ending.CANCELLED))
    assert end_of(result) is MoveEnd.NOT_NEEDED
    assert scenario.ledger.is_empty


def test_a_target_that_dies_after_the_decision_leads_to_the_next_attempt_somewhere(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2", hold_s=20), a_node("gpu3"))
    submit_job(scenario, restartable=False, marks=True)
    request_move(scenario, "r1", Way.CHECKPOINT_RESTART)
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    assert scenario.job("r1").attempt.node == "gpu2"
    for _ in range(40):
        scenario.now += 1000
        scenario.heartbeat("gpu1")
        scenario.heartbeat("gpu3")
        scenario.handle(events.TimePassed())
    job = scenario.job("r1")
    assert job.attempt.node in ("gpu1", "gpu3")
    assert job.attempts[1].outcome.ending is Ending.LOST
    attempt = job.attempt
    over = ended(scenario.handle(events.AttemptStarted(uid="r1", number=attempt.number, fence=attempt.fence, pid=8)))
    assert (over.end, over.ran_on) == (MoveEnd.DONE, attempt.node)
    assert "gpu2 could not run it" in over.problem


def test_a_target_that_cannot_start_it_is_not_tried_again_while_others_could(scenario):
    submit_job(scenario)
    request_move(scenario, "r1")
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    tried = []
    for _ in range(4):
        tried.append(scenario.job("r1").attempt.node)
        scenario.end("r1", Outcome(Ending.NEVER_STARTED, detail="no such file"))
    assert set(tried[:3]) == {"gpu1", "gpu2", "gpu3"}
    assert scenario.job("r1").state is JobState.ASSIGNED
    result = scenario.end("r1", Outcome(Ending.NEVER_STARTED, detail="no such file"))
    assert (end_of(result), ended(result).problem) == (MoveEnd.DONE, "job-r1 has ended (never_started): no such file")
    assert scenario.ledger.is_empty


def test_a_restartable_job_survives_the_loss_of_its_node_without_retries(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    submit_job(scenario)
    scenario.handle(events.NodeStopped("gpu1"))
    assert scenario.job("r1").attempt.node == "gpu2"


def test_a_move_that_waits_for_an_engine_can_be_cancelled_and_room_lost_ends_it(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    bound = replace(scenario.ledger.nodes["gpu2"], engine="ray", engine_node="n2")
    scenario.ledger.apply([bound])
    submit_job(scenario)
    request_move(scenario, "r1")
    assert scenario.ledger.moves["move-1"].state is MoveState.PROPOSED
    assert scenario.job("r1").state is JobState.RUNNING
    result = scenario.handle(events.MoveCancelled("move-1", "ada"))
    assert (end_of(result), ended(result).problem) == (MoveEnd.CANCELLED, "cancelled by ada")
    assert "move-1" not in scenario.ledger.leases
    request_move(scenario, "r1", move_id="move-2")
    result = scenario.handle(events.LeaseReclaimed("move-2", "its owner is back"))
    assert (end_of(result), ended(result).problem) == (
        MoveEnd.FAILED,
        "the room on gpu2 was lost: its owner is back",
    )
    assert scenario.job("r1").state is JobState.RUNNING


@pytest.mark.parametrize(("automatic", "end"), [(True, MoveEnd.CANCELLED), (False, None)])
def test_a_job_that_waits_for_room_is_left_where_automatic_offloading_is_switched_off_meanwhile(
    new_scenario, automatic, end
):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    free = scenario.ledger.observations["gpu2"]
    scenario.ledger.apply([replace(free, yields=True)])
    submit_job(scenario)
    scenario.handle(events.MoveRequested(replace(a_job_move("r1"), automatic=automatic)))
    scenario.handle(events.AutoOffloadSet(False, "ada"))
    assert scenario.ledger.moves["move-1"].state is MoveState.RESERVED
    scenario.ledger.apply([free])
    result = scenario.handle(CheckMove("move-1"))
    if end is None:
        assert scenario.job("r1").state is JobState.STOPPING
    else:
        assert (end_of(result), ended(result).problem) == (end, "automatic offloading was disabled by ada")
        assert scenario.job("r1").state is JobState.RUNNING
        assert "move-1" not in scenario.ledger.leases


def test_a_source_that_dies_while_the_job_is_stopped_does_not_lose_the_job(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    submit_job(scenario, restartable=False, marks=True)
    request_move(scenario, "r1", Way.CHECKPOINT_RESTART)
    scenario.handle(events.NodeStopped("gpu1"))
    assert scenario.job("r1").attempt.node == "gpu2"
    assert scenario.ledger.moves["move-1"].state is MoveState.DEAD


def test_a_restart_of_the_control_plane_does_not_send_the_job_back(new_scenario):
    scenario = new_scenario(*THREE)
    submit_job(scenario)
    request_move(scenario, "r1")
    scenario.ledger = Ledger(scenario.ledger.rows(durable_only=True))
    scenario.handle(events.ControlPlaneStarted(1))
    scenario.heartbeat("gpu1")
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    assert scenario.job("r1").state is JobState.QUEUED
    scenario.heartbeat("gpu3")
    scenario.handle(events.TimePassed())
    assert scenario.job("r1").state is JobState.QUEUED
    scenario.heartbeat("gpu2")
    scenario.handle(events.TimePassed())
    assert scenario.job("r1").attempt.node == "gpu2"
