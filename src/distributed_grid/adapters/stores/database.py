"""Schema of `grid.db`, opening it without ever harming a file that cannot be used, and opening files beside it.

- A refused file keeps every byte, and so does its `-wal`: inspection uses a plain read and a read-only connection,
  which neither recovers into the file nor checkpoints on closing.
- A new database is made beside its path and linked into place when complete; so an empty or partial `grid.db` was not
  made here and is refused like any other damaged one.
- Before a migration a backup is kept: `grid.db.v<version>.bak`.
- Database and backup are readable by their owner only; directories made here are 0700, existing ones are left as they
  are.

Opening reads the header, the schema and every live row: all the daemon is about to act on. `PRAGMA quick_check` would
read the whole file, seconds for a big history; `check_integrity` does that on demand.

What the files beside it hold is convenient, and no error of theirs stops anything.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

from distributed_grid.errors import StoreRefused
from distributed_grid.posix.private_files import sync_directory

APPLICATION_ID = 0x47524944  # "GRID"

TABLES = ("live", "ended", "events", "summaries", "marks")

Migration = Callable[[sqlite3.Connection], None]

# Totals are decimal text: a terabyte for a month, in byte-milliseconds, exceeds 64 bits.
_TABLES_SQL = """
CREATE TABLE live (
    kind TEXT NOT NULL, key TEXT NOT NULL, blob BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;

CREATE TABLE ended (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, request_id TEXT NOT NULL,
    user TEXT NOT NULL, node TEXT NOT NULL, ended_at_ms INTEGER NOT NULL, started_at_ms INTEGER NOT NULL,
    reason TEXT NOT NULL, cpu_milli INTEGER NOT NULL, memory_bytes INTEGER NOT NULL,
    gpu_milli INTEGER NOT NULL, blob BLOB NOT NULL, target TEXT NOT NULL DEFAULT '');
CREATE INDEX ended_by_time ON ended (kind, ended_at_ms);
CREATE INDEX ended_by_key ON ended (kind, key);
CREATE INDEX ended_by_request ON ended (request_id);
CREATE INDEX ended_by_user ON ended (kind, user, ended_at_ms);

CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, type TEXT NOT NULL, user TEXT NOT NULL,
    subject TEXT NOT NULL, node TEXT NOT NULL, reason TEXT NOT NULL, blob BLOB NOT NULL);
CREATE INDEX events_by_time ON events (at_ms);
CREATE INDEX events_by_subject ON events (subject);
CREATE INDEX events_by_type ON events (type);

CREATE TABLE summaries (
    day INTEGER NOT NULL, kind TEXT NOT NULL, user TEXT NOT NULL, node TEXT NOT NULL, reason TEXT NOT NULL,
    target TEXT NOT NULL DEFAULT '', count INTEGER NOT NULL, cpu_milli_ms TEXT NOT NULL,
    memory_byte_ms TEXT NOT NULL, gpu_milli_ms TEXT NOT NULL,
    PRIMARY KEY (day, kind, user, node, reason, target)) WITHOUT ROWID;

CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO marks VALUES ('last_folded_event', 0), ('times_opened', 0)
"""


def _create_tables(db: sqlite3.Connection) -> None:
    for statement in _TABLES_SQL.split(";"):
        db.execute(statement)


MIGRATIONS: Mapping[int, Migration] = {3: _create_tables}
"""The step *to* each version. A released step is never edited; a change is a new step. Versions 1 and 2 were those of
grid 0.1, whose rows this version cannot read."""


def version_of(db: sqlite3.Connection) -> int:
    """The schema version a database has."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(db: sqlite3.Connection, migrations: Mapping[int, Migration]) -> None:
    """Bring a database to the newest version in one transaction, or leave it unchanged."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        old_version = version_of(db)
        for version in sorted(migrations):
            if version > old_version:
                migrations[version](db)
        db.execute(f"PRAGMA user_version = {max(migrations)}")


REPAIR = "move it away to start afresh, or put a backup in its place"
MAGIC = b"SQLite format 3\x00"
HEADER_BYTES = 100
BUSY_TIMEOUT_MS = 5000
CHECKPOINT_PAGES = 2000
MAX_WAL_BYTES = 16 << 20
CACHE_KIB = 16 << 10


def connect(path: Path, *, writable: bool) -> sqlite3.Connection:
    """A connection in autocommit mode, usable from any thread that holds its lock."""
    uri = f"{path.absolute().as_uri()}?mode={'rw' if writable else 'ro'}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_MS / 1000)
    try:
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        if writable:
            db.execute("PRAGMA synchronous = FULL")
            db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            db.execute(f"PRAGMA journal_size_limit = {MAX_WAL_BYTES}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def prepare_database(path: Path, migrations: Mapping[int, Migration]) -> None:
    """Make `path` a sound database of the newest version, or raise and leave it untouched."""
    _make_private_directory(path.parent)
    if os.statvfs(path.parent).f_flag & os.ST_RDONLY:
        raise StoreRefused(f"{path}: is on a read-only file system; use another state directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StoreRefused(f"{path}: this user may not write there; use another state directory")
    if not path.exists() and not path.is_symlink():
        log = _with_suffix(path, "-wal")
        if log.exists() and log.stat().st_size:
            raise StoreRefused(f"{path}: is missing but its log {log.name} is not; put it back or move the log away")
        _create(path, migrations)
    _inspect_header(path, migrations)
    with closing(connect(path, writable=False)) as db:
        version = version_of(db)
        _refuse_unknown_version(path, version, migrations)
        try:
            for _ in db.execute("SELECT kind, key, blob FROM live"):
                pass
            for table in TABLES:
                db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # no such table or column
                raise StoreRefused(f"{path}: is damaged ({error}); {REPAIR}") from error
            raise
    if path.stat().st_uid == os.geteuid():
        path.chmod(0o600)
    if version < max(migrations):
        backup = path.with_name(f"{path.name}.v{version}.bak")
        unfinished = path.with_name(f"{backup.name}.new")
        _make_private_file(unfinished)
        try:
            with closing(connect(path, writable=True)) as db:
                with closing(connect(unfinished, writable=True)) as copy:
                    db.backup(copy)
                unfinished.rename(backup)
                sync_directory(path.parent)
                migrate(db, migrations)
        finally:
            _remove_with_logs(unfinished)


def _create(path: Path, migrations: Mapping[int, Migration]) -> None:
    unfinished = path.with_name(f"{path.name}.new")
    _make_private_file(unfinished)
    try:
        with closing(connect(unfinished, writable=True)) as db:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute("PRAGMA journal_mode = WAL")
            migrate(db, migrations)
        try:
            os.link(unfinished, path)  # unlike a rename, never replaces an existing file
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            unfinished.rename(path)  # the file system has no hard links
    finally:
        _remove_with_logs(unfinished)
    sync_directory(path.parent)


def _inspect_header(path: Path, migrations: Mapping[int, Migration]) -> None:
    """Refuse a file whose first 100 bytes are no header of ours, and a truncated one."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise StoreRefused(f"{path}: is not a file; move it away")
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise StoreRefused(f"{path}: is not a database; {REPAIR}")
    version, application_id = struct.unpack_from(">I4xI", header, 60)
    if application_id != APPLICATION_ID:
        raise StoreRefused(f"{path}: is a database of another program; move it away")
    _refuse_unknown_version(path, version, migrations)
    log = _with_suffix(path, "-wal")
    if log.exists() and log.stat().st_size:
        return  # the log may hold the missing part: a checkpoint was interrupted
    (page_bytes,) = struct.unpack_from(">H", header, 16)
    (pages,) = struct.unpack_from(">I", header, 28)
    if path.stat().st_size < pages * (65536 if page_bytes == 1 else page_bytes):
        raise StoreRefused(f"{path}: is damaged (cut short); {REPAIR}")


def _refuse_unknown_version(path: Path, version: int, migrations: Mapping[int, Migration]) -> None:
    newest = max(migrations)
    if 0 < version < min(migrations):
        raise StoreRefused(
            f"{path}: was made by grid 0.1, which this version cannot read; end all jobs with grid 0.1, then move the"
            " file away to start afresh"
        )
    if version > newest:
        raise StoreRefused(
            f"{path}: has schema version {version}, this program knows up to {newest}; use the newer program,"
            " or move the file away to start afresh"
        )


def _make_private_directory(directory: Path) -> None:
    if not directory.exists():
        _make_private_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        sync_directory(directory.parent)


def _make_private_file(path: Path) -> None:
    """An empty file that nobody else can read, in place of a remainder of a crash."""
    _remove_with_logs(path)
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    os.fchmod(handle, 0o600)
    os.close(handle)


def _remove_with_logs(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        _with_suffix(path, suffix).unlink(missing_ok=True)


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def open_auxiliary_file(path: Path, version: int, statements: Iterable[str]) -> sqlite3.Connection:
    """Open a private file (0600) with this version of its tables, made by the statements where they are missing.

    `sqlite3.DatabaseError` where it is damaged or of another version. Used by one thread at a time.
    """
    path.touch(mode=0o600)
    db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        (stored_version,) = db.execute("PRAGMA user_version").fetchone()
        if stored_version not in (0, version):
            raise sqlite3.DatabaseError(f"it has version {stored_version}, this program knows {version}")
        for statement in statements:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()
    except BaseException:
        db.close()
        raise
    return db
