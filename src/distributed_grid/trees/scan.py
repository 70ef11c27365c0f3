"""Directory scan: the manifest of a directory as it is now, with its file contents put into the content store.

The tree is surveyed first, so that one over the limits is refused before any file is read; files that look like secrets
(`secret_files`) are left out then, unless the user allows them. Content is hashed on its way
into the store, so the manifest never disagrees with the store; a file that changes while it is read is read again, and
refused when it keeps changing. Nothing outside the directory is read, even while links in it are being moved.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from msgspec import Struct

from distributed_grid.errors import BadInput
from distributed_grid.trees.content_store import ContentStore, HashCache, fingerprint
from distributed_grid.trees.ignore_rules import IgnoreMatcher, rules_for
from distributed_grid.trees.manifest import (
    EXECUTABLE,
    LIMIT_BYTES,
    LIMIT_FILES,
    MAX_ENCODED_BYTES,
    PLAIN,
    Kind,
    Manifest,
    ManifestEntry,
    SkippedFile,
    encode,
    manifest_of,
)
from distributed_grid.trees.paths import (
    MAX_DEPTH,
    MAX_PATH_BYTES,
    TRANSIENT_ERRNOS,
    DirectoryWalker,
    display_path,
    leads_outside,
    open_regular,
    open_root,
    to_text,
    translate_os_errors,
)
from distributed_grid.trees.secret_files import SecretFilter, SecretZone, ShipPatterns

OVERSIZE_SURVEY_SECONDS = 0.5
LARGEST_NAMED = 3
SHIP_HINT = "add them to .gridignore, or use --workdir DIR or --workdir none"
"""Advice for a directory that is too large."""
_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
_SPECIAL_FILES = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a fifo", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class SurveyedFile(Struct, frozen=True):
    """An entry of the tree, not read yet."""

    path: bytes
    kind: Kind
    size: int
    mode: int
    target: bytes = b""


class _TopLevelUsage:
    """How much one top-level entry holds."""

    __slots__ = ("bytes", "files", "is_directory")

    def __init__(self, is_directory: bool) -> None:
        self.bytes = self.files = 0
        self.is_directory = is_directory


class Survey:
    """A tree's entries and total size, counted before any file is read; `found`, `skipped` and `withheld` (files that
    look like secrets) are the result. Without `secrets` no name looks like one."""

    def __init__(
        self,
        root: int,
        name: str,
        *,
        limit_bytes: int,
        limit_files: int,
        oversize_seconds: float = OVERSIZE_SURVEY_SECONDS,
        hint: str = SHIP_HINT,
        secrets: SecretFilter | None = None,
    ) -> None:
        self._hint = hint
        self._secrets = secrets
        self.withheld: tuple[bytes, ...] = ()
        self.found: list[SurveyedFile] = []
        self.skipped: list[SkippedFile] = []
        self._root, self._name = root, name
        self._limit_bytes, self._limit_files = limit_bytes, limit_files
        self._oversize_seconds = oversize_seconds
        self._bytes = self._files = self._directories = self._seen = 0
        self._shares: dict[bytes, _TopLevelUsage] = {}
        self._deadline: float | None = None  # set once the limit is passed

    def walk(self, rules: IgnoreMatcher) -> None:
        """Record every entry that is not ignored; more than the limits is a `BadInput` that names the largest parts.

        The top-level directories take turns: of a tree far too large the largest parts are known after a
        moment, so a survey over the limit continues for a while to name them.
        """
        with DirectoryWalker(self._root) as walker:
            top = SecretZone.CHECKED if self._secrets is not None else SecretZone.ALLOWED
            turns = deque(deque([below]) for below in self._visit_directory(b"", walker, rules, top))
            while turns:
                ahead = turns.popleft()
                path, above, zone = ahead.popleft()
                ahead.extend(self._visit_directory(path, walker, above, zone))
                if ahead:
                    turns.append(ahead)
        if self._deadline is not None:
            self._refuse(so_far="")
        if self._secrets is not None:
            self.withheld, dropped = self._secrets.settle(surveyed.path for surveyed in self.found)
            if dropped:
                self.found = [surveyed for surveyed in self.found if surveyed.path not in dropped]

    def _visit_directory(
        self, path: bytes, walker: DirectoryWalker, above: IgnoreMatcher, zone: SecretZone
    ) -> list[tuple[bytes, IgnoreMatcher, SecretZone]]:
        """Record one directory's entries; its subdirectories with the rules that apply in them."""
        try:
            folder = walker.enter(tuple(path.split(b"/")) if path else ())
            rules = above.inside(folder, path)
            return [(below, rules, inside) for below, inside in self._list(folder, path, rules, zone)]
        except OSError as error:
            if error.errno in TRANSIENT_ERRNOS or not path:
                raise
            self.skipped.append(SkippedFile(to_text(path), error.strerror or "could not be read"))
            return []

    def _list(self, folder: int, path: bytes, rules: IgnoreMatcher, zone: SecretZone) -> list[tuple[bytes, SecretZone]]:
        directories = []
        lead = path + b"/" if path else b""
        with os.scandir(folder) as entries:
            for entry in entries:
                self._seen += 1
                if self._deadline is not None and self._seen % 64 == 0 and time.monotonic() > self._deadline:
                    self._refuse(so_far=" so far")
                below = lead + os.fsencode(entry.name)
                is_directory = entry.is_dir(follow_symlinks=False)
                is_ignored = rules.ignores(below, is_directory=is_directory)
                if self._secrets is None:
                    inside = None if is_ignored else zone
                else:
                    inside = self._secrets.zone(below, zone, rules, is_directory=is_directory, is_ignored=is_ignored)
                if inside is None:
                    continue
                try:
                    kind = self._add_entry(folder, entry, below)
                except FileNotFoundError:
                    continue  # removed meanwhile
                if kind == "dir":
                    directories.append((below, inside))
        return directories

    def _add_entry(self, folder: int, entry: os.DirEntry[str], path: bytes) -> Kind | None:
        seen = entry.stat(follow_symlinks=False)
        kind = _KINDS.get(stat.S_IFMT(seen.st_mode))
        if kind is None:
            self.skipped.append(
                SkippedFile(to_text(path), f"is {_SPECIAL_FILES.get(stat.S_IFMT(seen.st_mode), 'no file')}")
            )
            return None
        size = seen.st_size if kind == "file" else 0
        top, _, rest = path.partition(b"/")
        share = self._shares.setdefault(top, _TopLevelUsage(is_directory=bool(rest) or kind == "dir"))
        self._bytes += size
        share.bytes += size
        share.files += kind != "dir"
        self._files += kind != "dir"
        self._directories += kind == "dir"
        over = self._bytes > self._limit_bytes or max(self._files, self._directories) > self._limit_files
        if over and self._deadline is None:
            self._deadline = time.monotonic() + self._oversize_seconds
        if self._deadline is None:
            if len(path) > MAX_PATH_BYTES or path.count(b"/") >= MAX_DEPTH:
                raise BadInput(f"the directory {self._name} is too deep to ship: '{display_path(path[:200])}…'")
            mode = EXECUTABLE if kind == "dir" or (kind == "file" and seen.st_mode & stat.S_IXUSR) else PLAIN
            target = os.readlink(os.fsencode(entry.name), dir_fd=folder) if kind == "link" else b""
            self.found.append(SurveyedFile(path, kind, size, mode, target))
        return kind

    def _refuse(self, *, so_far: str) -> NoReturn:
        shares = sorted(self._shares.items())
        if self._bytes > self._limit_bytes:
            excess, order = format_bytes(self._limit_bytes), "largest"
            shares.sort(key=lambda item: -item[1].bytes)
            named = [
                f"{_top_level_name(name, share)} {format_bytes(share.bytes)}"
                for name, share in shares[:LARGEST_NAMED]
                if share.bytes
            ]
        else:
            noun = "files" if self._files > self._limit_files else "directories"
            excess, order = f"{self._limit_files:,} {noun}", "most"
            shares.sort(key=lambda item: -item[1].files)
            named = [
                f"{_top_level_name(name, share)} {share.files:,} files"
                for name, share in shares[:LARGEST_NAMED]
                if share.files
            ]
        largest = f" ({order}{so_far}: {', '.join(named)})" if named else ""
        raise BadInput(
            f"the directory {self._name} is too large to ship: more than {excess} after the ignore rules{largest};"
            f" {self._hint}"
        )


def format_bytes(count: int) -> str:
    """A number of bytes for a message: `3.2 GB`."""
    value = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" or value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def _top_level_name(name: bytes, share: _TopLevelUsage) -> str:
    return display_path(name) + ("/" if share.is_directory else "")


READ_BYTES = 1 << 20
MAX_READ_ATTEMPTS = 3


class ScanResult(Struct, frozen=True):
    """Manifest of a directory. `read_files` were read; the digests of the others were in the cache. `withheld` look
    like secrets and were not read; directories end with a slash. `unused` are patterns of `ship` that named none."""

    manifest: Manifest
    skipped: tuple[SkippedFile, ...]
    read_files: int
    read_bytes: int
    withheld: tuple[bytes, ...] = ()
    unused: tuple[str, ...] = ()


def scan_directory(
    root: str | os.PathLike[str],
    store: ContentStore,
    *,
    limit_bytes: int = LIMIT_BYTES,
    limit_files: int = LIMIT_FILES,
    own_dirs: Iterable[str | os.PathLike[str]] = (),
    ship: Sequence[str] = (),
) -> ScanResult:
    """Store the directory's files and return their manifest; `own_dirs` are the grid's own and are ignored by default.

    Files that look like secrets are withheld, but for those that `ship` names. Sockets, fifos, devices and what this
    user may not read are listed as skipped. More than the limits, and links that lead outside, are a `BadInput`.
    Scanning again is harmless, and quick where nothing changed.
    """
    name = display_path(os.path.abspath(os.fspath(root)))
    allowed = ShipPatterns(ship)
    try:
        fd = open_root(root)
    except OSError as error:
        raise BadInput(f"the directory {name} cannot be shipped: {error.strerror}") from error
    with translate_os_errors(name, "read the directory"):
        try:
            tree = os.path.realpath(os.fsencode(root))
            ignored = [os.path.realpath(os.fsencode(directory)) for directory in (store.root, *own_dirs)]
            secrets = SecretFilter(tree, allowed)
            survey = Survey(fd, name, limit_bytes=limit_bytes, limit_files=limit_files, secrets=secrets)
            survey.walk(rules_for(tree, own_dirs=ignored))
            links = {surveyed.path: surveyed.target for surveyed in survey.found if surveyed.kind == "link"}
            for path in sorted(links):
                if leads_outside(path, links):
                    link = f"{display_path(path)} -> {display_path(links[path])}"
                    raise BadInput(
                        f"the directory {name} cannot be shipped: the link {link} leads outside it; "
                        "add it to .gridignore, or use --workdir DIR or --workdir none"
                    )
            scanner = _Scanner(name, store, HashCache(store.root, tree), limit_bytes)
            manifest = manifest_of(read_surveyed(fd, survey.found, scanner.skipped, scanner.store_content))
            scanner.cache.save()
        finally:
            os.close(fd)
    if len(encode(manifest)) > MAX_ENCODED_BYTES:
        raise BadInput(f"the directory {name} is too large to ship: its file names alone take more than 16 MB")
    skipped = tuple(sorted([*survey.skipped, *scanner.skipped], key=lambda skip: skip.path))
    return ScanResult(
        manifest, skipped, scanner.read_files, scanner.read_bytes, withheld=survey.withheld, unused=allowed.unused
    )


def read_surveyed(
    root: int, found: list[SurveyedFile], skipped: list[SkippedFile], read: Callable[[int, bytes], tuple[str, int]]
) -> list[ManifestEntry]:
    """Entries of a survey; `read` returns digest and size of an open file. An unreadable file is noted in `skipped`,
    a temporary failure is raised."""
    entries = []
    with DirectoryWalker(root) as walker:
        for surveyed in sorted(found, key=lambda entry: entry.path.split(b"/")):
            path, mode = to_text(surveyed.path), surveyed.mode
            if surveyed.kind != "file":
                entries.append(ManifestEntry(path, surveyed.kind, 0, mode, target=to_text(surveyed.target)))
                continue
            *parents, last = surveyed.path.split(b"/")
            try:
                fd = open_regular(last, walker.enter(tuple(parents)))
            except OSError as error:
                if error.errno in TRANSIENT_ERRNOS:
                    raise
                skipped.append(SkippedFile(path, error.strerror or "could not be read"))
                continue
            try:
                digest, size = read(fd, surveyed.path)
            finally:
                os.close(fd)
            entries.append(ManifestEntry(path, "file", size, mode, digest))
    return entries


class _Scanner:
    """Reads the files that a survey found into the store."""

    def __init__(self, name: str, store: ContentStore, cache: HashCache, limit_bytes: int) -> None:
        self.skipped: list[SkippedFile] = []
        self.read_files = self.read_bytes = 0
        self._name, self._store, self.cache = name, store, cache
        self._limit_bytes = self._bytes_left = limit_bytes

    def store_content(self, fd: int, path: bytes) -> tuple[str, int]:
        """The digest and size of an open file whose content is now in the store."""
        for _ in range(MAX_READ_ATTEMPTS):
            read_at_ns = time.time_ns()
            before = os.fstat(fd)
            self._check_growth(before.st_size)
            known = self.cache.digest(path, before)
            if known is not None and self._store.has(known, before.st_size):
                self._bytes_left -= before.st_size
                return known, before.st_size
            if before.st_size <= READ_BYTES:
                content = os.pread(fd, before.st_size + 1, 0)
                digest, size = self._store.add(content), len(content)
            else:
                size = 0
                with self._store.writer() as writer:
                    while part := os.pread(fd, READ_BYTES, size):
                        writer.write(part)
                        size += len(part)
                        self._check_growth(size)
                    digest = writer.finish()
            after = os.fstat(fd)
            if fingerprint(before) == fingerprint(after) and size == before.st_size:
                self.cache.remember(path, after, digest, read_at_ns=read_at_ns)
                self._bytes_left -= size
                self.read_files += 1
                self.read_bytes += size
                return digest, size
        raise BadInput(
            f"{self._name}: {display_path(path)} keeps changing while it is read;"
            " try again when nothing writes to it, or add it to .gridignore"
        )

    def _check_growth(self, size: int) -> None:
        if size > self._bytes_left:
            raise BadInput(
                f"the directory {self._name} is too large to ship: it grew past {format_bytes(self._limit_bytes)} while"
                " it was read; add what grows to .gridignore, or use --workdir DIR or --workdir none"
            )
