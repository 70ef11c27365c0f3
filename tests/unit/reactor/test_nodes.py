"""Nodes: declared, doubted, drained, cooled down, stopped, forgotten; and what they offer meanwhile."""

# mypy: disable-error-code="comparison-overlap"
# A state changes between two lines that look at it; mypy does not see that.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import (
    AgentRejected,
    AgentRequested,
    ControlPlaneStarted,
    EpochReported,
    NodeDeclared,
    NodeDrained,
    NodeForgotten,
    NodeResumed,
    NodeStopped,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import MAX_EPOCH, MAX_EPOCH_LEAD
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import MAX_AMOUNT, Capacity, GpuDevice
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import JobState, NodeState
from distributed_grid.errors import NotFound, Refused
from distributed_grid.reactor.effects import attempt_effects
from distributed_grid.scheduling.queue.reasons import texts, why_not_lent, why_not_now
from tests.support.builders import Scenario, a_capacity, a_node, a_request, a_usage, caps, thresholds


def test_declaring_the_same_node_again_changes_nothing(new_scenario):
    scenario = new_scenario(a_node("gpu1"))
    assert scenario.handle(NodeDeclared(a_node("gpu1"))).changes == []


def test_other_thresholds_hold_at_once(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.7)))
    scenario.now += 2_000
    scenario.heartbeat("gpu1", a_usage(cpu_outside=0.5))
    scenario.handle(NodeDeclared(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3))))
    assert scenario.ledger.lends("gpu1").cpu_milli == 0
    scenario.handle(NodeDeclared(a_node("gpu1", cores=10)))
    assert scenario.ledger.lends("gpu1").cpu_milli == 10_000


def test_a_new_control_plane_doubts_everybody_and_starts_its_fences_above_all_earlier_ones(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    before = scenario.ask(a_request("r1")).fence
    scenario.handle(ControlPlaneStarted(3))
    assert {node.state for node in scenario.ledger.nodes.values()} == {NodeState.SUSPECT}
    assert scenario.ledger.counters == {"epoch": 3, "fence": 3 << 32}
    assert scenario.ask(a_request("r2")).state == "asked"
    scenario.heartbeat("gpu2")
    assert scenario.ledger.leases["r2"].fence == (3 << 32) + 1 > before


def test_a_fence_above_the_new_epoch_is_not_lowered(new_scenario):
    scenario = new_scenario()
    scenario.handle(ControlPlaneStarted(9))
    scenario.handle(ControlPlaneStarted(9))
    lease = None
    scenario.heartbeat("gpu1")
    lease = scenario.ask(a_request("r1"))
    scenario.handle(ControlPlaneStarted(9))
    assert scenario.ledger.counters["fence"] == lease.fence


def test_an_epoch_that_an_agent_has_seen_raises_the_fences_of_its_node_alone(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    scenario.handle(ControlPlaneStarted(3))
    scenario.handle(EpochReported("gpu1", 50))
    scenario.heartbeat("gpu1")
    scenario.heartbeat("gpu2")
    raised = scenario.ask(a_request("r1", require=["gpu1"])).fence
    assert raised == (51 << 32) + 1
    assert scenario.ask(a_request("r2", require=["gpu2"])).fence == (3 << 32) + 2
    assert scenario.ledger.counters["epoch"] == 3
    assert scenario.handle(EpochReported("gpu1", 51)).changes == [], "it was told that one"
    scenario.handle(NodeDeclared(a_node("gpu1", cores=8)))
    scenario.handle(ControlPlaneStarted(4))
    scenario.heartbeat("gpu1")
    assert scenario.ask(a_request("r3", require=["gpu1"])).fence > raised, "and it never goes back"
    for epoch in range(5, 60):
        scenario.handle(ControlPlaneStarted(epoch))
        scenario.heartbeat("gpu1")
        fence = scenario.ask(a_request(f"again{epoch}", cores=0.1, require=["gpu1"])).fence
        assert fence > raised
        raised = fence
    scenario.ledger.check()


@pytest.mark.parametrize("epoch", [3 + MAX_EPOCH_LEAD + 1, MAX_EPOCH, 2**33, 2**70])
def test_an_epoch_that_cannot_be_true_is_refused(new_scenario, epoch):
    scenario = new_scenario()
    scenario.handle(ControlPlaneStarted(3))
    with pytest.raises(Refused):
        scenario.handle(EpochReported("gpu1", epoch))
    assert scenario.ledger.nodes["gpu1"].epoch == 0


def test_an_agent_that_is_turned_away_is_why_its_node_lends_nothing(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    scenario.advance(20, heard=False)
    result = scenario.handle(AgentRejected("gpu1", "it has seen epoch 99"))
    assert [(record.type, record.node, record.reason) for record in result.records] == [
        ("agent-rejected", "gpu1", "it has seen epoch 99")
    ]
    assert scenario.handle(AgentRejected("gpu1", "and 98")).records == [], "the audit trail is not flooded"
    node = scenario.ledger.nodes["gpu1"]
    assert why_not_lent(scenario.ledger, node, scenario.now) == ("its agent is turned away: it has seen epoch 99",)
    scenario.advance(1, heard=False)
    scenario.heartbeat("gpu1")
    scenario.advance(20, heard=False)
    assert why_not_lent(scenario.ledger, scenario.ledger.nodes["gpu1"], scenario.now)[0].startswith("not heard")


def test_after_a_restart_nobody_was_heard_and_nothing_is_offered(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"))
    again = Ledger(scenario.ledger.rows(durable_only=True))
    assert again.observations == again.offers == {}
    assert attempt_effects(again) == attempt_effects(scenario.ledger)


def test_a_node_declared_larger_lends_more_at_once_also_to_those_who_wait(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=1))
    scenario.ask(a_request("r1", cores=4))
    assert scenario.ask(a_request("r2", cores=4)).state == "asked"
    scenario.handle(NodeDeclared(a_node("gpu1", cores=8)))
    assert scenario.ledger.leases["r2"].node == "gpu1"


def test_a_node_declared_smaller_lends_less_at_once(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4))
    scenario.ask(a_request("r1", cores=1))
    scenario.handle(NodeDeclared(a_node("gpu1", cores=2)))
    assert scenario.ledger.lends("gpu1") == a_capacity(cores=2)
    assert scenario.ask(a_request("r2", cores=2)).state == "asked"


def test_a_node_declared_smaller_than_what_it_lent_keeps_its_old_limits(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4, caps=caps(cores=3)))
    scenario.ask(a_request("r1", cores=3))
    result = scenario.handle(NodeDeclared(a_node("gpu1", cores=2, rank=7)))
    node = scenario.ledger.nodes["gpu1"]
    assert (node.capacity, node.caps, node.rank) == (a_capacity(cores=4), caps(cores=3), 7)
    assert [(record.type, record.reason) for record in result.records] == [
        ("node-kept", "still 3000 of 2000 millicores lent: keeps its old limits until the next start")
    ]


def test_a_gpu_declared_exclusive_while_it_is_shared_stays_as_it_was(new_scenario):
    scenario = new_scenario(a_node("gpu1", gpus=1))
    scenario.ask(a_request("r1", gpus=0.5))
    result = scenario.handle(NodeDeclared(a_node("gpu1", gpus=1, exclusive=True)))
    assert not scenario.ledger.nodes["gpu1"].capacity.gpus[0].exclusive
    assert "GPU 0 lent in parts, though exclusive" in result.records[0].reason


def test_declaring_the_same_limits_while_somebody_makes_room_is_no_excess(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4))
    scenario.submit(a_request("j1", cores=4, priority="low"), starts=True)
    scenario.advance(2)
    scenario.submit(a_request("j2", cores=4, priority="urgent"))
    assert scenario.handle(NodeDeclared(a_node("gpu1", cores=4))).records == []


def test_a_node_that_cannot_lend_what_a_preemptor_waits_for_keeps_its_old_limits(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4))
    scenario.submit(a_request("j1", cores=1, priority="low"), starts=True)
    scenario.advance(2)
    scenario.submit(a_request("j2", cores=4, priority="urgent"))
    scenario.handle(NodeDeclared(a_node("gpu1", cores=2)))
    scenario.end("j1")
    assert scenario.ledger.nodes["gpu1"].capacity == a_capacity(cores=4)


def test_a_node_declared_before_it_was_heard_has_no_offer_to_renew(new_scenario):
    scenario = new_scenario(ledger=Ledger([a_node("gpu1", cores=4)]))
    scenario.handle(NodeDeclared(a_node("gpu1", cores=8)))
    assert scenario.ledger.offers == {}


def test_a_forgotten_node_that_lends_nothing_leaves_at_once(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    result = scenario.handle(NodeForgotten("gpu1"))
    assert set(scenario.ledger.nodes) == {"gpu2"}
    assert [record.type for record in result.records] == ["node-forgotten"]


def test_a_forgotten_node_that_never_joined_leaves_too(new_scenario):
    scenario = new_scenario(ledger=Ledger([a_node("gpu1")]))
    scenario.handle(NodeForgotten("gpu1"))
    assert scenario.ledger.nodes == {}


def test_a_forgotten_node_that_nobody_hears_leaves_when_its_hold_is_over(new_scenario):
    scenario = new_scenario(a_node("gpu1", hold_s=30), a_node("gpu2"))
    scenario.ask(a_request("r1", require=("gpu1",)))
    scenario.handle(NodeForgotten("gpu1"))
    scenario.advance(40, heard=False)
    scenario.advance(1, heard=False)
    assert set(scenario.ledger.nodes) == {"gpu2"}
    assert scenario.ledger.leases == {}


def test_forgetting_a_stranger_is_harmless(new_scenario):
    assert new_scenario().handle(NodeForgotten("stranger")).changes == []


def test_a_forgotten_node_that_lends_drains_and_then_leaves(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1"))
    scenario.handle(NodeForgotten("gpu1"))
    assert scenario.ledger.nodes["gpu1"].state is NodeState.DRAINING
    scenario.heartbeat("gpu1")
    assert scenario.ask(a_request("r2")).state == "asked"
    scenario.advance(1)
    assert "gpu1" in scenario.ledger.nodes
    scenario.release("r1")
    scenario.advance(1)
    assert scenario.ledger.nodes == {}


def test_forgetting_a_node_twice_is_harmless(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1"))
    scenario.handle(NodeForgotten("gpu1"))
    scenario.handle(NodeForgotten("gpu1"))
    assert scenario.ledger.nodes["gpu1"].state is NodeState.DRAINING


def test_a_draining_node_that_is_declared_again_is_back_once_it_is_heard(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1"))
    scenario.handle(NodeForgotten("gpu1"))
    scenario.handle(NodeDeclared(a_node("gpu1", cores=4, memory_gb=16)))
    node = scenario.ledger.nodes["gpu1"]
    assert (node.state, node.forgotten) == (NodeState.SUSPECT, False)
    scenario.heartbeat("gpu1")
    assert scenario.ask(a_request("r2")).state == "active"


def test_a_node_that_left_may_come_back(new_scenario):
    scenario = new_scenario(a_node("gpu1"))
    scenario.handle(NodeForgotten("gpu1"))
    scenario.handle(NodeDeclared(a_node("gpu1", cores=2)))
    scenario.heartbeat("gpu1")
    assert scenario.ask(a_request("r1")).node == "gpu1"


def test_nodes_with_the_most_that_can_be_reported_are_summed_and_stored(new_scenario):
    gpus = tuple(GpuDevice(index, MAX_AMOUNT) for index in range(64))
    most = Capacity(10**9, MAX_AMOUNT, gpus, (("fpga", MAX_AMOUNT),))
    usage = Usage(cpu_busy_milli=1000, cpu_outside_milli=0, memory_bytes=MAX_AMOUNT, memory_outside_bytes=0)
    nodes = [replace(a_node(f"n{number}"), capacity=most) for number in range(300)]
    scenario = new_scenario(*nodes)
    for node in nodes:
        scenario.heartbeat(node.name, usage)
    for number in range(20):
        scenario.ask(a_request(f"r{number}", cores=10**6, memory_gb=2**19, user="ann"))
    scenario.advance(60)
    scenario.ledger.check()
    columns = scenario.ledger.columns
    total = sum(int(columns.memory[columns.row_of(node.name)]) for node in nodes)
    assert int(columns.memory.sum()) == total > 2**50
    for row in scenario.ledger.rows():
        if not row.is_volatile:
            assert decode_row(row.kind, encode_row(row)) == row


@pytest.fixture
def cooling(new_scenario) -> Scenario:
    """One node of four cores that cools down."""
    begun: Scenario = new_scenario(a_node("gpu1", cores=4))
    begun.submit(a_request("r1"), starts=True)
    assert begun.ask(a_request("b1")) is not None
    begun.handle(NodeDrained("gpu1", cooling=True))
    return begun


def state_of(scenario: Scenario) -> NodeState:
    return scenario.ledger.nodes["gpu1"].state


def test_a_node_that_cools_down_gives_everything_back(cooling):
    assert state_of(cooling) is NodeState.DRAINING
    assert "b1" not in cooling.ledger.leases
    cooling.end("r1", Outcome(Ending.RECLAIMED))
    assert cooling.job("r1").state is JobState.QUEUED
    assert texts(why_not_now(cooling.ledger, a_request("r2"), cooling.now)) == ("gpu1: cooling down",)


def test_it_lends_nothing_however_often_it_is_heard_declared_or_wanted(cooling):
    cooling.end("r1", Outcome(Ending.RECLAIMED))
    for event in (NodeDeclared(a_node("gpu1", cores=8)), AgentRequested("gpu1", True), NodeDrained("gpu1")):
        cooling.handle(event)
        cooling.heartbeat("gpu1")
        assert state_of(cooling) is NodeState.DRAINING
    assert cooling.job("r1").state is JobState.QUEUED


def test_it_stays_so_over_a_restart_of_the_control_plane(cooling):
    cooling.end("r1", Outcome(Ending.RECLAIMED))
    again = Scenario(now=cooling.now, ledger=Ledger(cooling.ledger.rows(durable_only=True)))
    again.handle(ControlPlaneStarted(2))
    again.handle(NodeDeclared(a_node("gpu1", cores=4)))
    again.heartbeat("gpu1")
    assert state_of(again) is NodeState.DRAINING
    again.handle(NodeResumed("gpu1"))
    again.heartbeat("gpu1")
    assert state_of(again) is NodeState.ALIVE
    again.ledger.check()


def test_it_stays_so_when_its_agent_is_stopped_and_started(cooling):
    cooling.handle(NodeStopped("gpu1"))
    assert state_of(cooling) is NodeState.JOINING
    cooling.heartbeat("gpu1")
    assert state_of(cooling) is NodeState.DRAINING
    assert not cooling.ledger.columns.open.any()


def test_it_lends_again_from_the_first_heartbeat_after_it_was_ended(cooling):
    cooling.end("r1", Outcome(Ending.RECLAIMED))
    assert [record.type for record in cooling.handle(NodeResumed("gpu1")).records] == ["node-resumed"]
    cooling.heartbeat("gpu1")
    assert state_of(cooling) is NodeState.ALIVE
    assert cooling.job("r1").state is JobState.ASSIGNED


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
    assert state_of(scenario) is NodeState.JOINING
    scenario.heartbeat("gpu1")
    assert state_of(scenario) is NodeState.DRAINING


def test_a_drained_node_gives_everything_back_and_its_jobs_wait(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"), starts=True)
    assert far_scenario.ask(a_request("r2")) is not None
    far_scenario.handle(NodeDrained("gpu2", "maintenance"))
    assert far_scenario.ledger.nodes["gpu2"].state is NodeState.DRAINING
    assert "r2" not in far_scenario.ledger.leases
    assert far_scenario.job("r1").state is JobState.STOPPING
    far_scenario.end("r1", Outcome(Ending.RECLAIMED))
    assert far_scenario.job("r1").state is JobState.QUEUED
    assert not far_scenario.ledger.leases_on.get("gpu2")
    far_scenario.handle(NodeDrained("gpu2"))


def test_a_stopped_node_holds_nothing_and_can_be_wanted_again(far_scenario: Scenario) -> None:
    far_scenario.handle(AgentRequested("gpu2", True))
    far_scenario.submit(a_request("r1"), starts=True)
    far_scenario.handle(NodeStopped("gpu2"))
    node = far_scenario.ledger.nodes["gpu2"]
    assert (node.state, node.wanted) == (NodeState.JOINING, False)
    assert not far_scenario.ledger.leases
    far_scenario.handle(AgentRequested("gpu2", True))
    far_scenario.heartbeat("gpu2")
    assert far_scenario.ledger.nodes["gpu2"].state is NodeState.ALIVE


def test_wanting_a_node_nobody_knows_is_refused(far_scenario: Scenario) -> None:
    for event in (AgentRequested("gpu9", True), NodeDrained("gpu9"), NodeStopped("gpu9")):
        with pytest.raises(NotFound, match="no node is called gpu9"):
            far_scenario.handle(event)


def test_a_drained_node_that_is_wanted_again_lends_when_it_is_heard(far_scenario: Scenario) -> None:
    far_scenario.handle(NodeDrained("gpu2"))
    far_scenario.handle(AgentRequested("gpu2", True))
    assert far_scenario.ledger.nodes["gpu2"].state is NodeState.SUSPECT
    far_scenario.heartbeat("gpu2")
    assert far_scenario.submit(a_request("r1")).state is JobState.ASSIGNED


def test_declaring_a_node_anew_keeps_that_it_is_wanted(far_scenario: Scenario) -> None:
    far_scenario.handle(AgentRequested("gpu2", True))
    far_scenario.handle(NodeDeclared(a_node("gpu2", cores=8, hold_s=60)))
    assert far_scenario.ledger.nodes["gpu2"].wanted
