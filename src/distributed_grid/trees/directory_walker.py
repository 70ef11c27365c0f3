"""File access below an open directory, and never outside it.

A directory is entered name by name, never through a link, so what is opened is below the root even while somebody moves
links about. Only `open_inside` follows links: it resolves them itself and never goes above the root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Mapping

from distributed_grid.trees.paths import display_path

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MAX_HOPS = 40  # as many links as the kernel follows


class DirectoryWalker:
    """A position below a root that the caller keeps open; moving to a sibling opens only what differs."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._open: list[tuple[bytes, int]] = []

    def __enter__(self) -> DirectoryWalker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, names: tuple[bytes, ...], *, make: int | None = None, exact: bool = False) -> int:
        """The directory at `names` as a descriptor that is valid until the next call.

        With `make` (a mode) missing directories are made; if `exact`, whatever the umask of this process is. A link or
        a file on the path is a `NotADirectoryError`.
        """
        shared = 0
        while shared < min(len(names), len(self._open)) and self._open[shared][0] == names[shared]:
            shared += 1
        self._close_below(shared)
        for name in names[shared:]:
            self._open.append((name, self._open_child(name, names, make, exact=exact)))
        return self._here

    def close(self) -> None:
        """Close every directory but the root. A second call does nothing."""
        self._close_below(0)

    @property
    def _here(self) -> int:
        return self._open[-1][1] if self._open else self._root

    def _close_below(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])

    def _open_child(self, name: bytes, names: tuple[bytes, ...], make: int | None, *, exact: bool) -> int:
        try:
            return os.open(name, DIRECTORY_FLAGS, dir_fd=self._here)
        except FileNotFoundError:
            if make is None:
                raise
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            path = display_path(b"/".join(names[: len(self._open) + 1]))
            raise NotADirectoryError(errno.ENOTDIR, describe_file_type(name, self._here), path) from error
        try:
            os.mkdir(name, make, dir_fd=self._here)
        except FileExistsError:
            exact = False  # made by somebody else meanwhile
        fd = os.open(name, DIRECTORY_FLAGS, dir_fd=self._here)
        if exact:
            os.fchmod(fd, make)
        return fd


def describe_file_type(name: bytes, folder: int) -> str:
    """The type of the file of that name, in words for a message."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except OSError:
        return "is gone"
    if stat.S_ISLNK(mode):
        return "is a link, and links are not followed"
    if stat.S_ISDIR(mode):
        return "is a directory"
    return "is a file" if stat.S_ISREG(mode) else "is not a regular file"


def open_root(root: str | bytes | os.PathLike[str]) -> int:
    """The root directory as the user named it: this one name may be a link."""
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def open_inside(root: int, path: bytes) -> int:
    """The regular file at `path` for reading; links are followed, and one that leads outside is a `PermissionError`."""
    with DirectoryWalker(root) as walker:
        names = _resolve(path, lambda names: _link_target(names[-1], walker.enter(tuple(names[:-1]))))
        return open_regular(names[-1], walker.enter(tuple(names[:-1])))


def _resolve(path: bytes, link_target: Callable[[list[bytes]], bytes | None]) -> list[bytes]:
    """The names from the root to what `path` leads to, all links followed as the kernel would follow them.

    Above the root is a `PermissionError`, the end in a directory an `IsADirectoryError`.
    """
    here: list[bytes] = []
    ahead, name, hops = deque(path.split(b"/")), b"", 0
    while ahead:
        name = ahead.popleft()
        if name in (b"", b"."):
            continue
        if name == b"..":
            if not here:
                raise PermissionError(errno.EACCES, "leads outside the directory", display_path(path))
            here.pop()
            continue
        here.append(name)
        target = link_target(here)
        if target is None:
            continue
        if target.startswith(b"/"):
            raise PermissionError(errno.EACCES, "leads outside the directory", display_path(path))
        hops += 1
        if hops > MAX_HOPS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), display_path(path))
        here.pop()
        ahead.extendleft(reversed(target.split(b"/")))
    if name in (b"", b".", b".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), display_path(path))
    return here


def open_regular(name: bytes, folder: int) -> int:
    """The regular file of that name for reading, without ever blocking; `OSError` when it is anything else."""
    fd = os.open(name, READ_FLAGS, dir_fd=folder)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), display_path(name))
    raise OSError(errno.EINVAL, "is not a regular file", display_path(name))


def _link_target(name: bytes, folder: int) -> bytes | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise


def leads_outside(path: bytes, links: Mapping[bytes, bytes]) -> bool:
    """Whether following the link at `path` goes above the root; `links` are all links of the tree, path to target.

    Links are followed as the kernel would: `a/b/c/up -> ../../../x` stays inside, and so, read by itself, does
    `a/b/c/out -> up/../..`; together they lead above the root. A cycle leads nowhere, and so not outside.
    """
    try:
        _resolve(path, lambda names: links.get(b"/".join(names)))
    except OSError as error:
        return isinstance(error, PermissionError)
    return False
