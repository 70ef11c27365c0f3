"""Writing files below a directory, never outside it and never through a link in it.

`materialize` makes a directory equal to a manifest; `FileReceiver` writes files that arrive one after another, each
whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from contextlib import AbstractContextManager, suppress

from msgspec import Struct

from distributed_grid.errors import ProtocolError, Refused
from distributed_grid.trees.content_store import ContentMissing, ContentStore, HashingWriter, file_digest, write_all
from distributed_grid.trees.manifest import Manifest, ManifestEntry, check
from distributed_grid.trees.paths import (
    DirectoryWalker,
    Tree,
    describe_file_type,
    display_path,
    open_regular,
    open_root,
    open_tree,
    split_path,
    to_bytes,
    translate_os_errors,
    tree_name,
)

FICLONE = 0x40049409
SMALL_COPY_BYTES = 128 << 10
READ_BYTES = 1 << 20
_COPY_UNSUPPORTED = {
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EPERM,
    errno.ETXTBSY,
}


class FileCopier:
    """Copies open files: by shared blocks where the file system can, else inside the kernel, else by reading.

    It remembers the operations that the two file systems do not support.
    """

    def __init__(self) -> None:
        self._clones = True
        self._in_kernel = True

    def copy(self, source: int, target: int, size: int) -> int:
        """Fill the empty `target` with the `size` bytes of `source`; returns the number of bytes copied."""
        if size <= SMALL_COPY_BYTES:
            return _copy_by_reading(source, target)
        if self._clones:
            try:
                fcntl.ioctl(target, FICLONE, source)
                return os.fstat(target).st_size
            except OSError as error:
                if error.errno not in _COPY_UNSUPPORTED:
                    raise
                self._clones = False
        done = 0
        while self._in_kernel and done < size:
            try:
                count = os.copy_file_range(source, target, size - done)
            except OSError as error:
                if error.errno not in _COPY_UNSUPPORTED:
                    raise
                self._in_kernel = False
                break
            if not count:
                break
            done += count
        return done + _copy_by_reading(source, target)


def _copy_by_reading(source: int, target: int) -> int:
    """Copy the rest of `source` from its current position."""
    done = 0
    while part := os.read(source, READ_BYTES):
        done += len(part)
        write_all(target, part)
    return done


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Materialized(Struct, frozen=True):
    """Files written by this call, and files that were there already."""

    written: int
    kept: int
    written_bytes: int


def materialize(manifest: Manifest, store: ContentStore, target: Tree) -> Materialized:
    """Make the tree below `target`, an open directory or the path of one; readable by its owner only.

    Contents that are not in the store are a `ContentMissing`, before anything is made. Files are copies, never the
    store's own: a job may write into them. A second call completes what a crash interrupted: an existing file is kept
    only if its content is right. Other files in the target are left alone.
    """
    check(manifest)
    if absent := store.missing(manifest.contents()):
        raise ContentMissing(absent)
    with open_tree(target, tree_name(target), "write the files") as root, DirectoryWalker(root) as walker:
        return _Materializer(store, walker).write(manifest)


class _Materializer:
    def __init__(self, store: ContentStore, walker: DirectoryWalker) -> None:
        self._store, self._walker = store, walker
        self._copier = FileCopier()
        self._written = self._kept = self._bytes = 0

    def write(self, manifest: Manifest) -> Materialized:
        for entry in manifest.entries:
            names = tuple(to_bytes(entry.path).split(b"/"))
            if entry.kind == "dir":
                self._walker.enter(names, make=0o700)
                continue
            folder = self._walker.enter(names[:-1], make=0o700)
            write = self._write_link if entry.kind == "link" else self._write_file
            if write(entry, names[-1], folder):
                self._written += 1
                self._bytes += entry.size
            else:
                self._kept += 1
        return Materialized(self._written, self._kept, self._bytes)

    def _write_file(self, entry: ManifestEntry, name: bytes, folder: int) -> bool:
        """Write the file unless it is there; whether it was written."""
        try:
            fd = os.open(name, _NEW, entry.mode, dir_fd=folder)
        except FileExistsError:
            if _has_content(entry, name, folder):
                return False
            os.unlink(name, dir_fd=folder)
            fd = os.open(name, _NEW, entry.mode, dir_fd=folder)
        try:
            os.fchmod(fd, entry.mode)
            with self._store.open(entry.digest) as content:
                if self._copier.copy(content.fileno(), fd, entry.size) != entry.size:
                    raise ContentMissing([entry.digest])
        except BaseException:
            os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(fd)
        return True

    def _write_link(self, entry: ManifestEntry, name: bytes, folder: int) -> bool:
        target = to_bytes(entry.target)
        try:
            os.symlink(target, name, dir_fd=folder)
        except FileExistsError:
            try:
                if os.readlink(name, dir_fd=folder) == target:
                    return False
            except OSError:
                pass  # not a link: replaced
            os.unlink(name, dir_fd=folder)
            os.symlink(target, name, dir_fd=folder)
        return True


def _has_content(entry: ManifestEntry, name: bytes, folder: int) -> bool:
    """True if the file is there already with the right content."""
    try:
        fd = open_regular(name, folder)
    except IsADirectoryError:
        raise
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if status.st_size != entry.size or status.st_nlink != 1:
            return False
        if file_digest(fd) != entry.digest:
            return False
        os.fchmod(fd, entry.mode)
        return True
    finally:
        os.close(fd)


_PROC_FDS = "/proc/self/fd"
_UNNAMED = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC
_TMPFILE_UNSUPPORTED = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


class FileReceiver:
    """Writes files one after another below a target, which is made if missing. Closing drops an unfinished file.

    A file has no name until it is finished, so not even a killed receiver leaves part of one; where the file system
    cannot do that, it is written under a temporary name that is removed on failure.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self._target = os.fspath(target)
        with translate_os_errors(self._target, "write there"):
            os.makedirs(target, exist_ok=True)
            self._root = open_root(target)
        self._walker = DirectoryWalker(self._root)
        self._current: _IncomingFile | None = None

    def __enter__(self) -> FileReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, path: str, size: int, mode: int) -> None:
        """Begin the next file; of `mode` only the owner's x bit counts, the rest follows the umask.

        A path that leads outside is a `ProtocolError`; a link on the path, or anything but a file under the file's own
        name, is `Refused`. A file of that name is replaced when this one is finished.
        """
        if self._current is not None:
            raise ProtocolError("a file begins before the last one is finished")
        names = split_path(to_bytes(path))
        if size < 0:
            raise ProtocolError(f"'{display_path(path)}' cannot have {size} bytes")
        permissions = 0o777 if mode & stat.S_IXUSR else 0o666
        with self._errors(path):
            folder = os.dup(self._walker.enter(names[:-1], make=0o777))
            try:
                _refuse_non_file(names[-1], folder, path)
                self._current = _IncomingFile(folder, names[-1], path, size, permissions)
            except BaseException:
                os.close(folder)
                raise

    def write(self, data: bytes) -> None:
        current = self._open_file()
        with self._errors(current.path):
            current.writer.write(data)

    def finish(self, digest: str | None = None) -> None:
        """Put the file in place; one with other content than announced is a `ProtocolError`, and is dropped."""
        current = self._open_file()
        self._current = None
        try:
            with self._errors(current.path):
                current.finish(digest)
        finally:
            current.drop()

    def abort(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.drop()

    def close(self) -> None:
        """Drop the unfinished file and close the target. A second call does nothing."""
        self.abort()
        self._walker.close()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _open_file(self) -> _IncomingFile:
        if self._current is None:
            raise ProtocolError("file content arrived before its name")
        return self._current

    def _errors(self, path: str) -> AbstractContextManager[None]:
        return translate_os_errors(os.path.join(self._target, display_path(path)), "write the file")


class _IncomingFile:
    """A file being received; it owns `folder`, the descriptor of its directory."""

    def __init__(self, folder: int, name: bytes, path: str, size: int, permissions: int) -> None:
        self.path = path
        self._folder, self._name = folder, name
        self._temporary: bytes | None = None
        unnamed = open_unnamed(folder, permissions)
        if unnamed is None:
            self._temporary = _temporary_name()
            unnamed = os.open(self._temporary, _NEW, permissions, dir_fd=folder)
        self._fd = unnamed
        self.writer = HashingWriter(unnamed, f"'{display_path(path)}'", size)

    def finish(self, digest: str | None) -> None:
        self.writer.check(digest)
        _refuse_non_file(self._name, self._folder, self.path)
        if self._temporary is None:
            try:
                self._link_as(self._name)
                return
            except FileExistsError:
                pass  # replacing takes a temporary name and a rename
            self._temporary = _temporary_name()
            self._link_as(self._temporary)
        os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._temporary = None

    def _link_as(self, name: bytes) -> None:
        os.link(f"{_PROC_FDS}/{self._fd}", name, dst_dir_fd=self._folder, follow_symlinks=True)

    def drop(self) -> None:
        if self._temporary is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._folder)
        os.close(self._fd)
        os.close(self._folder)


def open_unnamed(folder: int, permissions: int) -> int | None:
    """A new file without a name in this directory; None where that is unsupported, or it could not be named later."""
    if not os.path.isdir(_PROC_FDS):
        return None
    try:
        return os.open(b".", _UNNAMED, permissions, dir_fd=folder)
    except OSError as error:
        if error.errno not in _TMPFILE_UNSUPPORTED:
            raise
        return None


def _temporary_name() -> bytes:
    return b".grid-%s.part" % secrets.token_hex(8).encode()


def _refuse_non_file(name: bytes, folder: int, path: str) -> None:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise Refused(f"'{display_path(path)}' cannot be written: what exists {describe_file_type(name, folder)}")
