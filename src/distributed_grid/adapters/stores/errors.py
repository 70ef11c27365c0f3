"""What SQLite and the file system complain about, in the grid's own errors.

Rule 1. What may pass (full, busy, I/O error, read-only for now) is `StoreFailed`: worth trying again.
Rule 2. What is damaged is `StoreRefused`: a person has to look, and nothing was touched.
Rule 3. Anything else is a bug in this package, and goes up as it is.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed_grid.errors import StoreFailed, StoreRefused

_PASSING = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_PROTOCOL,
}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
LITTLE_ROOM_BYTES = 1 << 20
REPAIR = "move it away to start afresh, or put a backup in its place"


@contextmanager
def translated(path: Path, deed: str) -> Iterator[None]:
    """Run the body; what SQLite raises in it comes out as a `GridError` that names the file."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if primary in _PASSING:
            raise StoreFailed(f"{path}: could not {deed}: {error}{room_left(path.parent)}") from error
        if primary in _DAMAGED:
            raise StoreRefused(f"{path}: is damaged ({error}); {REPAIR}") from error
        raise


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Run the body; at opening time also what may pass is a refusal, since nothing can run without."""
    try:
        with translated(path, "open it"):
            yield
    except StoreFailed as error:
        raise StoreRefused(f"{error}; mend that and start again") from error
    except OSError as error:
        problem = f"{path}: could not open it: {error.strerror}{room_left(path.parent)}"
        raise StoreRefused(f"{problem}; mend that and start again") from error


def room_left(directory: Path) -> str:
    """A remark on how little room there is, or nothing when there is enough."""
    try:
        system = os.statvfs(directory)
    except OSError:
        return ""
    free = system.f_bavail * system.f_frsize
    return f" ({free} bytes free on that disk)" if free < LITTLE_ROOM_BYTES else ""
