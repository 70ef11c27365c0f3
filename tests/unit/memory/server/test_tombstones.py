"""Tombstones in a journal: the next server knows the freed copies, wherever the last one died."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.memory.protocol.frames import READ, TICKET_LIFE_MS, WRITE, FrameStatus, TicketClaims
from distributed_grid.memory.server.copy_file import CopyFile
from distributed_grid.memory.server.copy_store import CopyStore
from distributed_grid.memory.server.write_journal import Tombstones, WriteJournal

START = 8192
FREED_AT = 1_000_000


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("journal")
    yield fd
    os.close(fd)


def test_next_server_knows_what_was_freed(fd: int) -> None:
    Tombstones(fd, START).record("b:1", FREED_AT)
    after = Tombstones(fd, START)
    assert "b:1" in after
    assert after.refuses("b:1", FREED_AT + TICKET_LIFE_MS)
    assert not after.refuses("b:2", FREED_AT + 1)


def test_tombstone_lasts_as_long_as_a_ticket_for_it_may_be_valid(fd: int) -> None:
    stones = Tombstones(fd, START)
    stones.record("b:1", FREED_AT)
    stones.expire(FREED_AT + 2 * TICKET_LIFE_MS - 1)
    assert "b:1" in stones
    stones.expire(FREED_AT + 2 * TICKET_LIFE_MS)
    assert "b:1" not in stones
    assert "b:1" not in Tombstones(fd, START)


def test_ring_gives_its_memory_back_when_every_tombstone_has_expired(fd: int) -> None:
    stones = Tombstones(fd, START)
    for number in range(5_000):
        stones.record(f"b:{number}", FREED_AT)
    full = os.fstat(fd).st_blocks
    stones.expire(FREED_AT + 2 * TICKET_LIFE_MS)
    assert os.fstat(fd).st_blocks * 512 <= 4096 < full * 512
    stones.record("later:1", FREED_AT + 3 * TICKET_LIFE_MS)
    assert "later:1" in Tombstones(fd, START)


def test_full_ring_refuses_the_tickets_of_those_it_forgets_and_no_newer_ones(fd: int) -> None:
    stones = Tombstones(fd, START, capacity=4)
    for number in range(7):
        stones.record(f"b:{number}", FREED_AT + number)
    for known in (stones, Tombstones(fd, START, capacity=4)):
        for number in range(7):
            assert known.refuses(f"b:{number}", FREED_AT + number + TICKET_LIFE_MS), number
        assert not known.refuses("living:1", FREED_AT + 3 + TICKET_LIFE_MS), "issued after the last one forgotten"
    assert os.fstat(fd).st_size == Tombstones.end_of(START, 4)


def test_repeated_free_takes_no_second_place_in_the_ring(fd: int) -> None:
    stones = Tombstones(fd, START, capacity=2)
    stones.record("b:1", FREED_AT)
    for _ in range(10):
        stones.record("b:2", FREED_AT + 1)
    assert "b:1" in stones
    assert not stones.refuses("b:3", 1)


def test_new_incarnation_begins_without_tombstones(fd: int) -> None:
    stones = Tombstones(fd, START)
    stones.record("b:1", FREED_AT)
    stones.raise_floor(FREED_AT)
    stones.clear()
    assert not Tombstones(fd, START).refuses("b:1", 1)


def test_floor_survives_a_death_while_the_ring_is_emptied(fd: int) -> None:
    stones = Tombstones(fd, START)
    stones.raise_floor(FREED_AT)
    os.ftruncate(fd, START + 4096)
    assert Tombstones(fd, START).refuses("b:1", FREED_AT)


def claims(copy: str, *, on_disk: bool = False) -> TicketClaims:
    return TicketClaims(copy, 1, 4096, READ | WRITE, FREED_AT + TICKET_LIFE_MS, 0, "life", on_disk)


@pytest.mark.parametrize("on_disk", [False, True])
def test_server_that_died_between_tombstone_and_removal_is_finished_by_the_next(tmp_path: Path, on_disk: bool) -> None:
    journal = WriteJournal.make()
    store = CopyStore(tmp_path, "life", b"k", journal)
    _, backing, _ = store.open(claims("b:1", on_disk=on_disk), FREED_AT)
    assert backing is not None
    Tombstones(journal.fd, journal.length).record("b:1", FREED_AT)  # as far as the dying server came

    after = CopyStore(tmp_path, "life", b"k", WriteJournal(os.dup(journal.fd)))
    after.take_over([] if on_disk else [CopyFile.take_over(os.dup(backing.fd))])
    assert after.held == {}
    assert after.open(claims("b:1", on_disk=on_disk), FREED_AT + 1)[0] is FrameStatus.MOVED
    assert not list(tmp_path.glob("*.block"))
    backing.close()


def test_server_that_died_before_the_tombstone_leaves_the_copy_to_the_repeated_order(tmp_path: Path) -> None:
    journal = WriteJournal.make()
    _, backing, _ = CopyStore(tmp_path, "life", b"k", journal).open(claims("b:1"), FREED_AT)
    assert backing is not None
    after = CopyStore(tmp_path, "life", b"k", WriteJournal(os.dup(journal.fd)))
    after.take_over([CopyFile.take_over(os.dup(backing.fd))])
    assert after.open(claims("b:1"), FREED_AT)[0] is FrameStatus.OK
    after.free("b:1", FREED_AT)
    assert after.open(claims("b:1"), FREED_AT)[0] is FrameStatus.MOVED
    backing.close()


def test_journal_of_a_server_without_tombstones_is_taken_over(tmp_path: Path) -> None:
    journal = WriteJournal.make()
    assert os.fstat(journal.fd).st_size == journal.length
    store = CopyStore(tmp_path, "life", b"k", WriteJournal(os.dup(journal.fd)))
    store.free("b:1", FREED_AT)
    again = CopyStore(tmp_path, "life", b"k", WriteJournal(os.dup(journal.fd)))
    assert again.open(claims("b:1"), FREED_AT)[0] is FrameStatus.MOVED
