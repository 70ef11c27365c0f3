"""Outbox of an agent: reports about attempts and moves, kept until the control plane acknowledges them.

An unacknowledged report is sent again on every new link. The start of an attempt that ends at once is reported along
with its end: two reports in one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from msgspec import Struct

from distributed_grid.domain.jobs import Outcome
from distributed_grid.domain.states import MoveState
from distributed_grid.wire import AttemptEndedReport, AttemptPausedReport, AttemptStartedReport, MoveReport, clipped

SHORT_MS = 30
"""Attempts shorter than this report start and end together."""
Report = AttemptStartedReport | AttemptPausedReport | AttemptEndedReport | MoveReport
CallLater = Callable[[int, Callable[[], None]], object]
"""Calls a function after a time in milliseconds."""


class _Launched(Struct, frozen=True):
    """A start that has not been reported yet."""

    fence: int
    pid: int
    cores: tuple[int, ...]
    pid_start: int


class Outbox:
    """Numbers, sends and keeps reports; `send` is where they go, whether or not there is a link."""

    def __init__(self, send: Callable[[Report], None], call_later: CallLater) -> None:
        self._send = send
        self._call_later = call_later
        self._numbers = itertools.count(1)
        self._unacknowledged: dict[int, Report] = {}
        self._ends: dict[str, int] = {}  # by attempt, the number of its end
        self._moved: dict[tuple[str, MoveState], int] = {}  # by move and state, the number of the report
        self._launched: dict[str, _Launched] = {}

    def started(self, attempt_id: str, fence: int, pid: int, cores: tuple[int, ...] = (), pid_start: int = 0) -> None:
        """Report shortly that an attempt's command runs."""
        launched = self._launched[attempt_id] = _Launched(fence, pid, cores, pid_start)

        def report() -> None:
            if self._launched.get(attempt_id) is launched:
                del self._launched[attempt_id]
                self._post(
                    AttemptStartedReport(
                        seq=next(self._numbers),
                        lease_id=attempt_id,
                        fence=fence,
                        pid=pid,
                        cores=cores,
                        pid_start=pid_start,
                    )
                )

        self._call_later(SHORT_MS, report)

    def ended(
        self,
        attempt_id: str,
        fence: int,
        outcome: Outcome,
        mark_age_ms: int | None = None,
        *,
        has_checkpoint: bool = False,
        delay_ms: int = 0,
    ) -> None:
        """Report how an attempt ended, or why it never ran, how long ago it marked its last checkpoint, and whether it
        left something in its checkpoint directory. An end that is not acknowledged is sent again under its number.
        `delay_ms` gives another message time to be sent first."""
        known = self._unacknowledged.get(self._ends.get(attempt_id, 0))
        if isinstance(known, AttemptEndedReport) and (known.fence, known.outcome) == (fence, outcome):
            self._send(known)
            return
        launched = self._launched.pop(attempt_id, None) or _Launched(fence, 0, (), 0)
        seq = self._ends[attempt_id] = next(self._numbers)
        report = AttemptEndedReport(
            seq=seq,
            lease_id=attempt_id,
            fence=fence,
            outcome=outcome,
            pid=launched.pid,
            cores=launched.cores,
            mark_age_ms=mark_age_ms,
            pid_start=launched.pid_start,
            has_checkpoint=has_checkpoint,
        )
        self._unacknowledged[seq] = report

        def send() -> None:
            if seq in self._unacknowledged:
                self._send(report)

        if delay_ms:
            self._call_later(delay_ms, send)
        else:
            send()

    def paused(self, attempt_id: str, fence: int, paused: bool, detail: str) -> None:
        self._post(AttemptPausedReport(next(self._numbers), attempt_id, fence, paused, clipped(detail)))

    def moved(
        self,
        move_id: str,
        state: MoveState,
        *,
        detail: str = "",
        left_ms: int = 0,
        frozen_ms: int = 0,
        files: int = 0,
        kept: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        """Report the state of a move at its source. An unacknowledged report is sent again under its number."""
        seq = self._moved.get((move_id, state)) or next(self._numbers)
        self._moved[move_id, state] = seq
        report = MoveReport(
            seq=seq,
            move_id=move_id,
            state=state,
            detail=clipped(detail),
            left_ms=left_ms,
            files=files,
            kept=kept,
            frozen_ms=frozen_ms,
            notes=notes,
        )
        self._post(report)

    def forget_move(self, move_id: str) -> None:
        """Drop the reports of a move. Safe twice."""
        for key in [key for key in self._moved if key[0] == move_id]:
            self._unacknowledged.pop(self._moved.pop(key), None)

    def acknowledged(self, seq: int) -> Report | None:
        """Forget the report of this number, and return it; None the second time."""
        report = self._unacknowledged.pop(seq, None)
        if isinstance(report, MoveReport):
            self._moved.pop((report.move_id, report.state), None)
        elif report is not None and self._ends.get(report.lease_id) == seq:
            del self._ends[report.lease_id]
        return report

    def resend(self) -> None:
        """There is a new link: reports on the last one may be lost."""
        for report in list(self._unacknowledged.values()):
            self._send(report)

    @property
    def is_empty(self) -> bool:
        return not self._unacknowledged

    def unacknowledged_ends(self) -> list[str]:
        return [report.lease_id for report in self._unacknowledged.values() if isinstance(report, AttemptEndedReport)]

    def unacknowledged_attempts(self) -> list[str]:
        """Attempts whose start or end is not acknowledged, or not even sent."""
        reports = (one for one in self._unacknowledged.values() if not isinstance(one, MoveReport))
        return [*self._launched, *(report.lease_id for report in reports)]

    def stop(self) -> None:
        """Drop unsent starts. Safe twice."""
        self._launched.clear()

    def _post(self, report: Report) -> None:
        self._unacknowledged[report.seq] = report
        self._send(report)
