"""Cooling a node down: its owner gets everything back, and nothing but ending it makes the node lend again."""

# mypy: disable-error-code="comparison-overlap"
# A state changes between two lines that look at it; mypy does not see that.

from __future__ import annotations

import pytest

from distributed_grid.domain.events import (
    AgentRequested,
    ControlPlaneStarted,
    NodeDeclared,
    NodeDrained,
    NodeResumed,
    NodeStopped,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState, NodeState
from distributed_grid.errors import NotFound
from distributed_grid.scheduling.queue.reasons import why_not_now
from tests.support.builders import Scenario, a_node, a_request


@pytest.fixture
def scenario(new_scenario) -> Scenario:
    """One node of four cores that cools down."""
    begun: Scenario = new_scenario(a_node("gpu1", cores=4))
    begun.submit(a_request("r1"), starts=True)
    assert begun.ask(a_request("b1")) is not None
    begun.handle(NodeDrained("gpu1", cooling=True))
    return begun


def state(scenario: Scenario) -> NodeState:
    return scenario.ledger.nodes["gpu1"].state


def test_a_node_that_cools_down_gives_everything_back(scenario):
    assert state(scenario) is NodeState.DRAINING
    assert "b1" not in scenario.ledger.leases
    scenario.end("r1", Outcome(Ending.RECLAIMED))
    assert scenario.job("r1").state is JobState.QUEUED
    assert why_not_now(scenario.ledger, a_request("r2"), scenario.now) == ("gpu1: cooling down",)


def test_it_lends_nothing_however_often_it_is_heard_declared_or_wanted(scenario):
    scenario.end("r1", Outcome(Ending.RECLAIMED))
    for event in (NodeDeclared(a_node("gpu1", cores=8)), AgentRequested("gpu1", True), NodeDrained("gpu1")):
        scenario.handle(event)
        scenario.heartbeat("gpu1")
        assert state(scenario) is NodeState.DRAINING
    assert scenario.job("r1").state is JobState.QUEUED


def test_it_stays_so_over_a_restart_of_the_control_plane(scenario):
    scenario.end("r1", Outcome(Ending.RECLAIMED))
    again = Scenario(now=scenario.now, ledger=Ledger(scenario.ledger.rows(durable_only=True)))
    again.handle(ControlPlaneStarted(2))
    again.handle(NodeDeclared(a_node("gpu1", cores=4)))
    again.heartbeat("gpu1")
    assert state(again) is NodeState.DRAINING
    again.handle(NodeResumed("gpu1"))
    again.heartbeat("gpu1")
    assert state(again) is NodeState.ALIVE
    again.ledger.check()


def test_it_stays_so_when_its_agent_is_stopped_and_started(scenario):
    scenario.handle(NodeStopped("gpu1"))
    assert state(scenario) is NodeState.JOINING
    scenario.heartbeat("gpu1")
    assert state(scenario) is NodeState.DRAINING
    assert not scenario.ledger.columns.open.any()


def test_it_lends_again_from_the_first_heartbeat_after_it_was_ended(scenario):
    scenario.end("r1", Outcome(Ending.RECLAIMED))
    assert [record.type for record in scenario.handle(NodeResumed("gpu1")).records] == ["node-resumed"]
    scenario.heartbeat("gpu1")
    assert state(scenario) is NodeState.ALIVE
    assert scenario.job("r1").state is JobState.ASSIGNED


def test_ending_what_was_not_begun_changes_nothing(new_scenario):
    scenario = new_scenario(a_node("gpu1"))
    assert scenario.handle(NodeResumed("gpu1")).changes == []
    scenario.handle(NodeDrained("gpu1", "it is being stopped"))
    assert scenario.handle(NodeResumed("gpu1")).changes == []
    with pytest.raises(NotFound, match="no node is called gpu9"):
        scenario.handle(NodeResumed("gpu9"))


def test_a_node_that_nobody_hears_cools_down_when_it_comes(new_scenario):
    scenario = new_scenario(ledger=Ledger())
    scenario.handle(NodeDeclared(a_node("gpu1")))
    scenario.handle(NodeDrained("gpu1", cooling=True))
    assert state(scenario) is NodeState.JOINING
    scenario.heartbeat("gpu1")
    assert state(scenario) is NodeState.DRAINING
