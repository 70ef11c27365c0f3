"""Metrics out of the audit trail: figures of scheduling, and event counters.

They are read from the audit trail and the rows of ended jobs, so `SchedulingMetrics` survives a restart; only new
events are read, and memory is bounded: the last 1,000 jobs and a day of minutes. An unknown figure is None, not zero.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from distributed_grid.api.answers.metrics import SchedulingFigures
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.rebalancing import ASKED, AUTOMATIC_PREFIX, GIVEN_BACK, GRID_USER
from distributed_grid.domain.rows import decode_row
from distributed_grid.ports import EventRow, Store

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
MAX_JOBS = 1_000
MAX_FIRST_EVENTS = 20_000  # the first read: the newest events, none older than a day
BATCH = 1_000
MAX_BATCHES = 100  # per call; the next call reads the rest
GRANTED, REFUSED, WITHDRAWN, STOPPED, REBALANCED = "granted", "refused", "withdrawn", "stopped", "rebalanced"
MOVE_ENDED = "move-ended"
TYPES = (GRANTED, REFUSED, WITHDRAWN, STOPPED, REBALANCED)


class FinishedRun(msgspec.Struct, frozen=True):
    """An ended job in numbers; `reserved_ms` is core time, 0 where it held no cores."""

    ended_at_ms: int
    ran_ms: int
    used_ms: int
    reserved_ms: int


class SchedulingMetrics:
    """Scheduling figures of the last day, read from the audit trail on demand; several threads may share one."""

    def __init__(self, store: Store, *, max_jobs: int = MAX_JOBS) -> None:
        self._store = store
        self._seq: int | None = None
        self._max_jobs = max_jobs
        self._runs: deque[FinishedRun] = deque(maxlen=max_jobs)
        self._minutes: deque[tuple[int, Counter[str]]] = deque()
        self._lock = threading.Lock()

    def read(self, now: int) -> SchedulingFigures:
        """The figures at this moment; blocks while it reads new events."""
        with self._lock:
            if self._seq is None:
                newest = self._store.events(limit=1, newest=True)
                self._seq = newest[-1].seq if newest else 0
                self._count(self._store.events(since_ms=now - DAY_MS, types=TYPES, limit=MAX_FIRST_EVENTS, newest=True))
            for _ in range(MAX_BATCHES):
                rows = self._store.events(after_seq=self._seq, types=TYPES, limit=BATCH)
                self._count(rows)
                if len(rows) < BATCH:
                    break
            while self._minutes and (self._minutes[0][0] + 1) * MINUTE_MS <= now - DAY_MS:
                self._minutes.popleft()
            while self._runs and self._runs[0].ended_at_ms <= now - DAY_MS:
                self._runs.popleft()
            counts: Counter[str] = Counter()
            last_hour = 0
            for minute, counted in self._minutes:
                counts += counted
                last_hour += counted[REBALANCED] if (minute + 1) * MINUTE_MS > now - HOUR_MS else 0
            times = sorted(run.ran_ms for run in self._runs)
            asked = counts[GRANTED] + counts[REFUSED] + counts[WITHDRAWN]
            reserved = sum(run.reserved_ms for run in self._runs)
            return {
                "jobs_measured": len(times),
                "task_time_mean_seconds": round(sum(times) / len(times) / 1000, 3) if times else None,
                "task_time_p95_seconds": times[math.ceil(0.95 * len(times)) - 1] / 1000 if times else None,
                "resource_efficiency": round(sum(r.used_ms for r in self._runs) / reserved, 4) if reserved else None,
                "granted": counts[GRANTED],
                "refused": counts[REFUSED],
                "withdrawn": counts[WITHDRAWN],
                "allocation_success_rate": round(counts[GRANTED] / asked, 4) if asked else None,
                "rebalances_per_hour": last_hour,
            }

    def _count(self, rows: Sequence[EventRow]) -> None:
        for row in rows:
            if row.type == REBALANCED:
                is_counted = _data(row).get("action") in (ASKED, GIVEN_BACK)
            elif row.type == STOPPED or (row.user == GRID_USER and row.subject.startswith(AUTOMATIC_PREFIX)):
                is_counted = False
            else:
                is_counted = row.type != REFUSED or "about" not in _data(row)
            if is_counted:
                minute = row.at_ms // MINUTE_MS
                if not self._minutes or self._minutes[-1][0] < minute:
                    self._minutes.append((minute, Counter()))
                self._minutes[-1][1][row.type] += 1
            self._seq = max(self._seq or 0, row.seq)
        ended = [row for row in rows if row.type == STOPPED]
        for row in ended[-self._max_jobs :]:
            for stored in self._store.ended("job", request_id=row.subject, limit=1):
                job = decode_row("job", stored.blob)
                assert isinstance(job, Job)
                run = run_of(job)
                if run is not None:
                    self._runs.append(run)


def run_of(job: Job) -> FinishedRun | None:
    """An ended job in numbers; None where it never ran."""
    started = [attempt for attempt in job.attempts if attempt.started_at_ms]
    if not started:
        return None
    cores_milli = job.request.ask.cpu_milli
    held_ms = sum(attempt.ended_at_ms - attempt.assigned_at_ms for attempt in job.attempts)
    used_ms = sum(attempt.outcome.cpu_ms for attempt in started if attempt.outcome is not None)
    return FinishedRun(
        job.ended_at_ms,
        sum(attempt.ended_at_ms - attempt.started_at_ms for attempt in started),
        used_ms if cores_milli else 0,
        held_ms * cores_milli // 1000,
    )


class _AuditRecord(msgspec.Struct):
    """The part of an audit line that is read."""

    data: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_AuditRecord)


def _data(row: EventRow) -> dict[str, Any]:
    return _decoder.decode(row.blob).data


class EventCounters:
    """Counters of audit events since this object was made, as Prometheus wants them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        newest = store.events(limit=1, newest=True)
        self._seq = newest[-1].seq if newest else 0
        self.events: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.rebalances: Counter[str] = Counter()
        self.moves: Counter[str] = Counter()

    def catch_up(self) -> None:
        """Count the events since the last call; blocks while it reads."""
        for _ in range(MAX_BATCHES):
            rows = self._store.events(after_seq=self._seq, limit=BATCH)
            for row in rows:
                self.events[row.type] += 1
                if row.type == STOPPED:
                    self.outcomes[str(_data(row).get("ending"))] += 1
                elif row.type == REBALANCED:
                    self.rebalances[str(_data(row).get("action"))] += 1
                elif row.type == MOVE_ENDED:
                    self.moves[str(_data(row).get("end"))] += 1
                self._seq = row.seq
            if len(rows) < BATCH:
                return
