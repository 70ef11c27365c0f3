"""Digests of the files that the grid wrote into a person's directory: such a file may be replaced while it is as it was
written. One small file per directory in the state directory; without it nothing local is replaced."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from distributed_grid.posix.private_files import read_regular, write_private

MAX_BYTES = 64 << 20


class FetchedDigests:
    """Digests by path relative to one directory. Several processes may record at the same time."""

    def __init__(self, folder: Path, directory: str | os.PathLike[str]) -> None:
        self._directory = os.path.realpath(directory)
        name = hashlib.sha256(os.fsencode(self._directory)).hexdigest()[:32]
        self._path = folder / f"{name}.json"

    def read(self) -> dict[str, str]:
        """The digests; none where the file is missing or damaged."""
        try:
            stored = json.loads(read_regular(str(self._path), None, MAX_BYTES) or b"{}")
            files = stored["files"] if stored.get("directory") == _text(self._directory) else {}
            return {str(path): str(digest) for path, digest in files.items()}
        except (OSError, ValueError, KeyError, AttributeError):
            return {}

    def record(self, written: Mapping[str, str]) -> None:
        """Add the digests of files that were just written, and drop those of files that are gone. `OSError` leaves the
        old ones."""
        added = {path: digest for path, digest in written.items() if digest}
        if not added:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = {path: digest for path, digest in self.read().items() if self._exists(path)}
            content = json.dumps({"directory": _text(self._directory), "files": known | added}).encode()
            if len(content) <= MAX_BYTES:
                write_private(self._path, content, durable=False)
        finally:
            os.close(lock)

    def _exists(self, path: str) -> bool:
        return os.path.lexists(os.path.join(os.fsencode(self._directory), path.encode("utf-8", "surrogateescape")))


def _text(directory: str) -> str:
    return os.fsencode(directory).decode("utf-8", "surrogateescape")
