"""Cooling a node down: its owner gets everything back, and nothing but ending it makes the node lend again."""

# mypy: disable-error-code="comparison-overlap"
# A state changes between two lines that look at it; mypy does not see that.

from __future__ import annotations

import pytest

from distributed_grid.domain.events import (
    ControlPlaneStarted,
    NodeDeclared,
    NodeDrained,
    NodeResumed,
    NodeStopped,
    NodeWanted,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState, NodeState
from distributed_grid.errors import NotFound
from distributed_grid.scheduling.queue.reasons import why_not_now
from tests.support.builders import Scenario, a_node, a_request


@pytest.fixture
def tale(story) -> Scenario:
    """One node of four cores that cools down."""
    begun: Scenario = story(a_node("gpu1", cores=4))
    begun.submit(a_request("r1"), starts=True)
    assert begun.ask(a_request("b1")) is not None
    begun.tell(NodeDrained("gpu1", cooling=True))
    return begun


def state(tale: Scenario) -> NodeState:
    return tale.ledger.nodes["gpu1"].state


def test_a_node_that_cools_down_gives_everything_back(tale):
    assert state(tale) is NodeState.DRAINING
    assert "b1" not in tale.ledger.leases
    tale.end("r1", Outcome(Ending.RECLAIMED))
    assert tale.job("r1").state is JobState.QUEUED
    assert why_not_now(tale.ledger, a_request("r2"), tale.now) == ("gpu1: cooling down",)


def test_it_lends_nothing_however_often_it_is_heard_declared_or_wanted(tale):
    tale.end("r1", Outcome(Ending.RECLAIMED))
    for event in (NodeDeclared(a_node("gpu1", cores=8)), NodeWanted("gpu1", True), NodeDrained("gpu1")):
        tale.tell(event)
        tale.hear("gpu1")
        assert state(tale) is NodeState.DRAINING
    assert tale.job("r1").state is JobState.QUEUED


def test_it_stays_so_over_a_restart_of_the_control_plane(tale):
    tale.end("r1", Outcome(Ending.RECLAIMED))
    again = Scenario(now=tale.now, ledger=Ledger(tale.ledger.rows(durable_only=True)))
    again.tell(ControlPlaneStarted(2))
    again.tell(NodeDeclared(a_node("gpu1", cores=4)))
    again.hear("gpu1")
    assert state(again) is NodeState.DRAINING
    again.tell(NodeResumed("gpu1"))
    again.hear("gpu1")
    assert state(again) is NodeState.ALIVE
    again.ledger.check()


def test_it_stays_so_when_its_agent_is_stopped_and_started(tale):
    tale.tell(NodeStopped("gpu1"))
    assert state(tale) is NodeState.JOINING
    tale.hear("gpu1")
    assert state(tale) is NodeState.DRAINING
    assert not tale.ledger.columns.open.any()


def test_it_lends_again_from_the_first_heartbeat_after_it_was_ended(tale):
    tale.end("r1", Outcome(Ending.RECLAIMED))
    assert [record.type for record in tale.tell(NodeResumed("gpu1")).records] == ["node-resumed"]
    tale.hear("gpu1")
    assert state(tale) is NodeState.ALIVE
    assert tale.job("r1").state is JobState.ASSIGNED


def test_ending_what_was_not_begun_changes_nothing(story):
    tale = story(a_node("gpu1"))
    assert tale.tell(NodeResumed("gpu1")).changes == []
    tale.tell(NodeDrained("gpu1", "it is being stopped"))
    assert tale.tell(NodeResumed("gpu1")).changes == []
    with pytest.raises(NotFound, match="no node is called gpu9"):
        tale.tell(NodeResumed("gpu9"))


def test_a_node_that_nobody_hears_cools_down_when_it_comes(story):
    tale = story(ledger=Ledger())
    tale.tell(NodeDeclared(a_node("gpu1")))
    tale.tell(NodeDrained("gpu1", cooling=True))
    assert state(tale) is NodeState.JOINING
    tale.hear("gpu1")
    assert state(tale) is NodeState.DRAINING
