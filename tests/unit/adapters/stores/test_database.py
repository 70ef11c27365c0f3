"""A database that cannot be used is refused in one line, and keeps every byte."""

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from distributed_grid.adapters.stores.database import MIGRATIONS, TABLES, Migration, connect
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.errors import StoreFailed, StoreRefused
from distributed_grid.ports import Batch, LiveRow
from tests.support.store_contract import an_ended, an_event


def add_a_note(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE ended ADD COLUMN note TEXT NOT NULL DEFAULT ''")


def break_halfway(db: sqlite3.Connection) -> None:
    db.execute("DROP TABLE live")
    db.execute("CREATE TABLE")


NEWEST = max(MIGRATIONS)
NEXT: Mapping[int, Migration] = {**MIGRATIONS, NEWEST + 1: add_a_note}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "grid.db"


@pytest.fixture
def filled(path: Path) -> Path:
    """A closed database with a few hundred rows of each sort."""
    store = SqliteStore(path)
    live = [LiveRow("lease", f"L{n:04}", b"x" * 100) for n in range(300)]
    store.commit(Batch(live, [an_ended(f"E{n}") for n in range(300)], [an_event(n + 1) for n in range(300)]))
    store.close()
    return path


def leave_in_the_log(path: Path, *statements: str) -> None:
    """Run statements in a process that dies before anything leaves the log."""
    program = (
        "import sqlite3, os, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA wal_autocheckpoint = 0')\n"
        "[db.execute(statement) for statement in sys.argv[2:]]\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path), *statements], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.with_name("grid.db-wal").stat().st_size > 0


def contents(path: Path) -> dict[str, bytes]:
    """Content of the database and its log; the -shm file is no data, and an empty log is none either."""
    files = [path, path.with_name("grid.db-wal")]
    return {file.name: file.read_bytes() for file in files if file.is_file() and file.stat().st_size}


@contextmanager
def refusal(path: Path, match: str) -> Iterator[None]:
    before = contents(path)
    with pytest.raises(StoreRefused, match=match) as caught:
        yield
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert contents(path) == before


@pytest.mark.parametrize("content", [b"", b"hello", b"SQLite format 3\x00", b"PK\x03\x04" + bytes(5000)])
def test_what_is_no_database_is_refused(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with refusal(path, "not a database; move it away"):
        SqliteStore(path)


def test_a_database_of_another_program_is_refused(path: Path) -> None:
    path.parent.mkdir()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE live (kind, key, blob)")
    db.close()
    with refusal(path, "of another program"):
        SqliteStore(path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_not_even_a_file_is_refused(path: Path, make) -> None:
    path.parent.mkdir()
    make(path)
    with refusal(path, "not a file"):
        SqliteStore(path)


def test_a_link_to_nowhere_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(path.with_name("gone"))
    with refusal(path, "No such file"):
        SqliteStore(path)


def test_a_file_cut_short_is_refused(filled: Path) -> None:
    os.truncate(filled, filled.stat().st_size - 5000)
    with refusal(filled, "cut short"):
        SqliteStore(filled)


@pytest.mark.parametrize("log", [False, True], ids=["clean", "with a log"])
def test_damaged_live_rows_are_refused(filled: Path, log: bool) -> None:
    if log:
        leave_in_the_log(filled, "UPDATE marks SET value = 5")
    with filled.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(filled.stat().st_size - 4096))
    with refusal(filled, "damaged"):
        SqliteStore(filled)


@pytest.mark.parametrize("table", TABLES)
def test_a_missing_table_is_refused(filled: Path, table: str) -> None:
    db = sqlite3.connect(filled)
    db.execute(f"DROP TABLE {table}")
    db.close()
    with refusal(filled, rf"damaged \(no such table: {table}\)"):
        SqliteStore(filled)


def test_damage_in_old_history_does_not_stop_the_grid_but_is_found_by_a_check(filled: Path) -> None:
    db = sqlite3.connect(filled)
    (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'events_by_subject'").fetchone()
    db.close()
    with filled.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    store = SqliteStore(filled)
    assert len(store.load().live) == 300
    assert store.check_integrity() != ()
    with pytest.raises(StoreRefused, match="damaged"):
        store.events(subject="L1")
    with pytest.raises(StoreRefused, match="damaged"):
        store.commit(Batch([LiveRow("k", "a", b"")], [], [an_event(1000)]))
    assert len(store.load().live) == 300
    store.close()


def test_a_sound_file_passes_the_check(filled: Path) -> None:
    store = SqliteStore(filled)
    assert store.check_integrity() == ()
    store.close()


def test_a_newer_version_is_refused(filled: Path) -> None:
    SqliteStore(filled, migrations=NEXT).close()
    with refusal(filled, f"schema version {NEWEST + 1}, this program knows up to {NEWEST}; use the newer program"):
        SqliteStore(filled)


def test_a_newer_version_that_is_only_in_the_log_is_refused(filled: Path) -> None:
    leave_in_the_log(filled, "PRAGMA user_version = 9")
    with refusal(filled, "schema version 9"):
        SqliteStore(filled)


def test_a_log_without_its_database_is_refused(filled: Path) -> None:
    leave_in_the_log(filled, "UPDATE marks SET value = 5")
    filled.unlink()
    with refusal(filled, "grid.db-wal"):
        SqliteStore(filled)
    assert not filled.exists()


def test_an_older_version_is_migrated_and_a_backup_kept(filled: Path) -> None:
    leave_in_the_log(filled, "INSERT INTO live VALUES ('lease', 'from-the-log', x'01')")
    store = SqliteStore(filled, migrations=NEXT)
    assert store.load().schema_version == NEWEST + 1
    assert LiveRow("lease", "from-the-log", b"\x01") in store.load().live
    assert len(store.ended("lease", limit=1000)) == 300
    store.commit(Batch(ended=[an_ended("after")]))
    store.close()
    backup = filled.with_name(f"grid.db.v{NEWEST}.bak")
    assert backup.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in filled.parent.iterdir()) == ["grid.db", backup.name]
    old = SqliteStore(backup)
    assert LiveRow("lease", "from-the-log", b"\x01") in old.load().live
    assert old.ended("lease", key="after") == []
    old.close()


def test_a_migration_that_fails_changes_nothing(filled: Path) -> None:
    before = SqliteStore(filled)
    live = before.load().live
    before.close()
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError):
            SqliteStore(filled, migrations={**MIGRATIONS, NEWEST + 1: break_halfway})
    store = SqliteStore(filled)
    assert (store.load().live, store.load().schema_version) == (live, NEWEST)
    store.close()
    assert sorted(file.name for file in filled.parent.iterdir()) == ["grid.db", f"grid.db.v{NEWEST}.bak"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_database_of_grid_0_1_is_refused_with_what_to_do(filled: Path, version: int) -> None:
    with closing(sqlite3.connect(filled)) as old:
        old.execute(f"PRAGMA user_version = {version}")
    with refusal(filled, r"made by grid 0\.1, which this version cannot read; end all jobs with grid 0\.1, then move"):
        SqliteStore(filled)


def test_a_read_only_file_system_is_refused(filled: Path, mount) -> None:
    mount("--bind", str(filled.parent), str(filled.parent))
    mount("-o", "remount,ro,bind", str(filled.parent))
    with refusal(filled, "read-only file system"):
        SqliteStore(filled)
    with pytest.raises(StoreRefused, match=r"[Rr]ead-only file system"):
        SqliteStore(filled.parent / "new" / "grid.db")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreRefused, match="Not a directory"):
        SqliteStore(tmp_path / "file" / "state" / "grid.db")


def test_a_full_disk_is_refused_at_opening_and_leaves_nothing_behind(small_disk: Path) -> None:
    path = small_disk / "grid.db"
    fill(small_disk)
    with refusal(path, "bytes free"):
        SqliteStore(path)
    assert [file.name for file in small_disk.iterdir()] == ["ballast"]
    (small_disk / "ballast").unlink()
    store = SqliteStore(path)
    store.commit(Batch(live=[LiveRow("k", "a", b"1")]))
    store.close()
    fill(small_disk)
    with refusal(path, "bytes free"):
        SqliteStore(path)
    (small_disk / "ballast").unlink()
    store = SqliteStore(path)
    assert store.load().live == [LiveRow("k", "a", b"1")]
    store.close()


def test_a_disk_that_fills_up_fails_the_batch_and_nothing_else(small_disk: Path) -> None:
    path = small_disk / "grid.db"
    store = SqliteStore(path)
    fill(small_disk, leaving=100_000)
    stored = 0

    def commit_until_it_fails() -> None:
        nonlocal stored
        while True:
            row = LiveRow("k", str(stored + 1), b"x" * 5000)
            store.commit(Batch([row], [an_ended()], [an_event(stored + 1)]))
            stored += 1

    with pytest.raises(StoreFailed, match="full"):
        commit_until_it_fails()
    assert stored > 0
    for _ in range(3):
        with pytest.raises(StoreFailed) as caught:
            store.commit(Batch(live=[LiveRow("k", f"big{n}", b"x" * 50_000) for n in range(9)]))
        assert caught.value.retryable
        assert (len(store.load().live), store.load().last_event_seq) == (stored, stored)
    (small_disk / "ballast").unlink()
    store.commit(Batch([LiveRow("k", "later", b"x" * 5000)], [], [an_event(stored + 1)]))
    store.close()
    store = SqliteStore(path)
    assert (len(store.load().live), store.load().last_event_seq) == (stored + 1, stored + 1)
    assert len(store.ended("lease")) == stored
    assert store.check_integrity() == ()
    store.close()


@contextmanager
def failing_writes() -> Iterator[None]:
    """No file of this process grows: SQLite calls that an I/O error, whatever room the disk has."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


A_BATCH = Batch(live=[LiveRow("k", "a", b"1")])


def test_io_errors_that_pass_leave_no_trace(filled: Path) -> None:
    store = SqliteStore(filled, max_io_errors=3, io_error_seconds=0)
    for turn in range(3):
        batch = Batch(live=[LiveRow("k", str(turn), b"1")])
        for _ in range(2):
            with failing_writes(), pytest.raises(StoreFailed, match="I/O error"):
                store.commit(batch)
        store.commit(batch)
    assert [row.key for row in store.load().live if row.kind == "k"] == ["0", "1", "2"]
    store.close()


def test_io_errors_that_do_not_pass_are_final_and_the_next_store_works(filled: Path) -> None:
    store = SqliteStore(filled, max_io_errors=3, io_error_seconds=0)
    with failing_writes():
        for _ in range(2):
            with pytest.raises(StoreFailed):
                store.commit(A_BATCH)
        with pytest.raises(StoreRefused, match="3 I/O errors in a row: its disk is broken") as caught:
            store.commit(A_BATCH)
    assert "\n" not in str(caught.value)
    for use in (lambda: store.commit(A_BATCH), store.load):
        with pytest.raises(StoreRefused, match="its disk is broken"):
            use()
    store.close()
    store = SqliteStore(filled)
    store.commit(A_BATCH)
    store.close()


def test_io_errors_in_a_row_are_not_final_at_once(filled: Path) -> None:
    store = SqliteStore(filled, max_io_errors=3)
    with failing_writes():
        for _ in range(9):
            with pytest.raises(StoreFailed):
                store.commit(A_BATCH)
    store.commit(A_BATCH)
    store.close()


def fill(disk: Path, *, leaving: int = 0) -> None:
    system = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(system.f_bavail * system.f_frsize - leaving))


def test_a_locked_database_fails_and_works_again(filled: Path) -> None:
    store = SqliteStore(filled)
    store._writer.execute("PRAGMA busy_timeout = 20")
    other = connect(filled, writable=True)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreFailed, match="locked"):
        store.commit(Batch(live=[LiveRow("k", "a", b"1")]))
    other.execute("ROLLBACK")
    other.close()
    store.commit(Batch(live=[LiveRow("k", "a", b"1")]))
    store.close()


def test_a_database_whose_directory_was_removed_is_refused_and_not_tried_again(filled: Path) -> None:
    store = SqliteStore(filled)
    shutil.rmtree(filled.parent)
    with pytest.raises(StoreRefused, match="was replaced or removed"):
        store.load()
    with pytest.raises(StoreRefused, match="was replaced or removed"):
        store.commit(Batch([LiveRow("node", "n1", b"x")], [], []))
    store.close()
