"""Readers of a long queue: answers stay within bounds and say what they leave out; who does not read stops nobody."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import httpx
import pytest

from distributed_grid.api.framing import JSON, MAX_FRAME_BYTES, Unpacker, frame
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig, hello
from distributed_grid.posix.sockets import short_path
from distributed_grid.server.answers import MAX_ANSWER_BYTES
from distributed_grid.server.services.nodes import MAX_STATUS_ROWS
from distributed_grid.state_dir import StateDir
from tests.support.shell import Shell

pytestmark = pytest.mark.e2e
CORES = len(os.sched_getaffinity(0))
QUEUED, FEWER = 1400, 300
WIDE = {f"{number:03}_" + "X" * 246: "" for number in range(200)}
"""Variables whose names make the row of a job 50 KB long: all rows together are longer than a frame."""


@contextlib.contextmanager
def a_long_queue(grid: Shell, jobs: int) -> Iterator[Client]:
    """The newest of many jobs runs, all others wait."""
    with Client(StateDir(grid.state_dir)) as client:
        wait = {"resource_type": "cpu", "amount": CORES, "wait_seconds": 3600.0}
        client.call("request_lease", request_id="all", **wait)
        for number in range(jobs):
            client.call("submit_job", request_id=f"r{number}", job_id=f"j{number}", argv=["true"], env=WIDE, **wait)
        least = {"resource_type": "memory", "amount": 0.01}
        client.call("submit_job", request_id="runs", job_id="runs", argv=["sleep", "600"], env={}, **least)
        yield client


def connected(grid: Shell) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    with short_path(StateDir(grid.state_dir).socket) as name:
        connection.connect(name)
    connection.sendall(frame(JSON, json.dumps(hello(ClientConfig())).encode()))
    return connection


def test_a_long_queue_is_shown_in_part_with_the_number_left_out(grid: Shell) -> None:
    assert QUEUED * sum(map(len, WIDE)) > MAX_FRAME_BYTES
    with a_long_queue(grid, QUEUED) as client:
        status = client.call("get_status")
    assert status["job_states"].keys() <= {"queued", "assigned", "running"}
    assert sum(status["job_states"].values()) == QUEUED + 1
    shown = [job["job_id"] for job in status["jobs"]]
    assert 100 < len(shown) <= MAX_STATUS_ROWS
    assert status["jobs_total"] == QUEUED + 1
    assert status["omitted"]["jobs"] == QUEUED + 1 - len(shown)
    assert shown[:3] == ["runs", "j0", "j1"]
    assert status["omitted"]["allocations"] == 0
    assert {lease["allocation_id"] for lease in status["allocations"]} >= {"all"}
    text = grid("status", check=0).stdout
    assert f"{QUEUED:,} waiting" in text
    assert f"… and {QUEUED + 1 - 10:,} more (grid jobs list)" in text
    assert f"{QUEUED:,} queued" in text
    rows = [line.split() for line in grid("status", "--all", check=0).stdout.splitlines()]
    shown = [row[0] for row in rows if row[1:2] in (["queued"], ["running"]) and row[0] != "and"]
    assert shown[0] == "runs"
    assert sorted(shown) == sorted(["runs", *(f"j{number}" for number in range(QUEUED))])
    listed = grid("jobs", "list", check=0)
    assert listed.stderr.startswith(f"grid: the last 200 of {QUEUED + 1:,} jobs; ")
    assert len(listed.stdout.splitlines()) == 201
    names = [job["job_id"] for job in grid.json("jobs", "list")]
    assert names[-1] == "runs"
    assert sorted(names) == sorted([*(f"j{number}" for number in range(QUEUED)), "runs"])
    url = grid.json("daemon", "status")["rest"]
    token = (grid.host_dir / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(headers=headers, timeout=60, trust_env=False, verify=grid.trust) as client:
        walked: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            answer = client.get(f"{url}/v1/jobs", params={"limit": 10_000, "cursor": cursor})
            assert len(answer.content) < MAX_ANSWER_BYTES + 2**20
            page = answer.json()
            assert len(page["jobs"]) + page["omitted"] == QUEUED + 1 - len(walked)
            assert page["total"] == QUEUED + 1
            walked += [job["job_id"] for job in reversed(page["jobs"])]
            cursor = page["next"]
    assert walked[0] == "runs"
    assert sorted(walked) == sorted(["runs", *(f"j{number}" for number in range(QUEUED))])


def test_readers_who_leave_their_answers_unread_stop_nobody(grid: Shell) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(a_long_queue(grid, FEWER))
        for _ in range(20):
            connection = stack.enter_context(connected(grid))
            connection.sendall(frame(JSON, b'{"op": "get_status"}') * 50)
        for _ in range(3):
            assert client.call("get_status")["waiting"] == FEWER
        reader, unpacker = stack.enter_context(connected(grid)), Unpacker()
        reader.sendall(frame(JSON, b'{"op": "get_status"}') * 3)
        answers: list[bytes] = []
        while len(answers) < 4:
            answers += [body for _, body in unpacker.feed(reader.recv(2**20))]
        assert [len(json.loads(body)["nodes"]) for body in answers[1:]] == [1, 1, 1]
