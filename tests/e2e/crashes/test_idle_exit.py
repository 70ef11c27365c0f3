"""A daemon nobody needs goes away, and nobody who comes just then is turned away."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from tests.e2e.crashes.conftest import a_gate, call, daemon_pid, is_locked, open_gate, places, run_python, submission
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

BRIEF = "0.3"


@pytest.fixture
def hasty(grid: Shell) -> Iterator[Shell]:
    """A grid whose daemons leave after a third of a second."""
    grid.env["GRID_IDLE_SECONDS"] = BRIEF
    yield grid
    del grid.env["GRID_IDLE_SECONDS"]


def let_pass(seconds: float) -> None:
    """Time in which something must not happen."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, seconds + 1)


VISITS = """
import random, sys, time, uuid
from distributed_grid.client.client import Client
from distributed_grid.state_dir import StateDir

chance = random.Random(int(sys.argv[1]))
pids = set()
for visit in range(10):
    time.sleep(chance.uniform(0.25, 0.8))  # around the limit: this is the stimulus, nothing is waited for
    with Client(StateDir()) as client:
        if visit % 2:
            client.call("get_daemon_info")
        else:
            asked = {"request_id": uuid.uuid4().hex, "argv": ["/bin/sh", "-c", "echo ran >> marks"], "amount": 0.1}
            client.call("submit_job", cwd=sys.argv[2], **asked)
        pids.add(client.greet()["pid"])
print(len(pids))
"""


def test_commands_around_the_moment_of_leaving_all_succeed(hasty: Shell) -> None:
    visitors = [run_python(hasty, VISITS, str(seed), str(hasty.cwd)) for seed in (1, 2)]
    daemons = []
    for visitor in visitors:
        said, complaints = visitor.communicate(timeout=100)
        assert visitor.returncode == 0, complaints
        daemons.append(int(said))
    assert max(daemons) > 1, "the limit was never reached, so nothing was tested"
    hasty("jobs", "wait", "--timeout", "20", check=0)
    assert (hasty.cwd / "marks").read_text() == "ran\n" * 10
    wait_until(lambda: not os.path.exists(places(hasty).socket))
    wait_until(lambda: not is_locked(hasty))
    assert os.path.exists(places(hasty).lock)


def test_a_daemon_that_is_asked_now_and_then_does_not_leave(hasty: Shell) -> None:
    hasty("status", check=0, env={"GRID_IDLE_SECONDS": "1.0"})
    first = daemon_pid(hasty)
    for _ in range(8):
        let_pass(0.25)
        assert call(hasty, "get_daemon_info")["pid"] == first
    wait_until(lambda: not is_locked(hasty))


def test_it_stays_while_a_job_runs_or_waits_and_leaves_afterwards(hasty: Shell) -> None:
    gates = [a_gate(hasty, name) for name in ("one", "two")]
    for gate in gates:  # each takes more than half of the machine, so the second waits for the first
        cores = hasty.json("status")["nodes"][0]["cpu_cores"]
        call(hasty, "submit_job", **submission(hasty, 'read x < "$1"', gate.name, amount=cores))
    first = daemon_pid(hasty)
    assert [job["state"] for job in hasty.json("jobs", "list")] == ["running", "queued"]
    let_pass(1.0)
    assert daemon_pid(hasty) == first
    open_gate(gates[0])
    open_gate(gates[1])
    wait_until(lambda: not is_locked(hasty))
    wait_until(lambda: not is_running(first or 0))
    assert not os.path.exists(places(hasty).socket)
    assert {job["outcome"] for job in hasty.json("jobs", "list")} == {"exited"}


def test_it_stays_while_a_lease_is_held(hasty: Shell) -> None:
    call(hasty, "request_lease", request_id="a-lease", resource_type="cpu", amount=1, duration_seconds=1.5)
    first = daemon_pid(hasty)
    let_pass(1.0)
    assert daemon_pid(hasty) == first
    wait_until(lambda: not is_locked(hasty))


@pytest.mark.parametrize("already", [False, True], ids=["first", "after one that would leave"])
def test_a_daemon_that_was_started_by_name_stays_until_it_is_stopped(hasty: Shell, already: bool) -> None:
    if already:
        hasty("status", check=0, env={"GRID_IDLE_SECONDS": "1.5"})
    before = daemon_pid(hasty)
    hasty("daemon", "start", check=0)
    first = daemon_pid(hasty)
    assert first is not None
    assert before in (None, first)
    let_pass(2.0 if already else 1.0)
    assert daemon_pid(hasty) == first
    assert "stopped" in hasty("daemon", "stop", check=0).stdout
    assert not is_locked(hasty)
    assert hasty("daemon", "status").returncode == 3


def test_one_that_was_to_stay_is_followed_by_one_that_stays(grid: Shell) -> None:
    soon = {"GRID_IDLE_SECONDS": "0.3"}
    grid("daemon", "start", check=0, env=soon)
    grid.kill_daemon()
    assert json.loads(grid("daemon", "start", "--json", check=0, env=soon).stdout)["stays"]
    grid.kill_daemon()
    grid("status", check=0, env=soon)
    assert grid.json("daemon", "status")["stays"]
    grid("daemon", "stop", check=0)
    grid("status", check=0, env={"GRID_IDLE_SECONDS": "30"})  # it must still be there for the next command
    assert not grid.json("daemon", "status")["stays"]
