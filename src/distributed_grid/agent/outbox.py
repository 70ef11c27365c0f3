"""What an agent has to say about attempts, kept until it is known where it matters.

Rule 1. A report is kept until it is acknowledged, and told again on every new link.
Rule 2. The start of an attempt that is over at once is told along with its end: two reports in one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from distributed_grid.agent.execution.attempt import AttemptExit, AttemptLaunch
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.wire import AttemptEndedReport, AttemptPausedReport, AttemptStartedReport

SHORT_SECONDS = 0.03
"""What ends within this time after its start is over at once (Rule 2)."""
_ENDINGS = {"hold_expired": Ending.LOST}
Report = AttemptStartedReport | AttemptPausedReport | AttemptEndedReport


class Outbox:
    """Numbers reports, tells and keeps them; `tell` is where they go, whether or not there is a link."""

    def __init__(self, tell: Callable[[Report], None]) -> None:
        self._tell = tell
        self._numbers = itertools.count(1)
        self._unacknowledged: dict[int, Report] = {}
        self._starting: dict[str, tuple[AttemptLaunch, asyncio.TimerHandle]] = {}

    def started(self, report: AttemptLaunch) -> None:
        """Say that an attempt's command runs, in a moment."""
        later = asyncio.get_running_loop().call_later(SHORT_SECONDS, self._tell_started, report)
        self._starting[report.attempt_id] = (report, later)

    def ended(self, report: AttemptExit, mark_age_ms: int | None) -> None:
        """Say how an attempt ended, and how long ago it marked its last checkpoint."""
        pid = 0
        cores: tuple[int, ...] = ()
        if report.attempt_id in self._starting:
            started, later = self._starting.pop(report.attempt_id)
            later.cancel()
            pid, cores = started.pid, tuple(started.cores)
        outcome = _outcome(report)
        self._keep(
            AttemptEndedReport(
                next(self._numbers), report.attempt_id, report.fence, outcome, pid, cores, mark_age_ms=mark_age_ms
            )
        )

    def never_run(self, lease_id: str, fence: int, outcome: Outcome) -> None:
        """Say why nothing of an attempt was or will be run here."""
        self._keep(AttemptEndedReport(next(self._numbers), lease_id, fence, outcome))

    def paused(self, attempt_id: str, fence: int, paused: bool, detail: str) -> None:
        """Say that an attempt stands still, or goes on."""
        self._keep(AttemptPausedReport(next(self._numbers), attempt_id, fence, paused, detail))

    def acknowledged(self, seq: int) -> Report | None:
        """It is known where it matters: forget it; what was said under this number, None the second time."""
        return self._unacknowledged.pop(seq, None)

    def tell_again(self) -> None:
        """There is a new link: what was told on the last one may not have come through."""
        for report in list(self._unacknowledged.values()):
            self._tell(report)

    def ends(self) -> list[str]:
        """The attempts whose end is not acknowledged."""
        return [report.lease_id for report in self._unacknowledged.values() if isinstance(report, AttemptEndedReport)]

    def stop(self) -> None:
        """Say nothing more by itself. Safe twice."""
        for _, later in self._starting.values():
            later.cancel()

    def _tell_started(self, report: AttemptLaunch) -> None:
        self._starting.pop(report.attempt_id, None)
        self._keep(
            AttemptStartedReport(next(self._numbers), report.attempt_id, report.fence, report.pid, tuple(report.cores))
        )

    def _keep(self, report: Report) -> None:
        self._unacknowledged[report.seq] = report
        self._tell(report)


def _outcome(report: AttemptExit) -> Outcome:
    fields: dict[str, Any] = {
        "exit_code": report.exit_code,
        "signal": report.signal,
        "detail": report.detail,
        "cpu_ms": report.cpu_ms,
        "max_memory_bytes": report.max_memory_bytes,
        "wall_ms": report.wall_ms,
    }
    return Outcome(_ENDINGS.get(report.kind) or Ending(report.kind), **fields)
