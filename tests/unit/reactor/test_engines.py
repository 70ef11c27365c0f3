"""Engines: wanted until given up; leases on their nodes are bound, bound again after a crash, and freed when over."""

# mypy: disable-error-code="arg-type,comparison-overlap"

from __future__ import annotations

import pytest

from distributed_grid.domain.engines import ATTACHED, SSH, Binding, EngineResources, EngineRow
from distributed_grid.domain.events import (
    EngineNode,
    EngineObserved,
    EngineRegistered,
    EngineRemoved,
    GroupBound,
    GroupFreed,
    GroupRefused,
    GroupTermSet,
    LeaseAsked,
    LeaseExtended,
)
from distributed_grid.domain.leases import MAX_EPOCH_LEAD, Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.errors import Refused
from distributed_grid.reactor.effects import (
    BindLease,
    FreeBinding,
    SetGroupTerm,
    StartAttempt,
    attempt_effects,
    engine_effects,
)
from tests.support.builders import GB, Scenario, a_node, a_request

WANTED = EngineRegistered(name="ray", mode=SSH, address="10.0.0.1:6379", nodes=("gpu1", "gpu2"))


def test_a_wanted_engine_is_in_the_ledger_and_in_whatever_is_stored_of_it(new_scenario):
    scenario = new_scenario()
    scenario.handle(WANTED)
    row = scenario.ledger.engines["ray"]
    assert row == EngineRow(name="ray", mode=SSH, address="10.0.0.1:6379", nodes=("gpu1", "gpu2"))
    stored = [(kept.kind, encode_row(kept)) for kept in scenario.ledger.rows(durable_only=True)]
    assert Ledger(decode_row(kind, blob) for kind, blob in stored).engines == {"ray": row}


def test_wanting_what_is_wanted_changes_nothing_and_another_session_does(new_scenario):
    scenario = new_scenario()
    scenario.handle(WANTED)
    assert scenario.handle(WANTED).changes == []
    again = EngineRegistered(name="ray", mode=SSH, address="10.0.0.1:6379", session="s2", nodes=("gpu1", "gpu2"))
    assert [row.session for row in scenario.handle(again).changes] == ["s2"]


def test_an_engine_that_was_come_by_in_another_way_has_to_be_given_up_first(new_scenario):
    scenario = new_scenario()
    scenario.handle(WANTED)
    with pytest.raises(Refused, match=r"ray is ssh at 10\.0\.0\.1:6379 already"):
        scenario.handle(EngineRegistered(name="ray", mode=ATTACHED, address="10.0.0.9:6379"))
    scenario.handle(EngineRemoved("ray", "asked to"))
    scenario.handle(EngineRegistered(name="ray", mode=ATTACHED, address="10.0.0.9:6379"))
    assert scenario.ledger.engines["ray"].mode == ATTACHED


def test_giving_up_twice_is_harmless(new_scenario):
    scenario = new_scenario()
    scenario.handle(WANTED)
    result = scenario.handle(EngineRemoved("ray", "asked to"))
    assert [record.type for record in result.records] == ["engine-removed"]
    assert scenario.ledger.engines == {}
    assert scenario.handle(EngineRemoved("ray")).changes == []


ROOM = EngineResources(4000, 16 * GB, 1000)


def place(name: str = "gpu1", node_id: str = "n1", room: EngineResources = ROOM) -> EngineNode:
    return EngineNode(id=node_id, name=name, has=ROOM, room=room)


def looked(
    scenario: Scenario, *places: EngineNode, groups: tuple[tuple[str, str], ...] | None = None, session: str = "s1"
):
    return scenario.handle(
        EngineObserved(name="ray", session=session, asked_at_ms=scenario.now, nodes=places, groups=groups)
    )


def with_ray(*nodes) -> Scenario:
    """A grid whose first node Ray has, too."""
    scenario = Scenario(*(nodes or (a_node(gpus=1),)))
    scenario.handle(EngineRegistered(name="ray", mode="attached", address="head:6379"))
    looked(scenario, place())
    scenario.advance(1)
    return scenario


def only_binding(scenario: Scenario) -> Binding:
    (binding,) = scenario.ledger.bindings.values()
    return binding


def bound(scenario: Scenario, request) -> Binding:
    scenario.ask(request)
    binding = only_binding(scenario)
    scenario.handle(GroupBound(binding.key))
    return scenario.ledger.bindings[binding.key]


def test_a_lease_is_active_only_when_the_engine_has_its_group():
    scenario = with_ray()
    lease = scenario.ask(a_request("r1", cores=2))
    binding = only_binding(scenario)
    assert (lease.state, lease.engine) == (LeaseState.RESERVING, "ray")
    assert (binding.place, binding.group) == ("n1", f"grid-boost-r1-{lease.fence}")
    assert engine_effects(scenario.ledger) == [BindLease(binding, lease)]
    scenario.handle(GroupBound(binding.key))
    assert scenario.ledger.leases["r1"].state is LeaseState.ACTIVE
    assert engine_effects(scenario.ledger) == []
    scenario.ledger.check()


def test_a_group_that_cannot_be_had_ends_the_lease_with_the_reason():
    scenario = with_ray()
    scenario.ask(a_request("r1"))
    result = scenario.handle(GroupRefused(only_binding(scenario).key, "gpu1: Ray has 0 of 1 CPU free there"))
    (over,) = [row for row in result.changes if isinstance(row, Lease) and row.id == "r1"]
    assert (over.end, over.detail) == (LeaseEnd.FAILED, "gpu1: Ray has 0 of 1 CPU free there")
    assert not scenario.ledger.bindings
    assert "gpu1" not in scenario.ledger.offers  # until it is heard again
    scenario.ledger.check()


def test_what_is_released_is_freed_and_forgotten_only_then():
    scenario = with_ray()
    binding = bound(scenario, a_request("r1"))
    scenario.release("r1")
    assert engine_effects(scenario.ledger) == [FreeBinding(binding)]
    scenario.handle(GroupFreed(binding.key))
    assert not scenario.ledger.bindings
    scenario.handle(GroupFreed(binding.key))
    scenario.ledger.check()


def test_a_lease_that_ends_while_it_is_being_bound_is_freed():
    scenario = with_ray()
    scenario.ask(a_request("r1"))
    binding = only_binding(scenario)
    scenario.release("r1")
    scenario.handle(GroupBound(binding.key))
    assert engine_effects(scenario.ledger) == [FreeBinding(binding)]


def test_every_change_of_an_end_is_called_for_until_the_engine_knows_it():
    scenario = with_ray()
    scenario.ask(a_request("r1", duration_s=60))
    binding = only_binding(scenario)
    first = scenario.ledger.leases["r1"].ends_at_ms
    scenario.handle(GroupBound(binding.key, first))
    assert engine_effects(scenario.ledger) == []
    told = scenario.handle(LeaseExtended("r1", "ada", 30_000, "e1"))
    lease = scenario.ledger.leases["r1"]
    called_for = [SetGroupTerm(only_binding(scenario), lease)]
    assert engine_effects(scenario.ledger, told.changes) == engine_effects(scenario.ledger) == called_for
    scenario.handle(GroupTermSet(binding.key, first))  # of what was sent before
    assert engine_effects(scenario.ledger) == called_for
    scenario.handle(GroupTermSet(binding.key, lease.ends_at_ms))
    scenario.handle(GroupTermSet(binding.key, first))  # late
    scenario.handle(GroupTermSet("gone-1", 1))
    assert engine_effects(scenario.ledger) == []
    scenario.ledger.check()


def test_a_lease_that_was_extended_while_it_was_being_bound_is_not_forgotten():
    scenario = with_ray()
    first = scenario.ask(a_request("r1", duration_s=60)).ends_at_ms
    scenario.handle(LeaseExtended("r1", "ada", 30_000, "e1"))
    scenario.handle(GroupBound(only_binding(scenario).key, first))
    assert engine_effects(scenario.ledger) == [SetGroupTerm(only_binding(scenario), scenario.ledger.leases["r1"])]


def test_a_command_starts_only_under_a_reservation():
    scenario = with_ray()
    scenario.submit(a_request("j1"))
    assert attempt_effects(scenario.ledger) == []
    scenario.handle(GroupBound(only_binding(scenario).key))
    (start,) = attempt_effects(scenario.ledger)
    assert isinstance(start, StartAttempt)
    scenario.start("j1")
    binding = only_binding(scenario)
    scenario.end("j1")
    assert engine_effects(scenario.ledger) == [FreeBinding(binding)]


def test_a_command_whose_place_is_refused_looks_for_another():
    scenario = with_ray(a_node("gpu1", rank=2000), a_node("gpu2"))
    scenario.submit(a_request("j1"))
    assert scenario.lease_of("j1").node == "gpu1"
    scenario.handle(GroupRefused(only_binding(scenario).key, "no room"))
    assert (scenario.lease_of("j1").node, scenario.job("j1").state) == ("gpu2", JobState.ASSIGNED)
    assert len(attempt_effects(scenario.ledger)) == 1  # gpu2 is no node of the engine
    scenario.ledger.check()


def test_a_group_that_vanished_is_made_again_under_a_new_fence():
    scenario = with_ray()
    old = bound(scenario, a_request("r1"))
    scenario.advance(1)
    looked(scenario, place(), groups=())
    lease = scenario.ledger.leases["r1"]
    new = scenario.ledger.binding_of(lease)
    assert (lease.state, new.fence > old.fence, new.again) == (LeaseState.RESERVING, True, True)
    assert engine_effects(scenario.ledger) == [FreeBinding(old)]  # first the old one is known to be gone
    scenario.handle(GroupFreed(old.key))
    assert engine_effects(scenario.ledger) == [BindLease(new, lease)]
    scenario.handle(GroupBound(new.key))
    assert scenario.ledger.leases["r1"].state is LeaseState.ACTIVE
    scenario.ledger.check()


def test_a_group_name_raises_no_fence_but_those_of_its_node_and_only_if_it_can_be_true():
    for fence, is_found in ((9 << 32, True), ((MAX_EPOCH_LEAD + 9) << 32, False), (10**18, False), (10**30, False)):
        scenario = with_ray(a_node("gpu1"), a_node("gpu2"))
        scenario.ask(a_request("r1", require=["gpu1"]))
        scenario.handle(GroupFreed(only_binding(scenario).key))
        last = scenario.ledger.counters["fence"]
        looked(scenario, place(), groups=((f"grid-boost-r1-{fence}", "n1"),))
        assert (only_binding(scenario).fence == fence) is is_found
        assert scenario.ledger.counters["fence"] == last + 1
        assert scenario.ask(a_request("r2", require=["gpu2"])).fence == last + 2
        scenario.advance(1)
        looked(scenario, place(), groups=())
        newest = scenario.ledger.binding_of(scenario.ledger.leases["r1"])
        assert (newest.fence > fence) is is_found
        scenario.ledger.check()


def test_a_group_that_was_bound_after_the_look_was_asked_for_has_not_vanished():
    scenario = with_ray()
    binding = bound(scenario, a_request("r1"))
    looked(scenario, place(), groups=())
    assert scenario.ledger.bindings == {binding.key: binding}


def test_another_life_of_the_engine_binds_everything_again():
    scenario = with_ray()
    old = bound(scenario, a_request("r1"))
    scenario.advance(5)
    looked(scenario, place(node_id="n2"), groups=(), session="s2")
    assert (scenario.ledger.nodes["gpu1"].engine_node, scenario.ledger.engines["ray"].session) == ("n2", "s2")
    scenario.handle(GroupFreed(old.key))
    assert only_binding(scenario).place == "n2"


def test_a_node_that_the_engine_loses_keeps_its_leases_until_its_hold_is_over():
    scenario = with_ray(a_node("gpu1", hold_s=30))
    bound(scenario, a_request("r1"))
    looked(scenario)
    assert scenario.ledger.leases["r1"].state is LeaseState.RESERVING
    scenario.advance(20)
    assert "r1" in scenario.ledger.leases
    result = scenario.advance(11)
    assert [(row.id, row.end) for row in result.changes if isinstance(row, Lease) and row.end] == [
        ("r1", LeaseEnd.LOST)
    ]
    assert scenario.ledger.nodes["gpu1"].engine == ""
    scenario.ledger.check()


def test_a_node_that_comes_back_in_time_is_bound_again():
    scenario = with_ray(a_node("gpu1", hold_s=30))
    old = bound(scenario, a_request("r1"))
    looked(scenario)
    scenario.advance(10)
    looked(scenario, place(node_id="n2"), groups=())
    scenario.handle(GroupFreed(old.key))
    scenario.handle(GroupBound(only_binding(scenario).key))
    scenario.advance(60)
    assert scenario.ledger.leases["r1"].state is LeaseState.ACTIVE


def test_while_an_engine_is_away_nothing_changes():
    scenario = with_ray()
    binding = bound(scenario, a_request("r1"))
    scenario.advance(10_000)
    assert scenario.ledger.leases["r1"].state is LeaseState.ACTIVE
    assert only_binding(scenario) == binding


def test_a_lease_that_was_there_before_the_engine_is_bound_when_it_comes():
    scenario = Scenario(a_node())
    scenario.ask(a_request("r1"))
    scenario.handle(EngineRegistered(name="ray", mode="attached", address="head:6379"))
    looked(scenario, place(), groups=())
    assert scenario.ledger.leases["r1"].state is LeaseState.RESERVING
    scenario.handle(GroupBound(only_binding(scenario).key))
    assert scenario.ledger.leases["r1"].state is LeaseState.ACTIVE
    scenario.ledger.check()


def test_a_group_of_a_lease_whose_binding_was_forgotten_is_taken_for_its_own():
    scenario = Scenario(a_node())
    lease = scenario.ask(a_request("r1"))
    scenario.handle(EngineRegistered(name="ray", mode="attached", address="head:6379"))
    looked(scenario, place(), groups=((f"grid-boost-r1-{lease.fence}", "n1"),))
    assert only_binding(scenario).bound_at_ms == scenario.now
    assert scenario.ledger.leases["r1"].state is LeaseState.ACTIVE
    scenario.ledger.check()


def test_without_the_engine_the_grid_alone_keeps_its_leases():
    scenario = with_ray()
    bound(scenario, a_request("r1"))
    scenario.ask(a_request("r2"))
    scenario.handle(EngineRemoved("ray"))
    assert {lease.state for lease in scenario.ledger.leases.values()} == {LeaseState.ACTIVE}
    assert (scenario.ledger.bindings, scenario.ledger.nodes["gpu1"].engine) == ({}, "")
    scenario.ledger.check()


def test_what_others_have_taken_in_the_engine_is_not_offered():
    scenario = with_ray()
    looked(scenario, place(room=EngineResources(1500, 2 * GB, 0)))
    scenario.advance(61)
    lends = scenario.ledger.offers["gpu1"].lends
    assert (lends.cpu_milli, lends.memory_bytes, lends.gpus) == (1500, 2 * GB, ())
    assert scenario.ledger.offers["gpu1"].withheld == ("its engine has given the rest to others",)


def test_a_gpu_that_is_lent_stays_in_the_offer_when_others_take_the_rest():
    scenario = with_ray(a_node(gpus=2))
    bound(scenario, a_request("r1", gpus=1))
    (share,) = scenario.ledger.leases["r1"].claim.gpus
    looked(scenario, place(room=EngineResources(4000, 16 * GB, 1000)))
    scenario.advance(61)
    assert [device.index for device in scenario.ledger.offers["gpu1"].lends.gpus] == [share.index]


def test_who_makes_room_is_gone_before_the_urgent_lease_is_bound():
    scenario = with_ray(a_node(cores=1))
    scenario.submit(a_request("low", priority="low"))
    victim = only_binding(scenario)
    scenario.handle(GroupBound(victim.key))
    scenario.start("low")
    scenario.advance(3600)
    scenario.handle(LeaseAsked(a_request("hot", priority="urgent")))
    hot = scenario.ledger.binding_of(scenario.ledger.leases["hot"])
    assert engine_effects(scenario.ledger) == []
    scenario.end("low")
    effects = engine_effects(scenario.ledger)
    assert BindLease(hot, scenario.ledger.leases["hot"]) in effects
    assert FreeBinding(scenario.ledger.bindings[victim.key]) in effects
    scenario.handle(GroupBound(hot.key))
    assert scenario.ledger.leases["hot"].state is LeaseState.ACTIVE
    scenario.ledger.check()
