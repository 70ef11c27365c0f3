"""What there is to ship in a directory, and whether it is little enough, before any of it is read.

The directories at the top take turns, so that of a tree far too large the largest parts are known after a moment: a
survey that is over the limit goes on for `LOOK_ON_SECONDS` to be able to name them, and then refuses.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from typing import NoReturn

from msgspec import Struct

from distributed_grid.adapters.workdir.directory_walker import DirectoryWalker
from distributed_grid.adapters.workdir.errors import PASSING
from distributed_grid.adapters.workdir.ignore_rules import IgnoreMatcher
from distributed_grid.adapters.workdir.manifest import EXECUTABLE, PLAIN, Kind
from distributed_grid.adapters.workdir.paths import MAX_DEPTH, MAX_PATH_BYTES, shown, to_text
from distributed_grid.errors import BadInput

LOOK_ON_SECONDS = 0.5
NAMED = 3
_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
_ODD = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a fifo", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class Skipped(Struct, frozen=True):
    """A file that is not shipped, and why not."""

    path: str
    why: str


class SurveyedFiles(Struct, frozen=True):
    """A name in the tree, as it was seen."""

    path: bytes
    kind: Kind
    size: int
    mode: int
    target: bytes = b""


class _Share:
    """How much one name at the top holds."""

    __slots__ = ("bytes", "files", "is_directory")

    def __init__(self, is_directory: bool) -> None:
        self.bytes = self.files = 0
        self.is_directory = is_directory


class Survey:
    """One walk over one tree; `found` and `skipped` are its result."""

    def __init__(
        self,
        root: int,
        name: str,
        *,
        limit_bytes: int,
        limit_files: int,
        look_on_seconds: float = LOOK_ON_SECONDS,
    ) -> None:
        self.found: list[SurveyedFiles] = []
        self.skipped: list[Skipped] = []
        self._root, self._name = root, name
        self._limit_bytes, self._limit_files = limit_bytes, limit_files
        self._look_on_seconds = look_on_seconds
        self._bytes = self._files = self._directories = self._seen = 0
        self._shares: dict[bytes, _Share] = {}
        self._deadline: float | None = None  # set once the limit is passed

    def walk(self, rules: IgnoreMatcher) -> None:
        """Look at everything the rules leave in; more than the limits is a `BadInput` that names the largest."""
        with DirectoryWalker(self._root) as descent:
            turns = deque(deque([below]) for below in self._look_into(b"", descent, rules))
            while turns:
                ahead = turns.popleft()
                path, above = ahead.popleft()
                ahead.extend(self._look_into(path, descent, above))
                if ahead:
                    turns.append(ahead)
        if self._deadline is not None:
            self._refuse(so_far="")

    def _look_into(
        self, path: bytes, descent: DirectoryWalker, above: IgnoreMatcher
    ) -> list[tuple[bytes, IgnoreMatcher]]:
        """Take what is in one directory; the directories in it, and the rules that hold there."""
        try:
            folder = descent.to(tuple(path.split(b"/")) if path else ())
            rules = above.entering(folder, path)
            return [(below, rules) for below in self._list(folder, path, rules)]
        except OSError as error:
            if error.errno in PASSING or not path:
                raise
            self.skipped.append(Skipped(to_text(path), error.strerror or "could not be read"))
            return []

    def _list(self, folder: int, path: bytes, rules: IgnoreMatcher) -> list[bytes]:
        directories = []
        lead = path + b"/" if path else b""
        with os.scandir(folder) as entries:
            for entry in entries:
                self._seen += 1
                if self._deadline is not None and self._seen % 64 == 0 and time.monotonic() > self._deadline:
                    self._refuse(so_far=" so far")
                below = lead + os.fsencode(entry.name)
                if rules.ignores(below, is_directory=entry.is_dir(follow_symlinks=False)):
                    continue
                try:
                    kind = self._take(folder, entry, below)
                except FileNotFoundError:
                    continue  # it went away in between
                if kind == "dir":
                    directories.append(below)
        return directories

    def _take(self, folder: int, entry: os.DirEntry[str], path: bytes) -> Kind | None:
        seen = entry.stat(follow_symlinks=False)
        kind = _KINDS.get(stat.S_IFMT(seen.st_mode))
        if kind is None:
            self.skipped.append(Skipped(to_text(path), f"is {_ODD.get(stat.S_IFMT(seen.st_mode), 'no file')}"))
            return None
        size = seen.st_size if kind == "file" else 0
        self._count(path, kind, size)
        if self._deadline is None:
            if len(path) > MAX_PATH_BYTES or path.count(b"/") >= MAX_DEPTH:
                raise BadInput(f"the directory {self._name} is too deep to ship: '{shown(path[:200])}…'")
            mode = EXECUTABLE if kind == "dir" or (kind == "file" and seen.st_mode & stat.S_IXUSR) else PLAIN
            target = os.readlink(os.fsencode(entry.name), dir_fd=folder) if kind == "link" else b""
            self.found.append(SurveyedFiles(path, kind, size, mode, target))
        return kind

    def _count(self, path: bytes, kind: Kind, size: int) -> None:
        top, _, rest = path.partition(b"/")
        share = self._shares.setdefault(top, _Share(is_directory=bool(rest) or kind == "dir"))
        self._bytes += size
        share.bytes += size
        share.files += kind != "dir"
        self._files += kind != "dir"
        self._directories += kind == "dir"
        over = self._bytes > self._limit_bytes or max(self._files, self._directories) > self._limit_files
        if over and self._deadline is None:
            self._deadline = time.monotonic() + self._look_on_seconds

    def _refuse(self, *, so_far: str) -> NoReturn:
        shares = sorted(self._shares.items())
        if self._bytes > self._limit_bytes:
            excess, order = amount(self._limit_bytes), "largest"
            shares.sort(key=lambda item: -item[1].bytes)
            named = [f"{_top(name, share)} {amount(share.bytes)}" for name, share in shares[:NAMED] if share.bytes]
        else:
            noun = "files" if self._files > self._limit_files else "directories"
            excess, order = f"{self._limit_files:,} {noun}", "most"
            shares.sort(key=lambda item: -item[1].files)
            named = [f"{_top(name, share)} {share.files:,} files" for name, share in shares[:NAMED] if share.files]
        largest = f" ({order}{so_far}: {', '.join(named)})" if named else ""
        raise BadInput(
            f"the directory {self._name} is too large to ship: more than {excess} after the ignore rules{largest};"
            " add them to .gridignore, or use --workdir DIR or --workdir none"
        )


def amount(count: int) -> str:
    """A number of bytes for a person: `3.2 GB`."""
    value = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" or value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def _top(name: bytes, share: _Share) -> str:
    return shown(name) + ("/" if share.is_directory else "")
