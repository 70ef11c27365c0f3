"""Acknowledged rows survive a crash; files are private; the log and the file stay bounded."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.ports import Batch, EventRow, LiveRow
from tests.support.store_contract import DAY_MS, an_ended, an_event

WRITER = """
import sys
from pathlib import Path
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.ports import Batch, EventRow, LiveRow
from tests.support.store_contract import an_ended, an_event

store = SqliteStore(Path(sys.argv[1]))
n = store.load().last_event_seq
while True:
    n += 1
    text = str(n).encode()
    ended = [an_ended(str(n), at_ms=n), an_ended(str(n), kind="job", at_ms=n)]
    live = {"first": text, str(n): b"x" * (n % 7 * 1000), "last": text}
    store.commit(Batch([LiveRow("k", key, blob) for key, blob in live.items()], ended, [an_event(n)]))
    if n % 50 == 0:
        store.summarise(before_ms=n - 100, limit=40)
    print(n, flush=True)
"""


def test_a_number_beyond_64_bits_leaves_the_store_as_it_was_and_is_not_worth_trying_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "grid.db")
    store.commit(Batch([LiveRow("k", "kept", b"1")], [], [an_event(1)]))
    with pytest.raises(OverflowError):
        store.commit(Batch([LiveRow("k", "other", b"2")], [an_ended("a", at_ms=2**63)], [an_event(2)]))
    store.commit(Batch([], [], [an_event(2)]))
    assert [row.key for row in store.load().live] == ["kept"]
    store.close()


class HeldTypes(Sequence[str]):
    """Types of events that are read out only when the test says so."""

    def __init__(self) -> None:
        self.is_read, self.may_go_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: Any) -> Any:
        self.is_read.set()
        assert self.may_go_on.wait(20)
        return ["LeaseGranted"][at]


def test_a_long_read_delays_neither_a_commit_nor_another_read(tmp_path: Path) -> None:
    store, types, found = SqliteStore(tmp_path / "grid.db"), HeldTypes(), list[EventRow]()
    store.commit(Batch([], [], [an_event(1)]))
    reading = threading.Thread(target=lambda: found.extend(store.events(types=types)))
    reading.start()
    assert types.is_read.wait(20)
    store.commit(Batch([], [an_ended("L9", at_ms=9)], [an_event(2)]))
    assert [row.key for row in store.ended("lease")] == ["L9"]
    assert [row.seq for row in store.events()] == [1, 2]
    types.may_go_on.set()
    reading.join(20)
    assert found[0].seq == 1
    store.close()


@pytest.mark.parametrize("acknowledged", [1, 30, 150])
def test_a_killed_writer_loses_nothing_it_acknowledged_and_tears_no_batch(tmp_path: Path, acknowledged: int) -> None:
    path = tmp_path / "grid.db"
    for life in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(acknowledged):
                writer.stdout.readline()
            time.sleep(0.0007 * life)  # somewhere in the middle of a commit
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
        store = SqliteStore(path)
        loaded = store.load()
        last = loaded.last_event_seq
        assert last >= int(rest[-1] if rest else acknowledged * (life + 1))
        live = {row.key: row.blob for row in loaded.live}
        assert live["first"] == live["last"] == str(last).encode()
        assert len(live) == last + 2
        assert store.ended("lease", limit=1)[0].key == store.ended("job", limit=1)[0].key == str(last)
        kept = len(store.events()) + len(store.ended("lease", limit=10**6)) + len(store.ended("job", limit=10**6))
        assert kept + sum(row.count for row in store.summaries()) == 3 * last
        assert store.check_integrity() == ()
        store.close()


def test_files_and_the_directories_made_for_them_are_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "state" / "hosts" / "grid.db"
    before = os.umask(0)
    try:
        store = SqliteStore(path)
        store.commit(Batch(live=[LiveRow("k", "a", b"1")]))
    finally:
        os.umask(before)
    files = list(path.parent.iterdir())
    assert sorted(file.name for file in files) == ["grid.db", "grid.db-shm", "grid.db-wal"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {place.stat().st_mode & 0o777 for place in (path.parent, path.parent.parent)} == {0o700}
    store.close()
    assert [file.name for file in path.parent.iterdir()] == ["grid.db"]


def test_a_directory_that_was_there_keeps_its_mode_and_a_wider_file_is_tightened(tmp_path: Path) -> None:
    path = tmp_path / "grid.db"
    tmp_path.chmod(0o755)
    SqliteStore(path).close()
    path.chmod(0o644)
    SqliteStore(path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_creation_that_crashed_left_behind_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "grid.db.new").write_bytes(b"half a database")
    (tmp_path / "grid.db.new-wal").write_bytes(b"half a log")
    SqliteStore(tmp_path / "grid.db").close()
    assert [file.name for file in tmp_path.iterdir()] == ["grid.db"]


def test_the_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "grid.db")
    for n in range(300):
        store.commit(Batch(live=[LiveRow("k", str(n % 20), bytes(200_000))]))
    assert (tmp_path / "grid.db-wal").stat().st_size < 20 << 20
    store.close()


def test_the_file_shrinks_when_history_was_folded(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "grid.db")
    store.commit(Batch(ended=[an_ended(str(n), blob=bytes(4000)) for n in range(4000)]))
    while store.summarise(before_ms=DAY_MS):
        pass
    store.close()
    assert (tmp_path / "grid.db").stat().st_size < 5 << 20


def test_a_row_that_cannot_be_stored_leaves_its_batch_out_altogether(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "grid.db")
    with pytest.raises(OverflowError):
        store.commit(Batch([LiveRow("k", "a", b"1")], [an_ended(cpu_milli=2**70)], [an_event(1)]))
    assert (store.load().live, store.load().last_event_seq) == ([], 0)
    store.commit(Batch([LiveRow("k", "a", b"1")], [], [an_event(1)]))
    store.close()
