"""Taking a directory as it is now: its manifest, and the contents put into a blob store.

Rule 1. What the manifest says of a file is what the store holds: content is hashed on its way into the store.
Rule 2. A file that changes while it is read is read again, and refused when it does not come to rest.
Rule 3. Nothing outside the directory is read, whatever links are moved about meanwhile; a link that leads out is
        refused by name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from msgspec import Struct

from distributed_grid.adapters.workdir.content_store import ContentStore
from distributed_grid.adapters.workdir.directory_walker import DirectoryWalker, leads_out, open_regular, open_root
from distributed_grid.adapters.workdir.errors import PASSING, translated
from distributed_grid.adapters.workdir.hash_cache import HashCache, mark
from distributed_grid.adapters.workdir.ignore_rules import rules_for
from distributed_grid.adapters.workdir.manifest import (
    LIMIT_BYTES,
    LIMIT_FILES,
    MAX_ENCODED_BYTES,
    Manifest,
    ManifestEntry,
    encode,
    manifest_of,
)
from distributed_grid.adapters.workdir.paths import shown, to_text
from distributed_grid.adapters.workdir.survey import Skipped, Survey, SurveyedFiles, amount
from distributed_grid.errors import BadInput

SMALL_BYTES = 1 << 20
TRIES = 3


class Scan(Struct, frozen=True):
    """What was taken. `read_files` had to be read; the others were known from the last time."""

    manifest: Manifest
    skipped: tuple[Skipped, ...]
    read_files: int
    read_bytes: int


def scan(
    root: str | os.PathLike[str],
    store: ContentStore,
    *,
    limit_bytes: int = LIMIT_BYTES,
    limit_files: int = LIMIT_FILES,
    own: Iterable[str | os.PathLike[str]] = (),
) -> Scan:
    """Take the directory after its ignore rules; `own` are the grid's directories, never shipped unasked.

    Sockets, fifos, devices and what this user may not read are left out and listed as skipped. More than the limits,
    and links that lead out, are a `BadInput`. Scanning again is harmless, and quick where nothing changed.
    """
    name = shown(os.path.abspath(os.fspath(root)))
    try:
        fd = open_root(root)
    except OSError as error:
        raise BadInput(f"the directory {name} cannot be shipped: {error.strerror}") from error
    with translated(name, "read the directory"):
        try:
            tree = os.path.realpath(os.fsencode(root))
            places = [os.path.realpath(os.fsencode(place)) for place in (store.root, *own)]
            survey = Survey(fd, name, limit_bytes=limit_bytes, limit_files=limit_files)
            survey.walk(rules_for(tree, own=places))
            _refuse_links_out(name, survey.found)
            taking = _Taking(name, store, HashCache(store.root, tree), limit_bytes)
            manifest = manifest_of(taking.entries(fd, survey.found))
        finally:
            os.close(fd)
    if len(encode(manifest)) > MAX_ENCODED_BYTES:
        raise BadInput(f"the directory {name} is too large to ship: its file names alone take more than 16 MB")
    skipped = tuple(sorted([*survey.skipped, *taking.skipped], key=lambda one: one.path))
    return Scan(manifest, skipped, taking.read_files, taking.read_bytes)


def _refuse_links_out(name: str, found: list[SurveyedFiles]) -> None:
    links = {one.path: one.target for one in found if one.kind == "link"}
    for path in sorted(links):
        if leads_out(path, links):
            raise BadInput(
                f"the directory {name} cannot be shipped: the link {shown(path)} -> {shown(links[path])} leads out of"
                " it; add it to .gridignore, or use --workdir DIR or --workdir none"
            )


class _Taking:
    """The reading of the files that a survey found."""

    def __init__(self, name: str, store: ContentStore, memory: HashCache, limit_bytes: int) -> None:
        self.skipped: list[Skipped] = []
        self.read_files = self.read_bytes = 0
        self._name, self._store, self._memory = name, store, memory
        self._limit_bytes = self._room = limit_bytes

    def entries(self, root: int, found: list[SurveyedFiles]) -> list[ManifestEntry]:
        entries = []
        with DirectoryWalker(root) as descent:
            for one in sorted(found, key=lambda one: one.path.split(b"/")):
                if one.kind != "file":
                    entries.append(ManifestEntry(to_text(one.path), one.kind, 0, one.mode, target=to_text(one.target)))
                    continue
                *way, last = one.path.split(b"/")
                try:
                    fd = open_regular(last, descent.to(tuple(way)))
                except OSError as error:
                    if error.errno in PASSING:
                        raise
                    self.skipped.append(Skipped(to_text(one.path), error.strerror or "could not be read"))
                    continue
                try:
                    digest, size = self._content(fd, one.path)
                finally:
                    os.close(fd)
                entries.append(ManifestEntry(to_text(one.path), "file", size, one.mode, digest))
        self._memory.save()
        return entries

    def _content(self, fd: int, path: bytes) -> tuple[str, int]:
        """The digest and size of an open file whose content is now in the store."""
        for _ in range(TRIES):
            read_at_ns = time.time_ns()
            before = os.fstat(fd)
            self._refuse_growth(before.st_size)
            known = self._memory.digest(path, before)
            if known is not None and self._store.has(known, before.st_size):
                self._room -= before.st_size
                return known, before.st_size
            digest, size = self._read(fd, before.st_size)
            after = os.fstat(fd)
            if mark(before) == mark(after) and size == before.st_size:
                self._memory.learn(path, after, digest, read_at_ns=read_at_ns)
                self._room -= size
                self.read_files += 1
                self.read_bytes += size
                return digest, size
        raise BadInput(
            f"{self._name}: {shown(path)} keeps changing while it is read;"
            " try again when nothing writes to it, or add it to .gridignore"
        )

    def _read(self, fd: int, size: int) -> tuple[str, int]:
        if size <= SMALL_BYTES:
            content = os.pread(fd, size + 1, 0)
            return self._store.keep(content), len(content)
        at = 0
        with self._store.writer() as writer:
            while part := os.pread(fd, SMALL_BYTES, at):
                writer.write(part)
                at += len(part)
                self._refuse_growth(at)
            return writer.finish(), at

    def _refuse_growth(self, size: int) -> None:
        if size > self._room:
            raise BadInput(
                f"the directory {self._name} is too large to ship: it grew past {amount(self._limit_bytes)} while it"
                " was read; add what grows to .gridignore, or use --workdir DIR or --workdir none"
            )
