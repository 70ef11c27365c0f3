"""Return of files into a person's directory: no local work is lost, and no returned file runs by itself.

One rule for every way back (downloads, deliveries, returns of moves):

- A file that the job left as it was shipped is not returned.
- A local file is replaced only if it is as it was shipped, or as the grid itself wrote it last time; `overwrite`
  insists. Any other local file stays, and the job's version is put beside it as `NAME.from-ORIGIN`.
- Where a link or a file is in place of a directory, the returned files go below `NAME.from-ORIGIN`.
- Protected paths (`secret_files`) are never written. A new executable bit is reported.

Nothing is written through a link or outside the directory, nothing is removed, and no file is ever there in part. Done
again with the same files it changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct, field

from distributed_grid.errors import ProtocolError
from distributed_grid.posix.private_files import read_regular, write_private
from distributed_grid.trees.content_store import READ_BYTES, HashingWriter, file_digest
from distributed_grid.trees.manifest import EXECUTABLE, Manifest, ManifestEntry
from distributed_grid.trees.paths import (
    MAX_DEPTH,
    MAX_NAME_BYTES,
    DirectoryWalker,
    display_path,
    open_regular,
    split_path,
    to_bytes,
    to_text,
    translate_os_errors,
)
from distributed_grid.trees.secret_files import is_protected, is_unremarkable
from distributed_grid.trees.tree_writer import open_unnamed

MAX_BYTES = 64 << 20


class FetchedDigests:
    """Digests by path relative to one directory. Several processes may record at the same time."""

    def __init__(self, folder: Path, directory: str | os.PathLike[str]) -> None:
        self._directory = os.path.realpath(directory)
        name = hashlib.sha256(os.fsencode(self._directory)).hexdigest()[:32]
        self._path = folder / f"{name}.json"

    def read(self) -> dict[str, str]:
        """The digests; none where the file is missing or damaged."""
        try:
            stored = json.loads(read_regular(str(self._path), None, MAX_BYTES) or b"{}")
            files = stored["files"] if stored.get("directory") == _text(self._directory) else {}
            return {str(path): str(digest) for path, digest in files.items()}
        except (OSError, ValueError, KeyError, AttributeError):
            return {}

    def record(self, written: Mapping[str, str]) -> None:
        """Add the digests of files that were just written, and drop those of files that are gone. `OSError` leaves the
        old ones."""
        added = {path: digest for path, digest in written.items() if digest}
        if not added:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = os.fsencode(self._directory)
            known = {
                path: digest
                for path, digest in self.read().items()
                if os.path.lexists(os.path.join(folder, path.encode("utf-8", "surrogateescape")))
            }
            content = json.dumps({"directory": _text(self._directory), "files": known | added}).encode()
            if len(content) <= MAX_BYTES:
                write_private(self._path, content, durable=False)
        finally:
            os.close(lock)


def _text(directory: str) -> str:
    return os.fsencode(directory).decode("utf-8", "surrogateescape")


MAX_BESIDE_NAMES = 99
PART_PREFIX = b".grid-"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PROC_FDS = "/proc/self/fd"
_NOTHING: Mapping[str, str] = MappingProxyType({})


class ReturnPolicy(Struct, frozen=True, kw_only=True):
    """Knowledge about the files that return, and about those that are there."""

    origin: str
    """Job or move that the files come from: the suffix of a version that is put beside a local file."""
    shipped: Mapping[str, str] = _NOTHING
    """Digests of the files as they were shipped, by path."""
    shipped_links: Mapping[str, str] = _NOTHING
    """Targets of the links as they were shipped, by path."""
    fetched: Mapping[str, str] = _NOTHING
    """Digests of the files that the grid itself wrote into this directory before, by path."""
    overwrite: bool = False
    umask: int | None = None
    """Permissions that new files do not get; None: those that their directory does not give."""
    durable: bool = False
    """Each file is on the disk before the next one begins."""


class ReturnReport(Struct):
    """Outcome of a return: paths relative to the directory, in the order in which they came."""

    written: dict[str, str] = field(default_factory=dict)
    """Digests of the files that are in the directory now, by path; those beside a local file included."""
    replaced: int = 0
    beside: dict[str, str] = field(default_factory=dict)
    """Local files that stay, each with the name of the job's version."""
    protected: list[str] = field(default_factory=list)
    executable: list[str] = field(default_factory=list)
    """Files that are executable now and were not before."""
    unchanged: int = 0
    """Files that the job left as they were shipped."""
    present: int = 0
    """Files that were there already with the same content."""
    bytes: int = 0


def shipped_policy(
    manifest: Manifest,
    *,
    origin: str,
    fetched: Mapping[str, str] = _NOTHING,
    overwrite: bool = False,
    umask: int | None = None,
    durable: bool = False,
) -> ReturnPolicy:
    """The policy for the files of a job that began with this tree."""
    entries = manifest.entries
    files = {entry.path: entry.digest for entry in entries if entry.kind == "file"}
    links = {entry.path: entry.target for entry in entries if entry.kind == "link"}
    return ReturnPolicy(
        origin=origin,
        shipped=files,
        shipped_links=links,
        fetched=fetched,
        overwrite=overwrite,
        umask=umask,
        durable=durable,
    )


class ReturnDirectory:
    """Receives files one after another into a directory that the caller keeps open.

    A file has no name until it is finished, so not even a killed receiver leaves part of one; where the file system
    cannot do that, it is written under a temporary name that is removed on failure.
    """

    def __init__(self, root: int, policy: ReturnPolicy) -> None:
        self.report = ReturnReport()
        self._root = root
        self._policy = policy
        self._suffix = b".from-" + policy.origin.encode()
        self._walker = DirectoryWalker(root)
        self._current: _IncomingFile | None = None
        self._skips = False

    def begin(self, path: str, size: int, *, executable: bool, digest: str = "") -> None:
        """Begin the next file. A path that leads outside is a `ProtocolError`. With its digest, a file that is there
        already need not be written again."""
        if self._current is not None:
            raise ProtocolError("a file begins before the last one is finished")
        names = split_path(to_bytes(path))
        if size < 0:
            raise ProtocolError(f"'{display_path(path)}' cannot have {size} bytes")
        self._skips = self._is_refused(path, names) or path in self._policy.shipped_links
        if self._skips:
            return
        parents, folder = self._nearest_directory(names[:-1])
        if digest and parents == names[:-1] and _digest(names[-1], folder) == digest:
            self.report.present += 1
            self.report.written[path] = digest
            self._skips = True
            return
        self._current = _IncomingFile(path, (*parents, names[-1]), size, executable, os.dup(folder))

    def write(self, data: bytes) -> None:
        """Write the next piece of the file."""
        if self._skips:
            return
        if self._current is None:
            raise ProtocolError("file content arrived before its name")
        self._current.writer.write(data)

    def finish(self) -> None:
        """Put the file in its place, or beside the local file there; an incomplete one is a `ProtocolError`."""
        if self._skips:
            self._skips = False
            return
        current, self._current = self._current, None
        if current is None:
            raise ProtocolError("a file ends before it began")
        try:
            digest = current.writer.check(None)
            if self._policy.shipped.get(current.path) == digest:
                self.report.unchanged += 1
                return
            *parents, own = current.names
            if len(current.names) > MAX_DEPTH:
                raise ProtocolError(f"'{display_path(current.path)}' is more than {MAX_DEPTH} directories deep")
            folder = self._enter(tuple(parents))
            for name in self._candidates(own):
                shown = to_text(b"/".join((*parents, name)))
                if self._try_name(current, digest, name, folder, shown):
                    self.report.written[shown] = digest
                    if shown != current.path:
                        self.report.beside[current.path] = shown
                    return
            raise FileExistsError(errno.EEXIST, "no name is free for the returned file", display_path(current.path))
        finally:
            current.close()

    def put_link(self, path: str, target: str) -> None:
        """Make a link where there is nothing; else beside it. A link to a protected path is not made."""
        names = split_path(to_bytes(path))
        aim = (*names[:-1], *(name for name in to_bytes(target).split(b"/") if name not in (b"", b".", b"..")))
        if self._is_refused(path, names) or self._is_refused(path, aim):
            return
        parents, _ = self._nearest_directory(names[:-1])
        folder = self._enter(parents)
        for name in self._candidates(names[-1]):
            try:
                os.symlink(to_bytes(target), name, dir_fd=folder)
            except FileExistsError:
                try:
                    is_same = os.readlink(name, dir_fd=folder) == to_bytes(target)
                except OSError:
                    is_same = False
                if not is_same:
                    continue
            shown = to_text(b"/".join((*parents, name)))
            self.report.written[shown] = ""
            if shown != path:
                self.report.beside[path] = shown
            return

    def make_directory(self, path: str) -> None:
        """Have a directory; where a file or a link has its name, nothing is made."""
        names = split_path(to_bytes(path))
        if not is_protected(names):
            parents, _ = self._nearest_directory(names)
            if parents == names:
                self._enter(names)

    def flush(self) -> None:
        """Flush all written files to the disk, as far as the system can."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(self._root) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Drop an unfinished file. Safe to call twice; the root stays open."""
        current, self._current = self._current, None
        if current is not None:
            current.close()
        self._walker.close()

    def _enter(self, names: tuple[bytes, ...]) -> int:
        umask = self._policy.umask
        return self._walker.enter(names, make=0o777 & ~(umask or 0), exact=umask is not None)

    def _is_refused(self, path: str, names: tuple[bytes, ...]) -> bool:
        if not is_protected(names):
            return False
        if not is_unremarkable(names) and path not in self.report.protected:
            self.report.protected.append(path)
        return True

    def _nearest_directory(self, names: tuple[bytes, ...]) -> tuple[tuple[bytes, ...], int]:
        """The directory that a file goes to, which need not be there yet, and the nearest one that is: a descriptor
        that is valid until the walker moves. A name that a file or a link has gets the suffix of the origin."""
        here: tuple[bytes, ...] = ()
        for depth, name in enumerate(names):
            for candidate in self._candidates(name):
                try:
                    self._walker.enter((*here, candidate))
                except NotADirectoryError:
                    continue
                except FileNotFoundError:
                    return (*here, candidate, *names[depth + 1 :]), self._walker.enter(here)
                here = (*here, candidate)
                break
            else:
                raise FileExistsError(errno.EEXIST, "no name is free for a directory", display_path(name))
        return here, self._walker.enter(here)

    def _candidates(self, name: bytes) -> list[bytes]:
        """Names for a file or directory, the best first."""
        beside = name[: MAX_NAME_BYTES - len(self._suffix) - 3] + self._suffix
        return [name, beside, *(b"%s.%d" % (beside, number) for number in range(2, MAX_BESIDE_NAMES))]

    def _try_name(self, file: _IncomingFile, digest: str, name: bytes, folder: int, shown: str) -> bool:
        """Put the file under this name; False where a local file has it that must stay."""
        for _ in range(2):  # another process may write to it meanwhile
            existing = _stat(name, folder)
            if existing is None:
                whole = 0o777 if file.executable else 0o666
                umask = self._policy.umask
                if file.link(
                    name,
                    folder,
                    whole & (stat.S_IMODE(os.fstat(folder).st_mode) if umask is None else ~umask),
                    durable=self._policy.durable,
                ):
                    self._count(file, shown, is_new_bit=file.executable)
                    return True
                continue
            if not stat.S_ISREG(existing.st_mode):
                return False
            local = _digest(name, folder)
            if local == digest:
                self.report.present += 1
                return True
            known = {self._policy.shipped.get(shown), self._policy.fetched.get(shown)} - {None}
            if local not in known and not (self._policy.overwrite and name == file.names[-1]):
                return False
            mode = stat.S_IMODE(existing.st_mode)
            is_new_bit = file.executable and not mode & stat.S_IXUSR
            mode |= (mode & 0o444) >> 2 if is_new_bit else 0
            if file.replace(name, folder, mode, existing, durable=self._policy.durable):
                self.report.replaced += 1
                self._count(file, shown, is_new_bit=is_new_bit)
                return True
        return False

    def _count(self, file: _IncomingFile, shown: str, *, is_new_bit: bool) -> None:
        self.report.bytes += file.size
        if is_new_bit:
            self.report.executable.append(shown)


class _IncomingFile:
    """A file that is being received in the nearest directory that was there; it owns the descriptor of that."""

    def __init__(self, path: str, names: tuple[bytes, ...], size: int, executable: bool, near: int) -> None:
        self.path, self.names, self.size, self.executable = path, names, size, executable
        self._near = near
        self._part: bytes | None = None
        try:
            fd = open_unnamed(near, 0o600)
            if fd is None:
                self._part = PART_PREFIX + secrets.token_hex(8).encode() + b".part"
                fd = os.open(self._part, _NEW, 0o600, dir_fd=near)
        except BaseException:
            os.close(near)
            raise
        self._fd = fd
        self.writer = HashingWriter(fd, f"'{display_path(path)}'", size)

    def link(self, name: bytes, folder: int, mode: int, *, durable: bool) -> bool:
        """Link the file under a free name; False if the name is taken by now."""
        self._settle(mode, durable)
        try:
            if self._part is None:
                os.link(f"{_PROC_FDS}/{self._fd}", name, dst_dir_fd=folder, follow_symlinks=True)
            else:
                os.link(self._part, name, src_dir_fd=self._near, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if self._part is None or error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            if _stat(name, folder) is not None:  # no hard links here
                return False
            os.rename(self._part, name, src_dir_fd=self._near, dst_dir_fd=folder)
            self._part = None
        return True

    def replace(self, name: bytes, folder: int, mode: int, seen: os.stat_result, *, durable: bool) -> bool:
        """Replace the file that was seen there; False where it is another one by now."""
        self._settle(mode, durable)
        if self._part is None:
            part = PART_PREFIX + secrets.token_hex(8).encode() + b".part"
            os.link(f"{_PROC_FDS}/{self._fd}", part, dst_dir_fd=self._near, follow_symlinks=True)
            self._part = part
        current = _stat(name, folder)
        if current is None or _identity(current) != _identity(seen):
            return False
        os.rename(self._part, name, src_dir_fd=self._near, dst_dir_fd=folder)
        self._part = None
        return True

    def close(self) -> None:
        if self._part is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._part, dir_fd=self._near)
        os.close(self._fd)
        os.close(self._near)

    def _settle(self, mode: int, durable: bool) -> None:
        os.fchmod(self._fd, mode)
        if durable:
            os.fsync(self._fd)


def return_tree(results: Manifest, staged: int, target: int, policy: ReturnPolicy) -> ReturnReport:
    """Return a tree that is laid out in the open directory `staged` to the open directory `target`. `StoreFailed`: it
    may succeed later."""
    with translate_os_errors("the working directory", "return the files"), DirectoryWalker(staged) as source:
        directory = ReturnDirectory(target, policy)
        try:
            for entry in results.entries:
                if entry.kind == "dir":
                    directory.make_directory(entry.path)
                elif entry.kind == "link":
                    directory.put_link(entry.path, entry.target)
                else:
                    _return_file(directory, source, entry)
        finally:
            directory.close()
        return directory.report


def _return_file(directory: ReturnDirectory, source: DirectoryWalker, entry: ManifestEntry) -> None:
    names = tuple(to_bytes(entry.path).split(b"/"))
    fd = open_regular(names[-1], source.enter(names[:-1]))
    try:
        directory.begin(entry.path, entry.size, executable=entry.mode == EXECUTABLE, digest=entry.digest)
        while data := os.read(fd, READ_BYTES):
            directory.write(data)
        directory.finish()
    except ProtocolError as error:
        raise OSError(errno.EIO, "a fetched file is not complete", display_path(entry.path)) from error
    finally:
        os.close(fd)


def current_umask() -> int:
    """The umask of this process, read without changing it; 0o077 where it cannot be read."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except (OSError, ValueError, IndexError):
        pass
    return 0o077


def _stat(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(name: bytes, folder: int) -> str:
    """The digest of a regular file; empty for one that cannot be read, which so counts as changed."""
    try:
        fd = open_regular(name, folder)
    except OSError:
        return ""
    try:
        return file_digest(fd)
    finally:
        os.close(fd)
