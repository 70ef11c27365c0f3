"""Size on disk of a directory and all that is below it, counted a few entries at a time.

- Links are not followed, and other file systems are not entered.
- A file of several names counts once. Of those, as many are remembered as `MAX_LINKED`; beyond that each name counts
  for its part.
- Whatever is not there any more when it is looked at does not count. A directory deeper than `MAX_DEPTH` counts
  without its content, so that few descriptors are open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

MAX_DEPTH = 40
MAX_LINKED = 50_000
ENTRY_BYTES = 512
"""A file without content needs room, too: for its name and its inode."""
BLOCK_BYTES = 512
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _OpenDirectory:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.entries: Iterator[os.DirEntry[str]] = os.scandir(fd)

    def close(self) -> None:
        self.entries.close()  # type: ignore[attr-defined]
        os.close(self.fd)


class TreeSize:
    """Counts one tree again and again; names in `apart`, directly below it, are summed apart from the rest."""

    def __init__(self, path: str, apart: frozenset[str] = frozenset(), *, max_linked: int = MAX_LINKED) -> None:
        self._path = path
        self._apart = apart
        self._max_linked = max_linked
        self._open: list[_OpenDirectory] = []
        self._linked: set[int] = set()
        self._device = 0
        self._bytes = self._apart_bytes = 0
        self.size_bytes = self.apart_bytes = 0  # of the last whole pass
        self.passes = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has begun and not ended."""
        return bool(self._open)

    @property
    def known_bytes(self) -> int:
        """The size that is known: of the last pass, or of the one under way where that has found more already."""
        return max(self.size_bytes, self._bytes)

    @property
    def known_total_bytes(self) -> int:
        """The same with what is summed apart."""
        return self.known_bytes + max(self.apart_bytes, self._apart_bytes)

    def count(self, entries: int) -> bool:
        """Count so many entries more; True when that ends a pass."""
        if not self._open:
            self._begin()
        while self._open and entries > 0:
            entries -= 1
            entry = next(self._open[-1].entries, None)
            if entry is None:
                self._open.pop().close()
            else:
                self._add(entry)
        if self._open:
            return False
        self.size_bytes, self.apart_bytes, self.passes = self._bytes, self._apart_bytes, self.passes + 1
        return True

    def close(self) -> None:
        """Close what is open; the next call begins a new pass. Safe twice."""
        while self._open:
            self._open.pop().close()

    def _begin(self) -> None:
        self._bytes = self._apart_bytes = 0
        self._linked = set()
        try:
            fd = os.open(self._path, _FLAGS)
        except OSError:  # it is gone
            return
        self._device = os.fstat(fd).st_dev
        self._enter(fd)

    def _enter(self, fd: int) -> None:
        try:
            self._open.append(_OpenDirectory(fd))
        except OSError:
            os.close(fd)

    def _add(self, entry: os.DirEntry[str]) -> None:
        here = self._open[-1]
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return
        if found.st_dev != self._device:
            return
        if stat.S_ISDIR(found.st_mode):
            self._bytes += ENTRY_BYTES + found.st_blocks * BLOCK_BYTES
            if len(self._open) < MAX_DEPTH:
                try:
                    fd = os.open(entry.name, _FLAGS, dir_fd=here.fd)
                except OSError:
                    return
                self._enter(fd)
            return
        size = ENTRY_BYTES + found.st_blocks * BLOCK_BYTES
        if found.st_nlink > 1:
            if found.st_ino in self._linked:
                size = 0
            elif len(self._linked) < self._max_linked:
                self._linked.add(found.st_ino)
            else:
                size //= found.st_nlink
        if len(self._open) == 1 and entry.name in self._apart:
            self._apart_bytes += size
        else:
            self._bytes += size
