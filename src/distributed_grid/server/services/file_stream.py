"""Bringing back what a job has left in its directory, file by file, at the reader's pace."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from distributed_grid.adapters.workdir.manifest import EXECUTABLE, ManifestEntry
from distributed_grid.control.attempt_files import AttemptFiles, in_work
from distributed_grid.domain.jobs import Attempt, Job
from distributed_grid.errors import NotFound, Refused

SLICE = 4 * 1024 * 1024


class FileParcel:
    """What a reader gets: a header for each file, its bytes, and at last the sum."""

    def __init__(
        self, header: Callable[[dict[str, Any]], Awaitable[None]], data: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self.header = header
        self.data = data


async def fetch(files: AttemptFiles, job: Job, patterns: tuple[str, ...], parcel: FileParcel) -> dict[str, Any]:
    """Send the files of a job's last attempt that fit; the sum of it. A job that ran in its caller's own directory
    has left them there already."""
    attempt = job.attempts[-1] if job.attempts else None
    if attempt is None or not (attempt.started_at_ms or attempt.outcome is not None):
        raise Refused(f"{job.id} has not run yet")
    if files.is_here(attempt) and job.command.cwd:
        return {"files": 0, "bytes": 0, "in_place": True, "skipped": []}
    found = await files.find(attempt, patterns)
    total = 0
    for entry in found.entries:
        total += await _send(files, attempt, entry, parcel)
    return {"files": len(found.entries), "bytes": total, "in_place": False, "skipped": list(found.skipped)}


async def _send(files: AttemptFiles, attempt: Attempt, entry: ManifestEntry, parcel: FileParcel) -> int:
    """One file as it was listed; of one that has grown meanwhile no more than that."""
    executable = entry.mode == EXECUTABLE
    await parcel.header({"file": entry.path.encode("utf-8", "surrogateescape").hex(), "size": entry.size,
                         "executable": executable})  # fmt: skip
    sent = 0
    while sent < entry.size:
        _, data = await files.read(attempt, in_work(entry), sent, min(SLICE, entry.size - sent))
        if not data:
            raise NotFound(f"{entry.path!r} became shorter while it was fetched")
        await parcel.data(data)
        sent += len(data)
    return sent
