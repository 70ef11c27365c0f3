"""Which files of a job's directory were asked for.

A pattern is a path from the top: `model.bin`, `*.txt` (at the top), `out/**` (all below), `**/*.log` (anywhere). A
directory that matches stands for all below it. Names that begin with a dot match like any other.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable

from msgspec import Struct

from distributed_grid.adapters.workdir.directory_walker import DirectoryWalker, open_inside, open_root
from distributed_grid.adapters.workdir.errors import translated
from distributed_grid.adapters.workdir.globs import translate
from distributed_grid.adapters.workdir.manifest import EXECUTABLE, PLAIN, ManifestEntry
from distributed_grid.adapters.workdir.paths import MAX_DEPTH, shown, to_bytes, to_text
from distributed_grid.adapters.workdir.survey import Skipped
from distributed_grid.errors import BadInput

FETCH_LIMIT_FILES = 100_000


class Collected(Struct, frozen=True):
    """The files that match, those that match and cannot be had, and the patterns that nothing matched."""

    entries: tuple[ManifestEntry, ...]
    skipped: tuple[Skipped, ...]
    unmatched: tuple[str, ...]


class Wanted:
    """Patterns of what to bring back; the receiving side asks it too, and takes nothing it did not ask for."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        simple = [_simple(pattern) for pattern in self.patterns]
        self._whole = [re.compile(translate(pattern) + b"(?:/.*)?", re.DOTALL) for pattern in simple]
        self._leads = [_lead(pattern) for pattern in simple]
        self._depths = [_depth(pattern) for pattern in simple]

    def matching(self, path: str | bytes) -> list[int]:
        """Which patterns (by number) this file or directory matches, itself or by a directory it lies in."""
        raw = path if isinstance(path, bytes) else to_bytes(path)
        return [number for number, pattern in enumerate(self._whole) if pattern.fullmatch(raw)]

    def may_lie_below(self, directory: bytes) -> bool:
        """Whether it is worth looking into a directory."""
        names = directory.split(b"/")
        return any(
            len(names) < depth and lead[: len(names)] == names[: len(lead)]
            for lead, depth in zip(self._leads, self._depths, strict=True)
        )


def collect(
    root: int | str | os.PathLike[str],
    patterns: Iterable[str],
    *,
    limit_files: int = FETCH_LIMIT_FILES,
    limit_bytes: int | None = None,
) -> Collected:
    """The files below `root` that match, without their content; `open_inside` opens each.

    A link to a file inside counts as that file; one that leads out, or to a directory, is skipped and said.
    """
    wanted = Wanted(patterns)
    place = f"descriptor {root}" if isinstance(root, int) else os.fspath(root)
    with translated(place, "look for the files"):
        fd = os.dup(root) if isinstance(root, int) else open_root(root)
        try:
            return _Collecting(fd, wanted, limit_files, limit_bytes).run()
        finally:
            os.close(fd)


class _Collecting:
    def __init__(self, root: int, wanted: Wanted, limit_files: int, limit_bytes: int | None) -> None:
        self._root, self._wanted = root, wanted
        self._limit_files, self._limit_bytes = limit_files, limit_bytes
        self._entries: list[ManifestEntry] = []
        self._skipped: list[Skipped] = []
        self._matched: set[int] = set()
        self._bytes = 0

    def run(self) -> Collected:
        ahead: list[tuple[bytes, ...]] = [()]
        with DirectoryWalker(self._root) as descent:
            while ahead:
                names = ahead.pop()
                try:
                    below = self._list(descent.to(names), names)
                except OSError as error:
                    if not names:
                        raise
                    self._skipped.append(Skipped(to_text(b"/".join(names)), error.strerror or "could not be read"))
                    continue
                ahead.extend((*names, name) for name in below)
        unmatched = [pattern for number, pattern in enumerate(self._wanted.patterns) if number not in self._matched]
        entries = tuple(sorted(self._entries, key=lambda entry: entry.path))
        return Collected(entries, tuple(sorted(self._skipped, key=lambda one: one.path)), tuple(unmatched))

    def _list(self, folder: int, names: tuple[bytes, ...]) -> list[bytes]:
        """Take the files of one directory; the directories in it that are worth looking into."""
        below = []
        with os.scandir(folder) as found:
            for one in found:
                name = os.fsencode(one.name)
                path = b"/".join((*names, name))
                matching = self._wanted.matching(path)
                self._matched.update(matching)
                if one.is_dir(follow_symlinks=False):
                    if matching or self._wanted.may_lie_below(path):
                        below.append(name)
                elif matching:
                    self._take(path)
        if below and len(names) >= MAX_DEPTH - 1:
            self._skipped.append(Skipped(to_text(b"/".join(names)), f"is more than {MAX_DEPTH} directories deep"))
            return []
        return below

    def _take(self, path: bytes) -> None:
        try:
            fd = open_inside(self._root, path)
        except OSError as error:
            self._skipped.append(Skipped(to_text(path), error.strerror or "could not be read"))
            return
        try:
            seen = os.fstat(fd)
        finally:
            os.close(fd)
        mode = EXECUTABLE if seen.st_mode & stat.S_IXUSR else PLAIN
        self._entries.append(ManifestEntry(to_text(path), "file", seen.st_size, mode))
        self._bytes += seen.st_size
        if len(self._entries) > self._limit_files:
            raise BadInput(f"more than {self._limit_files:,} files match; ask for fewer with a narrower pattern")
        if self._limit_bytes is not None and self._bytes > self._limit_bytes:
            raise BadInput(f"the files that match hold more than {self._limit_bytes} bytes; use a narrower pattern")


def _simple(pattern: str) -> bytes:
    """The pattern without what means nothing, such as `./`; one that points elsewhere is a `BadInput`."""
    raw = pattern.encode("utf-8", "surrogateescape")
    names = [name for name in raw.split(b"/") if name not in (b"", b".")]
    if not raw or b"\0" in raw:
        raise BadInput(f"'{shown(raw)}' is not a pattern of files to bring back")
    if raw.startswith((b"/", b"~/")) or b".." in names:
        raise BadInput(f"'{shown(raw)}' leads out of the job's directory; give a path inside it, such as 'out/**'")
    return b"/".join(names) or b"**"


def _depth(pattern: bytes) -> int:
    """How deep below the top what it matches can lie."""
    return MAX_DEPTH + 1 if b"**" in pattern else pattern.count(b"/") + 1


def _lead(pattern: bytes) -> list[bytes]:
    """The names a pattern begins with that are no patterns themselves."""
    lead = []
    for name in pattern.split(b"/"):
        if re.search(rb"[*?\[\\]", name):
            break
        lead.append(name)
    return lead
