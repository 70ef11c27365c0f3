"""Copies of blocks: moved when they have to leave, made again when one is lost, on disk where no node has room."""

from __future__ import annotations

from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.events import (
    BlockReleased,
    CopiesFreed,
    CopyMade,
    LeaseLost,
    MemoryReclaimRequested,
    MemoryServed,
    NodeDrained,
    TimePassed,
)
from distributed_grid.domain.states import LeaseState
from distributed_grid.reactor.effects import MakeCopy, ServeMemory, memory_effects
from tests.support.builders import GB, Scenario, a_node
from tests.unit.reactor.block_pool import a_pool, ask, effects, freed, served


def moved(scenario: Scenario, problem: str = "") -> None:
    (effect,) = effects(scenario, MakeCopy)
    moving = effect.block.moving
    scenario.handle(CopyMade(moving.source, moving.generation, problem, (effect.node,)))


def test_a_node_whose_memory_nobody_has_used_yet_is_asked_to_serve_it():
    scenario = Scenario(a_node("gpu1"))
    ask(scenario)
    assert effects(scenario, ServeMemory) == [ServeMemory("gpu1")]
    served(scenario, "gpu1")
    assert scenario.ledger.blocks["b1"].places[0].incarnation == "gpu1-life1"
    assert not memory_effects(scenario.ledger)


def test_a_node_whose_memory_cannot_be_served_loses_what_was_to_be_there():
    scenario = Scenario(a_node("gpu1"))
    ask(scenario)
    scenario.handle(MemoryServed(MemoryServerRow(node="gpu1", gone=True), problem="no space left"))
    block = scenario.ledger.blocks["b1"]
    assert block.lost
    assert "no space left" in block.detail
    assert not scenario.ledger.leases


def test_a_node_that_drains_has_its_blocks_moved_before_its_leases_end():
    scenario = a_pool("gpu1", "gpu2")
    ask(scenario, prefer="gpu1")
    scenario.handle(NodeDrained("gpu1"))
    assert [place.node for place in scenario.ledger.blocks["b1"].places] == ["gpu1"]
    moved(scenario)
    block = scenario.ledger.blocks["b1"]
    assert [place.node for place in block.places] == ["gpu2"]
    assert block.generation == 2
    assert scenario.ledger.leases["b1:1"].state is LeaseState.RELEASING
    freed(scenario)
    assert list(scenario.ledger.leases) == ["b1:2"]
    assert not scenario.ledger.unsettled_blocks


def test_where_no_other_node_has_room_a_block_goes_to_the_borrowers_disk_and_comes_back():
    scenario = a_pool("gpu1", "gpu2", memory=4)
    ask(scenario, gb=3, prefer="gpu1")
    other = ask(scenario, "b2", gb=3)
    scenario.handle(MemoryReclaimRequested("gpu1", GB))
    moved(scenario)
    freed(scenario)
    (place,) = scenario.ledger.blocks["b1"].places
    assert (place.node, place.on_disk) == ("", True)
    assert list(scenario.ledger.leases) == [other.places[0].copy]
    scenario.handle(BlockReleased("b2", "ann"))
    freed(scenario)
    scenario.advance(31)
    moved(scenario)
    freed(scenario)
    assert not scenario.ledger.blocks["b1"].places[0].on_disk
    assert scenario.ledger.blocks["b1"].generation == 3


def test_only_as_much_is_moved_away_as_the_owner_needs():
    scenario = a_pool("gpu1", "gpu2", "gpu3")
    for number, gb in enumerate((1, 2, 4)):
        ask(scenario, f"b{number}", gb=gb, prefer="gpu1")
    scenario.handle(MemoryReclaimRequested("gpu1", 2 * GB))
    assert [effect.block.id for effect in effects(scenario, MakeCopy)] == ["b1"]
    scenario.handle(MemoryReclaimRequested("gpu1", 2 * GB))
    assert len(effects(scenario, MakeCopy)) == 1


def test_a_move_that_fails_leaves_the_block_where_it_was_and_is_tried_again():
    scenario = a_pool("gpu1", "gpu2")
    ask(scenario, prefer="gpu1")
    scenario.handle(NodeDrained("gpu1"))
    moved(scenario, problem="connection refused")
    block = scenario.ledger.blocks["b1"]
    assert [place.node for place in block.places] == ["gpu1"]
    assert block.generation == 3
    freed(scenario)
    scenario.advance(6)
    moved(scenario)
    assert scenario.ledger.blocks["b1"].places[0].node == "gpu2"


def test_a_lost_lender_without_other_copies_is_a_lost_block_that_says_so():
    scenario = a_pool("gpu1", "gpu2")
    ask(scenario, prefer="gpu1")
    scenario.handle(LeaseLost("b1:1", "gpu1 was not heard from"))
    block = scenario.ledger.blocks["b1"]
    assert block.lost
    assert "gpu1 was not heard from" in block.detail
    scenario.handle(BlockReleased("b1", "ann"))
    assert not scenario.ledger.blocks


def test_a_lost_copy_is_made_again_from_the_one_that_is_left():
    scenario = a_pool("gpu1", "gpu2", "gpu3")
    block = ask(scenario, copies=2)
    first, second = block.places
    scenario.handle(LeaseLost(first.copy, "gone"))
    assert scenario.ledger.blocks["b1"].places == (second,)
    assert scenario.ledger.blocks["b1"].generation == 2
    scenario.handle(TimePassed())
    moved(scenario)
    block = scenario.ledger.blocks["b1"]
    assert len(block.places) == 2
    assert not scenario.ledger.unsettled_blocks


def test_a_node_that_loses_a_copy_as_soon_as_it_has_it_does_not_get_the_next_at_once():
    """Else it could fill the audit trail, with a round at each tick."""
    scenario = a_pool("gpu1", "gpu2")
    ask(scenario, copies=2)
    made = 0
    for life in range(60):
        served(scenario, "gpu2", life=f"life{life}")
        scenario.advance(1)
        if effects(scenario, MakeCopy):
            moved(scenario)
            made += 1
    assert 8 <= made <= 60 // 5 + 1


def test_another_life_of_a_nodes_memory_has_lost_what_was_in_the_one_before():
    scenario = a_pool("gpu1", "gpu2")
    ask(scenario, prefer="gpu1")
    served(scenario, "gpu1", life="life1")
    assert not scenario.ledger.blocks["b1"].lost
    served(scenario, "gpu1", life="life2")
    assert scenario.ledger.blocks["b1"].lost


def test_a_target_that_is_lost_on_the_way_gives_the_move_up():
    scenario = a_pool("gpu1", "gpu2")
    ask(scenario, prefer="gpu1")
    scenario.handle(NodeDrained("gpu1"))
    scenario.handle(LeaseLost("b1:2", "gone"))
    block = scenario.ledger.blocks["b1"]
    assert block.moving is None
    assert [place.node for place in block.places] == ["gpu1"]
    assert list(scenario.ledger.leases) == ["b1:1"]


def test_a_source_that_is_lost_on_the_way_loses_the_block_but_nothing_else():
    scenario = a_pool("gpu1", "gpu2")
    ask(scenario, prefer="gpu1")
    scenario.handle(NodeDrained("gpu1"))
    scenario.handle(LeaseLost("b1:1", "gone"))
    assert scenario.ledger.blocks["b1"].lost
    freed(scenario)
    assert not scenario.ledger.leases


def test_a_report_about_a_foreign_nodes_copy_changes_nothing():
    scenario = a_pool("gpu1", "gpu2")
    ask(scenario, prefer="gpu1")
    scenario.handle(NodeDrained("gpu1"))
    before = scenario.ledger.blocks["b1"]
    scenario.handle(CopyMade("b1:1", 2, "", ("gpu2",)))
    scenario.handle(BlockReleased("b1", "ann"))
    scenario.handle(CopiesFreed(("b1:1",), ("gpu2",)))
    assert before.moving is not None
    assert "b1:1" in scenario.ledger.leases
