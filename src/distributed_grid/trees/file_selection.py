"""Selection of the files to fetch from a job's directory.

A pattern is a path from the top: `model.bin`, `*.txt` (at the top), `out/**` (all below), `**/*.log` (anywhere). A
directory that matches stands for everything below it. Names that begin with a dot match like any other.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable

from msgspec import Struct

from distributed_grid.errors import BadInput
from distributed_grid.trees.content_store import file_digest
from distributed_grid.trees.manifest import EXECUTABLE, PLAIN, Manifest, ManifestEntry, SkippedFile
from distributed_grid.trees.paths import (
    MAX_DEPTH,
    DirectoryWalker,
    Tree,
    display_path,
    open_inside,
    open_tree,
    pattern_regex,
    to_bytes,
    to_text,
    tree_name,
)

FETCH_LIMIT_FILES = 100_000


class SelectedFiles(Struct, frozen=True):
    """The files that match, those that match but cannot be read, and the patterns that nothing matched."""

    entries: tuple[ManifestEntry, ...]
    skipped: tuple[SkippedFile, ...]
    unmatched: tuple[str, ...]


class ChangedFiles(Struct, frozen=True):
    """The files of a selection that were made or changed since they were shipped, and the number of the others."""

    entries: tuple[ManifestEntry, ...]
    unchanged: int = 0


class FilePatterns:
    """Patterns of files to fetch; the receiving side checks them too, and accepts nothing else."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        normalized = [_normalized_pattern(pattern) for pattern in self.patterns]
        self._regexes = [re.compile(pattern_regex(pattern) + b"(?:/.*)?", re.DOTALL) for pattern in normalized]
        # The leading names of each pattern that hold no wildcard.
        self._prefixes = [
            list(itertools.takewhile(lambda name: not re.search(rb"[*?\[\\]", name), pattern.split(b"/")))
            for pattern in normalized
        ]
        self._depths = [(MAX_DEPTH + 1 if b"**" in pattern else pattern.count(b"/") + 1) for pattern in normalized]

    def matches(self, path: str | bytes) -> list[int]:
        """Indexes of the patterns that match this file or directory, itself or by one of its parents."""
        raw = path if isinstance(path, bytes) else to_bytes(path)
        return [number for number, pattern in enumerate(self._regexes) if pattern.fullmatch(raw)]

    def may_match_below(self, directory: bytes) -> bool:
        """True if anything below this directory may match."""
        names = directory.split(b"/")
        return any(
            len(names) < depth and prefix[: len(names)] == names[: len(prefix)]
            for prefix, depth in zip(self._prefixes, self._depths, strict=True)
        )


def select_files(
    root: Tree, patterns: Iterable[str], *, limit_files: int = FETCH_LIMIT_FILES, limit_bytes: int | None = None
) -> SelectedFiles:
    """The files below `root` that match, without their content; `open_inside` opens each.

    A link to a file inside counts as that file; one that leads outside, or to a directory, is listed as skipped.
    """
    with open_tree(root, tree_name(root), "look for the files") as fd:
        return _Selector(fd, FilePatterns(patterns), limit_files, limit_bytes).run()


def changed_files(root: Tree, entries: Iterable[ManifestEntry], shipped: Manifest) -> ChangedFiles:
    """Leave out the files that are as they were shipped; only files of the same size are read for that."""
    before = {entry.path: entry for entry in shipped.entries}
    current = tuple(entries)
    if not before or not current:
        return ChangedFiles(current)
    with open_tree(root, "the job's directory", "compare the files") as fd:
        changed = tuple(entry for entry in current if not _is_as_shipped(fd, entry, before.get(entry.path)))
    return ChangedFiles(changed, len(current) - len(changed))


def _is_as_shipped(root: int, entry: ManifestEntry, before: ManifestEntry | None) -> bool:
    if before is None or before.kind == "dir" or (before.kind == "file" and before.size != entry.size):
        return False
    path = to_bytes(entry.path)
    *parents, name = path.split(b"/")
    try:
        if before.kind == "link":
            with DirectoryWalker(root) as walker:
                return os.readlink(name, dir_fd=walker.enter(tuple(parents))) == to_bytes(before.target)
        fd = open_inside(root, path)
    except OSError:
        return False
    try:
        return file_digest(fd) == before.digest
    finally:
        os.close(fd)


class _Selector:
    def __init__(self, root: int, patterns: FilePatterns, limit_files: int, limit_bytes: int | None) -> None:
        self._root, self._patterns = root, patterns
        self._limit_files, self._limit_bytes = limit_files, limit_bytes
        self._entries: list[ManifestEntry] = []
        self._skipped: list[SkippedFile] = []
        self._matched: set[int] = set()
        self._bytes = 0

    def run(self) -> SelectedFiles:
        ahead: list[tuple[bytes, ...]] = [()]
        with DirectoryWalker(self._root) as walker:
            while ahead:
                names = ahead.pop()
                try:
                    below = self._list(walker.enter(names), names)
                except OSError as error:
                    if not names:
                        raise
                    self._skipped.append(SkippedFile(to_text(b"/".join(names)), error.strerror or "could not be read"))
                    continue
                ahead.extend((*names, name) for name in below)
        unmatched = [pattern for number, pattern in enumerate(self._patterns.patterns) if number not in self._matched]
        entries = tuple(sorted(self._entries, key=lambda entry: entry.path))
        return SelectedFiles(entries, tuple(sorted(self._skipped, key=lambda skip: skip.path)), tuple(unmatched))

    def _list(self, folder: int, names: tuple[bytes, ...]) -> list[bytes]:
        """Add the matching files of one directory; the subdirectories in which more may match."""
        below = []
        with os.scandir(folder) as listing:
            for entry in listing:
                name = os.fsencode(entry.name)
                path = b"/".join((*names, name))
                matching = self._patterns.matches(path)
                self._matched.update(matching)
                if entry.is_dir(follow_symlinks=False):
                    if matching or self._patterns.may_match_below(path):
                        below.append(name)
                elif matching:
                    try:
                        fd = open_inside(self._root, path)
                    except OSError as error:
                        self._skipped.append(SkippedFile(to_text(path), error.strerror or "could not be read"))
                        continue
                    try:
                        seen = os.fstat(fd)
                    finally:
                        os.close(fd)
                    mode = EXECUTABLE if seen.st_mode & stat.S_IXUSR else PLAIN
                    self._entries.append(ManifestEntry(to_text(path), "file", seen.st_size, mode))
                    self._bytes += seen.st_size
                    if len(self._entries) > self._limit_files:
                        raise BadInput(
                            f"more than {self._limit_files:,} files match; ask for fewer with a narrower pattern"
                        )
                    if self._limit_bytes is not None and self._bytes > self._limit_bytes:
                        raise BadInput(
                            f"the files that match hold more than {self._limit_bytes} bytes; use a narrower pattern"
                        )
        if below and len(names) >= MAX_DEPTH - 1:
            self._skipped.append(SkippedFile(to_text(b"/".join(names)), f"is more than {MAX_DEPTH} directories deep"))
            return []
        return below


def _normalized_pattern(pattern: str) -> bytes:
    """The pattern without redundant parts such as `./`; one that leads outside is a `BadInput`."""
    raw = pattern.encode("utf-8", "surrogateescape")
    names = [name for name in raw.split(b"/") if name not in (b"", b".")]
    if not raw or b"\0" in raw:
        raise BadInput(f"'{display_path(raw)}' is not a pattern of files to fetch")
    if raw.startswith((b"/", b"~/")) or b".." in names:
        raise BadInput(
            f"'{display_path(raw)}' leads outside the job's directory; give a path inside it, such as 'out/**'"
        )
    return b"/".join(names) or b"**"
