"""Reaching files below an open directory, and nothing else.

Rule 1. A directory is entered name by name, never through a link, so what is opened lies below the root even
        while somebody moves links about.
Rule 2. A link is followed only by `open_inside`, which reads it itself and goes no step above the root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from distributed_grid.adapters.workdir.paths import shown

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MAX_HOPS = 40  # as many links as the kernel follows


class DirectoryWalker:
    """A place below a root that somebody else keeps open; moving to a neighbour opens only what differs."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._way: list[tuple[bytes, int]] = []

    def __enter__(self) -> DirectoryWalker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def to(self, names: tuple[bytes, ...], *, make: int | None = None) -> int:
        """The directory at `names` as a descriptor that is good until the next call.

        With `make` (a mode) directories that are missing are made. A link or a file on the way is a
        `NotADirectoryError` that says so.
        """
        shared = 0
        while shared < min(len(names), len(self._way)) and self._way[shared][0] == names[shared]:
            shared += 1
        self._back_to(shared)
        for name in names[shared:]:
            self._way.append((name, self._enter(name, names, make)))
        return self._here

    def close(self) -> None:
        """Let go of every directory but the root. A second call changes nothing."""
        self._back_to(0)

    @property
    def _here(self) -> int:
        return self._way[-1][1] if self._way else self._root

    def _back_to(self, depth: int) -> None:
        while len(self._way) > depth:
            os.close(self._way.pop()[1])

    def _enter(self, name: bytes, names: tuple[bytes, ...], make: int | None) -> int:
        try:
            return os.open(name, DIRECTORY, dir_fd=self._here)
        except FileNotFoundError:
            if make is None:
                raise
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            path = shown(b"/".join(names[: len(self._way) + 1]))
            raise NotADirectoryError(errno.ENOTDIR, what_is(name, self._here), path) from error
        try:
            os.mkdir(name, make, dir_fd=self._here)
        except FileExistsError:
            pass  # somebody else was quicker; what it is shows next
        return os.open(name, DIRECTORY, dir_fd=self._here)


def what_is(name: bytes, folder: int) -> str:
    """What stands under that name, in words for a message."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except OSError:
        return "is gone"
    if stat.S_ISLNK(mode):
        return "is a link, and links are not followed"
    if stat.S_ISDIR(mode):
        return "is a directory"
    return "is a file" if stat.S_ISREG(mode) else "is no ordinary file"


def open_root(root: str | bytes | os.PathLike[str]) -> int:
    """The top directory itself, as the person named it: this one name may be a link."""
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def open_inside(root: int, path: bytes) -> int:
    """The regular file at `path` for reading; links count as long as they stay inside, else `PermissionError`."""
    here: list[bytes] = []
    ahead = deque(path.split(b"/"))
    hops = 0
    with DirectoryWalker(root) as descent:
        while ahead:
            name = ahead.popleft()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if not here:
                    raise PermissionError(errno.EACCES, "leads out of the directory", shown(path))
                here.pop()
                continue
            folder = descent.to(tuple(here))
            target = _link_target(name, folder)
            if target is None:
                if not ahead:
                    return open_regular(name, folder)
                here.append(name)
                continue
            hops += 1
            if hops > MAX_HOPS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), shown(path))
            if target.startswith(b"/"):
                raise PermissionError(errno.EACCES, "leads out of the directory", shown(path))
            ahead.extendleft(reversed(target.split(b"/")))
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), shown(path))


def open_regular(name: bytes, folder: int) -> int:
    """The regular file of that name for reading, without ever waiting for it; `OSError` when it is anything else."""
    fd = os.open(name, READ, dir_fd=folder)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), shown(name))
    raise OSError(errno.EINVAL, "is no ordinary file", shown(name))


def _link_target(name: bytes, folder: int) -> bytes | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise


def leads_out(path: bytes, links: Mapping[bytes, bytes]) -> bool:
    """Whether following the link at `path` goes above the top, decided from names alone.

    All links of the tree are followed as the kernel would: `a/b/c/up -> ../../../x` stays inside, and so, read by
    itself, does `a/b/c/out -> up/../..`; together they lead above the top.
    `links` are all links of the tree, path to target.

    What goes in circles leads nowhere, and so not out: the kernel gives up after as many links.
    """
    here: list[bytes] = []
    ahead = deque(path.split(b"/"))
    hops = 0
    while ahead:
        name = ahead.popleft()
        if name in (b"", b"."):
            continue
        if name == b"..":
            if not here:
                return True
            here.pop()
            continue
        here.append(name)
        target = links.get(b"/".join(here))
        if target is None:
            continue
        if target.startswith(b"/"):
            return True
        hops += 1
        if hops > MAX_HOPS:
            return False
        here.pop()
        ahead.extendleft(reversed(target.split(b"/")))
    return False
