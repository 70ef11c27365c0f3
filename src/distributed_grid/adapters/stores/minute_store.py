"""Minutes of usage history in a SQLite file of their own, so that they survive a restart.

Nothing here is worth an error: the ledger does not need it. A file that cannot be read is replaced by an empty one, and
one that cannot be written is left as it is; each is said once in the log. Rows are fixed in size, one for each node and
minute, and those that are too old are deleted with each write.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from distributed_grid.adapters.stores.database import open_auxiliary_file

VERSION = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS minutes (
    at_ms INTEGER NOT NULL, node TEXT NOT NULL, row BLOB NOT NULL, PRIMARY KEY (at_ms, node)) WITHOUT ROWID
"""
log = logging.getLogger(__name__)


class MinuteStore:
    """The minutes in one file. Used by one thread at a time; `close` is safe to call twice."""

    def __init__(self, path: Path, *, row_bytes: int) -> None:
        self._path = path
        self._row_bytes = row_bytes
        self._db: sqlite3.Connection | None = None
        self._is_broken = False

    def load(self, since_ms: int, until_ms: int) -> list[tuple[str, bytes]]:
        """The rows of these minutes as (node, row), oldest first; nothing where the file is new or unusable."""
        try:
            db = self._open()
            rows = db.execute(
                "SELECT node, row FROM minutes WHERE at_ms BETWEEN ? AND ? ORDER BY at_ms, node", (since_ms, until_ms)
            ).fetchall()
            for node, row in rows:
                if not isinstance(node, str) or not isinstance(row, bytes) or len(row) != self._row_bytes:
                    raise sqlite3.DatabaseError("a row is damaged")
            return rows
        except (sqlite3.Error, OSError) as failure:
            log.warning("%s cannot be read (%s): the history begins anew", self._path, failure)
            self.close()
            if not isinstance(failure, sqlite3.OperationalError | OSError):  # it is damaged, not out of reach
                for suffix in ("", "-wal", "-shm"):
                    self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            return []

    def write(self, rows: Iterable[tuple[int, str, bytes]], *, before_ms: int) -> bool:
        """Write rows (begin of the minute, node, row), replacing earlier ones, and delete those before that moment.

        False where that failed: the rows are to be written again.
        """
        try:
            with self._open() as db:
                db.executemany("INSERT OR REPLACE INTO minutes VALUES (?, ?, ?)", rows)
                db.execute("DELETE FROM minutes WHERE at_ms < ?", (before_ms,))
        except (sqlite3.Error, OSError) as failure:
            if not self._is_broken:
                log.warning("%s cannot be written (%s): a restart will not know the last minutes", self._path, failure)
            self._is_broken = True
            self.close()
            return False
        self._is_broken = False
        return True

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = open_auxiliary_file(self._path, VERSION, (_TABLE,))
        return self._db
