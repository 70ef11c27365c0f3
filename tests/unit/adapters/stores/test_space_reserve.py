"""Space reserve: on a full disk there is room for ends and cancels, and for nothing else that fills the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.ports import Batch, LiveRow
from tests.support.small_disks import SmallDisk, small_disk
from tests.support.store_contract import an_ended, an_event

__all__ = ["small_disk"]
DISK_BYTES = 64 << 20
ENDS = 200


def test_a_full_disk_has_no_room_but_ends_are_stored(small_disk: Callable[..., SmallDisk], tmp_path: Path) -> None:
    disk = small_disk(tmp_path / "disk", DISK_BYTES)
    store = SqliteStore(disk.place / "grid.db")
    store.commit(Batch([LiveRow("job", str(n), b"x" * 1000) for n in range(ENDS)]))
    store.fill_reserve()
    assert store.has_room()
    disk.fill()
    assert not store.has_room()
    for n in range(ENDS):
        store.commit(Batch([LiveRow("job", str(n), None)], [an_ended(f"E{n}")], [an_event(n + 1)]))
        store.commit(Batch([LiveRow("lease", str(n), b"x" * 1000)]))
    store.close()

    disk.free()
    store = SqliteStore(disk.place / "grid.db")
    store.fill_reserve()
    assert store.has_room(), "the reserve is filled again"
    disk.fill()
    assert not store.has_room()
    store.commit(Batch([], [an_ended("last")], [an_event(ENDS + 1)]))
    assert len(store.ended("lease", limit=2 * ENDS)) == ENDS + 1
    assert store.check_integrity() == ()
    store.close()


def test_the_reserve_is_used_also_by_the_process_after_one_that_was_killed(
    small_disk: Callable[..., SmallDisk], tmp_path: Path
) -> None:
    disk = small_disk(tmp_path / "disk", DISK_BYTES)
    killed = SqliteStore(disk.place / "grid.db")
    killed.fill_reserve()
    assert killed.has_room()
    disk.fill()
    heir = SqliteStore(disk.place / "grid.db")  # the first has not closed anything
    assert not heir.has_room()
    heir.commit(Batch([], [an_ended("E")], [an_event(1)]))
    assert len(heir.ended("lease")) == 1
    heir.close()
    killed.close()


def test_filling_a_full_reserve_changes_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "grid.db")
    store.fill_reserve()
    before = {file.name: file.stat().st_blocks for file in tmp_path.iterdir()}
    store.fill_reserve()
    assert {file.name: file.stat().st_blocks for file in tmp_path.iterdir()} == before
    store.close()
