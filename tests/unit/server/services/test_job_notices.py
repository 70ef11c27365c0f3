"""Notices about a job: a line each for a pause, a resumption, an end before another run, and a further attempt."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from distributed_grid.domain.jobs import Ending
from distributed_grid.ports import EventRow
from distributed_grid.reactor.decision import Record
from distributed_grid.server.services.job_notices import JobNotices, notice_of
from distributed_grid.server.services.records import find_job
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid


def a_row(record: Record) -> EventRow:
    return EventRow(7, 0, record.type, record.user, record.subject, record.node, "", msgspec.json.encode(record))


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (Record("paused", "ana", "u1", "gpu1", "its owner works"), "job is paused on gpu1: its owner works"),
        (Record("resumed", "ana", "u1", "gpu1"), "job is resumed on gpu1"),
        (Record("requeued", "ana", "u1", "gpu1", "exited"), "job ended on gpu1 and is run again: exited"),
        (Record("started", "ana", "u1", "gpu2", data={"attempt": 2}), "---- job: attempt 2 on gpu2 ----"),
    ],
)
def test_a_change_of_a_running_job_is_one_line(record: Record, line: str) -> None:
    notice = notice_of(a_row(record), "job")
    assert notice is not None
    assert (notice.seq, notice.message) == (7, line)


def test_the_first_start_is_no_news() -> None:
    assert notice_of(a_row(Record("started", "ana", "u1", "gpu1", data={"attempt": 1})), "job") is None


def test_a_reader_gets_each_notice_once() -> None:
    async def scenario(setting: InProcessGrid) -> None:
        await setting.open(a_node("gpu1", cores=4))
        await setting.submit("work", restartable=True)
        await setting.starts("work")
        reader = JobNotices(setting.grid, 0)
        assert await reader.read_new(await find_job(setting.grid, "work")) == []
        await setting.ends("work", Ending.PREEMPTED, "made room")
        job = await find_job(setting.grid, "work")
        (ended,) = await reader.read_new(job)
        assert ended.message == f"{job.id} ended on gpu1 and is run again: made room"
        assert await reader.read_new(job) == []

    setting = InProcessGrid()
    asyncio.run(setting.run(lambda _: scenario(setting)))
