"""Checkpoint marks: a job touches the file named in $GRID_CHECKPOINT, and the control plane hears how long ago.

Rule 1. What counts is when the file was last written, by this machine's clock; a time to come counts as now.
Rule 2. An attempt is told of at most once in ten seconds. A mark that nobody has confirmed, or that may have been lost
        with a link, is told again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from distributed_grid.agent.files import job_dir
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import CheckpointAge

TELL_EVERY_MS = 10_000


class CheckpointMark(NamedTuple):
    """An attempt of a node, and when it last marked a checkpoint (nanoseconds of the wall clock)."""

    node: str
    fence: int
    at_ns: int


class CheckpointMarks:
    """What attempts below a root have marked, and what of that is known where it matters."""

    def __init__(self, root: str, now_ms: Callable[[], int] = boot_ms) -> None:
        self._root = root
        self._now_ms = now_ms
        self._seen: dict[str, CheckpointMark] = {}
        self._told: dict[str, tuple[int, int]] = {}  # by attempt: which mark, and when
        self._known: dict[str, int] = {}
        self._ahead: dict[int, dict[str, int]] = {}  # by heartbeat: what it told

    def look(self, attempts: Iterable[tuple[str, int, str]]) -> None:
        """See what these have marked, given as (id, fence, node). A file system may hang: call it from a thread."""
        seen = {}
        for attempt_id, fence, node in attempts:
            at_ns = self._last(attempt_id)
            if at_ns is not None:
                seen[attempt_id] = CheckpointMark(node, fence, at_ns)
        self._seen = seen

    def to_tell(self, node: str, beat: int) -> tuple[CheckpointAge, ...]:
        """The marks of a node that this heartbeat should tell of."""
        seen, now = self._seen, self._now_ms()
        found = []
        for attempt_id, mark in seen.items():
            _, told_ms = self._told.get(attempt_id, (0, -TELL_EVERY_MS))
            is_news = self._known.get(attempt_id) != mark.at_ns and now - told_ms >= TELL_EVERY_MS
            if mark.node == node and is_news:
                found.append(CheckpointAge(attempt_id, mark.fence, _age_ms(mark.at_ns)))
                self._told[attempt_id] = (mark.at_ns, now)
                self._ahead.setdefault(beat, {})[attempt_id] = mark.at_ns
        self._forget_others(seen)
        return tuple(found)

    def heard(self, beat: int) -> None:
        """A heartbeat has arrived, and what it told is in the ledger; so is what those before it told, or never."""
        for earlier in [one for one in self._ahead if one <= beat]:
            told = self._ahead.pop(earlier)
            if earlier == beat:
                self._known |= told

    def tell_again(self) -> None:
        """There is a new link: what was told on the last one may not have come through."""
        self._told.clear()
        self._known.clear()
        self._ahead.clear()

    def ago_ms(self, attempt_id: str) -> int | None:
        """How long before now an attempt marked a checkpoint, as last seen; None where it was not seen to."""
        mark = self._seen.get(attempt_id)
        return None if mark is None else _age_ms(mark.at_ns)

    def age_ms(self, attempt_id: str) -> int | None:
        """How long ago an attempt marked its last checkpoint; None where it never did."""
        at_ns = self._last(attempt_id)
        return None if at_ns is None else _age_ms(at_ns)

    def _last(self, attempt_id: str) -> int | None:
        try:
            return os.stat(f"{self._root}/{attempt_id}/{job_dir.CHECKPOINT}", follow_symlinks=False).st_mtime_ns
        except OSError:
            return None

    def _forget_others(self, seen: dict[str, CheckpointMark]) -> None:
        """Keep nothing about attempts that are not there any more."""
        for table in (self._told, self._known):
            for attempt_id in [one for one in table if one not in seen]:
                del table[attempt_id]


def _age_ms(at_ns: int) -> int:
    return max(time.time_ns() - at_ns, 0) // 1_000_000
