"""Deciders of moves: requests, reports and who may make them, cancellation, and consents of users."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.followups import CheckMove
from distributed_grid.domain.moves import MoveConsent, MoveEnd
from distributed_grid.domain.states import MoveState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from tests.support.builders import a_node
from tests.unit.reactor.offloading.move_builders import (
    THREE,
    UNCOMMITTED,
    a_job_move,
    a_process_move,
    answered,
    begin_process_move,
    end_of,
    move_through,
    reported,
    request_move,
    submit_job,
)


@pytest.fixture
def scenario(new_scenario):
    return begin_process_move(new_scenario(a_node("gpu1"), a_node("gpu2"), a_node("gpu3")))


def test_reports_that_repeat_come_late_or_are_anothers_change_nothing(scenario):
    reports = [
        events.MoveShipped("move-1", "other", 7),
        reported(MoveState.FROZEN),
        events.MoveFilesSettled("move-1", "other", 7),
        reported(MoveState.DECIDED),
        reported(MoveState.THAWED, detail="late"),
        reported(MoveState.FAILED, detail="late"),
        reported(MoveState.DEAD),
        events.MoveRequested(a_process_move()),
        events.MoveResultsBrought("move-1", "other"),
        reported(MoveState.RETURNED, files=1),
        CheckMove("move-1"),
    ]
    move_through(scenario, MoveState.DEAD)
    before = scenario.ledger.rows()
    for report in reports:
        scenario.handle(report)
    assert scenario.ledger.rows() == before
    for report in reports[:3] + reports[8:]:
        scenario.handle(replace(report, move_id="move-9"))
    assert scenario.ledger.rows() == before


@pytest.mark.parametrize("state", [*UNCOMMITTED, MoveState.DECIDED])
def test_who_does_not_serve_the_source_has_nothing_to_say(scenario, state):
    move_through(scenario, state)
    before = scenario.ledger.rows()
    for event in (
        reported(MoveState.FROZEN, ("gpu2",)),
        reported(MoveState.DECIDED, ("gpu2",)),
        reported(MoveState.DEAD, ("gpu2", "gpu3")),
        reported(MoveState.THAWED, ("gpu3",)),
        reported(MoveState.FAILED, ("gpu3",)),
    ):
        scenario.handle(event)
    assert scenario.ledger.rows() == before


def test_a_guard_that_decides_without_having_been_asked_is_not_believed(scenario):
    move_through(scenario, MoveState.FROZEN)
    scenario.handle(reported(MoveState.DECIDED))
    assert scenario.ledger.moves["move-1"].state is MoveState.FROZEN
    assert end_of(scenario.handle(reported(MoveState.DEAD))) is MoveEnd.NOT_NEEDED
    assert scenario.ledger.is_empty


def test_a_repeated_request_is_the_same_move(new_scenario):
    scenario = new_scenario(*THREE)
    submit_job(scenario)
    request_move(scenario, "r1")
    before = scenario.ledger.rows()
    assert answered(request_move(scenario, "r1")).id == "move-1"
    assert scenario.ledger.rows() == before
    with pytest.raises(Conflict):
        request_move(scenario, "r1", target="gpu3")
    with pytest.raises(Refused, match="grid offload cancel move-1"):
        request_move(scenario, "r1", move_id="move-2")


def test_requests_without_sense_are_refused(new_scenario):
    scenario = new_scenario(*THREE)
    submit_job(scenario)
    with pytest.raises(NotFound):
        request_move(scenario, "r9")
    with pytest.raises(BadInput):
        request_move(scenario, "r1", move_id="r7")
    with pytest.raises(Refused, match="the nodes are: gpu1, gpu2, gpu3"):
        request_move(scenario, "r1", target="gpu9")
    with pytest.raises(Refused, match="already"):
        request_move(scenario, "r1", target="gpu1")
    with pytest.raises(Refused, match="is on gpu1, not on gpu3"):
        scenario.handle(events.MoveRequested(replace(a_job_move("r1"), source="gpu3")))
    scenario.handle(events.NodeDrained("gpu2"))
    with pytest.raises(Refused, match="gpu2 is stopped"):
        request_move(scenario, "r1")
    scenario.cancel("r1")
    with pytest.raises(Refused, match="being stopped"):
        request_move(scenario, "r1", target="gpu3")


def test_a_decided_move_is_not_cancelled_and_says_how_to_cancel_the_job(new_scenario):
    scenario = new_scenario(*THREE)
    submit_job(scenario)
    request_move(scenario, "r1")
    with pytest.raises(Refused, match="type: grid jobs cancel job-r1"):
        scenario.handle(events.MoveCancelled("move-1", "ada"))
    with pytest.raises(NotFound):
        scenario.handle(events.MoveCancelled("move-9", "ada"))
    assert scenario.handle(events.MoveFailed("move-1", "x")).changes == []


def test_a_consent_is_remembered_until_it_is_withdrawn_and_said_twice_it_is_recorded_once(new_scenario):
    scenario = new_scenario(*THREE)
    consent = MoveConsent(user="ada", shape="python3 train.py", given_at_ms=0, variables=("PATH",), cwd="/srv/a")
    given = scenario.handle(events.ConsentGiven(consent))
    assert [record.reason for record in given.records] == ["given"]
    assert scenario.ledger.consents[consent.key] == replace(consent, given_at_ms=scenario.now)
    assert scenario.handle(events.ConsentGiven(consent)).records == []
    scenario.handle(events.ConsentGiven(replace(consent, variables=("PATH", "HOME"))))
    assert scenario.ledger.consents[consent.key].variables == ("PATH", "HOME")
    gone = scenario.handle(events.ConsentWithdrawn("ada", consent.shape))
    assert [record.reason for record in gone.records] == ["withdrawn"]
    assert not scenario.ledger.consents
    assert scenario.handle(events.ConsentWithdrawn("ada", consent.shape)).changes == []


def test_cancelling_a_move_that_is_not_going_on_is_refused(new_scenario):
    with pytest.raises(NotFound, match="no move move-9 is going on"):
        new_scenario(*THREE).handle(events.MoveCancelled("move-9", "ada"))
