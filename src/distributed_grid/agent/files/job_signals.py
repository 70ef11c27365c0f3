"""Files through which agent and jobs signal: the hold deadline, the notice before a stop, checkpoint marks."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from distributed_grid.agent.files import job_dir
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.posix.private_files import DAMAGE, read_regular, replace_file
from distributed_grid.wire import MAX_MARKS, CheckpointAge

REPORT_EVERY_MS = 10_000
BOOT_DEADLINE = "deadline_boot_ms"
log = logging.getLogger(__name__)


class HoldDeadline:
    """Hold deadline of a root: attempts stop at it unless the control plane extends it. It never gets earlier.

    It is on disk while something runs, for each shim to read by itself; there it is written in place, so that a
    full disk ends nothing. A deadline that cannot be written counts as not extended: work is stopped in time rather
    than late.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self.key = ""
        self._until = self._on_disk = 0

    @property
    def lasts(self) -> bool:
        return self._until > boot_ms()

    def restore(self, key: str) -> None:
        """Read it from disk, if it was written with this key, and have room for it there."""
        self.key = key
        try:
            job_dir.make_hold(self._root)
        except OSError as error:
            log.warning("there is no room for holds: %s", error.strerror)
        self._until = self._on_disk = job_dir.read_hold(self._root, key)

    def begin(self, now: int, hold_ms: int) -> None:
        """Begin the hold of a launch, unless a current one lasts."""
        self._until = self._until if self._until > now else now + hold_ms
        self._write()

    def extend(self, until_boot_ms: int, *, in_use: bool) -> None:
        """Extend it to that time, at least. Where nothing runs (not `in_use`) it is not written to the disk."""
        if until_boot_ms <= self._until:
            return
        self._until = until_boot_ms
        if in_use:
            self._write()

    def _write(self) -> None:
        if self._until == self._on_disk:
            return
        try:
            job_dir.write_hold(self._root, self._until, self.key)
            self._on_disk = self._until
        except OSError as error:  # a broken disk: the attempts are stopped in time, as without an extension
            log.warning("the hold could not be renewed: %s", error.strerror)


def give_notice(root: str, attempt_id: str, reason: str, in_ms: int) -> int:
    """Warn an attempt of its stop; returns its time in milliseconds. A second notice adds no time, and
    takes none away, even if the wall clock was set since the first."""
    now, boot_now = time.time(), boot_ms()
    try:
        folder = job_dir.open_job_folder(root, attempt_id)
        try:
            before = job_dir.parse_json(read_regular(job_dir.NOTICE, folder, job_dir.MAX_FILE_BYTES))
            if isinstance(before, dict) and isinstance(before.get(BOOT_DEADLINE), int):
                in_ms = min(in_ms, max(before[BOOT_DEADLINE] - boot_now, 0))
            notice = {"reason": reason, "deadline": round(now + in_ms / 1000, 3), BOOT_DEADLINE: boot_now + in_ms}
            replace_file(job_dir.NOTICE, json.dumps(notice).encode(), folder)
        finally:
            os.close(folder)
    except OSError as error:  # a full disk: it learns of it by SIGTERM
        log.warning("%s could not be warned: %s", attempt_id, error.strerror)
    return in_ms


def withdraw_notice(root: str, attempt_id: str) -> None:
    """Remove the notice: the attempt may continue. Safe twice."""
    try:
        os.unlink(f"{root}/{attempt_id}/{job_dir.NOTICE}")
    except OSError as error:
        if error.errno not in DAMAGE:
            log.warning("the notice of %s could not be withdrawn: %s", attempt_id, error.strerror)


class CheckpointMark(NamedTuple):
    """An attempt of a node, and when it last marked a checkpoint (nanoseconds of the wall clock)."""

    node: str
    fence: int
    at_ns: int


class CheckpointMarks:
    """Checkpoints that attempts marked by writing $GRID_CHECKPOINT, and which of them the control plane knows.

    The time of a mark is the file's modification time by this machine's clock; a time to come counts as now. An
    attempt is reported at most once in ten seconds. A mark that is not confirmed, or that may have been lost with
    a link, is reported again.
    """

    def __init__(self, root: str, now_ms: Callable[[], int] = boot_ms) -> None:
        self._root = root
        self._now_ms = now_ms
        self._marks: dict[str, CheckpointMark] = {}
        self._reported_ms: dict[str, int] = {}
        self._confirmed: dict[str, int] = {}
        self._in_flight: dict[int, dict[str, int]] = {}  # by heartbeat

    def observe(self, attempts: Iterable[tuple[str, int, str]]) -> None:
        """Read the marks of these attempts, given as (id, fence, node). A file system may hang: call it in a thread."""
        seen = {}
        for attempt_id, fence, node in attempts:
            at_ns = self._marked_ns(attempt_id)
            if at_ns is not None:
                seen[attempt_id] = CheckpointMark(node, fence, at_ns)
        self._marks = seen

    def take_unreported(self, node: str, beat: int) -> tuple[CheckpointAge, ...]:
        """Marks of a node for this heartbeat; the next one has the rest."""
        seen, now = self._marks, self._now_ms()
        ages: list[CheckpointAge] = []
        for attempt_id, mark in seen.items():
            is_due = now - self._reported_ms.get(attempt_id, -REPORT_EVERY_MS) >= REPORT_EVERY_MS
            if len(ages) == MAX_MARKS:
                break
            if mark.node == node and is_due and self._confirmed.get(attempt_id) != mark.at_ns:
                ages.append(CheckpointAge(attempt_id, mark.fence, _age_ms(mark.at_ns)))
                self._reported_ms[attempt_id] = now
                self._in_flight.setdefault(beat, {})[attempt_id] = mark.at_ns
        for table in (self._reported_ms, self._confirmed):
            for attempt_id in [known for known in table if known not in seen]:
                del table[attempt_id]
        return tuple(ages)

    def confirm(self, beat: int) -> None:
        """The marks of this heartbeat are in the ledger; those of earlier ones are there too, or lost."""
        for earlier in [sent for sent in self._in_flight if sent <= beat]:
            marks = self._in_flight.pop(earlier)
            if earlier == beat:
                self._confirmed |= marks

    def report_again(self) -> None:
        """Report all marks again after a new link: reports on the last one may be lost."""
        self._reported_ms.clear()
        self._confirmed.clear()
        self._in_flight.clear()

    def observed_age_ms(self, attempt_id: str) -> int | None:
        """Age of an attempt's last seen checkpoint mark; None without one."""
        mark = self._marks.get(attempt_id)
        return None if mark is None else _age_ms(mark.at_ns)

    def age_ms(self, attempt_id: str) -> int | None:
        at_ns = self._marked_ns(attempt_id)
        return None if at_ns is None else _age_ms(at_ns)

    def _marked_ns(self, attempt_id: str) -> int | None:
        try:
            return os.stat(f"{self._root}/{attempt_id}/{job_dir.CHECKPOINT}", follow_symlinks=False).st_mtime_ns
        except OSError:
            return None


def _age_ms(at_ns: int) -> int:
    return max(time.time_ns() - at_ns, 0) // 1_000_000
