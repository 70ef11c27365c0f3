"""Notices about a job that somebody follows: paused, resumed, stopped by its node, run again; each with the reason.

They are read from the audit trail, so that a reader who comes back with the number of its last notice misses none.
A job that runs once without a pause has none, and costs no query.
"""

from __future__ import annotations

import msgspec

from distributed_grid.api.answers.jobs import JobNotice
from distributed_grid.control.grid import Grid
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.states import JobState
from distributed_grid.ports import EventRow, Store
from distributed_grid.reactor.decision import Record

MAX_NOTICES = 1_000
"""Notices that are read at once; the others follow with the next change."""
TYPES = ("paused", "resumed", "requeued", "started")


class JobNotices:
    """The notices of one job after a number, each once."""

    def __init__(self, grid: Grid, seen: int) -> None:
        self._grid = grid
        self._seen = seen
        self._was_paused = False

    async def read_new(self, job: Job) -> list[JobNotice]:
        """The notices that are new, in their order."""
        is_paused = job.state is JobState.PAUSED
        is_requeued = job.state is JobState.QUEUED and bool(job.attempts)
        may_have_news = is_paused or self._was_paused or len(job.attempts) > 1 or is_requeued
        self._was_paused = self._was_paused or is_paused
        if not may_have_news:
            return []

        def question(store: Store) -> list[EventRow]:
            return store.events(subject=job.uid, types=TYPES, after_seq=self._seen, limit=MAX_NOTICES)

        rows = await self._grid.query(question)
        if rows:
            self._seen = rows[-1].seq
        notices = (notice_of(row, job.id) for row in rows)
        return [notice for notice in notices if notice is not None]


def notice_of(row: EventRow, job_id: str) -> JobNotice | None:
    """The notice of an audit record; None for the first start, which is no news."""
    record = msgspec.json.decode(row.blob, type=Record)
    attempt = record.data.get("attempt", 0) if record.type == "started" else 0
    if record.type == "started" and attempt <= 1:
        return None
    reason = f": {record.reason}" if record.reason else ""
    texts = {
        "paused": f"{job_id} is paused on {record.node}{reason}",
        "resumed": f"{job_id} is resumed on {record.node}",
        "requeued": f"{job_id} ended on {record.node} and is run again{reason}",
        "started": attempt_line(job_id, attempt, record.node),
    }
    return JobNotice(
        seq=row.seq,
        notice=record.type,
        node_id=record.node,
        reason=record.reason,
        attempt=attempt,
        message=texts[record.type],
    )


def attempt_line(job_id: str, number: int, node: str) -> str:
    """The divider between the output of one attempt and that of the next."""
    return f"---- {job_id}: attempt {number} on {node} ----"
