"""Download of the files that a job has changed: what came as it was shipped is left out, and a file that was changed
here meanwhile is never replaced."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distributed_grid.adapters.workdir.content_store import ContentStore
from distributed_grid.adapters.workdir.manifest import decode
from distributed_grid.api.framing import JSON
from distributed_grid.client.job_payload import FileDownload, content_store_dir, decode_path
from distributed_grid.errors import Refused
from distributed_grid.state_dir import StateDir

READ_BYTES = 1 << 20


class ShippedDirectory:
    """A directory as it was shipped: the digests of its files, and when."""

    def __init__(
        self, directory: str, digests: Mapping[str, str], shipped_at_ns: int, links: Collection[str] = ()
    ) -> None:
        self.directory = directory
        self.links = links
        self._digests = digests
        self._shipped_at_ns = shipped_at_ns

    @classmethod
    def uploaded(cls, directory: str, manifest: str, state_dir: StateDir, shipped_at_ns: int) -> ShippedDirectory:
        """The directory that was uploaded as this manifest; an empty one is a directory that was not."""
        if not manifest:
            return cls(directory, {}, shipped_at_ns)
        with ContentStore(content_store_dir(state_dir)).open(manifest) as file:
            entries = decode(file.read()).entries
        digests = {one.path: one.digest for one in entries if one.kind == "file"}
        return cls(directory, digests, shipped_at_ns, {one.path for one in entries if one.kind == "link"})

    def is_as_shipped(self, path: str, digest: str) -> bool:
        """Whether this is the content that the file was shipped with."""
        return self._digests.get(path) == digest

    def was_changed_since(self, path: str) -> bool:
        """Whether the file here is another one than was shipped; of one that was not, whether it was touched since."""
        here = os.path.join(self.directory, path)
        try:
            found = os.lstat(here)
        except OSError:
            return path in self._digests  # somebody removed it
        if not stat.S_ISREG(found.st_mode):
            return True
        if path not in self._digests:
            return found.st_ctime_ns > self._shipped_at_ns
        try:
            return _digest(here) != self._digests[path]
        except OSError:
            return True


class ChangedFilesDownload(FileDownload):
    """Writes the files of a job that differ from what was shipped; `kept` names those that were changed here, too, or
    that are something else than a file by now. A link that was shipped comes as the file that it leads to, and is left.
    """

    def __init__(self, shipped: ShippedDirectory, patterns: Sequence[str]) -> None:
        super().__init__(shipped.directory, patterns)
        self._shipped = shipped
        self._hash = hashlib.sha256()
        self.kept: list[str] = []
        self.written: list[str] = []

    def receive(self, kind: bytes, part: bytes | dict[str, Any]) -> dict[str, Any] | None:
        if kind != JSON:
            if not self._open:
                return None
            assert isinstance(part, bytes)
            self._hash.update(part)
        return super().receive(kind, part)

    def _begin(self, header: dict[str, Any]) -> None:
        try:
            super()._begin(header)
        except Refused:  # a link or a directory is in its place
            path = decode_path(header)
            if path not in self._shipped.links:
                self.kept.append(path)

    def _finish(self) -> None:
        if not self._open:
            return
        path, digest = self.paths[-1], self._hash.hexdigest()
        self._hash = hashlib.sha256()
        if self._shipped.is_as_shipped(path, digest):
            self._drop()
        elif self._shipped.was_changed_since(path):
            self.kept.append(path)
            self._drop()
        else:
            super()._finish()
            self.written.append(path)

    def _drop(self) -> None:
        self._receiver.abort()
        self._open = False


def _digest(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(READ_BYTES):
            found.update(part)
    return found.hexdigest()
