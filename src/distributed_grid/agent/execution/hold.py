"""Until when everything here that has a hold may go on without another word.

Rule 1. A hold never gets shorter.
Rule 2. It is on the disk while something runs, for each shim to read by itself. What cannot be written is as if nobody
        had been heard: work is stopped in time rather than late.
"""

from __future__ import annotations

import logging

from distributed_grid.agent.files import job_dir
from distributed_grid.posix.boot_clock import boot_ms

log = logging.getLogger(__name__)


class HoldDeadline:
    """The one hold of a root, in this boot."""

    def __init__(self, root: str, boot_id: str) -> None:
        self._root = root
        self._boot_id = boot_id
        self._until = self._on_disk = 0

    @property
    def lasts(self) -> bool:
        """Whether what was given last has not run out."""
        return self._until > boot_ms()

    def recall(self) -> None:
        """Know what the disk says."""
        self._until = self._on_disk = job_dir.read_hold(self._root, self._boot_id)

    def begin(self, now: int, hold_ms: int) -> None:
        """Something with a hold is launched now: it has the one that lasts, or else its own begins."""
        self._until = self._until if self._until > now else now + hold_ms
        self._write()

    def extend(self, until_boot_ms: int, *, in_use: bool) -> None:
        """Let it last until then, at least. Where nothing runs (not `in_use`) the disk need not know."""
        if until_boot_ms <= self._until:
            return
        self._until = until_boot_ms
        if in_use:
            self._write()

    def _write(self) -> None:
        if self._until == self._on_disk:
            return
        try:
            job_dir.write_hold(self._root, self._until, self._boot_id)
            self._on_disk = self._until
        except OSError as error:  # a full disk: what runs is stopped in time, as if nobody had been heard
            log.warning("the hold could not be renewed: %s", error.strerror)
