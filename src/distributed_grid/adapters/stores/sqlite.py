"""The grid's memory on disk: `grid.db`, one SQLite file in WAL mode, synced on every commit.

Rule 1. When `commit` returns, the batch survives a crash and a power cut; when it raises, this store is
        as it was and works again once the cause is gone.
Rule 2. One connection writes and one reads, each behind its own lock: history being read never holds up a
        commit, and a commit waiting for the disk never holds up a reader.
Rule 3. The log does not grow for ever: commits checkpoint it, and what is longer than a few MiB is cut.
Rule 4. One `SqliteStore` per file and process: SQLite's locks belong to the process.
"""

import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from msgspec.structs import astuple

from distributed_grid.adapters.stores import ended_rows
from distributed_grid.adapters.stores.database import connect, prepare
from distributed_grid.adapters.stores.errors import refusing, translated
from distributed_grid.adapters.stores.row_order import last_seq_after
from distributed_grid.adapters.stores.tables import MIGRATIONS, Migration, version_of
from distributed_grid.errors import StoreRefused
from distributed_grid.ports import Batch, EndedRow, EventRow, LentRow, LiveRow, LoadedRows, SummaryRow

FOLD_STEP_ROWS = 200
VACUUM_STEP_PAGES = 200
VACUUM_STEPS = 10
PAGES_KEPT_FREE = 1000

_PUT = "INSERT INTO live VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET blob = excluded.blob"
_REMOVE = "DELETE FROM live WHERE kind = ? AND key = ?"
_ALIVE = "SELECT kind, key, blob FROM live ORDER BY kind, key"


class SqliteStore:
    """The `Store` port on one SQLite file; made with its directory when it is not there."""

    def __init__(self, path: Path, *, migrations: Mapping[int, Migration] = MIGRATIONS) -> None:
        """Open or create; `StoreRefused` says in one line what is wrong and what to do."""
        self._path = path
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        with refusing(path):
            prepare(path, migrations)
            self._writer = connect(path, writable=True)
            try:
                self._prove_writable()
                self._reader = connect(path, writable=False)
                self._last_event_seq = ended_rows.last_event_seq(self._writer)
            except sqlite3.Error:
                self._writer.close()
                raise

    def load(self) -> LoadedRows:
        """Everything alive, by kind and key, from one moment."""
        with self._reading, translated(self._path, "read it"), self._reader as db:
            db.execute("BEGIN")
            live = [LiveRow(*row) for row in db.execute(_ALIVE)]
            return LoadedRows(live, ended_rows.last_event_seq(db), version_of(db))

    def commit(self, batch: Batch) -> None:
        """Make the batch durable in one transaction, or leave everything as it was."""
        last_live = {(row.kind, row.key): row for row in batch.live}
        put = [astuple(row) for row in last_live.values() if row.blob is not None]
        remove = [at for at, row in last_live.items() if row.blob is None]
        with self._writing, translated(self._path, "write to it"):
            last_seq = last_seq_after(batch.events, self._last_event_seq)
            with self._writer as db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany(_PUT, put)
                db.executemany(_REMOVE, remove)
                db.executemany(ended_rows.INSERT_ENDED, map(astuple, batch.ended))
                db.executemany(ended_rows.INSERT_EVENT, map(astuple, batch.events))
            self._last_event_seq = last_seq

    def ended(
        self,
        kind: str,
        *,
        key: str | None = None,
        key_prefix: str | None = None,
        request_id: str | None = None,
        user: str | None = None,
        since_ms: int | None = None,
        limit: int = 100,
    ) -> list[EndedRow]:
        """What ended and fits all that is given, newest first."""
        with self._reading, translated(self._path, "read it"):
            return ended_rows.select_ended(
                self._reader,
                kind,
                key=key,
                key_prefix=key_prefix,
                request_id=request_id,
                user=user,
                since_ms=since_ms,
                limit=limit,
            )

    def events(
        self,
        *,
        after_seq: int = 0,
        since_ms: int | None = None,
        subject: str | None = None,
        types: Sequence[str] = (),
        limit: int = 1000,
        newest: bool = False,
    ) -> list[EventRow]:
        """What happened, in the order it did; the first `limit`, or the newest."""
        with self._reading, translated(self._path, "read it"):
            return ended_rows.select_events(
                self._reader,
                after_seq=after_seq,
                since_ms=since_ms,
                subject=subject,
                types=types,
                limit=limit,
                newest=newest,
            )

    def summarise(self, *, before_ms: int, limit: int = 5000) -> int:
        """Fold at most `limit` old rows, in short transactions; then give some free pages back."""
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
        """All that was folded."""
        with self._reading, translated(self._path, "read it"):
            return ended_rows.select_summaries(self._reader)

    def lent(self, *, since_ms: int, by_day: bool = False) -> list[LentRow]:
        """What leases that ended since then had, from then on."""
        with self._reading, translated(self._path, "read it"), self._reader as db:
            db.execute("BEGIN")  # what is being folded meanwhile is in one of the two places, never in both
            return ended_rows.select_lent(db, since_ms=since_ms, by_day=by_day)

    def check_integrity(self) -> tuple[str, ...]:
        """What SQLite finds wrong in the whole file, nothing when sound; may take seconds."""
        try:
            with translated(self._path, "check it"), closing(connect(self._path, writable=False)) as db:
                found = tuple(str(line) for (line,) in db.execute("PRAGMA integrity_check"))
        except StoreRefused as error:  # damaged beyond walking through it
            return (str(error),)
        return () if found == ("ok",) else found

    def close(self) -> None:
        """Fold the log into the file and let go of both. Closing twice is not an error."""
        with self._reading:
            self._reader.close()
        with self._writing, translated(self._path, "close it"):
            self._writer.close()

    def _fold(self, before_ms: int, limit: int) -> int:
        with self._writing, translated(self._path, "summarise it"), self._writer as db:
            db.execute("BEGIN IMMEDIATE")
            return ended_rows.fold_step(db, before_ms=before_ms, limit=limit)

    def _shrink(self) -> bool:
        """Give some pages back to the disk, unless few are free: those will be used again soon."""
        with self._writing, translated(self._path, "shrink it"):
            (free,) = self._writer.execute("PRAGMA freelist_count").fetchone()
            pages = min(VACUUM_STEP_PAGES, free - PAGES_KEPT_FREE)
            if pages > 0:
                # The pragma frees one page per step, and only a script is stepped to its end.
                self._writer.executescript(f"PRAGMA incremental_vacuum({pages})")
            return bool(pages > 0)

    def _prove_writable(self) -> None:
        """One small durable write: a full or dying disk is told to the person who starts the grid."""
        with self._writer as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("UPDATE marks SET value = value + 1 WHERE name = 'times_opened'")
