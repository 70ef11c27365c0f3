"""Listing of a whole directory, without content: every file, directory and link below it, whatever its name.

Nothing is ignored and nothing outside is looked at. A link that leads outside cannot be made anywhere else, and neither
can a socket or a device: these are left out, and listed. Too much of anything is refused.

`TreeDigests` lists names, kinds, links and digests. Listed again, only changed files are read. A file that changes
while it is read is listed as it was read: its reader finds that out by the digest.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
import time
from functools import partial

from msgspec import Struct

from distributed_grid.errors import BadInput
from distributed_grid.trees.content_store import SETTLED_NS, Fingerprint, fingerprint
from distributed_grid.trees.ignore_rules import GridIgnoreMatcher
from distributed_grid.trees.manifest import EXECUTABLE, LIMIT_BYTES, LIMIT_FILES, PLAIN, ManifestEntry, SkippedFile
from distributed_grid.trees.paths import (
    MAX_DEPTH,
    MAX_PATH_BYTES,
    DirectoryWalker,
    Tree,
    leads_outside,
    open_tree,
    to_bytes,
    to_text,
    translate_os_errors,
    tree_name,
)
from distributed_grid.trees.scan import READ_BYTES, Survey, read_surveyed
from distributed_grid.trees.secret_files import SecretFilter

MAX_TREE_BYTES = 4 << 30
MAX_TREE_FILES = 10_000


class TreeListing(Struct, frozen=True):
    """Everything below a directory, each directory before its content, and the entries left out.

    The files of `list_tree` have no digest yet. The links of `TreeDigests` are listed as they are, wherever they lead.
    """

    entries: tuple[ManifestEntry, ...]
    skipped: tuple[SkippedFile, ...] = ()


def list_tree(
    root: int, path: str, *, limit_bytes: int = MAX_TREE_BYTES, limit_files: int = MAX_TREE_FILES
) -> TreeListing:
    """List everything below the open directory `root`, which is at `path`.

    A link that names an entry inside by its full path becomes a relative one. More bytes, files or directories than
    the limits are a `BadInput`; an unreadable entry is `Refused`.
    """
    with translate_os_errors(path, "list the directory"), DirectoryWalker(root) as walker:
        return _Lister(walker, os.fsencode(path), limit_bytes, limit_files).run()


class _Lister:
    def __init__(self, walker: DirectoryWalker, path: bytes, limit_bytes: int, limit_files: int) -> None:
        self._walker, self._path = walker, path
        self._limit_bytes, self._limit_files = limit_bytes, limit_files
        self._entries: dict[bytes, ManifestEntry] = {}
        self._skipped: list[SkippedFile] = []
        self._bytes = self._files = self._directories = 0

    def run(self) -> TreeListing:
        ahead: list[tuple[bytes, ...]] = [()]
        while ahead:
            names = ahead.pop()
            folder = self._walker.enter(names)
            with os.scandir(folder) as listing:
                for item in listing:
                    name, status = os.fsencode(item.name), item.stat(follow_symlinks=False)
                    self._add(names, name, folder, status)
                    if stat.S_ISDIR(status.st_mode):
                        ahead.append((*names, name))
        links = {path: to_bytes(entry.target) for path, entry in self._entries.items() if entry.kind == "link"}
        for path in sorted(links):
            if leads_outside(path, links):
                self._skip(path, "is a link that leads outside")
                del self._entries[path]
        paths = sorted(self._entries, key=lambda path: path.split(b"/"))
        return TreeListing(tuple(self._entries[path] for path in paths), tuple(self._skipped))

    def _add(self, names: tuple[bytes, ...], name: bytes, folder: int, status: os.stat_result) -> None:
        path = b"/".join((*names, name))
        if len(path) > MAX_PATH_BYTES or len(names) >= MAX_DEPTH:
            raise BadInput(f"it is more than {MAX_DEPTH} directories deep, or has too long a path")
        shown = to_text(path)
        if stat.S_ISDIR(status.st_mode):
            self._directories += 1
            self._entries[path] = ManifestEntry(shown, "dir", mode=EXECUTABLE)
        elif stat.S_ISREG(status.st_mode):
            self._files += 1
            self._bytes += status.st_size
            mode = EXECUTABLE if status.st_mode & stat.S_IXUSR else PLAIN
            self._entries[path] = ManifestEntry(shown, "file", status.st_size, mode)
        elif stat.S_ISLNK(status.st_mode):
            self._files += 1
            target = os.readlink(name, dir_fd=folder)
            if target.startswith(self._path + b"/"):  # inside by its full path
                target = posixpath.relpath(target, posixpath.dirname(self._path + b"/" + path))
            self._entries[path] = ManifestEntry(shown, "link", target=to_text(target))
        else:
            self._skip(path, "is no file")
        if max(self._files, self._directories) > self._limit_files:
            raise BadInput(f"it holds more than {self._limit_files:,} files or directories")
        if self._bytes > self._limit_bytes:
            raise BadInput(f"it holds more than {self._limit_bytes >> 20:,} MB")

    def _skip(self, path: bytes, reason: str) -> None:
        self._skipped.append(SkippedFile(to_text(path), reason))


TREE_HINT = "add what is not needed to .gridignore"


class TreeDigests:
    """Lists one directory again and again, and remembers the digests of files that stay as they are.

    Of ignore files only `.gridignore` is obeyed: a process may need anything in its directory. Files that look like
    secrets are listed as skipped and not read where a filter of secrets is given.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Fingerprint, str]] = {}

    def list_tree(
        self,
        root: Tree,
        *,
        name: str = "",
        limit_bytes: int = LIMIT_BYTES,
        limit_files: int = LIMIT_FILES,
        secrets: SecretFilter | None = None,
    ) -> TreeListing:
        """The directory (a path, or a descriptor that stays open); BadInput where it is beyond the limits."""
        name = name or tree_name(root)
        with open_tree(root, name, "read the directory") as fd:
            survey = Survey(fd, name, limit_bytes=limit_bytes, limit_files=limit_files, hint=TREE_HINT, secrets=secrets)
            survey.walk(GridIgnoreMatcher())
            skipped = [SkippedFile(to_text(path), "looks like a secret") for path in survey.withheld]
            skipped += survey.skipped
            kept: dict[bytes, tuple[Fingerprint, str]] = {}
            entries = read_surveyed(fd, survey.found, skipped, partial(self._digest, kept=kept))
            self._known = kept
            return TreeListing(tuple(entries), tuple(skipped))

    def _digest(self, fd: int, path: bytes, kept: dict[bytes, tuple[Fingerprint, str]]) -> tuple[str, int]:
        read_at_ns = time.time_ns()
        before = os.fstat(fd)
        known = self._known.get(path)
        if known is not None and known[0] == fingerprint(before):
            kept[path] = known
            return known[1], before.st_size
        hasher, offset = hashlib.sha256(), 0
        while offset < before.st_size and (part := os.pread(fd, min(READ_BYTES, before.st_size - offset), offset)):
            hasher.update(part)
            offset += len(part)
        digest = hasher.hexdigest()
        settled = read_at_ns - max(before.st_mtime_ns, before.st_ctime_ns) > SETTLED_NS
        if offset == before.st_size and settled:  # file system clocks are coarse: a recent change is read again
            kept[path] = (fingerprint(before), digest)
        return digest, offset
