"""Silence is not death: what a node holds, when it is given up, and what is taken back on purpose."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import (
    AgentRequested,
    AttemptEnded,
    AttemptPaused,
    AttemptsListed,
    AttemptStarted,
    ControlPlaneStarted,
    HeartbeatReceived,
    NodeDeclared,
    NodeDrained,
    NodeStopped,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rows import VOLATILE
from distributed_grid.domain.states import JobState, NodeState
from distributed_grid.errors import NotFound
from distributed_grid.reactor import decide, pending
from distributed_grid.reactor.nodes import HOLD_GRACE_MS
from tests.support.builders import Scenario, a_node, a_request, an_exit

HOLD = 60


@pytest.fixture
def new_scenario():
    scenario = Scenario(a_node("gpu2", cores=4, hold_s=HOLD))
    yield scenario
    scenario.ledger.check()


def _state(new_scenario: Scenario, name: str = "gpu2") -> NodeState:
    return new_scenario.ledger.nodes[name].state


def test_a_silent_node_is_doubted_keeps_its_work_and_gets_nothing_new(new_scenario: Scenario) -> None:
    new_scenario.submit(a_request("r1"), starts=True)
    new_scenario.advance(7, heard=False)
    assert _state(new_scenario) is NodeState.SUSPECT
    assert new_scenario.job("r1").state is JobState.RUNNING
    assert new_scenario.submit(a_request("r2")).state is JobState.QUEUED


def test_a_node_heard_again_within_its_hold_goes_on_as_if_nothing_was(new_scenario: Scenario) -> None:
    new_scenario.submit(a_request("r1"), starts=True)
    new_scenario.advance(HOLD - 1, heard=False)
    new_scenario.heartbeat("gpu2")
    assert _state(new_scenario) is NodeState.ALIVE
    assert new_scenario.job("r1").state is JobState.RUNNING


def test_nothing_is_lent_again_before_the_hold_and_its_grace_are_over(new_scenario: Scenario) -> None:
    new_scenario.submit(a_request("r1", cores=4), starts=True)
    new_scenario.advance(7, heard=False)
    new_scenario.advance(HOLD - 7 + HOLD_GRACE_MS / 1000 - 0.001, heard=False)
    assert new_scenario.ledger.claims_on("gpu2").cpu_milli == 4000
    new_scenario.advance(0.001, heard=False)
    assert new_scenario.ledger.claims_on("gpu2").cpu_milli == 0
    assert _state(new_scenario) is NodeState.LOST


def test_a_lost_job_ends_as_lost_and_runs_again_only_with_retries(new_scenario: Scenario) -> None:
    new_scenario.submit(a_request("r1"), starts=True)
    new_scenario.submit(a_request("r2"), retries=1, starts=True)
    new_scenario.advance(7, heard=False)
    result = new_scenario.advance(HOLD, heard=False)
    assert "r1" not in new_scenario.ledger.jobs
    assert new_scenario.job("r2").state is JobState.QUEUED
    ended = next(record for record in result.records if record.type == "stopped" and record.subject == "r1")
    assert ended.data["ending"] == "lost"


def test_a_lease_without_a_job_ends_with_its_node(new_scenario: Scenario) -> None:
    assert new_scenario.ask(a_request("r1")) is not None
    new_scenario.advance(7, heard=False)
    new_scenario.advance(HOLD, heard=False)
    assert "r1" not in new_scenario.ledger.leases


def test_a_report_after_the_node_was_given_up_is_history_and_nothing_else(new_scenario: Scenario) -> None:
    attempt = new_scenario.submit(a_request("r1"), retries=1, starts=True).attempt
    assert attempt is not None
    new_scenario.advance(7, heard=False)
    new_scenario.advance(HOLD, heard=False)
    before = new_scenario.ledger.rows(durable_only=True)
    result = new_scenario.handle(AttemptEnded("r1", attempt.number, attempt.fence, an_exit(), ("gpu2",)))
    assert [record.type for record in result.records] == ["late-report"]
    assert new_scenario.ledger.rows(durable_only=True) == before


def test_a_control_plane_that_was_restarted_waits_a_whole_hold_before_it_gives_anything_up(
    new_scenario: Scenario,
) -> None:
    new_scenario.submit(a_request("r1"), starts=True)
    new_scenario.now += 1_000_000_000
    new_scenario.handle(ControlPlaneStarted(9))
    new_scenario.advance(HOLD + HOLD_GRACE_MS / 1000 - 0.001, heard=False)
    assert "r1" in new_scenario.ledger.jobs
    new_scenario.advance(0.001, heard=False)
    assert "r1" not in new_scenario.ledger.jobs


def test_a_node_of_this_machine_is_never_given_up() -> None:
    new_scenario = Scenario(a_node("here"))
    new_scenario.submit(a_request("r1"), starts=True)
    new_scenario.advance(7, heard=False)
    new_scenario.advance(1_000_000, heard=False)
    assert _state(new_scenario, "here") is NodeState.SUSPECT
    assert new_scenario.job("r1").state is JobState.RUNNING


def test_nobody_reports_about_another_nodes_attempts(new_scenario: Scenario) -> None:
    new_scenario.handle(NodeDeclared(a_node("liar", hold_s=HOLD)))
    attempt = new_scenario.submit(a_request("r1")).attempt
    assert attempt is not None
    new_scenario.handle(AttemptStarted("r1", 1, attempt.fence, 7, (), ("liar",)))
    new_scenario.handle(AttemptEnded("r1", 1, attempt.fence, an_exit(), ("liar",)))
    assert new_scenario.job("r1").state is JobState.ASSIGNED


def test_what_is_paused_for_the_owner_is_shown_and_goes_on(new_scenario: Scenario) -> None:
    attempt = new_scenario.submit(a_request("r1"), starts=True).attempt
    assert attempt is not None
    result = new_scenario.handle(AttemptPaused("r1", 1, attempt.fence, True, "its owner is back", ("gpu2",)))
    assert (new_scenario.job("r1").state, result.records[0].type) == (JobState.PAUSED, "paused")
    new_scenario.handle(AttemptPaused("r1", 1, attempt.fence, True, "", ("gpu2",)))
    new_scenario.handle(AttemptPaused("r1", 1, attempt.fence, False, "", ("gpu2",)))
    assert new_scenario.job("r1").state is JobState.RUNNING
    new_scenario.end("r1")
    assert "r1" not in new_scenario.ledger.jobs


def test_what_the_owner_takes_back_waits_for_another_place_and_the_offer_is_withdrawn(new_scenario: Scenario) -> None:
    new_scenario.submit(a_request("r1"), starts=True)
    new_scenario.end("r1", Outcome(Ending.RECLAIMED, detail="its owner needs the memory"))
    assert new_scenario.job("r1").state is JobState.QUEUED
    assert new_scenario.job("r1").retries_left == 0
    assert "gpu2" not in new_scenario.ledger.offers
    new_scenario.heartbeat("gpu2")
    assert new_scenario.job("r1").state is JobState.ASSIGNED


def test_a_node_that_gives_way_offers_nothing(new_scenario: Scenario) -> None:
    new_scenario.handle(HeartbeatReceived("gpu2", Usage(), yields=True, generation=5))
    assert new_scenario.submit(a_request("r1")).state is JobState.QUEUED
    new_scenario.handle(HeartbeatReceived("gpu2", Usage(), generation=6))
    assert new_scenario.lease_of("r1").generation == 6


def test_what_an_agent_withdraws_is_withdrawn_with_its_heartbeat_before_anything_else_is_decided(
    new_scenario: Scenario,
) -> None:
    seen = decide(new_scenario.ledger, HeartbeatReceived("gpu2", Usage(), yields=True, generation=5), new_scenario.now)
    assert all(row.kind in VOLATILE for row in seen.changes)
    new_scenario.ledger.apply(seen.changes)
    assert new_scenario.submit(a_request("r1")).state is JobState.QUEUED


def test_a_drained_node_gives_everything_back_and_its_jobs_wait(new_scenario: Scenario) -> None:
    new_scenario.submit(a_request("r1"), starts=True)
    assert new_scenario.ask(a_request("r2")) is not None
    new_scenario.handle(NodeDrained("gpu2", "maintenance"))
    assert _state(new_scenario) is NodeState.DRAINING
    assert "r2" not in new_scenario.ledger.leases
    assert new_scenario.job("r1").state is JobState.STOPPING
    new_scenario.end("r1", Outcome(Ending.RECLAIMED))
    assert new_scenario.job("r1").state is JobState.QUEUED
    assert not new_scenario.ledger.leases_on.get("gpu2")
    new_scenario.handle(NodeDrained("gpu2"))


def test_a_stopped_node_holds_nothing_and_can_be_wanted_again(new_scenario: Scenario) -> None:
    new_scenario.handle(AgentRequested("gpu2", True))
    new_scenario.submit(a_request("r1"), starts=True)
    new_scenario.handle(NodeStopped("gpu2"))
    node = new_scenario.ledger.nodes["gpu2"]
    assert (node.state, node.wanted) == (NodeState.JOINING, False)
    assert not new_scenario.ledger.leases
    new_scenario.handle(AgentRequested("gpu2", True))
    new_scenario.heartbeat("gpu2")
    assert _state(new_scenario) is NodeState.ALIVE


def test_wanting_a_node_nobody_knows_is_refused(new_scenario: Scenario) -> None:
    for event in (AgentRequested("gpu9", True), NodeDrained("gpu9"), NodeStopped("gpu9")):
        with pytest.raises(NotFound, match="no node is called gpu9"):
            new_scenario.handle(event)


def test_a_drained_node_that_is_wanted_again_lends_when_it_is_heard(new_scenario: Scenario) -> None:
    new_scenario.handle(NodeDrained("gpu2"))
    new_scenario.handle(AgentRequested("gpu2", True))
    assert _state(new_scenario) is NodeState.SUSPECT
    new_scenario.heartbeat("gpu2")
    assert new_scenario.submit(a_request("r1")).state is JobState.ASSIGNED


def test_declaring_a_node_anew_keeps_that_it_is_wanted(new_scenario: Scenario) -> None:
    new_scenario.handle(AgentRequested("gpu2", True))
    new_scenario.handle(NodeDeclared(a_node("gpu2", cores=8, hold_s=HOLD)))
    assert new_scenario.ledger.nodes["gpu2"].wanted


def test_what_was_assigned_before_the_machine_was_restarted_is_lost_not_ordered_again(new_scenario: Scenario) -> None:
    new_scenario.handle(AttemptsListed("gpu2", (), "boot-1"))
    new_scenario.submit(a_request("r1"))
    new_scenario.handle(AttemptsListed("gpu2", (), "boot-1"))
    assert len(pending(new_scenario.ledger)) == 1
    new_scenario.handle(AttemptsListed("gpu2", (), "boot-2"))
    assert "r1" not in new_scenario.ledger.jobs
    new_scenario.submit(a_request("r2"))
    attempt = new_scenario.job("r2").attempt
    assert attempt is not None
    assert attempt.boot == "boot-2"


def test_what_a_lost_node_held_is_given_up_though_somebody_waits(new_scenario: Scenario) -> None:
    new_scenario.submit(a_request("r1", cores=4), starts=True)
    assert new_scenario.submit(a_request("r2", cores=4, priority="urgent")).state is JobState.QUEUED
    new_scenario.advance(7, heard=False)
    new_scenario.advance(HOLD, heard=False)
    assert _state(new_scenario) is NodeState.LOST
    assert "r1" not in new_scenario.ledger.jobs
    assert new_scenario.ledger.claims_on("gpu2").cpu_milli == 0


def test_a_preemptor_on_a_lost_node_waits_for_another_place(new_scenario: Scenario) -> None:
    new_scenario.submit(a_request("r1", cores=4, priority="low"), starts=True)
    urgent: Request = replace(a_request("r2", cores=4, priority="urgent"))
    new_scenario.advance(120)
    assert new_scenario.submit(urgent).state is JobState.ASSIGNED
    assert new_scenario.lease_of("r2").awaits
    new_scenario.advance(7, heard=False)
    new_scenario.advance(HOLD, heard=False)
    assert new_scenario.job("r2").state is JobState.QUEUED
    assert new_scenario.job("r1").state is JobState.QUEUED
