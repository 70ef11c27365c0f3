"""History of the runs of tasks in a SQLite file of its own: rows for 90 days, then a summary of each type.

Nothing here is worth an error, because no job needs it. A damaged file is moved aside and begun anew. One that cannot
be written is left as it is, and the caller keeps what was not written. Each is said once in the log. All reads are
bounded and by index, however long the history is.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from distributed_grid.adapters.stores.database import open_auxiliary_file
from distributed_grid.prediction.task_runs import RunSummary, TaskRun

VERSION = 1
DAY_MS = 86_400_000
KEPT_MS = 90 * DAY_MS
"""Age at which the row of a run is folded."""
MAX_ROWS = 2_000_000
"""Number of rows beyond which the oldest are folded early."""
MAX_TYPES = 50_000
"""Number of types beyond which those that ran longest ago are forgotten."""
FOLD_ROWS = 2_000
"""Rows that one step folds."""
MAX_JOURNAL_BYTES = 16 << 20
_TABLES = """
CREATE TABLE IF NOT EXISTS types (
    id INTEGER PRIMARY KEY, user TEXT NOT NULL, key TEXT NOT NULL, samples INTEGER NOT NULL,
    last_at_ms INTEGER NOT NULL, UNIQUE (user, key));
CREATE INDEX IF NOT EXISTS types_by_time ON types (last_at_ms);
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, type_id INTEGER NOT NULL, task TEXT NOT NULL, attempt INTEGER NOT NULL,
    ended_at_ms INTEGER NOT NULL, features BLOB NOT NULL, input_bytes INTEGER NOT NULL, memory_bytes INTEGER NOT NULL,
    cpu_ms INTEGER NOT NULL, run_ms INTEGER NOT NULL, gpu_memory_bytes INTEGER NOT NULL,
    is_lower_bound INTEGER NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS runs_by_task ON runs (task, attempt);
CREATE INDEX IF NOT EXISTS runs_by_type ON runs (type_id, id);
CREATE INDEX IF NOT EXISTS runs_by_time ON runs (ended_at_ms);
CREATE TABLE IF NOT EXISTS summaries (type_id INTEGER PRIMARY KEY, summary BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS peaks (type_id INTEGER PRIMARY KEY, measured_bytes INTEGER NOT NULL)
"""
_COLUMNS = (
    "task, attempt, features, input_bytes, memory_bytes, cpu_ms, run_ms, gpu_memory_bytes, ended_at_ms, is_lower_bound"
)
T = TypeVar("T")
log = logging.getLogger(__name__)
_summaries = msgspec.msgpack.Decoder(RunSummary)


class TaskType(NamedTuple):
    """A type of task that has a history: its user and key, the runs that are samples, and when the last one ended."""

    user: str
    key: str
    samples: int
    last_at_ms: int


class TaskHistory:
    """The history in one file. Used by one thread at a time; `close` is safe to call twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._is_broken = False

    def record(self, runs: Sequence[TaskRun]) -> list[TaskRun] | None:
        """Store runs; those that were new. A task and attempt that is there already changes nothing.

        None where nothing was written: the runs are to be recorded again.
        """
        return self._attempt(lambda db: self._record(db, runs), None, "the last runs are not kept")

    def _record(self, db: sqlite3.Connection, runs: Sequence[TaskRun]) -> list[TaskRun]:
        new = []
        for run in runs:
            samples = int(not run.is_lower_bound and run.memory_bytes > 0)
            (type_id,) = db.execute(
                "INSERT INTO types (user, key, samples, last_at_ms) VALUES (?, ?, 0, ?) ON CONFLICT (user, key)"
                " DO UPDATE SET last_at_ms = max(last_at_ms, excluded.last_at_ms) RETURNING id",
                (run.user, run.key, run.ended_at_ms),
            ).fetchone()
            features = struct.pack(f"<{len(run.features)}d", *run.features)
            numbers = (run.input_bytes, run.memory_bytes, run.cpu_ms, run.run_ms, run.gpu_memory_bytes, run.ended_at_ms)
            stored = db.execute(
                f"INSERT OR IGNORE INTO runs (type_id, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (type_id, *(f"{run.user}/{run.task_id}", run.attempt, features, *numbers, int(run.is_lower_bound))),
            )
            if stored.rowcount:
                new.append(run)
                db.execute("UPDATE types SET samples = samples + ? WHERE id = ?", (samples, type_id))
                if run.measured_bytes:
                    db.execute(
                        "INSERT INTO peaks VALUES (?, ?) ON CONFLICT (type_id)"
                        " DO UPDATE SET measured_bytes = max(measured_bytes, excluded.measured_bytes)",
                        (type_id, run.measured_bytes),
                    )
        return new

    def runs(self, user: str, key: str, limit: int) -> list[TaskRun]:
        """The last runs of a type, the oldest first."""

        def read(db: sqlite3.Connection) -> list[TaskRun]:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM runs WHERE type_id = (SELECT id FROM types WHERE user = ? AND key = ?)"
                " ORDER BY id DESC LIMIT ?",
                (user, key, limit),
            ).fetchall()
            return [_run_of(user, key, row) for row in reversed(rows)]

        return self._attempt(read, [], "it begins anew")

    def summary(self, user: str, key: str) -> RunSummary:
        """Summary of the runs that are too old; empty without any."""

        def read(db: sqlite3.Connection) -> RunSummary:
            row = db.execute(
                "SELECT summary FROM summaries WHERE type_id = (SELECT id FROM types WHERE user = ? AND key = ?)",
                (user, key),
            ).fetchone()
            return _summaries.decode(row[0]) if row else RunSummary()

        return self._attempt(read, RunSummary(), "it begins anew")

    def samples(self, user: str, key: str) -> int:
        """How many samples a type has had, those in its summary included."""

        def read(db: sqlite3.Connection) -> int:
            row = db.execute("SELECT samples FROM types WHERE user = ? AND key = ?", (user, key)).fetchone()
            return int(row[0]) if row else 0

        return self._attempt(read, 0, "it begins anew")

    def measured_bytes(self, user: str, key: str) -> int:
        """The largest peak of memory that a shim has measured of a type; 0: none has."""

        def read(db: sqlite3.Connection) -> int:
            row = db.execute(
                "SELECT measured_bytes FROM peaks WHERE type_id = (SELECT id FROM types WHERE user = ? AND key = ?)",
                (user, key),
            ).fetchone()
            return int(row[0]) if row else 0

        return self._attempt(read, 0, "it begins anew")

    def types(self, limit: int) -> list[TaskType]:
        """The types whose last runs are the latest, the latest first."""

        def read(db: sqlite3.Connection) -> list[TaskType]:
            rows = db.execute(
                "SELECT user, key, samples, last_at_ms FROM types ORDER BY last_at_ms DESC, id DESC LIMIT ?", (limit,)
            )
            return [TaskType(*row) for row in rows]

        return self._attempt(read, [], "it begins anew")

    def fold(self, before_ms: int) -> int:
        """Fold some of the rows that ended before, or are too many, into summaries; how many. 0: none are left."""
        return self._attempt(lambda db: _fold(db, before_ms), 0, "old runs stay")

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _attempt(self, step: Callable[[sqlite3.Connection], T], otherwise: T, consequence: str) -> T:
        """The result of a step in a transaction of its own; `otherwise` where the file fails."""
        try:
            if self._db is None:
                journal = f"PRAGMA journal_size_limit = {MAX_JOURNAL_BYTES}"
                self._db = open_auxiliary_file(self._path, VERSION, (journal, *_TABLES.split(";")))
            with self._db as db:
                result = step(db)
        except (sqlite3.Error, OSError, struct.error, msgspec.DecodeError) as failure:
            is_damaged = not isinstance(failure, sqlite3.OperationalError | OSError)
            if not self._is_broken:
                log.warning("%s cannot be used (%s): %s", self._path, failure, consequence)
            self._is_broken = True
            self.close()
            if is_damaged:
                # Move a damaged file away; its journal belongs to nothing any more.
                try:
                    self._path.replace(self._path.with_name(f"{self._path.name}.damaged"))
                    for suffix in ("-wal", "-shm"):
                        self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
                except OSError:
                    pass
            return otherwise
        self._is_broken = False
        return result


def _fold(db: sqlite3.Connection, before_ms: int) -> int:
    rows = db.execute(
        f"SELECT id, type_id, {_COLUMNS} FROM runs WHERE ended_at_ms < ? ORDER BY ended_at_ms LIMIT ?",
        (before_ms, FOLD_ROWS),
    ).fetchall()
    if not rows:
        rows = db.execute(
            f"SELECT id, type_id, {_COLUMNS} FROM runs WHERE id <= (SELECT max(id) FROM runs) - ? ORDER BY id LIMIT ?",
            (MAX_ROWS, FOLD_ROWS),
        ).fetchall()
    by_type: dict[int, list[TaskRun]] = defaultdict(list)
    for _, type_id, *row in rows:
        by_type[type_id].append(_run_of("", "", row))
    for type_id, runs in by_type.items():
        stored = db.execute("SELECT summary FROM summaries WHERE type_id = ?", (type_id,)).fetchone()
        summary = (_summaries.decode(stored[0]) if stored else RunSummary()).plus(runs)
        db.execute(
            "INSERT INTO summaries VALUES (?, ?) ON CONFLICT (type_id) DO UPDATE SET summary = excluded.summary",
            (type_id, msgspec.msgpack.encode(summary)),
        )
    db.executemany("DELETE FROM runs WHERE id = ?", [(row[0],) for row in rows])
    return len(rows) or _forget_types(db)


def _forget_types(db: sqlite3.Connection) -> int:
    """Forget some of the types beyond those that are kept; how many."""
    (count,) = db.execute("SELECT count(*) FROM types").fetchone()
    excess = min(max(count - MAX_TYPES, 0), FOLD_ROWS)
    oldest = db.execute("SELECT id FROM types ORDER BY last_at_ms LIMIT ?", (excess,)).fetchall()
    for table, column in (("runs", "type_id"), ("summaries", "type_id"), ("peaks", "type_id"), ("types", "id")):
        db.executemany(f"DELETE FROM {table} WHERE {column} = ?", oldest)
    return len(oldest)


def _run_of(user: str, key: str, row: Sequence[Any]) -> TaskRun:
    task, attempt, features, *numbers, is_lower_bound = row
    if not (isinstance(task, str) and isinstance(features, bytes) and all(isinstance(n, int) for n in numbers)):
        raise sqlite3.DatabaseError("a row is damaged")
    values = struct.unpack(f"<{len(features) // 8}d", features)
    input_bytes, memory_bytes, cpu_ms, run_ms, gpu_memory_bytes, ended_at_ms = numbers
    return TaskRun(
        task_id=task.partition("/")[2],
        attempt=attempt,
        user=user,
        key=key,
        features=values,
        input_bytes=input_bytes,
        memory_bytes=memory_bytes,
        cpu_ms=cpu_ms,
        run_ms=run_ms,
        gpu_memory_bytes=gpu_memory_bytes,
        ended_at_ms=ended_at_ms,
        is_lower_bound=bool(is_lower_bound),
    )
