"""Output limit: the newest part of an attempt's stdout and stderr stays on the disk, older bytes are dropped.

A command writes its files itself (ADR 7), so its shim reads their sizes. Above the limit the blocks at the head of the
file are returned to the disk (`FALLOC_FL_PUNCH_HOLE`): sizes and offsets stay. `output.json` in the control directory
has the number of dropped bytes; it is written before the hole is made, so a reader that compares with it after it has
read never takes the zeros of a hole for output. On a disk without room for that file the hole comes first. It runs in
the shim, so it imports only the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from distributed_grid.agent.files.job_dir import DROPPED_OUTPUT
from distributed_grid.posix.file_blocks import punch_hole

if TYPE_CHECKING:
    from distributed_grid.agent.files.job_dir import JobDir

MIN_CHECK_MS, MAX_CHECK_MS = 50, 1000
BLOCK_BYTES: Final = 4096
DROP_SHARE: Final = 16
"""A sixteenth of the limit is dropped at a time, so that a slow writer does not cost a hole per block."""
MAX_GROWTH: Final = 4
"""Assumed growth of the writer's speed until the next check."""


class _OutputFile:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.dropped = 0  # bytes at the head that are gone
        self.size = 0  # at the last check


class OutputLimit:
    """Watches the output files of one attempt, by descriptors that it closes."""

    def __init__(self, limit_bytes: int, job: JobDir, output: Mapping[str, int]) -> None:
        self.limit_bytes = limit_bytes
        self._job = job
        self._files = {name: _OutputFile(fd) for name, fd in output.items()}
        self._is_recorded = True
        self._checked_ms = 0
        self.next_check_ms = 0
        """When to check again, in boot milliseconds."""

    def check(self, now: int) -> str | None:
        """Drop the oldest output above the limit; the reason to stop the command if that is impossible."""
        overrun = None
        elapsed = max(now - self._checked_ms, 1) if self._checked_ms else 0
        pause = min(2 * elapsed or MIN_CHECK_MS, MAX_CHECK_MS)
        for name, file in self._files.items():
            status = os.fstat(file.fd)
            grown, file.size = max(status.st_size - file.size, 0), status.st_size
            held = status.st_size - file.dropped
            if status.st_blocks:  # else its file system does not count them
                held = min(held, status.st_blocks * 512)
            if held > self.limit_bytes:
                try:
                    held -= self._drop(name, file)
                except InterruptedError:
                    pause = 0
                except OSError as error:
                    limit = f"limit {self.limit_bytes / 2**30:.3g} GB"
                    amount = f"its {name} has {held / 2**30:.3g} GB ({limit})"
                    overrun = f"{amount}, whose beginning cannot be dropped: {error.strerror}"
            if grown and elapsed:
                room = max(self.limit_bytes - held, 0)
                pause = min(pause, room * elapsed // (MAX_GROWTH * grown))
        if not self._is_recorded:
            self._record()
        self._checked_ms = now
        self.next_check_ms = now + max(pause, MIN_CHECK_MS)
        return overrun

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1].fd)

    def _drop(self, name: str, file: _OutputFile) -> int:
        """Drop the head of a file; the bytes that became free."""
        keep = self.limit_bytes - self.limit_bytes // DROP_SHARE
        end = (file.size - keep) // BLOCK_BYTES * BLOCK_BYTES
        before = file.dropped
        if end <= before:
            return 0
        file.dropped = end
        self._record()
        try:
            punch_hole(file.fd, before, end - before)
        except OSError:
            file.dropped = before
            self._record()
            raise
        return end - before

    def _record(self) -> None:
        """Record the dropped bytes; on a full disk after the hole has made room."""
        try:
            self._job.write(DROPPED_OUTPUT, {name: file.dropped for name, file in self._files.items()})
        except OSError:
            self._is_recorded = False
        else:
            self._is_recorded = True
