"""SQLite store: `grid.db`, one file in WAL mode, synced on every commit.

When `commit` returns, the batch survives a crash and a power cut; when it raises, the store is unchanged and works
again once the cause is gone. A full or busy disk may last; I/O errors that do not pass are final.

One connection writes, and every read has one of its own: reading history delays neither a commit nor another reader,
and a commit that waits for the disk delays no reader. One `SqliteStore` per file and process: SQLite's locks belong to
the process.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Unpack

from msgspec.structs import astuple

from distributed_grid.adapters.stores import history_queries
from distributed_grid.adapters.stores.database import (
    MIGRATIONS,
    REPAIR,
    Migration,
    connect,
    prepare_database,
    version_of,
)
from distributed_grid.adapters.stores.history_queries import last_seq_after
from distributed_grid.adapters.stores.space_reserve import SpaceReserve
from distributed_grid.errors import StoreFailed, StoreRefused
from distributed_grid.ports import (
    Batch,
    EndedFilters,
    EndedRow,
    EventFilters,
    EventRow,
    LentRow,
    LiveRow,
    LoadedRows,
    NumberedRow,
    SummaryRow,
)

_TRANSIENT = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PROTOCOL,
}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
LOW_SPACE_BYTES = 1 << 20
MAX_IO_ERRORS, IO_ERROR_SECONDS = 10, 60.0
"""Number and duration of I/O errors in a row after which the disk counts as broken."""


@contextmanager
def translate_sqlite_errors(path: Path, action: str) -> Iterator[None]:
    """Raise SQLite's errors in the body as the grid's own.

    What may pass (full, busy, an I/O error, read-only for now) is `StoreFailed`, worth trying again; damage is
    `StoreRefused`. Anything else (a number beyond 64 bits, a constraint) is the fault of what was to be stored, and is
    raised as it is: trying again does not help.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if primary in _TRANSIENT:
            raise StoreFailed(f"{path}: could not {action}: {error}{low_space_note(path.parent)}") from error
        if primary in _DAMAGED:
            raise StoreRefused(f"{path}: is damaged ({error}); {REPAIR}") from error
        raise


@contextmanager
def refuse_on_failure(path: Path) -> Iterator[None]:
    """Raise every failure of the body as `StoreRefused`: without the database nothing can start."""
    try:
        with translate_sqlite_errors(path, "open it"):
            yield
    except StoreFailed as error:
        raise StoreRefused(f"{error}; fix that and start again") from error
    except OSError as error:
        problem = f"{path}: could not open it: {error.strerror}{low_space_note(path.parent)}"
        raise StoreRefused(f"{problem}; fix that and start again") from error


def low_space_note(directory: Path) -> str:
    """How little space there is, or nothing when there is enough."""
    try:
        system = os.statvfs(directory)
    except OSError:
        return ""
    free = system.f_bavail * system.f_frsize
    return f" ({free} bytes free on that disk)" if free < LOW_SPACE_BYTES else ""


class IoErrorCount:
    """I/O errors in a row; one of a disk that is all but full may pass as long as that lasts."""

    def __init__(self, path: Path, max_errors: int, seconds: float) -> None:
        self._path = path
        self._max_errors = max_errors
        self._seconds = seconds
        self._errors = 0
        self._since = 0.0

    def add(self, error: BaseException | None) -> None:
        """Count an error if it is one; StoreRefused where there were too many for too long."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_IOERR and not low_space_note(self._path.parent):
            self._since = self._since or time.monotonic()
            self._errors += 1
        self.check()

    def check(self) -> None:
        """Raise StoreRefused where the disk counts as broken."""
        if self._errors >= self._max_errors and time.monotonic() - self._since >= self._seconds:
            raise StoreRefused(f"{self._path}: {self._errors} I/O errors in a row: its disk is broken")

    def reset(self) -> None:
        """Something was written."""
        self._errors, self._since = 0, 0.0


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


IDLE_READERS = 4
FOLD_STEP_ROWS = 200
VACUUM_STEP_PAGES = 200
VACUUM_STEPS = 10
MIN_FREE_PAGES = 1000

_PUT = "INSERT INTO live VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET blob = excluded.blob"
_REMOVE = "DELETE FROM live WHERE kind = ? AND key = ?"
_LIVE = "SELECT kind, key, blob FROM live ORDER BY kind, key"


class SqliteStore:
    """The `Store` port on one SQLite file, which is created with its directory when missing."""

    def __init__(
        self,
        path: Path,
        *,
        migrations: Mapping[int, Migration] = MIGRATIONS,
        max_io_errors: int = MAX_IO_ERRORS,
        io_error_seconds: float = IO_ERROR_SECONDS,
    ) -> None:
        """Open or create; `StoreRefused` has the problem and the remedy in one line."""
        self._path = path
        self._io_errors = IoErrorCount(path, max_io_errors, io_error_seconds)
        self._writing = threading.Lock()
        self._readers: list[sqlite3.Connection] = []
        self._closed = threading.Event()
        with refuse_on_failure(path):
            prepare_database(path, migrations)
            self._writer = connect(path, writable=True)
            self._file = _identity(path)
            self._reserve = SpaceReserve(path)
            try:
                # One small durable write, so that a full or failing disk is reported at start.
                with self._writer as db:
                    db.execute("BEGIN IMMEDIATE")
                    db.execute("UPDATE marks SET value = value + 1 WHERE name = 'times_opened'")
                self._readers.append(connect(path, writable=False))
                self._last_event_seq = history_queries.last_event_seq(self._writer)
            except sqlite3.Error:
                self._writer.close()
                raise

    def load(self) -> LoadedRows:
        """All live rows, by kind and key, from one snapshot: as they are in the file, whatever was read before."""
        with self._counting("read it"):
            self._check_file()  # first: a file that is gone cannot be opened either, which might pass
            with closing(connect(self._path, writable=False)) as db, db:
                self._check_file()
                db.execute("BEGIN")
                live = [LiveRow(*row) for row in db.execute(_LIVE)]
                return LoadedRows(live, history_queries.last_event_seq(db), version_of(db))

    def commit(self, batch: Batch) -> None:
        """Make the batch durable in one transaction, or leave everything as it was."""
        last_live = {(row.kind, row.key): row for row in batch.live}
        put = [astuple(row) for row in last_live.values() if row.blob is not None]
        remove = [key for key, row in last_live.items() if row.blob is None]
        with self._writing, self._counting("write to it"):
            self._check_file()
            last_seq = last_seq_after(batch.events, self._last_event_seq)

            def write() -> None:
                with self._writer as db:
                    db.execute("BEGIN IMMEDIATE")
                    db.executemany(_PUT, put)
                    db.executemany(_REMOVE, remove)
                    db.executemany(history_queries.INSERT_ENDED, map(astuple, batch.ended))
                    db.executemany(history_queries.INSERT_EVENT, map(astuple, batch.events))

            try:
                write()
            except sqlite3.OperationalError:
                if not low_space_note(self._path.parent):
                    raise
                # The log has used its blocks: with its pages in the database it is written from its beginning.
                self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                write()
            self._last_event_seq = last_seq
            self._io_errors.reset()

    def has_room(self) -> bool:
        return self._reserve.has_room()

    def fill_reserve(self) -> None:
        """Fill the reserve where it was used and there is room for it."""
        with self._writing, self._counting("reserve space for it"):
            self._reserve.fill(self._writer)

    @contextmanager
    def _counting(self, action: str) -> Iterator[None]:
        """Translate errors and count those of the disk: after too many tries a failure is final, until the file is
        opened anew."""
        self._io_errors.check()
        try:
            with translate_sqlite_errors(self._path, action):
                yield
        except StoreFailed as failure:
            self._io_errors.add(failure.__cause__)
            raise

    def _check_file(self) -> None:
        """Raise StoreRefused where another file is in the place of the one that is open: nobody would ever read what
        is written to that."""
        try:
            is_same = _identity(self._path) == self._file
        except FileNotFoundError:
            is_same = False
        except OSError as error:
            raise StoreFailed(f"{self._path}: could not look at it: {error.strerror}") from error
        if not is_same:
            raise StoreRefused(f"{self._path}: was replaced or removed while it was in use")

    def ended(self, kind: str, *, limit: int = 100, **filters: Unpack[EndedFilters]) -> list[EndedRow]:
        with self._reader() as db:
            return history_queries.select_ended(db, kind, filters, limit)

    def last_ended_number(self) -> int:
        with self._reader() as db:
            return history_queries.select_last_ended_number(db)

    def ended_after(self, kind: str, number: int, *, limit: int, user: str | None = None) -> list[NumberedRow]:
        with self._reader() as db:
            return history_queries.select_ended_after(db, kind, number, user, limit)

    def ended_before(
        self,
        kind: str,
        last_number: int,
        *,
        limit: int,
        place: tuple[int, int] | None = None,
        user: str | None = None,
    ) -> list[NumberedRow]:
        with self._reader() as db:
            return history_queries.select_ended_before(db, kind, last_number, place, user, limit)

    def count_ended(self, kind: str, *, user: str | None = None) -> int:
        with self._reader() as db:
            return history_queries.count_ended(db, kind, user)

    def events(self, *, limit: int = 1000, newest: bool = False, **filters: Unpack[EventFilters]) -> list[EventRow]:
        with self._reader() as db:
            return history_queries.select_events(db, filters, limit, newest=newest)

    def begin_of_newest(self, count: int, **filters: Unpack[EventFilters]) -> int:
        with self._reader() as db:
            return history_queries.select_begin_of_newest(db, filters, count)

    def summarise(self, *, before_ms: int, limit: int = 5000) -> int:
        """Fold at most `limit` old rows into summaries, in short transactions; then free some pages."""
        total = 0
        while total < limit:
            folded = self._fold(before_ms, min(FOLD_STEP_ROWS, limit - total))
            total += folded
            if folded == 0:
                break
        for _ in range(VACUUM_STEPS):
            if not self._shrink():
                break
        return total

    def summaries(self) -> list[SummaryRow]:
        with self._reader() as db:
            return history_queries.select_summaries(db)

    def lent(self, *, since_ms: int, by_day: bool = False) -> list[LentRow]:
        """Resource time of the leases that ended since then, counted from then on."""
        with self._reader() as db, db:
            db.execute("BEGIN")  # rows being folded meanwhile are then seen once, never twice
            return history_queries.select_lent(db, since_ms=since_ms, by_day=by_day)

    def check_integrity(self) -> tuple[str, ...]:
        """Problems SQLite finds in the whole file, none when sound; may take seconds."""
        try:
            with translate_sqlite_errors(self._path, "check it"), closing(connect(self._path, writable=False)) as db:
                problems = tuple(str(line) for (line,) in db.execute("PRAGMA integrity_check"))
        except StoreRefused as error:  # too damaged to be checked
            return (str(error),)
        return () if problems == ("ok",) else problems

    def close(self) -> None:
        """Checkpoint the log and close all connections. Closing twice is not an error."""
        self._closed.set()
        while self._readers:
            self._readers.pop().close()
        with self._writing, translate_sqlite_errors(self._path, "close it"):
            self._writer.close()

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading that nobody else uses meanwhile; some are kept for the next."""
        with translate_sqlite_errors(self._path, "read it"):
            if self._closed.is_set():
                raise sqlite3.ProgrammingError("the store is closed")
            try:
                db = self._readers.pop()
            except IndexError:
                db = connect(self._path, writable=False)
            try:
                yield db
            finally:
                if self._closed.is_set() or len(self._readers) >= IDLE_READERS:
                    db.close()
                else:
                    self._readers.append(db)

    def _fold(self, before_ms: int, limit: int) -> int:
        with self._writing, translate_sqlite_errors(self._path, "summarise it"), self._writer as db:
            db.execute("BEGIN IMMEDIATE")
            return history_queries.fold_step(db, before_ms=before_ms, limit=limit)

    def _shrink(self) -> bool:
        """Return some free pages to the disk, unless few are free: those will be reused soon."""
        with self._writing, translate_sqlite_errors(self._path, "shrink it"):
            (free,) = self._writer.execute("PRAGMA freelist_count").fetchone()
            pages = min(VACUUM_STEP_PAGES, free - MIN_FREE_PAGES)
            if pages > 0:
                # The pragma frees one page per step, and only a script is stepped to its end.
                self._writer.executescript(f"PRAGMA incremental_vacuum({pages})")
            return bool(pages > 0)
