"""Space reserve of `grid.db`: disk blocks that only ends, stops and cancels use when the disk is full.

The blocks belong to the database itself, so nothing else on the disk can take them while they are needed:

- free pages inside `grid.db`, made by a row that is put and removed in one transaction and written by a checkpoint;
- blocks of the log `grid.db-wal`, allocated beyond its end: it is written from its beginning after each checkpoint.

A file system that never writes in place (btrfs, ZFS) needs new blocks for either; there the reserve does not help. On a
small disk it is smaller. The store has no room for new work while little is free or the reserve cannot be filled.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from distributed_grid.posix.file_blocks import reserve_blocks

MAX_FREE_PAGES = 1000
MAX_WAL_BYTES = 4 << 20
"""Less than a log is cut to; where it would grow beyond, a checkpoint lets it begin anew."""
MAX_LOW_BYTES = 4 << 20
PAGE_SHARE, WAL_SHARE, LOW_SHARE = 16, 8, 64
"""Shares of the disk that free pages, log and the mark for a full disk take at most."""
PAGE_BYTES = 4096


class SpaceReserve:
    """The reserve of one database; filled by the thread that writes to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wal = path.with_name(f"{path.name}-wal")
        system = os.statvfs(path.parent)
        total = system.f_blocks * system.f_frsize
        self._free_pages = min(MAX_FREE_PAGES, total // PAGE_SHARE // PAGE_BYTES)
        self._wal_bytes = min(MAX_WAL_BYTES, total // WAL_SHARE)
        self._low_bytes = min(MAX_LOW_BYTES, total // LOW_SHARE)
        self._is_filled = True

    def has_room(self) -> bool:
        return self._is_filled and self._free_bytes() >= self._low_bytes

    def fill(self, writer: sqlite3.Connection) -> None:
        free = self._free_bytes() - self._low_bytes
        try:
            self._is_filled = free >= 0 and self._fill_wal(free) and self._fill_pages(writer, free)
        except OSError as error:  # a file system that cannot reserve blocks works without them
            self._is_filled = error.errno not in (errno.ENOSPC, errno.EDQUOT)

    def _free_bytes(self) -> int:
        system = os.statvfs(self._path.parent)
        return system.f_bavail * system.f_frsize

    def _fill_wal(self, free: int) -> bool:
        try:
            fd = os.open(self._wal, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # nothing was written yet
            return True
        try:
            missing = self._wal_bytes - os.fstat(fd).st_blocks * 512
            if 0 < missing <= free:
                reserve_blocks(fd, 0, self._wal_bytes)
            return missing <= free
        finally:
            os.close(fd)

    def _fill_pages(self, writer: sqlite3.Connection, free: int) -> bool:
        (pages,) = writer.execute("PRAGMA freelist_count").fetchone()
        if 2 * pages >= self._free_pages:
            return True
        size = (self._free_pages - pages) * PAGE_BYTES
        if size > free:
            return False
        with writer:
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("INSERT INTO live VALUES ('reserve', '', zeroblob(?))", (size,))
            writer.execute("DELETE FROM live WHERE kind = 'reserve'")
        writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return True
