"""Writing files that come from elsewhere below a directory of the user, and never outside it.

Rule 1. Parents are entered name by name and never through a link; a link in the way is refused, and so is anything
        but a file under the file's own name.
Rule 2. A file appears whole or not at all: it has no name until it is finished, so not even a killed receiver leaves
        part of one (where the file system cannot do that, it is written aside and removed on failure).
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from contextlib import AbstractContextManager
from types import TracebackType

from distributed_grid.adapters.workdir.directory_walker import DirectoryWalker, open_root, what_is
from distributed_grid.adapters.workdir.errors import translated
from distributed_grid.adapters.workdir.paths import components, shown, to_bytes
from distributed_grid.errors import ProtocolError, Refused

_OPEN_FILES = "/proc/self/fd"
_NAMELESS = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CANNOT = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


class Receiver:
    """Takes files one after another; the target is made if need be. Closing it drops an unfinished file."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self._place = os.fspath(target)
        with translated(self._place, "write there"):
            os.makedirs(target, exist_ok=True)
            self._root = open_root(target)
        self._descent = DirectoryWalker(self._root)
        self._current: _Incoming | None = None

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, path: str, size: int, mode: int) -> None:
        """The next file; of `mode` only the owner's x bit counts, the rest is the umask's.

        A path that leads out is a `ProtocolError`, something in the way `Refused`. A file of that name is replaced
        when this one is finished.
        """
        if self._current is not None:
            raise ProtocolError("a file begins before the last one is finished")
        names = components(to_bytes(path))
        if size < 0:
            raise ProtocolError(f"'{shown(path)}' cannot have {size} bytes")
        permissions = 0o777 if mode & stat.S_IXUSR else 0o666
        with self._errors(path):
            folder = os.dup(self._descent.to(names[:-1], make=0o777))
            try:
                _refuse_in_the_way(names[-1], folder, path)
                self._current = _Incoming(folder, names[-1], path, size, permissions)
            except BaseException:
                os.close(folder)
                raise

    def write(self, data: bytes) -> None:
        """The next piece of the file."""
        current = self._unfinished()
        with self._errors(current.path):
            current.write(data)

    def finish(self, digest: str | None = None) -> None:
        """Put the file in its place; when it is not what was announced it is a `ProtocolError`, and it is dropped."""
        current = self._unfinished()
        self._current = None
        try:
            with self._errors(current.path):
                current.finish(digest)
        finally:
            current.drop()

    def abort(self) -> None:
        """Drop the unfinished file. Without one this does nothing."""
        current, self._current = self._current, None
        if current is not None:
            current.drop()

    def close(self) -> None:
        """Drop the unfinished file and let go of the target. A second call does nothing."""
        self.abort()
        self._descent.close()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _unfinished(self) -> _Incoming:
        if self._current is None:
            raise ProtocolError("content came before the name of its file")
        return self._current

    def _errors(self, path: str) -> AbstractContextManager[None]:
        return translated(os.path.join(self._place, shown(path)), "write the file")


class _Incoming:
    """One file on its way in; it owns `folder`, the directory it goes to."""

    def __init__(self, folder: int, name: bytes, path: str, size: int, permissions: int) -> None:
        self.path = path
        self._folder, self._name, self._size = folder, name, size
        self._hash = hashlib.sha256()
        self._written = 0
        self._aside: bytes | None = None
        nameless = _open_nameless(folder, permissions)
        if nameless is None:
            self._aside = _new_name()
            nameless = os.open(self._aside, _NEW, permissions, dir_fd=folder)
        self._fd = nameless

    def write(self, data: bytes) -> None:
        self._written += len(data)
        if self._written > self._size:
            raise ProtocolError(f"'{shown(self.path)}' is longer than the {self._size} bytes announced")
        self._hash.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def finish(self, digest: str | None) -> None:
        if self._written != self._size:
            raise ProtocolError(f"'{shown(self.path)}' ended after {self._written} of {self._size} bytes")
        if digest is not None and self._hash.hexdigest() != digest:
            raise ProtocolError(f"'{shown(self.path)}' arrived damaged: its digest is not the one announced")
        _refuse_in_the_way(self._name, self._folder, self.path)
        if self._aside is None:
            try:
                self._give_name(self._name)
                return
            except FileExistsError:
                pass  # to be replaced, which takes a name and a rename
            self._aside = _new_name()
            self._give_name(self._aside)
        os.rename(self._aside, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._aside = None

    def _give_name(self, name: bytes) -> None:
        os.link(f"{_OPEN_FILES}/{self._fd}", name, dst_dir_fd=self._folder, follow_symlinks=True)

    def drop(self) -> None:
        if self._aside is not None:
            try:
                os.unlink(self._aside, dir_fd=self._folder)
            except FileNotFoundError:
                pass
        os.close(self._fd)
        os.close(self._folder)


def _open_nameless(folder: int, permissions: int) -> int | None:
    """A new file without a name in this directory; None where that cannot be had, or could not be named later."""
    if not os.path.isdir(_OPEN_FILES):
        return None
    try:
        return os.open(b".", _NAMELESS, permissions, dir_fd=folder)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return None


def _new_name() -> bytes:
    return b".grid-%s.part" % secrets.token_hex(8).encode()


def _refuse_in_the_way(name: bytes, folder: int, path: str) -> None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"'{shown(path)}' cannot be written: what is there {what_is(name, folder)}")
