"""Moves of processes: the job exists from the recorded death on, and the guard's word is waited for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.moves import MoveEnd, Way
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.processes import ProcessIdentity
from distributed_grid.domain.states import JobState, MoveState
from distributed_grid.errors import BadInput, Conflict, Refused
from distributed_grid.reactor.effects import BringResults, OrderMoveStep, ShipFiles, attempt_effects, move_effects
from distributed_grid.reactor.offloading.move_transitions import WAIT_FOR_TARGET_MS
from distributed_grid.reactor.offloading.process_moves import FREEZE_LIMIT_MS, KEEP_ROOM_MS, SHIP_LIMIT_MS
from tests.support.builders import a_node, a_request, an_exit
from tests.unit.reactor.offloading.move_builders import (
    HERE,
    IDENTITY,
    UNCOMMITTED,
    a_process_move,
    begin_process_move,
    end_of,
    ended,
    hear_boot,
    move_through,
    reported,
)


@pytest.fixture
def scenario(new_scenario):
    return begin_process_move(new_scenario(a_node("gpu1"), a_node("gpu2"), a_node("gpu3")))


def _orders(scenario):
    return [one.step if isinstance(one, OrderMoveStep) else type(one) for one in move_effects(scenario.ledger)]


def test_each_state_calls_for_its_own_steps(scenario):
    assert scenario.ledger.moves["move-1"].state is MoveState.RESERVED
    assert _orders(scenario) == ["open", ShipFiles]
    move_through(scenario, MoveState.SHIPPED)
    assert _orders(scenario) == ["freeze"]
    move_through(scenario, MoveState.FROZEN)
    assert _orders(scenario) == [ShipFiles]
    scenario.handle(events.MoveFilesSettled("move-1", "final", 1))
    assert _orders(scenario) == ["commit"]
    scenario.handle(reported(MoveState.DECIDED))
    assert _orders(scenario) == ["commit"]
    assert not scenario.ledger.jobs
    scenario.handle(reported(MoveState.DEAD))
    assert _orders(scenario) == []


def test_the_job_begins_to_exist_with_the_recorded_death_and_in_the_kept_room(scenario):
    move = move_through(scenario, MoveState.DEAD)
    job = scenario.job(move.job)
    assert (job.id, job.request.user, job.command.argv, job.command.workdir) == (
        "train",
        "ada",
        ("python3", "train.py"),
        "final",
    )
    assert (job.state, job.attempt.node, job.restartable) == (JobState.ASSIGNED, "gpu2", True)
    assert [effect.node for effect in attempt_effects(scenario.ledger)] == ["gpu2"]
    assert "move-1" not in scenario.ledger.leases


def test_results_come_back_before_the_move_ends(scenario):
    move = move_through(scenario, MoveState.DEAD)
    scenario.start(move.job)
    assert scenario.ledger.moves["move-1"].state is MoveState.RUNNING
    scenario.end(move.job, an_exit(3))
    move = scenario.ledger.moves["move-1"]
    assert (move.result, move.ran_on, move.ran_as) == ("exited 3", "gpu2", f"{move.job}.1")
    assert _orders(scenario) == [BringResults]
    scenario.handle(reported(MoveState.RETURNED, files=9))
    scenario.handle(events.MoveResultsBrought("move-1", "results"))
    assert _orders(scenario) == ["return"]
    scenario.handle(reported(MoveState.FAILED, detail="no space left"))
    assert scenario.ledger.moves["move-1"].problem == "no space left"
    scenario.handle(reported(MoveState.RETURNED, ("gpu2",), files=9))
    result = scenario.handle(reported(MoveState.RETURNED, files=2, kept=("log.from-move-1",)))
    over = ended(result)
    assert (over.end, over.returned, over.kept) == (MoveEnd.DONE, 2, ("log.from-move-1",))
    assert [one.step for one in move_effects(scenario.ledger, result.changes)] == ["close"]
    assert scenario.ledger.is_empty


def test_a_job_that_has_written_nothing_ends_the_move(scenario):
    move = move_through(scenario, MoveState.DEAD)
    attempt = scenario.job(move.job).attempt
    scenario.handle(events.AttemptEnded(uid=move.job, number=1, fence=attempt.fence, outcome=an_exit(0), pid=5))
    assert scenario.ledger.moves["move-1"].state is MoveState.RUNNING
    assert end_of(scenario.handle(events.MoveResultsBrought("move-1"))) is MoveEnd.DONE


def test_files_that_cannot_be_returned_can_be_given_up(scenario):
    move = move_through(scenario, MoveState.DEAD)
    scenario.start(move.job)
    with pytest.raises(Refused, match="grid jobs cancel train"):
        scenario.handle(events.MoveCancelled("move-1", "ada"))
    scenario.end(move.job)
    result = scenario.handle(events.MoveCancelled("move-1", "ada"))
    assert (end_of(result), ended(result).problem) == (
        MoveEnd.DONE,
        "its files were not returned: cancelled by ada",
    )


def test_a_death_that_is_heard_before_the_decision_counts_as_both(scenario):
    move_through(scenario, MoveState.FROZEN)
    scenario.handle(events.MoveFilesSettled("move-1", "final"))
    scenario.handle(reported(MoveState.DEAD))
    move = scenario.ledger.moves["move-1"]
    assert move.state is MoveState.DEAD
    assert move.job in scenario.ledger.jobs


@pytest.mark.parametrize("state", UNCOMMITTED)
def test_before_the_commit_every_failure_ends_the_move_at_once(new_scenario, state):
    for event, end in (
        (events.MoveFailed("move-1", "its files are too many"), MoveEnd.FAILED),
        (events.MoveCancelled("move-1", "ada"), MoveEnd.CANCELLED),
        (
            reported(MoveState.THAWED, detail="the lease ended"),
            MoveEnd.FAILED,
        ),
        (reported(MoveState.GONE), MoveEnd.NOT_NEEDED),
        (events.LeaseReclaimed("move-1", "its owner is back"), MoveEnd.FAILED),
        (events.NodeStopped("gpu2"), MoveEnd.FAILED),
    ):
        scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
        scenario.handle(events.MoveRequested(a_process_move()))
        move_through(scenario, state)
        result = scenario.handle(event)
        assert end_of(result) is end
        assert scenario.ledger.is_empty
        steps = [one.step for one in move_effects(scenario.ledger, result.changes)]
        assert steps == (["thaw", "close"] if state is MoveState.FROZEN else ["close"])


def test_after_the_commit_was_asked_only_the_guard_knows(scenario):
    move_through(scenario, MoveState.FROZEN)
    scenario.handle(events.MoveFilesSettled("move-1", "final"))
    scenario.handle(events.MoveCancelled("move-1", "ada"))
    scenario.handle(events.MoveCancelled("move-1", "ada"))
    assert scenario.ledger.moves["move-1"].ending is MoveEnd.CANCELLED
    assert _orders(scenario) == ["thaw"]
    result = scenario.handle(reported(MoveState.THAWED, detail="as ordered"))
    assert end_of(result) is MoveEnd.CANCELLED
    assert scenario.ledger.is_empty


def test_a_cancel_that_came_after_the_decision_is_overruled(scenario):
    move_through(scenario, MoveState.FROZEN)
    scenario.handle(events.MoveFilesSettled("move-1", "final"))
    scenario.handle(events.MoveFailed("move-1", "the content store is full"))
    scenario.handle(reported(MoveState.DECIDED))
    move = scenario.ledger.moves["move-1"]
    assert (move.state, move.ending, move.problem) == (MoveState.DECIDED, None, "")
    with pytest.raises(Refused, match="when the original is recorded dead"):
        scenario.handle(events.MoveCancelled("move-1", "ada"))
    assert _orders(scenario) == ["commit"]


def test_room_that_is_lost_after_the_commit_leaves_the_job_to_the_queue(scenario):
    move_through(scenario, MoveState.DECIDED)
    scenario.handle(events.NodeStopped("gpu2"))
    assert scenario.ledger.moves["move-1"].lease_id == ""
    scenario.handle(reported(MoveState.DEAD))
    move = scenario.ledger.moves["move-1"]
    assert scenario.job(move.job).attempt.node in ("gpu1", "gpu3")


def _die_while_the_target_gives_way(scenario):
    move_through(scenario, MoveState.DECIDED)
    scenario.handle(events.HeartbeatReceived(name="gpu2", usage=Usage(), yields=True))
    scenario.handle(reported(MoveState.DEAD))
    move = scenario.ledger.moves["move-1"]
    assert (move.state, move.lease_id) == (MoveState.DEAD, "move-1")
    assert scenario.job(move.job).state is JobState.QUEUED
    return move.job


def test_the_job_waits_for_a_target_on_which_nothing_may_start_for_now(scenario):
    uid = _die_while_the_target_gives_way(scenario)
    scenario.advance(1, heard=False)
    assert scenario.job(uid).state is JobState.QUEUED
    scenario.heartbeat("gpu2")
    scenario.advance(1)
    assert scenario.job(uid).attempt.node == "gpu2"
    assert "move-1" not in scenario.ledger.leases


def test_the_job_goes_elsewhere_when_the_target_is_of_no_use_for_long(scenario):
    uid = _die_while_the_target_gives_way(scenario)
    scenario.now += WAIT_FOR_TARGET_MS + 1
    for name in ("gpu1", "gpu3"):
        scenario.heartbeat(name)
    scenario.handle(events.HeartbeatReceived(name="gpu2", usage=Usage(), yields=True))
    scenario.advance(0, heard=False)
    assert scenario.job(uid).attempt.node in ("gpu1", "gpu3")
    assert "move-1" not in scenario.ledger.leases


def test_the_job_goes_elsewhere_at_once_when_the_room_is_lost_while_it_waits(scenario):
    uid = _die_while_the_target_gives_way(scenario)
    scenario.handle(events.LeaseReclaimed("move-1", "its owner is back"))
    assert scenario.job(uid).attempt.node in ("gpu1", "gpu3")


def test_nothing_is_ended_for_a_target_on_which_nothing_may_start(scenario):
    move_through(scenario, MoveState.FROZEN)
    scenario.handle(events.HeartbeatReceived(name="gpu2", usage=Usage(), yields=True))
    result = scenario.handle(events.MoveFilesSettled("move-1", "final"))
    assert (end_of(result), ended(result).problem) == (MoveEnd.FAILED, "the owner of gpu2 is using it")


def test_a_target_that_dies_with_the_job_leads_to_its_next_attempt(scenario):
    move = move_through(scenario, MoveState.DEAD)
    scenario.start(move.job)
    scenario.handle(events.NodeStopped("gpu2"))
    assert scenario.job(move.job).attempt.node in ("gpu1", "gpu3")
    scenario.start(move.job)
    scenario.end(move.job)
    assert scenario.ledger.moves["move-1"].ran_on in ("gpu1", "gpu3")


@pytest.mark.parametrize("state", UNCOMMITTED)
def test_a_machine_that_restarts_before_the_commit_ends_the_move(scenario, state):
    move_through(scenario, state)
    hear_boot(scenario, "gpu1", "boot-2")
    result = scenario.advance(1)
    assert (end_of(result), ended(result).problem) == (MoveEnd.FAILED, "the process ended with its machine")


@pytest.mark.parametrize("decided", [True, False])
def test_a_machine_that_restarts_after_the_commit_is_a_death(scenario, decided):
    move_through(scenario, MoveState.DECIDED if decided else MoveState.FROZEN)
    scenario.handle(events.MoveFilesSettled("move-1", "final"))
    hear_boot(scenario, "gpu1", "boot-2", machine="m2-dir")
    scenario.advance(1)
    assert not scenario.ledger.jobs  # another machine has taken the name: that proves nothing
    hear_boot(scenario, "gpu1", "boot-2")
    scenario.advance(1)
    assert scenario.ledger.moves["move-1"].state is MoveState.DEAD
    assert len(scenario.ledger.jobs) == 1


def test_what_a_restarted_machine_says_of_a_process_after_the_commit_is_a_death(scenario):
    move_through(scenario, MoveState.FROZEN)
    scenario.handle(events.MoveFilesSettled("move-1", "final"))
    hear_boot(scenario, "gpu1", "boot-2")
    scenario.handle(reported(MoveState.GONE))
    assert scenario.ledger.moves["move-1"].state is MoveState.DEAD


def test_a_source_that_is_silent_or_removed_is_waited_for_after_the_commit(scenario):
    move_through(scenario, MoveState.DECIDED)
    scenario.handle(events.NodeForgotten("gpu1"))
    assert "gpu1" not in scenario.ledger.nodes
    scenario.now += KEEP_ROOM_MS + 1
    scenario.advance(0)
    move = scenario.ledger.moves["move-1"]
    assert (move.state, move.lease_id) == (MoveState.DECIDED, "")
    assert not scenario.ledger.leases
    assert not scenario.ledger.jobs
    scenario.handle(events.NodeDeclared(a_node("gpu1")))
    hear_boot(scenario, "gpu1", "boot-1")
    scenario.handle(reported(MoveState.DEAD))
    assert len(scenario.ledger.jobs) == 1


def test_a_source_that_is_removed_before_the_commit_ends_the_move(scenario):
    scenario.handle(events.NodeForgotten("gpu1"))
    assert end_of(scenario.advance(1)) is MoveEnd.FAILED


def test_a_source_that_is_removed_gets_no_files_back(scenario):
    move = move_through(scenario, MoveState.DEAD)
    scenario.start(move.job)
    scenario.end(move.job)
    scenario.handle(events.NodeForgotten("gpu1"))
    over = ended(scenario.advance(1))
    assert over.end is MoveEnd.DONE
    assert "not returned" in over.problem


@pytest.mark.parametrize(
    ("state", "limit_ms"),
    [
        (MoveState.RESERVED, SHIP_LIMIT_MS),
        (MoveState.SHIPPED, FREEZE_LIMIT_MS),
        (MoveState.FROZEN, 10_000 + FREEZE_LIMIT_MS),
    ],
)
def test_a_step_that_takes_too_long_ends_the_move(scenario, state, limit_ms):
    move_through(scenario, state)
    scenario.now += limit_ms
    for name in ("gpu1", "gpu2", "gpu3"):
        scenario.heartbeat(name)
    scenario.advance(0)
    assert "move-1" in scenario.ledger.moves
    assert end_of(scenario.advance(1)) is MoveEnd.FAILED
    assert scenario.ledger.is_empty


def test_a_target_that_drains_ends_a_move_that_is_not_committed(scenario):
    scenario.handle(events.NodeDrained("gpu2", reclaims=False))
    assert end_of(scenario.advance(1)) is MoveEnd.FAILED


def test_what_is_not_a_process_of_now_is_refused(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"), a_node("gpu3"))
    hear_boot(scenario, "gpu1", "boot-1")
    move = a_process_move()
    for wrong, error in (
        (replace(move, command=None), BadInput),
        (replace(move, way=Way.RESTART), BadInput),
        (replace(move, freeze_ms=1), BadInput),
        (replace(move, automatic=True), Refused),
        (a_process_move(identity=ProcessIdentity(1, 1, "boot-0")), Refused),
        (a_process_move(cores=64), Refused),
    ):
        with pytest.raises(error):
            scenario.handle(events.MoveRequested(wrong))
    scenario.handle(events.MoveRequested(move))
    with pytest.raises(Refused, match="being moved already"):
        scenario.handle(events.MoveRequested(a_process_move(move_id="move-2")))
    with pytest.raises(Conflict):
        scenario.handle(events.MoveRequested(replace(move, user="eve")))
    scenario.now += 10_000
    scenario.handle(events.TimePassed())
    other = a_process_move(move_id="move-3", identity=replace(IDENTITY, pid=2))
    with pytest.raises(Refused, match="gpu2 is suspect"):
        scenario.handle(events.MoveRequested(other))
    scenario.heartbeat("gpu2")
    with pytest.raises(Refused, match="gpu1 is suspect"):
        scenario.handle(events.MoveRequested(other))


def test_a_name_that_is_taken_meanwhile_does_not_keep_the_job_from_starting(scenario):
    scenario.handle(
        events.JobSubmitted(id="train", command=scenario.ledger.moves["move-1"].command, request=a_request("r1"))
    )
    move = move_through(scenario, MoveState.DEAD)
    assert scenario.job(move.job).id == move.job_id == "moved-1"


def test_a_job_that_is_cancelled_before_it_has_run_ends_the_move(scenario):
    scenario.ask(a_request("r2", cores=4, require=("gpu3",)))
    scenario.ask(a_request("r3", cores=4, require=("gpu1",)))
    move_through(scenario, MoveState.DECIDED)
    scenario.handle(events.LeaseReclaimed("move-1", "its owner is back"))
    scenario.handle(events.NodeDrained("gpu2"))
    scenario.handle(reported(MoveState.DEAD))
    move = scenario.ledger.moves["move-1"]
    assert scenario.job(move.job).state is JobState.QUEUED
    result = scenario.cancel(move.job)
    assert end_of(result) is MoveEnd.DONE
    assert "without having run" in ended(result).problem


def test_a_moved_process_that_fails_is_the_users_business(scenario):
    move = move_through(scenario, MoveState.DEAD)
    scenario.start(move.job)
    scenario.end(move.job, Outcome(Ending.SIGNALLED, signal=11))
    assert scenario.ledger.moves["move-1"].result == "signalled"


@pytest.mark.parametrize("committed", [True, False])
def test_an_agent_that_has_lost_its_directory_has_nothing_to_say_of_the_move(scenario, committed):
    move_through(scenario, MoveState.FROZEN)
    if committed:
        scenario.handle(events.MoveFilesSettled("move-1", "final"))
    hear_boot(scenario, "gpu1", "boot-1", machine="m1-other")
    scenario.handle(
        events.MoveReported(
            move_id="move-1", state=MoveState.THAWED, nodes=HERE, detail="nothing is known of this move here"
        )
    )
    scenario.handle(reported(MoveState.DEAD))
    assert scenario.ledger.moves["move-1"].state is MoveState.FROZEN
    result = scenario.advance(1)
    if committed:
        hear_boot(scenario, "gpu1", "boot-2", machine="m1-other")
        scenario.advance(1)
        assert str(scenario.ledger.moves["move-1"].state) == "dead"
    else:
        assert end_of(result) is MoveEnd.FAILED
