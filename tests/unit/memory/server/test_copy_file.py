"""Copies as files: state in the file alone, and state finished by a journal."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, FILL, READ, WRITE, FrameStatus, TicketClaims, digest_of
from distributed_grid.memory.server.copy_file import CopyFile, file_bytes, load_copies
from distributed_grid.memory.server.copy_store import CopyStore
from distributed_grid.memory.server.write_journal import WriteJournal
from distributed_grid.posix.boot_clock import boot_ms


def a_copy(size: int, folder: Path | None = None, name: str = "mem-1:1") -> CopyFile:
    made = CopyFile.make(name, size, folder)
    made.generation, made.ends_boot_ms = 7, 123
    made.save()
    return made


def whole(backing: CopyFile) -> bytes:
    return os.pread(backing.fd, backing.size, 0)


def fill(backing: CopyFile, index: int, letter: bytes) -> bytes:
    data = letter * backing.chunk_length(index)
    backing.write(memoryview(data), index * CHUNK_BYTES)
    backing.set_digest(index, digest_of(data))
    return data


@pytest.mark.parametrize("size", [1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES - 3])
def test_the_descriptor_alone_says_everything(size: int) -> None:
    made = a_copy(size)
    last = len(made.digests) - 1
    fill(made, last, b"z")
    made.frozen = True
    made.save()
    found = CopyFile.take_over(os.dup(made.fd))
    assert (found.copy, found.size, found.generation, found.ends_boot_ms) == ("mem-1:1", size, 7, 123)
    assert found.frozen
    assert found.complete
    assert found.digests == made.digests
    assert whole(found) == whole(made)
    made.close()
    found.close()


def test_a_chunk_whose_writer_died_reads_as_zeros_in_the_next_life() -> None:
    made = a_copy(3 * CHUNK_BYTES)
    kept = fill(made, 1, b"k")
    made.write(memoryview(b"half" * 1000), 0)  # died before the digest
    made.write(memoryview(b"half" * 1000), 2 * CHUNK_BYTES)
    found = CopyFile.take_over(os.dup(made.fd))
    assert whole(found) == bytes(CHUNK_BYTES) + kept + bytes(CHUNK_BYTES)
    made.close()
    found.close()


def test_a_file_that_holds_no_copy_is_refused_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(10_000))
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ProtocolError):
        CopyFile.take_over(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_empty_copy_takes_next_to_no_memory() -> None:
    made = a_copy(64 * CHUNK_BYTES)
    assert made.resident_bytes <= 8192
    fill(made, 3, b"x")
    assert CHUNK_BYTES <= made.resident_bytes <= CHUNK_BYTES + 16384
    made.close()


def test_a_copy_on_disk_is_private_and_found_again(tmp_path: Path) -> None:
    made = a_copy(CHUNK_BYTES + 5, tmp_path)
    data = fill(made, 1, b"d")
    unfinished = a_copy(10, tmp_path, "mem-2:1")
    unfinished.complete = False
    unfinished.save()
    made.close()
    unfinished.close()
    (path,) = [one for one in tmp_path.iterdir() if "mem-1" in one.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (found,) = load_copies(tmp_path)
    assert found.copy == "mem-1:1"
    assert whole(found) == bytes(CHUNK_BYTES) + data
    assert [one.name for one in tmp_path.iterdir()] == [path.name], "a fill that never ended was left"
    found.remove()
    assert not list(tmp_path.iterdir())


def test_the_layout_keeps_tiny_copies_small() -> None:
    assert file_bytes(1) == 2 * 4096


@pytest.mark.parametrize("copied", [0, 1000, 5000])
def test_an_intent_is_finished_by_the_next_server_however_far_it_came(copied: int, tmp_path: Path) -> None:
    made, journal = a_copy(2 * CHUNK_BYTES), WriteJournal.make()
    before = bytearray(fill(made, 0, b"a") + fill(made, 1, b"b"))
    slot, data = journal.slots[3], os.urandom(5000)
    slot.view[:5000] = data
    journal.record_intent(slot, "mem-1:1", CHUNK_BYTES + 100, 5000)
    made.write(memoryview(data)[:copied], CHUNK_BYTES + 100)  # and then it was killed

    taken = CopyStore(tmp_path, "life", b"k", WriteJournal(os.dup(journal.fd)))
    found = CopyFile.take_over(os.dup(made.fd))
    assert taken.take_over([found]) == 1
    before[CHUNK_BYTES + 100 : CHUNK_BYTES + 5100] = data
    assert whole(found) == before
    assert found.digests[1] == digest_of(before[CHUNK_BYTES:])
    assert taken.take_over([found]) == 0, "it was finished twice"
    made.close()
    found.close()


def test_what_was_never_intended_is_not_replayed(tmp_path: Path) -> None:
    made, journal = a_copy(CHUNK_BYTES), WriteJournal.make()
    before = fill(made, 0, b"a")
    journal.slots[1].view[:100] = bytes(100)  # received, but it was killed before the intent
    store = CopyStore(tmp_path, "life", b"k", WriteJournal(os.dup(journal.fd)))
    assert store.take_over([made]) == 0
    assert whole(made) == before
    made.close()


def a_store(tmp_path: Path) -> CopyStore:
    return CopyStore(tmp_path, "life", b"k", WriteJournal.make())


def claims(generation: int = 1, rights: int = READ | WRITE, **other: object) -> TicketClaims:
    return TicketClaims("m:1", generation, 2 * CHUNK_BYTES, rights, boot_ms() + 60_000, 0, "life", **other)  # type: ignore[arg-type]


def test_a_freed_copy_is_not_made_again_by_an_old_ticket(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert store.open(claims(), boot_ms())[0] is FrameStatus.OK
    store.free("m:1", boot_ms())
    assert store.open(claims(), boot_ms())[0] is FrameStatus.MOVED
    store.free("m:2", boot_ms())  # never here: a ticket for it may be on its way
    assert store.open(TicketClaims("m:2", 1, 5, 3, boot_ms() + 9000, 0, "life"), boot_ms())[0] is FrameStatus.MOVED


def test_generations_only_grow_and_a_new_one_thaws(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    _, backing, _ = store.open(claims(2), boot_ms())
    assert backing is not None
    store.freeze(backing)
    assert store.open(claims(1), boot_ms())[0] is FrameStatus.STALE
    assert store.open(claims(2), boot_ms())[0] is FrameStatus.OK
    assert backing.frozen
    assert store.open(claims(3), boot_ms())[0] is FrameStatus.OK
    assert not backing.frozen
    assert backing.generation == 3
    store.free("m:1", boot_ms())


def test_a_copy_that_is_being_filled_is_nobody_elses(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    status, backing, is_new = store.open(claims(2, READ | WRITE | FILL), boot_ms())
    assert (status, is_new) == (FrameStatus.OK, True)
    assert store.open(claims(2), boot_ms())[0] is FrameStatus.FROZEN
    assert backing is not None
    store.end_fill(backing)
    assert store.open(claims(2), boot_ms())[0] is FrameStatus.OK
    store.free("m:1", boot_ms())


def test_a_part_of_a_damaged_chunk_is_neither_read_nor_written(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    _, backing, _ = store.open(claims(), boot_ms())
    assert backing is not None
    fill(backing, 0, b"a")
    os.pwrite(backing.fd, b"!", 77)
    assert store.read(backing, 1000, memoryview(bytearray(10))) == -1
    slot = store.staging.acquire()
    slot.view[:4] = b"data"
    assert store.write(backing, 1000, slot, 4, digest_of(b"data")) is FrameStatus.CORRUPT
    store.free("m:1", boot_ms())


def test_an_overwritten_disk_copy_is_finished_by_the_journal_beside_it(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    _, backing, _ = store.open(claims(on_disk=True), boot_ms())
    assert backing is not None
    slot = store.staging.acquire()
    for letter in (b"a", b"b"):
        slot.view[:] = letter * CHUNK_BYTES
        assert store.write(backing, 0, slot, CHUNK_BYTES, digest_of(slot.view)) is FrameStatus.OK
    journal = WriteJournal(os.open(tmp_path / "journal", os.O_RDWR), slots=1)
    journal.slots[0].view[:] = b"c" * CHUNK_BYTES
    journal.record_intent(journal.slots[0], "m:1", 0, CHUNK_BYTES)  # and then every process died
    backing.close()
    again = a_store(tmp_path)
    assert again.take_over([]) == 1
    assert whole(again.held["m:1"])[:CHUNK_BYTES] == b"c" * CHUNK_BYTES
    again.free("m:1", boot_ms())
    assert [one.name for one in tmp_path.iterdir()] == ["journal"]
