"""What files held when they were last read, so that an unchanged tree is not read again.

Rule 1. A file is unchanged when size, modification time, change time and inode are; the change time is the kernel's
        own and cannot be set back.
Rule 2. What changed less than `SETTLED_NS` before it was read is not remembered: clocks of file systems are coarse,
        and a change right after the reading could bear the same time.
Rule 3. Memory is bounded: one file per tree, the trees used last.
"""

import hashlib
import os
import time
from contextlib import suppress

import msgspec

SETTLED_NS = 2 * 10**9
MAX_TREES = 64
MAX_MEMORY_BYTES = 64 << 20
FOLDER = "scans"

Mark = tuple[int, int, int, int]
_memory = msgspec.msgpack.Decoder(dict[bytes, tuple[Mark, str]])


def mark(seen: os.stat_result) -> Mark:
    """What changes when the file does."""
    return seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino


class HashCache:
    """The digests of one tree's files; kept next to the blobs."""

    def __init__(self, store_root: str, tree: bytes) -> None:
        self._folder = f"{store_root}/{FOLDER}"
        self._path = f"{self._folder}/{hashlib.sha256(tree).hexdigest()[:32]}"
        self._known: dict[bytes, tuple[Mark, str]] = {}
        self._kept: dict[bytes, tuple[Mark, str]] = {}
        with suppress(OSError, msgspec.MsgspecError), open(self._path, "rb") as file:
            self._known = _memory.decode(file.read(MAX_MEMORY_BYTES))  # lost memory costs time, nothing else

    def digest(self, path: bytes, seen: os.stat_result) -> str | None:
        """The digest of this file as it stands; None when that is not known."""
        known = self._known.get(path)
        if known is None or known[0] != mark(seen):
            return None
        self._kept[path] = known
        return known[1]

    def learn(self, path: bytes, seen: os.stat_result, digest: str, *, read_at_ns: int) -> None:
        """This file, last changed as in `seen`, was read at that time of day and has this digest."""
        if read_at_ns - max(seen.st_mtime_ns, seen.st_ctime_ns) > SETTLED_NS:
            self._kept[path] = (mark(seen), digest)

    def save(self) -> None:
        """Keep what this scan has seen, and only that. Not being able to is no failure."""
        if self._kept == self._known:
            return
        aside = f"{self._path}.{os.getpid()}"
        with suppress(OSError):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(self._kept))
            os.rename(aside, self._path)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        with os.scandir(self._folder) as entries:
            by_age = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in entries)
        for changed, path in by_age[:-MAX_TREES]:
            if time.time() - changed > 60:
                os.unlink(path)
