"""Return of files to the working directory of a process that was moved: never over a file changed since.

What the job has written replaces a file that is as it was when the original stood still, each atomically and with the
mode that it has. A new file may be read and written by whom its directory lets in. Anything else there is kept, and the
new file is put beside it under the name `NAME.from-MOVE`. Nothing is written through a link or outside the directory,
nothing is removed, and no file is ever there in part. Done again it changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from typing import NamedTuple

from distributed_grid.adapters.workdir.directory_walker import DirectoryWalker, open_regular
from distributed_grid.adapters.workdir.manifest import EXECUTABLE, Manifest, ManifestEntry
from distributed_grid.adapters.workdir.paths import display_path, to_bytes, translate_os_errors
from distributed_grid.adapters.workdir.tree_writer import FileCopier

READ_BYTES = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ReturnedFiles(NamedTuple):
    """How many files and links came back, and the paths that were kept as they are, with their new files beside them
    where there is a place for these."""

    files: int
    kept: tuple[str, ...]


def return_files(results: Manifest, staged: int, target: int, before: Manifest, move_id: str) -> ReturnedFiles:
    """Put the results, which are laid out in the open directory `staged`, into the open directory `target`; `before` is
    what was there when the original stood still. `StoreFailed`: it may succeed later."""
    said = translate_os_errors("the working directory", "return the files")
    with said, DirectoryWalker(staged) as source, DirectoryWalker(target) as walker:
        return _FileReturn(source, walker, before, move_id).run(results)


class _FileReturn:
    def __init__(self, source: DirectoryWalker, target: DirectoryWalker, before: Manifest, move_id: str) -> None:
        self._source, self._target = source, target
        self._before = {entry.path: entry for entry in before.entries}
        self._suffix = b".from-" + move_id.encode()
        self._part = b".grid-" + move_id.encode() + b".part"
        self._copier = FileCopier()

    def run(self, results: Manifest) -> ReturnedFiles:
        files, kept = 0, []
        for entry in results.entries:
            names = tuple(to_bytes(entry.path).split(b"/"))
            if entry.kind == "dir":
                self._enter(names)
                continue
            folder = self._enter(names[:-1])
            if folder is None:  # a file or a link is in place of its directory, and stays there
                kept.append(display_path(entry.path))
                continue
            put = self._put_link if entry.kind == "link" else self._put_file
            if put(entry, names, folder):
                files += 1
            else:
                kept.append(display_path(entry.path))
        return ReturnedFiles(files, tuple(kept))

    def _enter(self, names: tuple[bytes, ...]) -> int | None:
        try:
            return self._target.enter(names, make=0o777)
        except NotADirectoryError:
            return None

    def _put_file(self, entry: ManifestEntry, names: tuple[bytes, ...], folder: int) -> bool:
        """Whether the file has its own name; False where it was put beside another one."""
        name = names[-1]
        found = _stat(name, folder)
        if found is not None and stat.S_ISREG(found.st_mode):
            digest = _digest(name, folder)
            if digest == entry.digest:
                return True
            known = self._before.get(entry.path)
            if known is not None and known.kind == "file" and digest == known.digest:
                self._copy(entry, names, folder, stat.S_IMODE(found.st_mode))
                if _same_file(found, _stat(name, folder)):  # nobody has written to it meanwhile
                    os.rename(self._part, name, src_dir_fd=folder, dst_dir_fd=folder)
                    return True
                os.unlink(self._part, dir_fd=folder)
        mode = (0o777 if entry.mode == EXECUTABLE else 0o666) & stat.S_IMODE(os.fstat(folder).st_mode)
        if found is None and self._put_new(entry, names, name, folder, mode):
            return True
        beside = name[: 255 - len(self._suffix)] + self._suffix
        there = _stat(beside, folder)
        if there is not None and stat.S_ISREG(there.st_mode) and _digest(beside, folder) == entry.digest:
            return False
        if there is not None and not stat.S_ISDIR(there.st_mode):
            os.unlink(beside, dir_fd=folder)  # ours, of a manifest that was ordered before
        self._put_new(entry, names, beside, folder, mode)
        return False

    def _put_new(self, entry: ManifestEntry, names: tuple[bytes, ...], name: bytes, folder: int, mode: int) -> bool:
        """Put a file under a name that nobody has; False where somebody has it by now."""
        self._copy(entry, names, folder, mode)
        try:
            os.link(self._part, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            if _stat(name, folder) is not None:  # no hard links here
                return False
            os.rename(self._part, name, src_dir_fd=folder, dst_dir_fd=folder)
            return True
        finally:
            if _stat(self._part, folder) is not None:
                os.unlink(self._part, dir_fd=folder)
        return True

    def _copy(self, entry: ManifestEntry, names: tuple[bytes, ...], folder: int, mode: int) -> None:
        """Write the content aside, whole and on the disk, or not at all."""
        if _stat(self._part, folder) is not None:
            os.unlink(self._part, dir_fd=folder)  # of an agent that was killed
        source = open_regular(names[-1], self._source.enter(names[:-1]))
        try:
            fd = os.open(self._part, _NEW, 0o600, dir_fd=folder)
            try:
                if self._copier.copy(source, fd, entry.size) != entry.size:
                    raise OSError(errno.EIO, "what was fetched is not whole", display_path(entry.path))
                os.fchmod(fd, mode)
                os.fsync(fd)
            except BaseException:
                os.unlink(self._part, dir_fd=folder)
                raise
            finally:
                os.close(fd)
        finally:
            os.close(source)

    def _put_link(self, entry: ManifestEntry, names: tuple[bytes, ...], folder: int) -> bool:
        name, target = names[-1], to_bytes(entry.target)
        for place in (name, name[: 255 - len(self._suffix)] + self._suffix):
            try:
                os.symlink(target, place, dir_fd=folder)
                return place == name
            except FileExistsError:
                if _link_target(place, folder) == target:
                    return place == name
        return False


def _stat(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _same_file(one: os.stat_result, other: os.stat_result | None) -> bool:
    def identity(found: os.stat_result) -> tuple[int, ...]:
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    return other is not None and identity(one) == identity(other)


def _digest(name: bytes, folder: int) -> str:
    """The digest of a regular file; none of one that cannot be read, which so counts as changed."""
    try:
        fd = open_regular(name, folder)
    except OSError:
        return ""
    found = hashlib.sha256()
    try:
        while part := os.read(fd, READ_BYTES):
            found.update(part)
    finally:
        os.close(fd)
    return found.hexdigest()


def _link_target(name: bytes, folder: int) -> bytes | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None
