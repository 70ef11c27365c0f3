"""The files of attempts wherever they ran: on this machine, or on another one whose agent is asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from distributed_grid.adapters.workdir import file_selection
from distributed_grid.adapters.workdir.manifest import ManifestEntry, decode_listing
from distributed_grid.adapters.workdir.paths import display_path, to_bytes
from distributed_grid.agent.files.attempt_files import open_file
from distributed_grid.agent.files.job_dir import WORK
from distributed_grid.control.remote_files import RemoteFiles
from distributed_grid.domain.jobs import Attempt
from distributed_grid.errors import NotFound


class AttemptOutputFile(Struct, frozen=True):
    """Files of an attempt's working directory, and those that cannot be had, with the reason."""

    entries: tuple[ManifestEntry, ...]
    skipped: tuple[str, ...]


class AttemptFiles:
    """Reads by attempt and name (`stdout`, `stderr`, `work/…`), by looking or by asking."""

    def __init__(self, jobs: Path, remote: RemoteFiles, is_local: Callable[[str], bool]) -> None:
        self._jobs = str(jobs)
        self._remote = remote
        self._is_local = is_local

    def is_here(self, attempt: Attempt) -> bool:
        """Whether it ran on this machine."""
        return self._is_local(attempt.node)

    async def read(
        self, attempt: Attempt, name: bytes, offset: int, most: int, *, from_end: bool = False
    ) -> tuple[int, bytes]:
        """Where, and what there is from an offset on (or from so far before the end); empty where there is nothing.

        Unreachable while nobody answers.
        """
        if not self.is_here(attempt):
            where = (attempt.node, attempt.lease_id, name)
            return await self._remote.read(*where, offset, most, from_end=from_end)
        try:
            fd = open_file(self._jobs, attempt.lease_id, name)
        except (FileNotFoundError, NotADirectoryError):
            return 0, b""
        try:
            start = max(os.fstat(fd).st_size - offset, 0) if from_end else offset
            return start, os.pread(fd, most, start)
        finally:
            os.close(fd)

    async def find(self, attempt: Attempt, patterns: tuple[str, ...]) -> AttemptOutputFile:
        """The files that fit the patterns in the directory the attempt ran in."""
        if not self.is_here(attempt):
            listing = await self._remote.find(attempt.node, attempt.lease_id, patterns)
            entries = (
                decode_listing(listing.files, limit_files=file_selection.FETCH_LIMIT_FILES) if listing.files else ()
            )
            return AttemptOutputFile(entries, listing.skipped)
        work = Path(self._jobs, attempt.lease_id, WORK)
        if not work.is_dir():
            raise NotFound(f"the directory of {attempt.lease_id} is not there any more")
        found = await asyncio.to_thread(file_selection.select_files, work, patterns)
        return AttemptOutputFile(
            found.entries, tuple(f"{display_path(one.path)}: {one.reason}" for one in found.skipped)
        )


def in_work(entry: ManifestEntry) -> bytes:
    """The name of a found file, for `read`."""
    return WORK.encode() + b"/" + to_bytes(entry.path)
