"""Moves of jobs: room first, then the stop; the recorded end gives the job that room."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MoveEnd, Way
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState, MoveState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor import pending, pending_moves
from distributed_grid.reactor.effects import StartAttempt, StopAttempt
from distributed_grid.reactor.offloading.move_transitions import WAIT_FOR_TARGET_MS
from tests.support.builders import a_node, a_request, a_submission, an_exit
from tests.unit.reactor.offloading.move_builders import a_job_move, answered, end_of, ended

THREE = (a_node("gpu1", cores=4), a_node("gpu2", cores=4), a_node("gpu3", cores=4))


@pytest.fixture
def scenario(new_scenario):
    return new_scenario(*THREE)


def _submit(scenario, uid="r1", *, restartable=True, marks=False, starts=True, **request):
    wanted = a_request(uid, prefer=("gpu1",), **({"cores": 2} | request))
    scenario.handle(replace(a_submission(wanted), restartable=restartable))
    if starts:
        scenario.start(uid)
    if marks:
        attempt = scenario.job(uid).attempt
        scenario.handle(events.AttemptMarked(uid, attempt.number, attempt.fence, 0))
    return scenario.job(uid)


def _move(scenario, *args, **kwargs):
    return scenario.handle(events.MoveRequested(a_job_move(*args, **kwargs)))


def test_room_is_kept_before_the_job_is_stopped(scenario):
    _submit(scenario)
    move = answered(_move(scenario, "r1"))
    lease = scenario.ledger.leases[move.lease_id]
    assert (lease.node, lease.request.user, lease.state) == ("gpu2", GRID_USER, LeaseState.ACTIVE)
    assert scenario.ledger.moves["move-1"].state is MoveState.DECIDED
    assert [type(one) for one in pending(scenario.ledger)] == [StopAttempt]
    assert scenario.job("r1").stop.ending is Ending.MOVED
    assert pending_moves(scenario.ledger, scenario.now) == []


def test_the_recorded_end_of_the_job_gives_it_the_room(scenario):
    _submit(scenario)
    _move(scenario, "r1")
    result = scenario.end("r1", Outcome(Ending.PREEMPTED))
    job = scenario.job("r1")
    assert (job.state, job.attempt.node, job.attempt.number) == (JobState.ASSIGNED, "gpu2", 2)
    assert job.attempts[0].outcome.ending is Ending.MOVED
    assert job.moved_at_ms == scenario.now
    assert "move-1" not in scenario.ledger.leases
    assert scenario.ledger.moves["move-1"].state is MoveState.DEAD
    assert [effect.node for effect in pending(scenario.ledger) if isinstance(effect, StartAttempt)] == ["gpu2"]
    states = [record.data["state"] for record in result.records if record.type == "move-advanced"]
    assert states == ["dead"]
    attempt = job.attempt
    result = scenario.handle(events.AttemptStarted("r1", attempt.number, attempt.fence, 7))
    assert end_of(result) is MoveEnd.DONE
    assert not scenario.ledger.moves


def test_a_moved_end_is_neither_a_reclaim_of_the_node_nor_a_preemption_of_the_job(scenario):
    _submit(scenario)
    before = scenario.ledger.observations["gpu1"]
    _move(scenario, "r1")
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    assert scenario.ledger.observations["gpu1"] == before
    assert not scenario.ledger.offers["gpu1"].withdrawn
    assert [one.outcome.ending for one in scenario.job("r1").attempts if one.outcome] == [Ending.MOVED]


def test_somebody_who_waits_does_not_take_the_room_or_the_turn_of_what_is_moved(scenario):
    _submit(scenario)
    _move(scenario, "r1")
    for number in range(6):
        scenario.submit(a_request(f"w{number}", cores=2))
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    assert scenario.job("r1").attempt.node == "gpu2"


def test_a_repeated_request_is_the_same_move(scenario):
    _submit(scenario)
    _move(scenario, "r1")
    before = scenario.ledger.rows()
    assert answered(_move(scenario, "r1")).id == "move-1"
    assert scenario.ledger.rows() == before
    with pytest.raises(Conflict):
        _move(scenario, "r1", target="gpu3")
    with pytest.raises(Refused, match="grid offload cancel move-1"):
        _move(scenario, "r1", move_id="move-2")


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
    _submit(scenario, **kwargs)
    before = scenario.ledger.rows()
    with pytest.raises(Refused, match=why):
        _move(scenario, "r1", way)
    assert scenario.ledger.rows() == before


def test_requests_without_sense_are_refused(scenario):
    _submit(scenario)
    with pytest.raises(NotFound):
        _move(scenario, "r9")
    with pytest.raises(BadInput):
        _move(scenario, "r1", move_id="r7")
    with pytest.raises(Refused, match="the nodes are: gpu1, gpu2, gpu3"):
        _move(scenario, "r1", target="gpu9")
    with pytest.raises(Refused, match="already"):
        _move(scenario, "r1", target="gpu1")
    with pytest.raises(Refused, match="is on gpu1, not on gpu3"):
        scenario.handle(events.MoveRequested(replace(a_job_move("r1"), source="gpu3")))
    scenario.handle(events.NodeDrained("gpu2"))
    with pytest.raises(Refused, match="gpu2 is draining"):
        _move(scenario, "r1")
    scenario.cancel("r1")
    with pytest.raises(Refused, match="being stopped"):
        _move(scenario, "r1", target="gpu3")


def test_a_full_target_is_refused_with_its_reasons(scenario):
    _submit(scenario)
    scenario.ask(a_request("r2", cores=3, require=("gpu2",)))
    with pytest.raises(Refused, match="gpu2: 1 core") as refused:
        _move(scenario, "r1")
    assert refused.value.reasons


def test_a_checkpoint_that_was_marked_allows_a_restart(scenario):
    _submit(scenario, restartable=False, marks=True)
    _move(scenario, "r1", Way.CHECKPOINT_RESTART)
    assert scenario.job("r1").state is JobState.STOPPING


def test_a_waiting_job_gets_the_target_at_once(scenario):
    for name in ("gpu1", "gpu2", "gpu3"):
        scenario.ask(a_request(f"full-{name}", cores=4, require=(name,)))
    _submit(scenario, starts=False, restartable=False)
    over = replace(scenario.ledger.leases["full-gpu2"], state=LeaseState.ENDED, claim=None, end=LeaseEnd.RELEASED)
    scenario.ledger.apply([over])  # and nobody has scanned the queue since
    result = _move(scenario, "r1", Way.QUEUE_ELSEWHERE)
    job = scenario.job("r1")
    assert (job.state, job.attempt.node) == (JobState.ASSIGNED, "gpu2")
    assert [one.data["state"] for one in result.records if one.type == "move-advanced"] == ["reserved", "dead"]
    scenario.start("r1")
    assert not scenario.ledger.moves


def test_a_job_that_waits_for_its_quota_or_for_room_everywhere_is_refused(scenario):
    for name in ("gpu1", "gpu2", "gpu3"):
        scenario.ask(a_request(f"full-{name}", cores=4, require=(name,)))
    _submit(scenario, starts=False, restartable=False)
    scenario.handle(events.PolicySet(SchedulingPolicy(quotas=(Quota("ada", ("ada",), cpu_milli=8000),))))
    assert scenario.job("r1").state is JobState.QUEUED
    with pytest.raises(Refused, match="quota"):
        _move(scenario, "r1", Way.QUEUE_ELSEWHERE)
    scenario.handle(events.PolicySet(SchedulingPolicy()))
    with pytest.raises(Refused, match="gpu2: 0 cores"):
        _move(scenario, "r1", Way.QUEUE_ELSEWHERE)


def test_a_job_that_is_assigned_but_not_started_goes_elsewhere(scenario):
    _submit(scenario, starts=False, restartable=False)
    move = answered(_move(scenario, "r1"))
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
    result = _move(scenario, "r1")
    job = scenario.job("r1")
    assert (job.state, job.attempt.node) == (JobState.ASSIGNED, "gpu2")
    assert job.attempts[0].outcome.ending is Ending.MOVED
    assert not [record for record in result.records if record.type == "stopped"]


def test_success_before_the_stop_arrives_ends_the_move_as_not_needed(scenario):
    _submit(scenario)
    _move(scenario, "r1")
    result = scenario.end("r1", an_exit(0))
    assert end_of(result) is MoveEnd.NOT_NEEDED
    assert scenario.ledger.is_empty


def test_a_job_cancelled_by_its_user_releases_the_room(scenario):
    _submit(scenario)
    _move(scenario, "r1")
    scenario.cancel("r1")
    result = scenario.end("r1", Outcome(Ending.CANCELLED))
    assert end_of(result) is MoveEnd.NOT_NEEDED
    assert scenario.ledger.is_empty


@pytest.mark.parametrize(
    "loss",
    [
        lambda: events.LeaseReclaimed("move-1", "its owner is back"),
        lambda: events.NodeStopped("gpu2"),
        lambda: events.LeaseLost("move-1", "gone"),
    ],
)
def test_room_that_is_lost_after_the_decision_leaves_the_job_to_the_queue(scenario, loss):
    _submit(scenario)
    _move(scenario, "r1")
    scenario.handle(loss())
    assert scenario.ledger.moves["move-1"].lease_id == ""
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    job = scenario.job("r1")
    assert job.state is JobState.ASSIGNED
    scenario.start("r1")
    assert not scenario.ledger.moves
    assert scenario.job("r1").state is JobState.RUNNING


def test_a_target_that_dies_after_the_decision_leads_to_the_next_attempt_somewhere(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2", hold_s=20), a_node("gpu3"))
    _submit(scenario, restartable=False, marks=True)
    _move(scenario, "r1", Way.CHECKPOINT_RESTART)
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
    over = ended(scenario.handle(events.AttemptStarted("r1", attempt.number, attempt.fence, 8)))
    assert (over.end, over.ran_on) == (MoveEnd.DONE, attempt.node)
    assert "gpu2 could not run it" in over.problem


def test_a_target_that_cannot_start_it_is_not_tried_again_while_others_could(scenario):
    _submit(scenario)
    _move(scenario, "r1")
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
    _submit(scenario)
    scenario.handle(events.NodeStopped("gpu1"))
    assert scenario.job("r1").attempt.node == "gpu2"


def test_a_move_that_waits_for_an_engine_can_be_cancelled_and_room_lost_ends_it(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    bound = replace(scenario.ledger.nodes["gpu2"], engine="ray", engine_node="n2")
    scenario.ledger.apply([bound])
    _submit(scenario)
    _move(scenario, "r1")
    assert scenario.ledger.moves["move-1"].state is MoveState.PROPOSED
    assert scenario.job("r1").state is JobState.RUNNING
    result = scenario.handle(events.MoveCancelled("move-1", "ada"))
    assert (end_of(result), ended(result).problem) == (MoveEnd.CANCELLED, "cancelled by ada")
    assert "move-1" not in scenario.ledger.leases
    _move(scenario, "r1", move_id="move-2")
    result = scenario.handle(events.LeaseReclaimed("move-2", "its owner is back"))
    assert (end_of(result), ended(result).problem) == (
        MoveEnd.FAILED,
        "the room on gpu2 was lost: its owner is back",
    )
    assert scenario.job("r1").state is JobState.RUNNING


def test_a_decided_move_is_not_cancelled_and_says_how_to_cancel_the_job(scenario):
    _submit(scenario)
    _move(scenario, "r1")
    with pytest.raises(Refused, match="type: grid jobs cancel job-r1"):
        scenario.handle(events.MoveCancelled("move-1", "ada"))
    with pytest.raises(NotFound):
        scenario.handle(events.MoveCancelled("move-9", "ada"))
    assert scenario.handle(events.MoveFailed("move-1", "x")).changes == []


def test_kept_room_is_not_released_as_a_lease(scenario):
    _submit(scenario)
    _move(scenario, "r1")
    with pytest.raises(Refused, match="grid offload cancel move-1"):
        scenario.release("move-1")


def test_a_source_that_dies_while_the_job_is_stopped_does_not_lose_the_job(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    _submit(scenario, restartable=False, marks=True)
    _move(scenario, "r1", Way.CHECKPOINT_RESTART)
    scenario.handle(events.NodeStopped("gpu1"))
    assert scenario.job("r1").attempt.node == "gpu2"
    assert scenario.ledger.moves["move-1"].state is MoveState.DEAD


def test_moved_work_goes_into_the_automatic_boost_of_the_node_that_it_leaves(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    _submit(scenario)
    boost = a_request("auto-1", cores=4, user=GRID_USER, target="gpu1", anti_affinity=("gpu1",), priority="low")
    scenario.ask(boost)
    assert scenario.ledger.leases["auto-1"].node == "gpu2"
    _move(scenario, "r1")
    assert scenario.ledger.leases["move-1"].carved_from == ("auto-1",)
    assert scenario.ledger.leases["auto-1"].claim.cpu_milli == 2000
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    assert scenario.lease_of("r1").carved_from == ("auto-1",)
    assert scenario.job("r1").attempt.node == "gpu2"


def test_automatic_leases_of_other_nodes_make_room_for_what_is_moved(scenario):
    _submit(scenario)
    boost = a_request("auto-1", cores=4, user=GRID_USER, target="gpu3", anti_affinity=("gpu3", "gpu1"), priority="low")
    scenario.ask(boost)
    _move(scenario, "r1")
    assert "auto-1" not in scenario.ledger.leases
    assert scenario.ledger.leases["move-1"].node == "gpu2"


def test_a_job_is_left_alone_while_nothing_may_start_on_its_target(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    _submit(scenario)
    bound = replace(scenario.ledger.nodes["gpu2"], engine="ray", engine_node="n2")
    scenario.ledger.apply([bound])
    _move(scenario, "r1")
    scenario.handle(events.HeartbeatReceived("gpu2", Usage(), yields=True))
    (binding,) = scenario.ledger.bindings
    scenario.handle(events.GroupBound(binding, 0))
    assert scenario.ledger.moves["move-1"].state is MoveState.RESERVED
    assert scenario.job("r1").state is JobState.RUNNING
    scenario.now += WAIT_FOR_TARGET_MS + 1
    scenario.heartbeat("gpu1")
    scenario.handle(events.HeartbeatReceived("gpu2", Usage(), yields=True))
    assert end_of(scenario.handle(events.TimePassed())) is MoveEnd.FAILED
    assert scenario.job("r1").state is JobState.RUNNING


def test_a_restart_of_the_control_plane_does_not_send_the_job_back(new_scenario):
    scenario = new_scenario(*THREE)
    _submit(scenario)
    _move(scenario, "r1")
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
