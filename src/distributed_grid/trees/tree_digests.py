"""Digests of a whole directory as it is now: names, kinds and links, without copying any content.

Listed again, only files are read that have changed since, so a second listing costs no more than what has changed. A
file that changes while it is read is listed as it was read: whoever fetches it finds that out by the digest.
"""

from __future__ import annotations

import hashlib
import os
import time

from msgspec import Struct

from distributed_grid.trees.content_store import SETTLED_NS, Fingerprint, fingerprint
from distributed_grid.trees.directory_walker import DirectoryWalker, open_root
from distributed_grid.trees.ignore_rules import GridIgnoreMatcher
from distributed_grid.trees.manifest import (
    LIMIT_BYTES,
    LIMIT_FILES,
    ManifestEntry,
    SkippedFile,
)
from distributed_grid.trees.paths import to_text, translate_os_errors
from distributed_grid.trees.scan import READ_BYTES, Survey, SurveyedFile, open_surveyed
from distributed_grid.trees.secret_files import SecretFilter

TREE_HINT = "add what is not needed to .gridignore"


class ListedTree(Struct, frozen=True):
    """Everything in a directory, and what cannot be read. Links are listed as they are, wherever they lead."""

    entries: tuple[ManifestEntry, ...]
    skipped: tuple[SkippedFile, ...] = ()


class TreeDigests:
    """Lists one directory again and again, and remembers the digests of files that stay as they are.

    Of ignore files only `.gridignore` is obeyed: what runs in a directory may need anything in it. Files that look like
    secrets are listed as skipped and not read where a filter of secrets is given.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Fingerprint, str]] = {}

    def list_tree(
        self,
        root: int | str | os.PathLike[str],
        *,
        name: str = "",
        limit_bytes: int = LIMIT_BYTES,
        limit_files: int = LIMIT_FILES,
        secrets: SecretFilter | None = None,
    ) -> ListedTree:
        """The directory (a path, or a descriptor that stays open); BadInput where it is beyond the limits."""
        shown = name or (f"descriptor {root}" if isinstance(root, int) else os.fspath(root))
        with translate_os_errors(shown, "read the directory"):
            fd = os.dup(root) if isinstance(root, int) else open_root(root)
            try:
                survey = Survey(
                    fd, shown, limit_bytes=limit_bytes, limit_files=limit_files, hint=TREE_HINT, secrets=secrets
                )
                survey.walk(GridIgnoreMatcher())
                skipped = [SkippedFile(to_text(path), "looks like a secret") for path in survey.withheld]
                skipped += survey.skipped
                return ListedTree(tuple(self._entries(fd, survey.found, skipped)), tuple(skipped))
            finally:
                os.close(fd)

    def _entries(self, root: int, found: list[SurveyedFile], skipped: list[SkippedFile]) -> list[ManifestEntry]:
        entries: list[ManifestEntry] = []
        kept: dict[bytes, tuple[Fingerprint, str]] = {}
        with DirectoryWalker(root) as walker:
            for one in sorted(found, key=lambda one: one.path.split(b"/")):
                if one.kind != "file":
                    entries.append(ManifestEntry(to_text(one.path), one.kind, 0, one.mode, target=to_text(one.target)))
                    continue
                fd = open_surveyed(walker, one, skipped)
                if fd is None:
                    continue
                try:
                    digest, size = self._digest(fd, one.path, kept)
                finally:
                    os.close(fd)
                entries.append(ManifestEntry(to_text(one.path), "file", size, one.mode, digest))
        self._known = kept
        return entries

    def _digest(self, fd: int, path: bytes, kept: dict[bytes, tuple[Fingerprint, str]]) -> tuple[str, int]:
        read_at_ns = time.time_ns()
        before = os.fstat(fd)
        known = self._known.get(path)
        if known is not None and known[0] == fingerprint(before):
            kept[path] = known
            return known[1], before.st_size
        found, at = hashlib.sha256(), 0
        while at < before.st_size and (part := os.pread(fd, min(READ_BYTES, before.st_size - at), at)):
            found.update(part)
            at += len(part)
        digest = found.hexdigest()
        settled = read_at_ns - max(before.st_mtime_ns, before.st_ctime_ns) > SETTLED_NS
        if at == before.st_size and settled:  # file system clocks are coarse: one that changed just now is read again
            kept[path] = (fingerprint(before), digest)
        return digest, at
