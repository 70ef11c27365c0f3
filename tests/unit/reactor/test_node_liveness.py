"""Liveness: heartbeats and the offers that follow from them, silence, and nodes that are heard again."""

# mypy: disable-error-code="comparison-overlap"
# A state changes between two lines that look at it; mypy does not see that.

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import (
    NodeDeclared,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.states import NodeState
from distributed_grid.reactor.node_liveness import SUSPECT_AFTER_MS
from tests.support.builders import NOW, a_capacity, a_node, a_request, a_usage, thresholds


def test_a_declared_node_joins_and_is_alive_from_its_first_heartbeat(new_scenario):
    scenario = new_scenario(ledger=Ledger())
    declared = scenario.handle(NodeDeclared(a_node("gpu1")))
    assert scenario.ledger.nodes["gpu1"].state is NodeState.JOINING
    assert [record.type for record in declared.records] == ["node-declared"]
    heard = scenario.heartbeat("gpu1")
    assert scenario.ledger.nodes["gpu1"].state is NodeState.ALIVE
    assert [record.type for record in heard.records] == ["node-alive"]
    assert scenario.ledger.lends("gpu1") == a_capacity()


def test_a_heartbeat_from_before_the_capacity_was_known_says_nothing_about_idleness(new_scenario):
    node = a_node("gpu1", cores=4, memory_gb=16, thresholds=thresholds())
    scenario = new_scenario(ledger=Ledger())
    scenario.handle(NodeDeclared(replace(node, capacity=Capacity())))
    scenario.heartbeat("gpu1")
    scenario.handle(NodeDeclared(node))
    scenario.now += 2_000
    scenario.heartbeat("gpu1")
    assert scenario.ledger.lends("gpu1").cpu_milli > 0, "idle as it is, it waits for a dwell"


def test_a_heartbeat_of_a_node_nobody_declared_changes_nothing(new_scenario):
    scenario = new_scenario()
    assert scenario.heartbeat("stranger").changes == []


def test_a_heartbeat_that_says_nothing_new_is_only_an_observation(new_scenario):
    scenario = new_scenario()
    scenario.now += 2_000
    assert [row.kind for row in scenario.heartbeat("gpu1").changes] == ["observation"]


def test_an_offer_is_made_anew_when_it_says_something_else(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4, thresholds=thresholds()))
    scenario.heartbeat("gpu1", a_usage(cpu_outside=0.5))
    offer = scenario.ledger.offers["gpu1"]
    assert (offer.generation, offer.lends.cpu_milli) == (2, 2000)


def test_an_owners_short_visit_leaves_the_offer_but_not_its_size(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3)))
    for outside in (*[0.0] * 10, 0.6, 0.0, 0.6, 0.0):
        scenario.now += 2_000
        scenario.heartbeat("gpu1", a_usage(cpu_outside=outside))
        assert scenario.ledger.lends("gpu1").cpu_milli == 10_000 * (1 - outside)


def test_an_owner_who_stays_gets_the_offer_withdrawn_and_keeps_the_node_for_a_while(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3, dwell_s=60)))
    lends = []
    paused = []
    for usage in [a_usage()] * 30 + [a_usage(cpu_outside=0.6)] * 30 + [a_usage()] * 60:
        scenario.now += 2_000
        scenario.heartbeat("gpu1", usage)
        lends.append(scenario.ledger.lends("gpu1").cpu_milli)
        paused.append(scenario.ledger.offers["gpu1"].paused)
    assert [amount for amount, before in zip(lends, [None, *lends], strict=False) if amount != before] == [
        10_000,
        4_000,
        0,
        10_000,
    ]
    assert paused[lends.index(0)] == ("cpu",)
    assert lends.index(0) == 45, "half a minute at twice the mark is the mark, and one beat more is above it"
    assert paused[59] == (), "withdrawn by then"
    assert lends.index(10_000, 60) > 90


def test_what_a_withdrawn_offer_had_learnt_is_not_forgotten(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3, dwell_s=60)))
    for _ in range(30):
        scenario.now += 2_000
        scenario.heartbeat("gpu1", a_usage(cpu_outside=0.6))
    scenario.ledger.apply([replace(scenario.ledger.offers["gpu1"], withdrawn=True)])
    scenario.now += 2_000
    scenario.heartbeat("gpu1")
    assert scenario.ledger.lends("gpu1").cpu_milli == 0


def test_an_offer_is_made_anew_when_it_grows_old(new_scenario):
    scenario = new_scenario(replace(a_node("gpu1"), refresh_ms=60_000, offer_ms=300_000))
    scenario.now += 60_000
    scenario.heartbeat("gpu1")
    offer = scenario.ledger.offers["gpu1"]
    assert (offer.generation, offer.made_at_ms, offer.expires_at_ms) == (2, NOW + 60_000, NOW + 360_000)


def test_an_offer_expires_when_nobody_renews_it(new_scenario):
    scenario = new_scenario(replace(a_node("gpu1"), offer_ms=5_000))
    scenario.advance(4.999, heard=False)
    assert "gpu1" in scenario.ledger.offers
    scenario.advance(0.001, heard=False)
    assert scenario.ledger.offers == {}
    assert scenario.ask(a_request()).state == "asked"


def test_a_node_nobody_hears_is_suspect_gets_nothing_new_and_keeps_what_it_has(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1"))
    scenario.advance(SUSPECT_AFTER_MS / 1000, heard=False)
    assert scenario.ledger.nodes["gpu1"].state is NodeState.ALIVE
    passed = scenario.advance(0.001, heard=False)
    assert scenario.ledger.nodes["gpu1"].state is NodeState.SUSPECT
    assert [record.type for record in passed.records] == ["node-suspect"]
    assert scenario.ledger.leases["r1"].state == "active"
    assert scenario.ask(a_request("r2")).state == "asked"


def test_a_suspect_node_that_is_heard_serves_those_who_waited(new_scenario):
    scenario = new_scenario()
    scenario.advance(7, heard=False)
    assert scenario.ask(a_request("r1")).state == "asked"
    scenario.heartbeat("gpu1")
    assert scenario.ledger.leases["r1"].state == "active"


def test_a_lost_node_that_is_heard_joins_again(new_scenario):
    scenario = new_scenario()
    scenario.ledger.apply([replace(scenario.ledger.nodes["gpu1"], state=NodeState.LOST)])
    scenario.heartbeat("gpu1")
    assert scenario.ledger.nodes["gpu1"].state is NodeState.ALIVE
