from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from distributed_grid.api.framing import JSON, STDERR, STDOUT
from distributed_grid.client.conversation import JsonObject, Part
from distributed_grid.client.jobs import MAX_LINE_BYTES, JobUsage, LogLines, OutputPosition, Result
from distributed_grid.client.transports import complete, iterate
from distributed_grid.errors import JobFailed

END = (JSON, JsonObject(done=True, job=JsonObject(job_id="job-1")))


async def parts_of(parts: Iterable[tuple[bytes, Part]]) -> AsyncIterator[tuple[bytes, Part]]:
    for part in parts:
        yield part


def lines_of(*parts: tuple[bytes, Part], **streams: bool) -> list[str]:
    output = OutputPosition("job-1", follow=True)
    wanted = {"stdout": True, "stderr": True, **streams}
    return list(iterate(LogLines(parts_of(parts), output, **wanted)))


def test_lines_are_put_together_from_parts_each_stream_by_itself() -> None:
    parts = ((STDOUT, b"one\ntw"), (STDERR, b"err"), (STDOUT, b"o\nthree"), (STDERR, b"or\n"), END)
    assert lines_of(*parts) == ["one", "two", "error", "three"]
    assert lines_of(*parts, stderr=False) == ["one", "two", "three"]
    assert lines_of(*parts, stdout=False) == ["error"]


def test_empty_lines_stay_and_no_output_has_no_line() -> None:
    assert lines_of((STDOUT, b"\n\na\n"), END) == ["", "", "a"]
    assert lines_of(END) == []


def test_long_line_comes_in_pieces() -> None:
    lines = lines_of((STDOUT, b"x" * (2 * MAX_LINE_BYTES + 3)), (STDOUT, b"y\n"), END)
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 4]


def test_dropped_bytes_have_a_line_and_count_as_seen() -> None:
    output = OutputPosition("job-1", follow=False)
    dropped = JsonObject(dropped=100, stream="stderr", message="100 bytes of stderr are gone")
    assert output.receive(STDOUT, b"abc") == (STDOUT, b"abc")
    assert output.receive(JSON, dropped) == (STDERR, b"[grid: 100 bytes of stderr are gone]\n")
    output.receive(*END)
    fields = {"job_id": "job-1", "follow": False, "stdout_seen": 3, "stderr_seen": 100}
    assert (output.fields(), output.job) == (fields, END[1].job)


def result(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "job_id": "job-1",
        "exit_code": 3,
        "outcome": "exited",
        "detail": None,
        "node": "gpu1",
        "usage": JobUsage(1.0, 2.0, 0.5),
        "stdout_bytes": b"",
        "stderr_bytes": b"first\nno disk\n",
        "beside": {},
    }
    return Result(**(fields | changes))


def test_failed_check_names_job_node_and_reason() -> None:
    with pytest.raises(JobFailed, match=r"^job-1 exited with 3 on gpu1: no disk$") as failure:
        result().check()
    assert failure.value.result.exit_code == 3
    timed_out = result(outcome="timed_out", exit_code=124, detail="it ran for more than 5 s")
    with pytest.raises(JobFailed, match=r"^job-1 timed out on gpu1: it ran for more than 5 s$"):
        timed_out.check()
    with pytest.raises(JobFailed, match=r"^job-1 exited with 1$"):
        result(exit_code=1, node=None, stderr_bytes=b"").check()
    assert result(exit_code=0).check().succeeded


def test_representation_of_a_result_is_short() -> None:
    assert repr(result(exit_code=0, stderr_bytes=b"")) == (
        "Result(job_id='job-1', exit_code=0, node='gpu1', stdout='', stderr='')"
    )
    assert len(repr(result(stdout_bytes=b"x" * 10**6))) < 300
    assert "outcome='lost'" in repr(result(outcome="lost"))


def test_coroutine_that_suspends_is_not_completed() -> None:
    async def sleep() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waits for an event loop"):
        complete(sleep())
