"""Content store: file contents by digest at `<root>/ab/<sha256>`, and the digest cache of scanned directories.

A content is whole or absent: it is written to a temporary file, checked against its digest, and renamed. Several
processes may share a store: a lock on each unfinished file shows that its writer lives, and the next process
that opens the store removes the files of a dead one.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import BinaryIO

import msgspec

from distributed_grid.errors import NotFound, ProtocolError, StoreFailed
from distributed_grid.posix.private_files import sync_directory, try_lock
from distributed_grid.trees.paths import translate_os_errors

INCOMING_DIR = "new"
GRACE_SECONDS = 600
TOUCH_SECONDS = 60
READ_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ContentMissing(NotFound):
    """Needed contents are not in the store: put `digests`, and try again."""

    def __init__(self, digests: Iterable[str]) -> None:
        self.digests = tuple(digests)
        super().__init__(f"{len(self.digests)} of the files needed have not been sent")


class ContentStore:
    """One directory of contents; a `durable` one syncs each to the disk before it is reported stored."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = False) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.durable = durable
        with translate_os_errors(self.root, "open the store"):
            os.makedirs(f"{self.root}/{INCOMING_DIR}", mode=0o700, exist_ok=True)
            os.chmod(self.root, 0o700)
            for name in os.listdir(f"{self.root}/{INCOMING_DIR}"):
                path = f"{self.root}/{INCOMING_DIR}/{name}"
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                except OSError:
                    continue
                try:
                    if try_lock(fd):
                        os.unlink(path)
                except FileNotFoundError:
                    pass  # another process has finished it
                finally:
                    os.close(fd)

    def has(self, digest: str, size: int) -> bool:
        """True if this content is stored. Asking counts as a use."""
        path = self._path(digest)
        try:
            status = os.stat(path, follow_symlinks=False)
            if status.st_size != size:
                return False  # cut short when the machine went down
            if abs(time.time() - status.st_mtime) > TOUCH_SECONDS:
                os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def holds(self, digest: str) -> bool:
        return os.path.exists(self._path(digest))

    def missing(self, sizes: Mapping[str, int]) -> list[str]:
        """Digests (of these with sizes) that are not stored. Asking counts as a use of the others."""
        return [digest for digest, size in sizes.items() if not self.has(digest, size)]

    def open(self, digest: str) -> BinaryIO:
        """The content, unbuffered; `ContentMissing` when it is not stored."""
        try:
            fd = os.open(self._path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ContentMissing([digest]) from error
        return open(fd, "rb", buffering=0)

    def put(self, digest: str, parts: Iterable[bytes], *, size: int | None = None) -> None:
        """Store this content; other content than announced is a `ProtocolError`, and nothing is stored.

        Putting a content that is already stored is not an error.
        """
        with self.writer(digest=digest, size=size) as writer:
            for part in parts:
                writer.write(part)
            writer.finish()

    def add(self, content: bytes) -> str:
        """Store this content, and return its digest."""
        digest = hashlib.sha256(content).hexdigest()
        if not self.has(digest, len(content)):
            self.put(digest, [content])
        return digest

    def writer(self, *, digest: str | None = None, size: int | None = None) -> ContentWriter:
        """Writer of a content in pieces; digest and size are checked if given."""
        if digest is not None:
            self._path(digest)
        return ContentWriter(self, digest, size)

    def trim(self, max_bytes: int, *, keep: Collection[str] = frozenset(), grace_seconds: float = GRACE_SECONDS) -> int:
        """Remove the least recently used until `max_bytes` are left, and return how many bytes were freed.

        Contents in `keep`, or used within the grace period, stay even if that is too much.
        """
        contents = sorted(self._contents())
        surplus = sum(size for _, size, _, _ in contents) - max_bytes
        freed = 0
        for used_ns, size, digest, path in contents:
            if freed >= surplus:
                break
            if digest in keep or abs(time.time_ns() - used_ns) < grace_seconds * 1e9:
                continue
            try:
                if os.stat(path, follow_symlinks=False).st_mtime_ns != used_ns:
                    continue  # just used by another process
                os.unlink(path)
            except FileNotFoundError:
                pass  # trimmed by another process
            freed += size
        return freed

    def _path(self, digest: str) -> str:
        if not _DIGEST.fullmatch(digest):
            raise ProtocolError(f"{digest[:80]!a} is not a digest")
        return f"{self.root}/{digest[:2]}/{digest}"

    def _contents(self) -> Iterator[tuple[int, int, str, str]]:
        for folder in os.listdir(self.root):
            if len(folder) != 2:
                continue
            with os.scandir(f"{self.root}/{folder}") as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield status.st_mtime_ns, status.st_size, entry.name, entry.path


class ContentStores:
    """Several stores to read from; what belongs together is in one of them."""

    def __init__(self, *stores: ContentStore) -> None:
        self._stores = stores

    def holder(self, digest: str) -> ContentStore:
        """The store that has this content; `ContentMissing` where none has."""
        for store in self._stores:
            if store.holds(digest):
                return store
        raise ContentMissing([digest])

    def open(self, digest: str) -> BinaryIO:
        """The content, unbuffered; `ContentMissing` when it is not stored anywhere."""
        for store in self._stores:
            with suppress(ContentMissing):
                return store.open(digest)
        raise ContentMissing([digest])


class HashingWriter:
    """Writes to a descriptor, counts and hashes; other content than announced is a `ProtocolError`."""

    def __init__(self, fd: int, label: str, size: int | None) -> None:
        self._fd, self._label, self._size = fd, label, size
        self._hash = hashlib.sha256()
        self._written = 0

    def write(self, data: bytes) -> None:
        self._written += len(data)
        if self._size is not None and self._written > self._size:
            raise ProtocolError(f"{self._label} is longer than the {self._size} bytes announced")
        self._hash.update(data)
        write_all(self._fd, data)

    def check(self, digest: str | None) -> str:
        """Digest of the written content, which must be the announced one."""
        if self._size is not None and self._written != self._size:
            raise ProtocolError(f"{self._label} ended after {self._written} of {self._size} bytes")
        actual = self._hash.hexdigest()
        if digest is not None and actual != digest:
            raise ProtocolError(f"{self._label} arrived damaged: its digest is {actual}, {digest} was announced")
        return actual


def file_digest(fd: int) -> str:
    """The digest of an open file, from its current position on."""
    digest = hashlib.sha256()
    while part := os.read(fd, READ_BYTES):
        digest.update(part)
    return digest.hexdigest()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class ContentWriter:
    """Writes one content. Leaving the `with` block without `finish` leaves nothing behind."""

    def __init__(self, store: ContentStore, digest: str | None, size: int | None) -> None:
        self._store, self._digest = store, digest
        with translate_os_errors(store.root, "write there"):
            self._fd, self._temporary = _create_incoming(f"{store.root}/{INCOMING_DIR}")
        self._writer = HashingWriter(self._fd, "a file", size)

    def __enter__(self) -> ContentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, data: bytes) -> None:
        with translate_os_errors(self._store.root, "write there"):
            self._writer.write(data)

    def finish(self) -> str:
        """Put it in place, and return its digest; other content than announced is a `ProtocolError`."""
        digest = self._writer.check(self._digest)
        directory = self._store.root + "/" + digest[:2]
        with translate_os_errors(self._store.root, "write there"):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            if self._store.durable:
                os.fsync(self._fd)
            os.rename(self._temporary, f"{directory}/{digest}")
            os.close(self._fd)
            self._fd = -1
            if self._store.durable:
                sync_directory(directory)
        return digest

    def abort(self) -> None:
        """Drop the written content. After `finish`, or a second time, this does nothing."""
        if self._fd < 0:
            return
        with suppress(FileNotFoundError):
            os.unlink(self._temporary)
        os.close(self._fd)
        self._fd = -1


def _create_incoming(folder: str) -> tuple[int, str]:
    """A new locked file; when another process removed it before it was locked, try again with another name."""
    for _ in range(100):
        path = f"{folder}/{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, _NEW, 0o600)
        if not try_lock(fd):
            os.close(fd)
            continue
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)
    raise StoreFailed(f"{folder}: could not write there: other processes keep removing new files")


SETTLED_NS = 2 * 10**9
MAX_TREES = 64
MAX_CACHE_BYTES = 64 << 20
CACHE_DIR = "scans"

Fingerprint = tuple[int, int, int, int]
_cache_decoder = msgspec.msgpack.Decoder(dict[bytes, tuple[Fingerprint, str]])


def fingerprint(seen: os.stat_result) -> Fingerprint:
    """Changes whenever the file does: the change time is the kernel's own and cannot be set back."""
    return seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino


class HashCache:
    """Digests of one tree's files as last read, kept next to the contents so that an unchanged tree is not read again.

    It is bounded: one cache file per tree, and only the trees used last.
    """

    def __init__(self, store_root: str, tree: bytes) -> None:
        self._folder = f"{store_root}/{CACHE_DIR}"
        self._path = f"{self._folder}/{hashlib.sha256(tree).hexdigest()[:32]}"
        self._known: dict[bytes, tuple[Fingerprint, str]] = {}
        self._kept: dict[bytes, tuple[Fingerprint, str]] = {}
        # Without the cache the files are read again.
        with suppress(OSError, msgspec.MsgspecError), open(self._path, "rb") as file:
            self._known = _cache_decoder.decode(file.read(MAX_CACHE_BYTES))

    def digest(self, path: bytes, seen: os.stat_result) -> str | None:
        """The digest of this file as it is now; None when it is not known."""
        known = self._known.get(path)
        if known is None or known[0] != fingerprint(seen):
            return None
        self._kept[path] = known
        return known[1]

    def remember(self, path: bytes, seen: os.stat_result, digest: str, *, read_at_ns: int) -> None:
        """Store the digest of a file read at `read_at_ns`, unless it had just changed.

        File system clocks are coarse: a change right after the reading could bear the same time.
        """
        if read_at_ns - max(seen.st_mtime_ns, seen.st_ctime_ns) > SETTLED_NS:
            self._kept[path] = (fingerprint(seen), digest)

    def save(self) -> None:
        """Save the digests of this scan, and only those. A failure to save is ignored."""
        if self._kept == self._known:
            return
        temporary = f"{self._path}.{os.getpid()}"
        with suppress(OSError):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(self._kept))
            os.rename(temporary, self._path)
            with os.scandir(self._folder) as entries:
                by_age = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in entries)
            for changed, path in by_age[:-MAX_TREES]:
                if time.time() - changed > 60:
                    os.unlink(path)
