"""The tables of `grid.db`, and the numbered steps from each version of them to the next.

Rule 1. A step, once released, is never edited; a change is a new step with the next number.
Rule 2. All steps that are needed run in one transaction together with the new version number.
Rule 3. A new database takes the same way as an old one: it starts at version 0.
"""

import sqlite3
from collections.abc import Callable, Mapping

APPLICATION_ID = 0x47524944  # "GRID"

TABLES = ("live", "ended", "events", "summaries", "marks")

Migration = Callable[[sqlite3.Connection], None]

# Totals are decimal text: a terabyte for a month, in byte-milliseconds, exceeds 64 bits.
_VERSION_1 = """
CREATE TABLE live (
    kind TEXT NOT NULL, key TEXT NOT NULL, blob BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;

CREATE TABLE ended (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, request_id TEXT NOT NULL,
    user TEXT NOT NULL, node TEXT NOT NULL, ended_at_ms INTEGER NOT NULL, started_at_ms INTEGER NOT NULL,
    reason TEXT NOT NULL, cpu_milli INTEGER NOT NULL, memory_bytes INTEGER NOT NULL,
    gpu_milli INTEGER NOT NULL, blob BLOB NOT NULL);
CREATE INDEX ended_by_time ON ended (kind, ended_at_ms);
CREATE INDEX ended_by_key ON ended (kind, key);
CREATE INDEX ended_by_request ON ended (request_id);
CREATE INDEX ended_by_user ON ended (kind, user, ended_at_ms);

CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, type TEXT NOT NULL, user TEXT NOT NULL,
    subject TEXT NOT NULL, node TEXT NOT NULL, reason TEXT NOT NULL, blob BLOB NOT NULL);
CREATE INDEX events_by_time ON events (at_ms);
CREATE INDEX events_by_subject ON events (subject);

CREATE TABLE summaries (
    day INTEGER NOT NULL, kind TEXT NOT NULL, user TEXT NOT NULL, node TEXT NOT NULL, reason TEXT NOT NULL,
    count INTEGER NOT NULL, cpu_milli_ms TEXT NOT NULL, memory_byte_ms TEXT NOT NULL,
    gpu_milli_ms TEXT NOT NULL, PRIMARY KEY (day, kind, user, node, reason)) WITHOUT ROWID;

CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO marks VALUES ('last_folded_event', 0), ('times_opened', 0)
"""


def _create(db: sqlite3.Connection) -> None:
    for statement in _VERSION_1.split(";"):
        db.execute(statement)


_VERSION_2 = """
ALTER TABLE ended ADD COLUMN target TEXT NOT NULL DEFAULT '';

ALTER TABLE summaries RENAME TO summaries_1;
CREATE TABLE summaries (
    day INTEGER NOT NULL, kind TEXT NOT NULL, user TEXT NOT NULL, node TEXT NOT NULL, reason TEXT NOT NULL,
    target TEXT NOT NULL DEFAULT '', count INTEGER NOT NULL, cpu_milli_ms TEXT NOT NULL,
    memory_byte_ms TEXT NOT NULL, gpu_milli_ms TEXT NOT NULL,
    PRIMARY KEY (day, kind, user, node, reason, target)) WITHOUT ROWID;
INSERT INTO summaries (day, kind, user, node, reason, count, cpu_milli_ms, memory_byte_ms, gpu_milli_ms)
    SELECT day, kind, user, node, reason, count, cpu_milli_ms, memory_byte_ms, gpu_milli_ms FROM summaries_1;
DROP TABLE summaries_1
"""


def _add_targets(db: sqlite3.Connection) -> None:
    """What was lent for the sake of a node is kept apart; what was lent before counts as for none."""
    for statement in _VERSION_2.split(";"):
        db.execute(statement)


MIGRATIONS: Mapping[int, Migration] = {1: _create, 2: _add_targets}
"""The step that leads *to* each version."""


def version_of(db: sqlite3.Connection) -> int:
    """The schema version a database has."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(db: sqlite3.Connection, migrations: Mapping[int, Migration]) -> None:
    """Bring a database to the newest version, or leave it as it was."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        for version in range(version_of(db) + 1, max(migrations) + 1):
            migrations[version](db)
        db.execute(f"PRAGMA user_version = {max(migrations)}")
