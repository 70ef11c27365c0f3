"""Blocks: leases for their copies, moved when they have to leave, made again when one is lost, and then gone."""

# mypy: disable-error-code="union-attr,arg-type,comparison-overlap"

from __future__ import annotations

import random

import pytest

from distributed_grid.domain.blocks import Block, MemoryServerRow
from distributed_grid.domain.effects import FreeCopies, MakeCopy, ServeMemory
from distributed_grid.domain.events import (
    BlockAsked,
    BlockNamed,
    BlockReleased,
    BlocksRenewed,
    CopiesFreed,
    CopyMade,
    LeaseLost,
    LeaseReleased,
    MemoryServed,
    MemoryWanted,
    NodeDrained,
    TimePassed,
)
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor import pending_memory
from tests.support.builders import GB, Scenario, a_node, a_request

HOUR = 3_600_000
LENDERS = ("gpu1", "gpu2", "gpu3")


def served(tale: Scenario, *names: str, life: str = "life1", on_disk: tuple[str, ...] = ()) -> None:
    for name in names:
        lender = MemoryServerRow(name, "10.0.0.1", 7000, incarnation=f"{name}-{life}", key_bytes=b"k" * 32)
        tale.tell(MemoryServed(lender, on_disk))


def a_pool(*names: str, memory: int = 8) -> Scenario:
    tale = Scenario(*(a_node(name, memory_gb=memory) for name in names or LENDERS))
    served(tale, *(names or LENDERS), "")
    return tale


def ask(tale: Scenario, name: str = "b1", gb: int = 2, *, copies: int = 1, user: str = "ann", **more: object) -> Block:
    tale.tell(BlockAsked(name, user, gb * GB, HOUR, copies, **more))
    return tale.ledger.blocks[name]


def effects(tale: Scenario, kind: type) -> list:
    return [effect for effect in pending_memory(tale.ledger) if isinstance(effect, kind)]


def moved(tale: Scenario, problem: str = "") -> None:
    (effect,) = effects(tale, MakeCopy)
    moving = effect.block.moving
    tale.tell(CopyMade(moving.source, moving.generation, problem, (effect.node,)))


def freed(tale: Scenario) -> None:
    for effect in effects(tale, FreeCopies):
        tale.tell(CopiesFreed(effect.copies, (effect.node,)))


def test_a_block_is_a_memory_lease_of_the_node_that_lends_it():
    tale = a_pool()
    block = ask(tale, prefer="gpu2")
    (place,) = block.places
    lease = tale.ledger.leases[place.copy]
    assert (place.node, place.incarnation) == ("gpu2", "gpu2-life1")
    assert (lease.node, lease.claim.memory_bytes, lease.state) == ("gpu2", 2 * GB, LeaseState.ACTIVE)
    assert lease.ends_at_ms == block.ends_at_ms
    assert not pending_memory(tale.ledger)


def test_the_same_block_asked_for_twice_is_one_block():
    tale = a_pool()
    assert ask(tale) == ask(tale)
    with pytest.raises(Conflict):
        ask(tale, gb=3)


@pytest.mark.parametrize("gb", [0, -1, 1 << 40])
def test_a_size_that_makes_no_sense_is_refused_and_changes_nothing(gb):
    tale = a_pool()
    with pytest.raises(BadInput):
        ask(tale, gb=gb)
    assert not tale.ledger.blocks
    assert not tale.ledger.leases


def test_a_block_for_which_no_node_has_room_is_refused_node_by_node():
    tale = a_pool("gpu1", "gpu2")
    with pytest.raises(Refused, match=r"No available nodes for memory allocation: gpu1: .*; gpu2: "):
        ask(tale, gb=9)
    ask(tale, gb=6, copies=2)
    with pytest.raises(Refused, match="No available nodes for memory allocation"):
        ask(tale, "b2", gb=3)


def test_copies_are_on_different_nodes_or_there_is_no_block():
    tale = a_pool("gpu1", "gpu2")
    block = ask(tale, copies=2)
    assert {place.node for place in block.places} == {"gpu1", "gpu2"}
    with pytest.raises(Refused):
        ask(tale, "b2", copies=3)
    assert "b2" not in tale.ledger.blocks


def test_a_node_whose_memory_nobody_has_used_yet_is_asked_to_serve_it():
    tale = Scenario(a_node("gpu1"))
    ask(tale)
    assert effects(tale, ServeMemory) == [ServeMemory("gpu1")]
    served(tale, "gpu1")
    assert tale.ledger.blocks["b1"].places[0].incarnation == "gpu1-life1"
    assert not pending_memory(tale.ledger)


def test_a_node_whose_memory_cannot_be_served_loses_what_was_to_be_there():
    tale = Scenario(a_node("gpu1"))
    ask(tale)
    tale.tell(MemoryServed(MemoryServerRow("gpu1", gone=True), problem="no space left"))
    block = tale.ledger.blocks["b1"]
    assert block.lost
    assert "no space left" in block.detail
    assert not tale.ledger.leases


def test_a_released_block_is_over_when_its_node_has_let_go_of_it():
    tale = a_pool()
    ask(tale)
    tale.tell(BlockReleased("b1", "ann"))
    tale.tell(BlockReleased("b1", "ann"))
    assert tale.ledger.leases["b1:1"].state is LeaseState.RELEASING
    freed(tale)
    assert not tale.ledger.blocks
    assert not tale.ledger.leases
    with pytest.raises(NotFound):
        tale.tell(BlockReleased("b1", "ann"))


def test_nobody_releases_a_foreign_block_or_the_lease_of_a_copy():
    tale = a_pool()
    block = ask(tale)
    with pytest.raises(Refused, match="belongs to ann"):
        tale.tell(BlockReleased("b1", "bob"))
    with pytest.raises(Refused, match="grid memory deallocate b1"):
        tale.tell(LeaseReleased("b1:1", "ann"))
    assert tale.ledger.blocks["b1"] == block


def test_a_block_ends_with_its_time_unless_its_program_renews_it():
    tale = a_pool()
    ask(tale, session="s1")
    ask(tale, "b2")
    tale.later(3599)
    tale.tell(BlocksRenewed("s1", "ann"))
    tale.later(2)
    assert tale.ledger.blocks["b2"].freeing
    assert not tale.ledger.blocks["b1"].freeing
    assert tale.ledger.leases["b1:1"].ends_at_ms == tale.now - 2000 + HOUR


def test_a_name_belongs_to_the_block_that_got_it_last():
    tale = a_pool()
    ask(tale, name="b1")
    ask(tale, "b2")
    tale.tell(BlockNamed("b1", "ann", "model"))
    tale.tell(BlockNamed("b2", "ann", "model", term_ms=5 * HOUR))
    assert tale.ledger.block_names == {("ann", "model"): "b2"}
    assert tale.ledger.blocks["b1"].freeing
    assert tale.ledger.leases["b2:1"].ends_at_ms == tale.now + 5 * HOUR


def test_a_node_that_drains_has_its_blocks_moved_before_its_leases_end():
    tale = a_pool("gpu1", "gpu2")
    ask(tale, prefer="gpu1")
    tale.tell(NodeDrained("gpu1"))
    assert [place.node for place in tale.ledger.blocks["b1"].places] == ["gpu1"]
    moved(tale)
    block = tale.ledger.blocks["b1"]
    assert [place.node for place in block.places] == ["gpu2"]
    assert block.generation == 2
    assert tale.ledger.leases["b1:1"].state is LeaseState.RELEASING
    freed(tale)
    assert list(tale.ledger.leases) == ["b1:2"]
    assert not tale.ledger.unsettled_blocks


def test_where_no_other_node_has_room_a_block_goes_to_the_borrowers_disk_and_comes_back():
    tale = a_pool("gpu1", "gpu2", memory=4)
    ask(tale, gb=3, prefer="gpu1")
    other = ask(tale, "b2", gb=3)
    tale.tell(MemoryWanted("gpu1", GB))
    moved(tale)
    freed(tale)
    (place,) = tale.ledger.blocks["b1"].places
    assert (place.node, place.on_disk) == ("", True)
    assert list(tale.ledger.leases) == [other.places[0].copy]
    tale.tell(BlockReleased("b2", "ann"))
    freed(tale)
    tale.later(31)
    moved(tale)
    freed(tale)
    assert not tale.ledger.blocks["b1"].places[0].on_disk
    assert tale.ledger.blocks["b1"].generation == 3


def test_only_as_much_is_moved_away_as_the_owner_needs():
    tale = a_pool("gpu1", "gpu2", "gpu3")
    for number, gb in enumerate((1, 2, 4)):
        ask(tale, f"b{number}", gb=gb, prefer="gpu1")
    tale.tell(MemoryWanted("gpu1", 2 * GB))
    assert [effect.block.id for effect in effects(tale, MakeCopy)] == ["b1"]
    tale.tell(MemoryWanted("gpu1", 2 * GB))
    assert len(effects(tale, MakeCopy)) == 1


def test_a_move_that_fails_leaves_the_block_where_it_was_and_is_tried_again():
    tale = a_pool("gpu1", "gpu2")
    ask(tale, prefer="gpu1")
    tale.tell(NodeDrained("gpu1"))
    moved(tale, problem="connection refused")
    block = tale.ledger.blocks["b1"]
    assert [place.node for place in block.places] == ["gpu1"]
    assert block.generation == 3
    freed(tale)
    tale.later(6)
    moved(tale)
    assert tale.ledger.blocks["b1"].places[0].node == "gpu2"


def test_a_lost_lender_without_other_copies_is_a_lost_block_that_says_so():
    tale = a_pool("gpu1", "gpu2")
    ask(tale, prefer="gpu1")
    tale.tell(LeaseLost("b1:1", "gpu1 was not heard from"))
    block = tale.ledger.blocks["b1"]
    assert block.lost
    assert "gpu1 was not heard from" in block.detail
    tale.tell(BlockReleased("b1", "ann"))
    assert not tale.ledger.blocks


def test_a_lost_copy_is_made_again_from_the_one_that_is_left():
    tale = a_pool("gpu1", "gpu2", "gpu3")
    block = ask(tale, copies=2)
    first, second = block.places
    tale.tell(LeaseLost(first.copy, "gone"))
    assert tale.ledger.blocks["b1"].places == (second,)
    assert tale.ledger.blocks["b1"].generation == 2
    tale.tell(TimePassed())
    moved(tale)
    block = tale.ledger.blocks["b1"]
    assert len(block.places) == 2
    assert not tale.ledger.unsettled_blocks


def test_another_life_of_a_nodes_memory_has_lost_what_was_in_the_one_before():
    tale = a_pool("gpu1", "gpu2")
    ask(tale, prefer="gpu1")
    served(tale, "gpu1", life="life1")
    assert not tale.ledger.blocks["b1"].lost
    served(tale, "gpu1", life="life2")
    assert tale.ledger.blocks["b1"].lost


def test_a_target_that_is_lost_on_the_way_gives_the_move_up():
    tale = a_pool("gpu1", "gpu2")
    ask(tale, prefer="gpu1")
    tale.tell(NodeDrained("gpu1"))
    tale.tell(LeaseLost("b1:2", "gone"))
    block = tale.ledger.blocks["b1"]
    assert block.moving is None
    assert [place.node for place in block.places] == ["gpu1"]
    assert list(tale.ledger.leases) == ["b1:1"]


def test_a_source_that_is_lost_on_the_way_loses_the_block_but_nothing_else():
    tale = a_pool("gpu1", "gpu2")
    ask(tale, prefer="gpu1")
    tale.tell(NodeDrained("gpu1"))
    tale.tell(LeaseLost("b1:1", "gone"))
    assert tale.ledger.blocks["b1"].lost
    freed(tale)
    assert not tale.ledger.leases


def test_a_report_about_a_foreign_nodes_copy_changes_nothing():
    tale = a_pool("gpu1", "gpu2")
    ask(tale, prefer="gpu1")
    tale.tell(NodeDrained("gpu1"))
    before = tale.ledger.blocks["b1"]
    tale.tell(CopyMade("b1:1", 2, "", ("gpu2",)))
    tale.tell(BlockReleased("b1", "ann"))
    tale.tell(CopiesFreed(("b1:1",), ("gpu2",)))
    assert before.moving is not None
    assert "b1:1" in tale.ledger.leases


def test_an_urgent_request_never_displaces_a_block():
    tale = a_pool("gpu1")
    ask(tale, gb=7)
    with pytest.raises(Refused):
        tale.ask(a_request("u1", memory_gb=4, priority="urgent", wait_s=0))
    assert not tale.ledger.blocks["b1"].freeing


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_ledger_stays_right_and_everything_released_goes(seed):
    """A random script of asks, moves, losses and releases, with the ledger held against its laws after every step."""
    chance = random.Random(seed)
    tale = a_pool(*LENDERS)
    lives = dict.fromkeys(LENDERS, 1)
    for number in range(120):
        deed = chance.randrange(10)
        name = chance.choice(LENDERS)
        blocks = list(tale.ledger.blocks)
        try:
            if deed <= 2:
                ask(
                    tale,
                    f"b{number}",
                    gb=chance.randint(1, 3),
                    copies=chance.randint(1, 3),
                    home=chance.choice(["", name]),
                )
            elif deed == 3 and blocks:
                tale.tell(BlockReleased(chance.choice(blocks), "ann"))
            elif deed == 4:
                tale.tell(MemoryWanted(name, chance.randint(1, 4) * GB))
            elif deed == 5:
                lives[name] += 1
                served(tale, name, life=f"life{lives[name]}", on_disk=tuple(_on_disk(tale)))
            elif deed == 6 and tale.ledger.leases:
                tale.tell(LeaseLost(chance.choice(list(tale.ledger.leases)), "gone"))
            elif deed == 7:
                for effect in effects(tale, MakeCopy):
                    moving = effect.block.moving
                    tale.tell(CopyMade(moving.source, moving.generation, chance.choice(["", "", "no"]), (effect.node,)))
            elif deed == 8:
                freed(tale)
            tale.later(chance.choice([0.01, 3, 40]))
        except Refused:
            pass  # no room, or no such block any more: nothing may have changed
        tale.ledger.check()
    for block in list(tale.ledger.blocks):
        tale.tell(BlockReleased(block, "ann"))
    served(tale, "", on_disk=tuple(_on_disk(tale)))
    freed(tale)
    assert not tale.ledger.blocks
    assert not tale.ledger.leases


def _on_disk(tale: Scenario) -> list[str]:
    return [place.copy for block in tale.ledger.blocks.values() for place in block.places if place.on_disk]
