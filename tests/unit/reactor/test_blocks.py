"""Blocks: leases for their copies, for as long as their program renews them, and then gone."""

from __future__ import annotations

import pytest

from distributed_grid.domain.events import BlockNamed, BlockReleased, BlocksRenewed, LeaseReleased
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor.effects import memory_effects
from tests.support.builders import GB, a_request
from tests.unit.reactor.block_pool import HOUR, a_pool, ask, freed


def test_a_block_is_a_memory_lease_of_the_node_that_lends_it():
    scenario = a_pool()
    block = ask(scenario, prefer="gpu2")
    (place,) = block.places
    lease = scenario.ledger.leases[place.copy]
    assert (place.node, place.incarnation) == ("gpu2", "gpu2-life1")
    assert (lease.node, lease.claim.memory_bytes, lease.state) == ("gpu2", 2 * GB, LeaseState.ACTIVE)
    assert lease.ends_at_ms == block.ends_at_ms
    assert not memory_effects(scenario.ledger)


def test_the_same_block_asked_for_twice_is_one_block():
    scenario = a_pool()
    assert ask(scenario) == ask(scenario)
    with pytest.raises(Conflict):
        ask(scenario, gb=3)


@pytest.mark.parametrize("gb", [0, -1, 1 << 40])
def test_a_size_that_makes_no_sense_is_refused_and_changes_nothing(gb):
    scenario = a_pool()
    with pytest.raises(BadInput):
        ask(scenario, gb=gb)
    assert not scenario.ledger.blocks
    assert not scenario.ledger.leases


def test_a_block_for_which_no_node_has_room_is_refused_node_by_node():
    scenario = a_pool("gpu1", "gpu2")
    with pytest.raises(Refused, match=r"No available nodes for memory allocation: gpu1: .*; gpu2: "):
        ask(scenario, gb=9)
    ask(scenario, gb=6, copies=2)
    with pytest.raises(Refused, match="No available nodes for memory allocation"):
        ask(scenario, "b2", gb=3)


def test_copies_are_on_different_nodes_or_there_is_no_block():
    scenario = a_pool("gpu1", "gpu2")
    block = ask(scenario, copies=2)
    assert {place.node for place in block.places} == {"gpu1", "gpu2"}
    with pytest.raises(Refused):
        ask(scenario, "b2", copies=3)
    assert "b2" not in scenario.ledger.blocks


def test_a_released_block_is_over_when_its_node_has_let_go_of_it():
    scenario = a_pool()
    ask(scenario)
    scenario.handle(BlockReleased("b1", "ann"))
    scenario.handle(BlockReleased("b1", "ann"))
    assert scenario.ledger.leases["b1:1"].state is LeaseState.RELEASING
    freed(scenario)
    assert not scenario.ledger.blocks
    assert not scenario.ledger.leases
    with pytest.raises(NotFound):
        scenario.handle(BlockReleased("b1", "ann"))


def test_nobody_releases_a_foreign_block_or_the_lease_of_a_copy():
    scenario = a_pool()
    block = ask(scenario)
    with pytest.raises(Refused, match="belongs to ann"):
        scenario.handle(BlockReleased("b1", "bob"))
    with pytest.raises(Refused, match="grid memory deallocate b1"):
        scenario.handle(LeaseReleased("b1:1", "ann"))
    assert scenario.ledger.blocks["b1"] == block


def test_a_block_ends_with_its_time_unless_its_program_renews_it():
    scenario = a_pool()
    ask(scenario, session="s1")
    ask(scenario, "b2")
    scenario.advance(3599)
    scenario.handle(BlocksRenewed("s1", "ann"))
    scenario.advance(2)
    assert scenario.ledger.blocks["b2"].freeing
    assert not scenario.ledger.blocks["b1"].freeing
    assert scenario.ledger.leases["b1:1"].ends_at_ms == scenario.now - 2000 + HOUR


def test_a_name_belongs_to_the_block_that_got_it_last():
    scenario = a_pool()
    ask(scenario, name="b1")
    ask(scenario, "b2")
    scenario.handle(BlockNamed("b1", "ann", "model"))
    scenario.handle(BlockNamed("b2", "ann", "model", term_ms=5 * HOUR))
    assert scenario.ledger.block_names == {("ann", "model"): "b2"}
    assert scenario.ledger.blocks["b1"].freeing
    assert scenario.ledger.leases["b2:1"].ends_at_ms == scenario.now + 5 * HOUR


def test_an_urgent_request_never_displaces_a_block():
    scenario = a_pool("gpu1")
    ask(scenario, gb=7)
    with pytest.raises(Refused):
        scenario.ask(a_request("u1", memory_gb=4, priority="urgent", wait_s=0))
    assert not scenario.ledger.blocks["b1"].freeing
