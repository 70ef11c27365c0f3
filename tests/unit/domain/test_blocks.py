"""Blocks: names of copies, when a block is settled or over, and a key that is never shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.blocks import Block, BlockCopy, CopyMove, MemoryServerRow, block_of, copy_id
from tests.support.builders import GB, NOW

FIRST, SECOND = BlockCopy("b1:1", "gpu1"), BlockCopy("b1:2", "gpu2")
BLOCK = Block(id="b1", user="ada", size_bytes=2 * GB, made_at_ms=NOW, ends_at_ms=NOW + 1000, places=(FIRST,))
MOVE = CopyMove("b1:1", SECOND, 2, keep=False, why="gpu1 is being drained")


@given(st.text(min_size=1), st.integers(1, 10**9))
def test_a_copy_is_named_after_its_block_whatever_that_is_called(block_id, number):
    assert block_of(copy_id(block_id, number)) == block_id


def test_copies_of_a_block_have_different_names():
    assert len({copy_id("b1", number) for number in range(1, 20)}) == 19


def test_a_block_with_all_its_copies_in_memory_is_settled():
    assert BLOCK.is_settled
    assert replace(BLOCK, copies=2, places=(FIRST, SECOND)).is_settled


@pytest.mark.parametrize(
    "unsettled",
    [
        {"copies": 2},
        {"places": (replace(FIRST, on_disk=True),)},
        {"leaving": (SECOND,)},
        {"moving": MOVE},
        {"lost": True},
    ],
    ids=lambda unsettled: next(iter(unsettled)),
)
def test_a_block_that_something_has_to_be_done_about_is_not_settled(unsettled):
    assert not replace(BLOCK, **unsettled).is_settled


def test_a_released_block_is_over_only_when_its_last_copy_is_freed():
    assert not BLOCK.is_over
    assert not replace(BLOCK, freeing=True, places=(), leaving=(FIRST,)).is_over
    assert replace(BLOCK, freeing=True, places=()).is_over


def test_a_copy_that_is_made_or_freed_is_somewhere_too():
    third = BlockCopy("b1:3", "", on_disk=True)
    everywhere = replace(BLOCK, leaving=(third,), moving=MOVE).everywhere
    assert everywhere == (FIRST, third, SECOND)


def test_the_key_of_a_memory_server_is_not_shown():
    row = MemoryServerRow(node="gpu1", host="10.0.0.1", port=7000, incarnation="life1", key_bytes=b"secret")
    assert repr(row) == "MemoryServerRow(gpu1, 10.0.0.1:7000, life1)"
    assert row.key == "gpu1"
    assert [one.is_over for one in (row, replace(row, gone=True))] == [False, True]
