"""What a keeper holds along with its server: a descriptor of every copy in memory, the names of those on disk.

Rule 1. Until a server has told all it holds, what it tells is coming; then that, and nothing else, is held.
Rule 2. Every descriptor is closed once: when its copy is let go of, when another takes its place, at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterable

from distributed_grid.memory.protocol.control_messages import JOURNAL

log = logging.getLogger(__name__)


class HeldCopies:
    """The copies of one folder, the journal among them."""

    def __init__(self) -> None:
        self.descriptors: dict[str, int] = {}
        self.on_disk: set[str] = set()
        self._coming: dict[str, int] = {}

    @property
    def in_memory(self) -> tuple[str, ...]:
        """The copies in memory, by name."""
        return tuple(name for name in self.descriptors if name != JOURNAL)

    @property
    def is_empty(self) -> bool:
        """Whether there is no copy, neither in memory nor on disk."""
        return not self.descriptors.keys() - {JOURNAL} and not self.on_disk

    def measure(self) -> int:
        """The bytes that what is in memory really uses at this moment."""
        return 512 * sum(os.fstat(fd).st_blocks for fd in self.descriptors.values())

    # ------------------------------------------------------------------ while a server tells

    def begin_anew(self) -> None:
        """A server is about to tell what it holds; what is held stays until it has."""
        self.stop_coming()
        self.on_disk = set()

    def take(self, names: tuple[str, ...], fds: list[int], *, is_told: bool) -> None:
        """Hold these, at once where the server has told everything, or else when it has.

        Where this process has no room for more descriptors, the kernel leaves some out: those are the server's alone.
        """
        into = self.descriptors if is_told else self._coming
        if len(fds) < len(names):
            log.warning("no more files can be open here: %d copies are held by the server alone", len(names) - len(fds))
        for name, fd in zip(names, fds, strict=False):
            close_all([into.pop(name)] if name in into else [])
            into[name] = fd

    def all_told(self) -> None:
        """What the server does not hold, nobody does."""
        close_all(self.descriptors.values())
        self.descriptors, self._coming = self._coming, {}

    def stop_coming(self) -> None:
        """Who was telling does not go on; safe twice."""
        close_all(self._coming.values())
        self._coming = {}

    # ------------------------------------------------------------------ letting go

    def free(self, copies: Iterable[str]) -> None:
        """Let go of these; those that are not here are no error."""
        for copy in copies:
            fd = self.descriptors.pop(copy, -1)
            close_all([fd] if fd >= 0 else [])
            self.on_disk.discard(copy)

    def keep_journal(self) -> None:
        """Let go of every copy in memory; the journal goes on."""
        journal = self.descriptors.pop(JOURNAL, -1)
        self.free_memory()
        if journal >= 0:
            self.descriptors[JOURNAL] = journal

    def free_memory(self) -> None:
        """Let go of all that is in memory; safe twice."""
        close_all(self.descriptors.values())
        self.descriptors = {}


def close_all(fds: Iterable[int]) -> None:
    """Close every one of them."""
    for fd in fds:
        os.close(fd)


def raise_limit() -> None:
    """As many descriptors as this process may have: each copy in memory takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
