"""kill -9 of the control plane at any moment, followed by any command: nothing lost, nothing twice."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import uuid
from collections import Counter

import pytest

from tests.e2e.crashes.conftest import (
    a_gate,
    call,
    daemon_pid,
    kill_nine,
    lines,
    open_gate,
    run_python,
    spawner_pid,
    submission,
)
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

WORK = 'echo "start $1 $$" >> marks; read x < "gate-$1"; echo "end $1 $$" >> marks; exit "$1"'


def test_twenty_running_jobs_outlive_a_kill_nine_and_none_is_lost_or_run_twice(grid: Shell) -> None:
    gates = [a_gate(grid, f"gate-{n}") for n in range(20)]
    asked = [submission(grid, WORK, str(n), job_id=f"job-{n}") for n in range(20)]
    for request in asked:
        call(grid, "submit_job", **request)
    wait_until(lambda: len(lines(grid.cwd / "marks")) == 20)
    pids = wait_until(lambda: _pids_of_running(grid, 20))

    kill_nine(grid)
    for gate in gates[:10]:  # these end while no control plane is there
        open_gate(gate)
    wait_until(lambda: not any(is_running(pids[f"job-{n}"]) for n in range(10)))
    assert all(is_running(pids[f"job-{n}"]) for n in range(10, 20))

    grid("status", check=0)
    for n in range(10):
        assert call(grid, "wait_for_job", job_id=f"job-{n}", timeout_seconds=10)["job"]["exit_code"] == n
    found = {job["job_id"]: job for job in call(grid, "list_jobs", limit=100)["jobs"]}
    assert {name for name, job in found.items() if job["state"] == "running"} == {f"job-{n}" for n in range(10, 20)}
    assert {name: job["attempts"][-1]["pid"] for name, job in found.items()} == pids

    for gate in gates[10:]:
        open_gate(gate)
    for n in range(10, 20):
        call(grid, "wait_for_job", job_id=f"job-{n}", timeout_seconds=10)
    assert grid("jobs", "wait", "job-1").returncode == 1  # though job-10 to job-19 begin alike
    ends = {job["job_id"]: job for job in call(grid, "list_jobs", limit=100)["jobs"]}
    assert {name: (job["outcome"], job["exit_code"], len(job["attempts"])) for name, job in ends.items()} == {
        f"job-{n}": ("exited", n, 1) for n in range(20)
    }
    expected = [f"{word} {n} {pids[f'job-{n}']}" for word in ("start", "end") for n in range(20)]
    assert Counter(lines(grid.cwd / "marks")) == Counter(expected)
    assert grid.json("shared-status")["allocations"] == []


def _pids_of_running(grid: Shell, how_many: int) -> dict[str, int] | None:
    jobs = call(grid, "list_jobs", limit=100)["jobs"]
    pids = {job["job_id"]: job["attempts"][-1]["pid"] for job in jobs if job["state"] == "running"}
    return pids if len(pids) == how_many else None


def test_a_lease_that_expires_while_no_daemon_runs_is_ended_by_the_next_one(grid: Shell) -> None:
    brief, lasting = uuid.uuid4().hex, uuid.uuid4().hex
    ask = {"resource_type": "cpu", "amount": 0.5}
    call(grid, "request_lease", request_id=brief, duration_seconds=1.0, **ask)
    granted = time.monotonic()
    call(grid, "request_lease", request_id=lasting, duration_seconds=600.0, **ask)
    kill_nine(grid)
    wait_until(lambda: time.monotonic() > granted + 1.05)

    held = wait_until(lambda: _held(grid) if len(_held(grid)) == 1 else None)
    assert held == [lasting]
    expired = [event for event in _events(grid) if event["type"] == "expired"]
    assert [event["subject"] for event in expired] == [brief]
    again = call(grid, "request_lease", request_id=brief, duration_seconds=1.0, **ask)["allocation"]
    assert (again["state"], again["reason"]) == ("ended", "expired")
    assert call(grid, "release_lease", allocation_id=lasting)["allocation"]["reason"] == "released"


def _held(grid: Shell) -> list[str]:
    return [lease["allocation_id"] for lease in grid.json("shared-status")["allocations"]]


def _events(grid: Shell) -> list[dict[str, str]]:
    return [json.loads(line) for line in grid("events", "--json", check=0).stdout.splitlines()]


BURST = """
import sys
from distributed_grid.errors import Unreachable
from distributed_grid.client.client import Client
from distributed_grid.state_dir import StateDir

cwd, path, *ids = sys.argv[1:]
script = 'echo "$1" >> marks; exit 7'
for request_id in ids:
    while True:
        asked = dict(request_id=request_id, argv=["/bin/sh", "-c", script, "sh", request_id], amount=0.05)
        try:
            with Client(StateDir()) as client:
                client.call("submit_job", cwd=cwd, env={"PATH": path}, **asked)
        except Unreachable:
            continue
        print(request_id, flush=True)
        break
"""


def _end_a_moment_after(pid: int, deadly: signal.Signals, seconds: float) -> None:
    """Let a daemon that serves go on for that long, then end it."""
    moment = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= moment)
    os.kill(pid, deadly)
    wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("seed", [20])
def test_every_job_acknowledged_between_kills_is_there_once_and_ran_once(grid: Shell, seed: int) -> None:
    chance = random.Random(seed)
    ids = [f"{chance.getrandbits(128):032x}" for _ in range(400)]
    grid("status", check=0)
    bursts = [run_python(grid, BURST, str(grid.cwd), grid.env["PATH"], *ids[part::4]) for part in range(4)]
    ended = 0
    while ended < 10:
        pid = wait_until(lambda: daemon_pid(grid) or all(burst.poll() is not None for burst in bursts), 60)
        if pid is True:  # all was said before the tenth end
            break
        deadly = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        _end_a_moment_after(pid, deadly, chance.choice([0.0, 0.02, 0.1, 0.3]) * chance.random())
        ended += 1
    assert ended >= 5
    acknowledged: list[str] = []
    for burst in bursts:
        said, complaints = burst.communicate(timeout=60)
        assert burst.returncode == 0, complaints
        acknowledged += said.decode().split()
    assert sorted(acknowledged) == sorted(ids)

    assert grid("jobs", "wait", "--timeout", "40").returncode in (0, 7)
    jobs = grid.json("jobs", "list", "--all")
    assert Counter(job["uid"] for job in jobs) == Counter(ids)
    ends = Counter((job["outcome"], job["exit_code"], job["detail"], len(job["attempts"])) for job in jobs)
    assert ends == {("exited", 7, None, 1): len(ids)}
    assert Counter(lines(grid.cwd / "marks")) == Counter(ids)


def test_a_job_whose_start_was_on_the_way_when_everything_died_is_started_by_the_next_daemon(grid: Shell) -> None:
    grid("run-shared", "true", check=0)
    spawner = spawner_pid(grid)
    os.kill(spawner, signal.SIGSTOP)
    accepted = call(grid, "submit_job", **submission(grid, "echo ran >> marks; exit 3"))["job"]
    wait_until(lambda: (grid.host_dir / "jobs/.control" / f"{accepted['uid']}.1" / "spec.json").exists())
    kill_nine(grid)
    os.kill(spawner, signal.SIGKILL)
    wait_until(lambda: not is_running(spawner))

    grid("jobs", "wait", accepted["uid"], "--timeout", "10")
    job = grid.job(accepted["uid"])
    assert (job["outcome"], job["exit_code"], job["detail"]) == ("exited", 3, None)
    assert lines(grid.cwd / "marks") == ["ran"]


def test_a_killed_spawner_takes_no_job_with_it_and_is_replaced(grid: Shell) -> None:
    gate = a_gate(grid, "gate-5")
    before = call(grid, "submit_job", **submission(grid, WORK, "5"))["job"]
    wait_until(lambda: len(lines(grid.cwd / "marks")) == 1)
    os.kill(spawner_pid(grid), signal.SIGKILL)
    assert grid("run-shared", "sh", "-c", "exit 6").returncode == 6
    kill_nine(grid)
    open_gate(gate)
    assert grid("jobs", "wait", before["uid"], "--timeout", "10").returncode == 5
    assert len(lines(grid.cwd / "marks")) == 2
