"""Taking in what a job has left in its directory: only what was asked for, and never outside the target."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from distributed_grid.api.framing import JSON
from distributed_grid.errors import ProtocolError


class FileDownload:
    """Writes the frames of a `fetch` below a directory, file by file."""

    def __init__(self, target: str | os.PathLike[str], patterns: Sequence[str]) -> None:
        from distributed_grid.adapters import workdir  # only where something is fetched

        self._receiver = workdir.Receiver(target)
        self._wanted = workdir.Wanted(patterns)
        self._left = 0
        self._open = False
        self.paths: list[str] = []

    def take(self, kind: bytes, part: bytes | dict[str, Any]) -> dict[str, Any] | None:
        """One frame; the sum when it was the last."""
        if kind != JSON:
            assert isinstance(part, bytes)
            self._receiver.write(part)
            self._left -= len(part)
        else:
            assert isinstance(part, dict)
            if part.get("done"):
                self._finish()
                self._receiver.close()
                return part
            self._begin(part)
        return None

    def close(self) -> None:
        """Let go; a file that is not whole leaves no trace. Safe twice."""
        self._receiver.close()

    def _begin(self, header: dict[str, Any]) -> None:
        self._finish()
        path = bytes.fromhex(header["file"]).decode("utf-8", "surrogateescape")
        if not self._wanted.matching(path):
            raise ProtocolError(f"{path!r} was not asked for")
        self._receiver.begin(path, int(header["size"]), 0o700 if header["executable"] else 0o600)
        self._open, self._left = True, int(header["size"])
        self.paths.append(path)

    def _finish(self) -> None:
        if self._open:
            self._receiver.finish()
            self._open = False
