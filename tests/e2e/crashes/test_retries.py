"""A caller that heard no answer asks again with the same request id: it happens once."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import uuid

import pytest

from distributed_grid.api.framing import JSON, Unpacker, frame
from distributed_grid.client.client import Client
from distributed_grid.errors import Conflict, Unreachable
from distributed_grid.posix.sockets import short_path
from tests.e2e.crashes.conftest import a_gate, call, kill_nine, lines, open_gate, places, run_python, submission
from tests.support.shell import Shell

pytestmark = pytest.mark.e2e

SEND_AND_DIE = """
import json, os, signal, sys
from distributed_grid.client.client import Client
from distributed_grid.state_dir import StateDir

client = Client(StateDir())
client.call("get_daemon_info")
client._send({"op": "submit_job", **json.loads(sys.argv[1])})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_caller_killed_between_request_and_answer_asks_again_and_gets_one_job(grid: Shell) -> None:
    grid("status", check=0)
    asked = [submission(grid, 'echo "$1" >> marks; exit 3', str(n)) for n in range(6)]
    for number, request in enumerate(asked):
        died = run_python(grid, SEND_AND_DIE, json.dumps(request))
        died.communicate(timeout=20)
        assert died.returncode == -signal.SIGKILL
        if number == 3:  # and the daemon with it
            kill_nine(grid)
        first = call(grid, "submit_job", **request)["job"]
        again = call(grid, "submit_job", **request)["job"]
        assert first["uid"] == again["uid"] == request["request_id"]
    grid("jobs", "wait", "--timeout", "10")
    jobs = grid.json("jobs", "list")
    assert {job["uid"]: (job["exit_code"], len(job["attempts"])) for job in jobs} == {
        request["request_id"]: (3, 1) for request in asked
    }
    assert len(jobs) == 6
    assert sorted(lines(grid.cwd / "marks")) == [str(n) for n in range(6)]


def test_the_same_id_with_other_content_is_refused_while_it_runs_and_after_its_end(grid: Shell) -> None:
    gate = a_gate(grid, "gate")
    request = submission(grid, "echo ran >> marks; read x < gate; exit 3")
    others = [
        request | {"argv": ["/bin/sh", "-c", "echo other >> marks"]},
        request | {"env": {"OTHER": "1"}},
        request | {"amount": 0.1},
        request | {"job_id": "another"},
    ]
    uid = call(grid, "submit_job", **request)["job"]["uid"]
    for other in others:
        with pytest.raises(Conflict, match="used before"):
            call(grid, "submit_job", **other)
    open_gate(gate)
    assert grid("jobs", "wait", uid, "--timeout", "10").returncode == 3

    kill_nine(grid)
    again = call(grid, "submit_job", **request)["job"]
    assert (again["uid"], again["state"], again["outcome"], again["exit_code"]) == (uid, "ended", "exited", 3)
    for other in others:
        with pytest.raises(Conflict, match="used before"):
            call(grid, "submit_job", **other)
    assert lines(grid.cwd / "marks") == ["ran"]
    assert len(grid.json("jobs", "list")) == 1


def test_asking_again_for_a_lease_gives_the_same_lease(grid: Shell) -> None:
    ask = {"request_id": uuid.uuid4().hex, "resource_type": "cpu", "amount": 1, "duration_seconds": 60}
    first = call(grid, "request_lease", **ask)["allocation"]
    kill_nine(grid)
    again = call(grid, "request_lease", **ask)["allocation"]
    same = ("allocation_id", "fence", "node_id", "state")
    assert [first[name] for name in same] == [again[name] for name in same]
    assert len(grid.json("shared-status")["allocations"]) == 1
    with pytest.raises(Conflict):
        call(grid, "request_lease", **ask | {"amount": 2})
    call(grid, "release_lease", allocation_id=first["allocation_id"])
    assert call(grid, "request_lease", **ask)["allocation"]["reason"] == "released"
    assert grid.json("shared-status")["allocations"] == []


def test_a_daemon_that_goes_away_before_a_stream_begins_is_unreachable_not_a_broken_pipe(grid: Shell) -> None:
    where = places(grid)
    where.create()
    gone = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        with short_path(where.socket) as path:
            listener.bind(path)
        listener.listen()

        def greet_and_go() -> None:
            connection, _ = listener.accept()
            with connection:
                for _, body in Unpacker().feed(connection.recv(1 << 16)):
                    assert json.loads(body)["op"] == "hello"
                    connection.sendall(frame(JSON, json.dumps({"pid": os.getpid()}).encode()))
            gone.set()

        greeter = threading.Thread(target=greet_and_go)
        greeter.start()
        with Client(where, may_start=False) as client:
            client._connect()
            assert gone.wait(5)
            with pytest.raises(Unreachable):
                next(client.stream("read_logs", job_id="any"))
        greeter.join()
