"""SQLite files beside the ledger's: what they hold is convenient, and no error of theirs stops anything."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path


def open_auxiliary_file(path: Path, version: int, statements: Iterable[str]) -> sqlite3.Connection:
    """Open a private file (0600) with this version of its tables, made by the statements where they are missing.

    `sqlite3.DatabaseError` where it is damaged or of another version. Used by one thread at a time.
    """
    path.touch(mode=0o600)
    db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found not in (0, version):
            raise sqlite3.DatabaseError(f"it has version {found}, this program knows {version}")
        for statement in statements:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()
    except BaseException:
        db.close()
        raise
    return db
