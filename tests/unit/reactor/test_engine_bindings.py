"""Leases on a node of an engine: bound before they are active, bound again after a crash, freed when over."""

# mypy: disable-error-code="union-attr,arg-type,comparison-overlap"

from __future__ import annotations

from distributed_grid.domain.effects import BindLease, FreeBinding, StartAttempt
from distributed_grid.domain.engines import Binding, EngineResources, parse_group_name
from distributed_grid.domain.events import (
    EngineGivenUp,
    EngineNode,
    EngineObserved,
    EngineWanted,
    GroupBound,
    GroupFreed,
    GroupRefused,
    LeaseAsked,
)
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.reactor import pending, pending_bindings
from tests.support.builders import GB, Scenario, a_node, a_request

ROOM = EngineResources(4000, 16 * GB, 1000)


def place(name: str = "gpu1", node_id: str = "n1", room: EngineResources = ROOM) -> EngineNode:
    return EngineNode(node_id, name=name, has=ROOM, room=room)


def looked(tale: Scenario, *places: EngineNode, groups: tuple[tuple[str, str], ...] | None = None, session: str = "s1"):
    return tale.tell(EngineObserved("ray", session, tale.now, places, groups))


def with_ray(*nodes) -> Scenario:
    """A grid whose first node Ray has, too."""
    tale = Scenario(*(nodes or (a_node(gpus=1),)))
    tale.tell(EngineWanted("ray", "attached", "head:6379"))
    looked(tale, place())
    tale.later(1)
    return tale


def only_binding(tale: Scenario) -> Binding:
    (binding,) = tale.ledger.bindings.values()
    return binding


def bound(tale: Scenario, request) -> Binding:
    tale.ask(request)
    binding = only_binding(tale)
    tale.tell(GroupBound(binding.key))
    return tale.ledger.bindings[binding.key]


def test_a_lease_is_active_only_when_the_engine_has_its_group():
    tale = with_ray()
    lease = tale.ask(a_request("r1", cores=2))
    binding = only_binding(tale)
    assert (lease.state, lease.engine) == (LeaseState.RESERVING, "ray")
    assert (binding.place, binding.group) == ("n1", f"grid-boost-r1-{lease.fence}")
    assert pending_bindings(tale.ledger) == [BindLease(binding, lease)]
    tale.tell(GroupBound(binding.key))
    assert tale.ledger.leases["r1"].state is LeaseState.ACTIVE
    assert pending_bindings(tale.ledger) == []
    tale.ledger.check()


def test_a_group_that_cannot_be_had_ends_the_lease_with_the_reason():
    tale = with_ray()
    tale.ask(a_request("r1"))
    told = tale.tell(GroupRefused(only_binding(tale).key, "gpu1: Ray has 0 of 1 CPU free there"))
    (over,) = [row for row in told.changes if getattr(row, "id", "") == "r1"]
    assert (over.end, over.detail) == (LeaseEnd.FAILED, "gpu1: Ray has 0 of 1 CPU free there")
    assert not tale.ledger.bindings
    assert "gpu1" not in tale.ledger.offers  # until it is heard again
    tale.ledger.check()


def test_what_is_released_is_freed_and_forgotten_only_then():
    tale = with_ray()
    binding = bound(tale, a_request("r1"))
    tale.release("r1")
    assert pending_bindings(tale.ledger) == [FreeBinding(binding)]
    tale.tell(GroupFreed(binding.key))
    assert not tale.ledger.bindings
    tale.tell(GroupFreed(binding.key))
    tale.ledger.check()


def test_a_lease_that_ends_while_it_is_being_bound_is_freed():
    tale = with_ray()
    tale.ask(a_request("r1"))
    binding = only_binding(tale)
    tale.release("r1")
    tale.tell(GroupBound(binding.key))
    assert pending_bindings(tale.ledger) == [FreeBinding(binding)]


def test_a_command_starts_only_under_a_reservation():
    tale = with_ray()
    tale.submit(a_request("j1"))
    assert pending(tale.ledger) == []
    tale.tell(GroupBound(only_binding(tale).key))
    (start,) = pending(tale.ledger)
    assert isinstance(start, StartAttempt)
    tale.start("j1")
    binding = only_binding(tale)
    tale.end("j1")
    assert pending_bindings(tale.ledger) == [FreeBinding(binding)]


def test_a_command_whose_place_is_refused_looks_for_another():
    tale = with_ray(a_node("gpu1", rank=2000), a_node("gpu2"))
    tale.submit(a_request("j1"))
    assert tale.lease_of("j1").node == "gpu1"
    tale.tell(GroupRefused(only_binding(tale).key, "no room"))
    assert (tale.lease_of("j1").node, tale.job("j1").state) == ("gpu2", JobState.ASSIGNED)
    assert len(pending(tale.ledger)) == 1  # gpu2 is no node of the engine
    tale.ledger.check()


def test_a_group_that_vanished_is_made_again_under_a_new_fence():
    tale = with_ray()
    old = bound(tale, a_request("r1"))
    tale.later(1)
    looked(tale, place(), groups=())
    lease = tale.ledger.leases["r1"]
    new = tale.ledger.binding_of(lease)
    assert (lease.state, new.fence > old.fence, new.again) == (LeaseState.RESERVING, True, True)
    assert pending_bindings(tale.ledger) == [FreeBinding(old)]  # first the old one is known to be gone
    tale.tell(GroupFreed(old.key))
    assert pending_bindings(tale.ledger) == [BindLease(new, lease)]
    tale.tell(GroupBound(new.key))
    assert tale.ledger.leases["r1"].state is LeaseState.ACTIVE
    tale.ledger.check()


def test_a_group_that_was_bound_after_the_look_was_asked_for_has_not_vanished():
    tale = with_ray()
    binding = bound(tale, a_request("r1"))
    looked(tale, place(), groups=())
    assert tale.ledger.bindings == {binding.key: binding}


def test_another_life_of_the_engine_binds_everything_again():
    tale = with_ray()
    old = bound(tale, a_request("r1"))
    tale.later(5)
    looked(tale, place(node_id="n2"), groups=(), session="s2")
    assert (tale.ledger.nodes["gpu1"].engine_node, tale.ledger.engines["ray"].session) == ("n2", "s2")
    tale.tell(GroupFreed(old.key))
    assert only_binding(tale).place == "n2"


def test_a_node_that_the_engine_loses_keeps_its_leases_until_its_hold_is_over():
    tale = with_ray(a_node("gpu1", hold_s=30))
    bound(tale, a_request("r1"))
    looked(tale)
    assert tale.ledger.leases["r1"].state is LeaseState.RESERVING
    tale.later(20)
    assert "r1" in tale.ledger.leases
    told = tale.later(11)
    assert [(row.id, row.end) for row in told.changes if getattr(row, "end", None)] == [("r1", LeaseEnd.LOST)]
    assert tale.ledger.nodes["gpu1"].engine == ""
    tale.ledger.check()


def test_a_node_that_comes_back_in_time_is_bound_again():
    tale = with_ray(a_node("gpu1", hold_s=30))
    old = bound(tale, a_request("r1"))
    looked(tale)
    tale.later(10)
    looked(tale, place(node_id="n2"), groups=())
    tale.tell(GroupFreed(old.key))
    tale.tell(GroupBound(only_binding(tale).key))
    tale.later(60)
    assert tale.ledger.leases["r1"].state is LeaseState.ACTIVE


def test_while_an_engine_is_away_nothing_changes():
    tale = with_ray()
    binding = bound(tale, a_request("r1"))
    tale.later(10_000)
    assert tale.ledger.leases["r1"].state is LeaseState.ACTIVE
    assert only_binding(tale) == binding


def test_a_lease_that_was_there_before_the_engine_is_bound_when_it_comes():
    tale = Scenario(a_node())
    tale.ask(a_request("r1"))
    tale.tell(EngineWanted("ray", "attached", "head:6379"))
    looked(tale, place(), groups=())
    assert tale.ledger.leases["r1"].state is LeaseState.RESERVING
    tale.tell(GroupBound(only_binding(tale).key))
    assert tale.ledger.leases["r1"].state is LeaseState.ACTIVE
    tale.ledger.check()


def test_a_group_of_a_lease_whose_binding_was_forgotten_is_taken_for_its_own():
    tale = Scenario(a_node())
    lease = tale.ask(a_request("r1"))
    tale.tell(EngineWanted("ray", "attached", "head:6379"))
    looked(tale, place(), groups=((f"grid-boost-r1-{lease.fence}", "n1"),))
    assert only_binding(tale).bound_at_ms == tale.now
    assert tale.ledger.leases["r1"].state is LeaseState.ACTIVE
    tale.ledger.check()


def test_without_the_engine_the_grid_alone_keeps_its_leases():
    tale = with_ray()
    bound(tale, a_request("r1"))
    tale.ask(a_request("r2"))
    tale.tell(EngineGivenUp("ray"))
    assert {lease.state for lease in tale.ledger.leases.values()} == {LeaseState.ACTIVE}
    assert (tale.ledger.bindings, tale.ledger.nodes["gpu1"].engine) == ({}, "")
    tale.ledger.check()


def test_what_others_have_taken_in_the_engine_is_not_offered():
    tale = with_ray()
    looked(tale, place(room=EngineResources(1500, 2 * GB, 0)))
    tale.later(61)
    lends = tale.ledger.offers["gpu1"].lends
    assert (lends.cpu_milli, lends.memory_bytes, lends.gpus) == (1500, 2 * GB, ())
    assert tale.ledger.offers["gpu1"].withheld == ("its engine has given the rest to others",)


def test_a_gpu_that_is_lent_stays_in_the_offer_when_others_take_the_rest():
    tale = with_ray(a_node(gpus=2))
    bound(tale, a_request("r1", gpus=1))
    (share,) = tale.ledger.leases["r1"].claim.gpus
    looked(tale, place(room=EngineResources(4000, 16 * GB, 1000)))
    tale.later(61)
    assert [device.index for device in tale.ledger.offers["gpu1"].lends.gpus] == [share.index]


def test_who_makes_room_is_gone_before_the_urgent_lease_is_bound():
    tale = with_ray(a_node(cores=1))
    tale.submit(a_request("low", priority="low"))
    victim = only_binding(tale)
    tale.tell(GroupBound(victim.key))
    tale.start("low")
    tale.later(3600)
    tale.tell(LeaseAsked(a_request("hot", priority="urgent")))
    hot = tale.ledger.binding_of(tale.ledger.leases["hot"])
    assert pending_bindings(tale.ledger) == []
    tale.end("low")
    effects = pending_bindings(tale.ledger)
    assert BindLease(hot, tale.ledger.leases["hot"]) in effects
    assert FreeBinding(tale.ledger.bindings[victim.key]) in effects
    tale.tell(GroupBound(hot.key))
    assert tale.ledger.leases["hot"].state is LeaseState.ACTIVE
    tale.ledger.check()


def test_only_our_own_names_are_understood():
    assert parse_group_name("grid-boost-a-b-7") == ("a-b", 7)
    assert [parse_group_name(name) for name in ("grid-boost-a", "boost-a-7", "grid-boost--7", "grid-boost-a-x")] == [
        None
    ] * 4
