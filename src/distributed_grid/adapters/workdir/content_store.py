"""File contents kept by what they are: `<root>/ab/<sha256>`.

Rule 1. A blob is whole or absent: it is written aside, checked against its digest, and renamed.
Rule 2. Several processes may share a store. What a dead one left half-written is removed by the next that opens it;
        a lock on the unfinished file tells the dead from the living.
Rule 3. What was asked for lately is the last to go.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import BinaryIO

from distributed_grid.adapters.workdir.errors import translated
from distributed_grid.errors import NotFound, ProtocolError, StoreFailed
from distributed_grid.posix.locks import try_lock

UNFINISHED = "new"
GRACE_SECONDS = 600
TOUCH_SECONDS = 60
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ContentMissing(NotFound):
    """Contents that are needed are not (or no longer) here; `digests` says which. Put them, and ask again."""

    def __init__(self, digests: Iterable[str]) -> None:
        self.digests = tuple(digests)
        super().__init__(f"{len(self.digests)} of the files needed have not been sent")


class ContentStore:
    """One directory of blobs; a `durable` one has each on the disk before it says so."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = False) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.durable = durable
        with translated(self.root, "open the store"):
            os.makedirs(f"{self.root}/{UNFINISHED}", mode=0o700, exist_ok=True)
            os.chmod(self.root, 0o700)
            self._sweep()

    def has(self, digest: str, size: int) -> bool:
        """Whether this content is here. Asking counts as using it."""
        path = self._path(digest)
        try:
            found = os.stat(path, follow_symlinks=False)
            if found.st_size != size:
                return False  # cut short when the machine went down
            if abs(time.time() - found.st_mtime) > TOUCH_SECONDS:
                os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def missing(self, wanted: Mapping[str, int]) -> list[str]:
        """Which of these (digest and size) are not here. Asking counts as using the others."""
        return [digest for digest, size in wanted.items() if not self.has(digest, size)]

    def open(self, digest: str) -> BinaryIO:
        """The content, unbuffered; `ContentMissing` when it is not here."""
        try:
            fd = os.open(self._path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ContentMissing([digest]) from error
        return open(fd, "rb", buffering=0)

    def put(self, digest: str, parts: Iterable[bytes], *, size: int | None = None) -> None:
        """Keep this content; other content than promised is a `ProtocolError`, and nothing is kept.

        Putting what is already here is not an error.
        """
        with self.writer(digest=digest, size=size) as writer:
            for part in parts:
                writer.write(part)
            writer.finish()

    def keep(self, content: bytes) -> str:
        """Keep this content, and return its digest."""
        digest = hashlib.sha256(content).hexdigest()
        if not self.has(digest, len(content)):
            self.put(digest, [content])
        return digest

    def writer(self, *, digest: str | None = None, size: int | None = None) -> ContentWriter:
        """Begin a content that comes in pieces; what it has to be, where that is known, is checked."""
        if digest is not None:
            self._path(digest)
        return ContentWriter(self, digest, size)

    def trim(self, max_bytes: int, *, keep: Collection[str] = frozenset(), grace_seconds: float = GRACE_SECONDS) -> int:
        """Remove what was not used for longest until `max_bytes` are left, and return how many bytes went.

        What is in `keep`, or was used within the grace, stays even if that is too much.
        """
        found = sorted(self._blobs())
        surplus = sum(size for _, size, _, _ in found) - max_bytes
        freed = 0
        for used_ns, size, digest, path in found:
            if freed >= surplus:
                break
            if digest in keep or abs(time.time_ns() - used_ns) < grace_seconds * 1e9:
                continue
            try:
                if os.stat(path, follow_symlinks=False).st_mtime_ns != used_ns:
                    continue  # somebody has just asked for it
                os.unlink(path)
            except FileNotFoundError:
                pass  # another process trims too
            freed += size
        return freed

    def _path(self, digest: str) -> str:
        if not _DIGEST.fullmatch(digest):
            raise ProtocolError(f"{digest[:80]!a} is not a digest")
        return f"{self.root}/{digest[:2]}/{digest}"

    def _blobs(self) -> Iterator[tuple[int, int, str, str]]:
        for folder in os.listdir(self.root):
            if len(folder) != 2:
                continue
            with os.scandir(f"{self.root}/{folder}") as entries:
                for entry in entries:
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield found.st_mtime_ns, found.st_size, entry.name, entry.path

    def _sweep(self) -> None:
        for name in os.listdir(f"{self.root}/{UNFINISHED}"):
            path = f"{self.root}/{UNFINISHED}/{name}"
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                if try_lock(fd):
                    os.unlink(path)
            except FileNotFoundError:
                pass  # somebody has finished it
            finally:
                os.close(fd)


class ContentWriter:
    """One content on its way in. Leaving the `with` block without `finish` leaves nothing behind."""

    def __init__(self, store: ContentStore, digest: str | None, size: int | None) -> None:
        self._store, self._digest, self._size = store, digest, size
        self._hash = hashlib.sha256()
        self._written = 0
        self._fd = -1
        with translated(store.root, "write there"):
            self._fd, self._aside = _unfinished(f"{store.root}/{UNFINISHED}")

    def __enter__(self) -> ContentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def write(self, data: bytes) -> None:
        """Take the next piece."""
        self._written += len(data)
        if self._size is not None and self._written > self._size:
            raise ProtocolError(f"a file sent as {self._size} bytes is longer than that")
        self._hash.update(data)
        view = memoryview(data)
        with translated(self._store.root, "write there"):
            while view:
                view = view[os.write(self._fd, view) :]

    def finish(self) -> str:
        """Put it in place, and return its digest; a `ProtocolError` when it is not what was promised."""
        digest = self._hash.hexdigest()
        if self._size is not None and self._written != self._size:
            raise ProtocolError(f"a file sent as {self._size} bytes ended after {self._written}")
        if self._digest is not None and digest != self._digest:
            raise ProtocolError(f"a file arrived damaged: its digest is {digest}, {self._digest} was promised")
        place = self._store.root + "/" + digest[:2]
        with translated(self._store.root, "write there"):
            os.makedirs(place, mode=0o700, exist_ok=True)
            if self._store.durable:
                os.fsync(self._fd)
            os.rename(self._aside, f"{place}/{digest}")
            os.close(self._fd)
            self._fd = -1
            if self._store.durable:
                _sync(place)
        return digest

    def abort(self) -> None:
        """Drop what was written. After `finish`, or a second time, this does nothing."""
        if self._fd < 0:
            return
        try:
            os.unlink(self._aside)
        except FileNotFoundError:
            pass
        os.close(self._fd)
        self._fd = -1


def _unfinished(folder: str) -> tuple[int, str]:
    """A new locked file. One that a sweep took before it was locked is given up for another."""
    for _ in range(100):
        path = f"{folder}/{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, _NEW, 0o600)
        if not try_lock(fd):
            os.close(fd)
            continue
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)
    raise StoreFailed(f"{folder}: could not write there: other processes keep removing what is begun")


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
