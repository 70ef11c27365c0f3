"""Small private files: atomic writes with mode 0600, whole reads, advisory locks."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_private(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace the file, mode 0600; when `durable` it is on the disk, under its name, before this returns.

    Written aside and renamed: readers see the old file or the new one. `OSError` leaves the old one.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    fresh.replace(path)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: str | Path) -> None:
    """Have the names in a directory on the disk before this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_all(fd: int) -> bytes:
    """All that can be read from `fd`."""
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


def try_lock(fd: int, *, exclusive: bool = True) -> bool:
    """Lock the open file without waiting; False when it is locked elsewhere."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
