"""Small private files: atomic writes with mode 0600, whole reads, advisory locks.

Files that others may have replaced are opened without blocking, and read up to a size; a default file is trusted by the
owner of it and its folder. Imports only the standard library, and little of it: every command loads this module.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


DAMAGE = frozenset((errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.EACCES))
"""Errors of a missing file, or of another object in its place; any other error may be temporary."""


def write_private(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace the file, mode 0600; when `durable` it is on the disk, under its name, before this returns.

    Written aside and renamed: readers see the old file or the new one. `OSError` leaves the old one.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def overwrite_private(path: Path, content: bytes) -> None:
    """Overwrite the file in place, padded with spaces to its size: where there is no room for a second file."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(fd, content.ljust(os.fstat(fd).st_size), 0)
    finally:
        os.close(fd)


def sync_directory(path: str | Path) -> None:
    """Have the names in a directory on the disk before this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(name: str, flags: int, dir_fd: int | None = None) -> int:
    """Open a regular file, never through a link and without ever blocking; `OSError` where it is anything else."""
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", name)


def read_regular(name: str, dir_fd: int | None, max_bytes: int) -> bytes:
    """All of a regular file; nothing where there is none, where it is anything else, or where it is larger."""
    try:
        fd = open_regular(name, os.O_RDONLY, dir_fd)
    except OSError as error:
        if error.errno in DAMAGE:
            return b""
        raise
    try:
        content = b"" if os.fstat(fd).st_size > max_bytes else read_all(fd, max_bytes + 1)  # it may be growing
        return content if len(content) <= max_bytes else b""
    finally:
        os.close(fd)


def replace_file(name: str, content: bytes, dir_fd: int, *, durable: bool = False) -> None:
    """Replace the file in an open directory, mode 0600, whatever was there: written aside and renamed."""
    aside = f".{name}.{os.getpid()}"
    try:
        fd = os.open(aside, _NEW, 0o600, dir_fd=dir_fd)
    except FileExistsError:  # left by a process that died, or by another program
        _set_aside(aside, dir_fd)
        fd = os.open(aside, _NEW, 0o600, dir_fd=dir_fd)
    try:
        write_all(fd, content)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.rename(aside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except IsADirectoryError:
        _set_aside(name, dir_fd)
        os.rename(aside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    if durable:
        os.fsync(dir_fd)


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _set_aside(name: str, dir_fd: int) -> None:
    """Have the name free: remove what has it, or rename it where that is a directory."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except IsADirectoryError:
        os.rename(name, f"{name}.{os.urandom(4).hex()}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def remove_file(path: str) -> None:
    """Have no file of that name. Where there is none, or something that is no file, this does nothing."""
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in DAMAGE:
            raise


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def read_all(fd: int, max_bytes: int = sys.maxsize) -> bytes:
    """The rest of the file `fd`, or about `max_bytes` of it."""
    parts = []
    size = 0
    while size < max_bytes and (part := os.read(fd, 65536)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def try_lock(fd: int, *, exclusive: bool = True) -> bool:
    """Lock the open file without waiting; False when it is locked elsewhere."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def distrust_of(path: str) -> str | None:
    """Reason why a default file must not be used, or None: others could have written it.

    File and folder must belong to the caller or to root and be writable by no other user; where they are reached by a
    symbolic link, that must, too. The caller's private group, which has no other member, counts as the caller.
    """
    folder = os.path.dirname(path) or "."
    try:
        for place, name in ((folder, "its folder"), (path, "it")):
            for status in (os.lstat(place), os.stat(place)):
                if status.st_uid not in (0, os.geteuid()):
                    return f"{name} belongs to uid {status.st_uid}, not to you"
                if stat.S_ISLNK(status.st_mode):  # its mode means nothing
                    continue
                if status.st_mode & stat.S_IWOTH:
                    return f"everybody may write to {name}"
                if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
                    return f"the group {status.st_gid} may write to {name}"
    except OSError as failure:
        return f"it cannot be examined: {failure.strerror}"
    return None


def _is_private_group(gid: int) -> bool:
    """True if a group is the caller's alone, as systems make one for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
