"""Making a directory hold what a manifest says.

Rule 1. Nothing is written outside the target, and nothing through a link in it.
Rule 2. A job may write into its files: they are its own copies, never the store's.
Rule 3. Laying out again completes what a crash interrupted: a file that is there counts only if its content is right.
        Other files in the target are left alone.

Copying one open file into another: shared blocks where the file system can, else inside the kernel, else by hand.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os

from msgspec import Struct

from distributed_grid.adapters.workdir.content_store import ContentMissing, ContentStore
from distributed_grid.adapters.workdir.directory_walker import DirectoryWalker, open_regular, open_root
from distributed_grid.adapters.workdir.errors import translated
from distributed_grid.adapters.workdir.manifest import Manifest, ManifestEntry, check
from distributed_grid.adapters.workdir.paths import to_bytes

FICLONE = 0x40049409
SMALL_BYTES = 128 << 10
PART_BYTES = 1 << 20
_CANNOT = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.ETXTBSY}


class FileCopier:
    """Copies between two file systems, and remembers what these two cannot do."""

    def __init__(self) -> None:
        self._clones = True
        self._in_kernel = True

    def copy(self, source: int, target: int, size: int) -> int:
        """Fill the empty `target` with the `size` bytes of `source`; how many there really were."""
        if size <= SMALL_BYTES:
            return _by_hand(source, target)
        if self._clones:
            try:
                fcntl.ioctl(target, FICLONE, source)
                return os.fstat(target).st_size
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self._clones = False
        done = self._through_kernel(source, target, size) if self._in_kernel else 0
        return done + _by_hand(source, target)

    def _through_kernel(self, source: int, target: int, size: int) -> int:
        done = 0
        while done < size:
            try:
                count = os.copy_file_range(source, target, size - done)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self._in_kernel = False
                break
            if not count:
                break
            done += count
        return done


def _by_hand(source: int, target: int) -> int:
    """Whatever is left of `source`, from where it stands."""
    done = 0
    while part := os.read(source, PART_BYTES):
        done += len(part)
        view = memoryview(part)
        while view:
            view = view[os.write(target, view) :]
    return done


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Materialized(Struct, frozen=True):
    """What it took: files written now, and files that were there already."""

    written: int
    kept: int
    written_bytes: int


def lay_out(manifest: Manifest, store: ContentStore, target: int | str | os.PathLike[str]) -> Materialized:
    """Make the tree below `target`, an open directory or the path of one; all below is for its owner only.

    Contents that are not in the store are a `ContentMissing`, before anything is made. A second call is harmless.
    """
    check(manifest)
    if absent := store.missing(manifest.blobs()):
        raise ContentMissing(absent)
    place = f"descriptor {target}" if isinstance(target, int) else os.fspath(target)
    with translated(place, "lay out the files"):
        root = os.dup(target) if isinstance(target, int) else open_root(target)
        try:
            with DirectoryWalker(root) as descent:
                return _Materializer(store, descent).lay(manifest)
        finally:
            os.close(root)


class _Materializer:
    def __init__(self, store: ContentStore, descent: DirectoryWalker) -> None:
        self._store, self._descent = store, descent
        self._copier = FileCopier()
        self._written = self._kept = self._bytes = 0

    def lay(self, manifest: Manifest) -> Materialized:
        for entry in manifest.entries:
            names = tuple(to_bytes(entry.path).split(b"/"))
            if entry.kind == "dir":
                self._descent.to(names, make=0o700)
                continue
            folder = self._descent.to(names[:-1], make=0o700)
            put = self._put_link if entry.kind == "link" else self._put_file
            if put(entry, names[-1], folder):
                self._written += 1
                self._bytes += entry.size
            else:
                self._kept += 1
        return Materialized(self._written, self._kept, self._bytes)

    def _put_file(self, entry: ManifestEntry, name: bytes, folder: int) -> bool:
        """Whether it had to be written."""
        try:
            fd = os.open(name, _NEW, entry.mode, dir_fd=folder)
        except FileExistsError:
            if _holds(entry, name, folder):
                return False
            os.unlink(name, dir_fd=folder)
            fd = os.open(name, _NEW, entry.mode, dir_fd=folder)
        try:
            os.fchmod(fd, entry.mode)
            with self._store.open(entry.digest) as blob:
                if self._copier.copy(blob.fileno(), fd, entry.size) != entry.size:
                    raise ContentMissing([entry.digest])
        except BaseException:
            os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(fd)
        return True

    def _put_link(self, entry: ManifestEntry, name: bytes, folder: int) -> bool:
        target = to_bytes(entry.target)
        try:
            os.symlink(target, name, dir_fd=folder)
        except FileExistsError:
            try:
                if os.readlink(name, dir_fd=folder) == target:
                    return False
            except OSError:
                pass  # something else, and in the way
            os.unlink(name, dir_fd=folder)
            os.symlink(target, name, dir_fd=folder)
        return True


def _holds(entry: ManifestEntry, name: bytes, folder: int) -> bool:
    """Whether the file is there already, and right."""
    try:
        fd = open_regular(name, folder)
    except IsADirectoryError:
        raise
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if found.st_size != entry.size or found.st_nlink != 1:
            return False
        digest = hashlib.sha256()
        while part := os.read(fd, PART_BYTES):
            digest.update(part)
        if digest.hexdigest() != entry.digest:
            return False
        os.fchmod(fd, entry.mode)
        return True
    finally:
        os.close(fd)
