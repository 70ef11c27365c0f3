"""There is always exactly one owner of the ledger, whoever starts it, from wherever."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.e2e.crashes.conftest import (
    a_gate,
    call,
    daemon_pid,
    environment_of,
    is_locked,
    kill_nine,
    open_gate,
    parent_of,
    places,
    spawner_pid,
    submission,
)
from tests.support.processes import is_running, processes_naming
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e


def test_ten_first_commands_at_once_start_one_daemon_and_all_succeed(grid: Shell) -> None:
    commands = [grid.start("run-shared", "-a", "0.1", "echo", str(n)) for n in range(10)]
    said = [command.communicate(timeout=60) for command in commands]
    assert [(command.returncode, out, err) for command, (out, err) in zip(commands, said, strict=True)] == [
        (0, f"{n}\n".encode(), b"") for n in range(10)
    ]
    wait_until(lambda: len(_daemons(grid)) == 1)
    assert places(grid).log.read_text().count("serving, version") == 1
    assert len(grid.json("jobs", "list")) == 10


def _daemons(grid: Shell) -> list[int]:
    return [pid for pid in processes_naming(str(grid.state_dir)) if b"distributed_grid.server" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize("leftover", ["a socket nobody listens on", "a file"])
def test_what_a_dead_daemon_left_at_its_places_is_in_nobodys_way(grid: Shell, leftover: str) -> None:
    where = places(grid)
    where.create()
    lock_file, socket_file = Path(where.lock), Path(where.socket)
    lock_file.write_text("12345")
    if leftover == "a file":
        socket_file.write_text("not a socket")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            before = Path.cwd()
            os.chdir(socket_file.parent)  # its whole path may be too long for a socket's name
            try:
                listener.bind(socket_file.name)
            finally:
                os.chdir(before)
    lock = lock_file.stat().st_ino

    assert grid.json("status")["nodes"]
    assert lock_file.stat().st_ino == lock
    assert socket_file.is_socket()
    first = kill_nine(grid)  # and now with what a daemon of our own leaves
    assert socket_file.is_socket()
    grid("status", check=0)
    assert daemon_pid(grid) not in (None, first)
    assert lock_file.stat().st_ino == lock


def test_the_lock_and_the_database_are_open_in_the_daemon_and_nowhere_else(grid: Shell) -> None:
    gates = [a_gate(grid, name) for name in ("one", "two")]
    for gate in gates:
        call(grid, "submit_job", **submission(grid, 'read x < "$1"', gate.name))
    wait_until(lambda: [job["state"] for job in grid.observe("jobs", "list")] == ["running", "running"])
    daemon, spawner = daemon_pid(grid), spawner_pid(grid)
    jobs = {job["attempts"][-1]["pid"] for job in grid.json("jobs", "list")}
    shims = {parent_of(pid) for pid in jobs}
    others = set(processes_naming(str(grid.state_dir))) - {daemon}
    assert len(shims) == len(jobs) == 2
    assert others >= {spawner, *shims, *jobs}

    assert {"daemon.lock", "grid.db"} <= {path.name for path in _open_files(daemon)}
    for pid in others:
        names = {path.name for path in _open_files(pid)}
        assert not names & {"daemon.lock", "grid.db", "grid.db-wal", "grid.db-shm", "grid.sock"}
    kill_nine(grid)
    assert not is_locked(grid)
    for gate in gates:
        open_gate(gate)


def test_a_job_has_nothing_open_but_its_own_three_streams(grid: Shell) -> None:
    done = grid("run-shared", "sh", "-c", "ls -l /proc/$$/fd", check=0)
    open_files = {line.split(" -> ")[1].rpartition("/")[2] for line in done.stdout.splitlines() if " -> " in line}
    assert open_files == {"null", "stdout", "stderr"}


def test_a_job_whose_shim_dies_under_a_later_daemon_is_ended_and_told_lost(grid: Shell) -> None:
    gate = a_gate(grid, "gate")
    job = call(grid, "submit_job", **submission(grid, "read x < gate"))["job"]["uid"]
    pid = wait_until(lambda: grid.job(job)["attempts"][-1]["pid"])
    spawner = spawner_pid(grid)
    kill_nine(grid)
    wait_until(lambda: not is_running(spawner))  # it was the shim's heir; now only the next daemon cares
    grid("status", check=0)
    os.kill(parent_of(pid), signal.SIGKILL)
    try:
        assert grid("jobs", "wait", job, "--timeout", "5").returncode == 1
        assert grid.job(job)["outcome"] == "lost"
        assert not is_running(pid)
    finally:
        if is_running(pid):
            open_gate(gate)


def _open_files(pid: int | None) -> list[Path]:
    return [Path(os.readlink(entry)) for entry in Path(f"/proc/{pid}/fd").iterdir()]


@pytest.mark.parametrize("resource", ["cpu", "memory"])
def test_a_daemon_started_from_inside_a_job_is_no_part_of_the_job(grid: Shell, resource: str) -> None:
    gate = a_gate(grid, "gate")
    cores = _allowed_cores(grid.json("status") and daemon_pid(grid))
    words = ["--env", f"GRID_STATE_DIR={grid.state_dir}", "--env", "MY_SECRET=hush", "-r", resource]
    words += ["-a", "1" if resource == "cpu" else "0.2"]
    job = grid.detach(*words, "sh", "-c", "read x < gate; grid status --json > seen; exit 4")
    pid = wait_until(lambda: grid.job(job)["attempts"][-1]["pid"])
    if resource == "cpu":
        assert len(cores) < 2 or _allowed_cores(pid) < cores
    first = kill_nine(grid)

    open_gate(gate)
    wait_until(lambda: not is_running(pid))
    second = daemon_pid(grid)
    assert second not in (None, first)
    assert grid("jobs", "wait", job, "--timeout", "10").returncode == 4
    assert (grid.cwd / "seen").stat().st_size > 0
    assert daemon_pid(grid) == second, "the daemon did not outlive the job that started it"

    assert _allowed_cores(second) == cores
    theirs = environment_of(second)
    assert theirs["GRID_ROLE"] == "daemon"
    assert set(theirs) <= {"HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "GRID_ROLE"}
    assert "grid-" not in Path(f"/proc/{second}/cgroup").read_text()
    assert os.getsid(second) == second
    assert _nice(second) == _nice(os.getpid())
    grid("run-shared", "true", check=0)


def test_the_jobs_of_a_daemon_started_from_inside_a_job_outlive_that_job(grid: Shell) -> None:
    gates = [a_gate(grid, name) for name in ("gate", "end")]
    words = ["--env", f"GRID_STATE_DIR={grid.state_dir}"]
    outer = grid.detach(*words, "sh", "-c", "read x < gate; grid run-shared --detach sleep 1000; read x < end")
    wait_until(lambda: grid.job(outer)["attempts"][-1]["pid"])
    kill_nine(grid)
    open_gate(gates[0])
    second = wait_until(lambda: daemon_pid(grid))
    inner = wait_until(lambda: [job for job in grid.observe("jobs", "list") if job["command"] == "sleep 1000"])[0]
    pid = wait_until(lambda: grid.job(inner["uid"])["attempts"][-1]["pid"])
    spawner = spawner_pid(grid)
    os.kill(second, signal.SIGKILL)  # now the inner job's shim is a child of the outer job's
    wait_until(lambda: not is_running(spawner))
    grid("jobs", "cancel", outer, check=0)
    wait_until(lambda: grid.job(outer)["outcome"] == "cancelled")
    assert is_running(pid)
    assert grid.job(inner["uid"])["state"] == "running"
    grid("jobs", "cancel", inner["uid"], check=0)
    wait_until(lambda: not is_running(pid))


def test_another_grid_started_inside_a_job_is_part_of_the_job(grid: Shell) -> None:
    nested = grid.cwd / "nested"
    words = ["--env", f"GRID_STATE_DIR={nested}"]
    job = grid.detach(*words, "sh", "-c", "grid run-shared --detach sleep 1000; echo up > up; sleep 1000")
    wait_until(lambda: (grid.cwd / "up").exists(), 30)
    wait_until(lambda: len(processes_naming(str(nested))) >= 3)  # daemon, spawner, shims and the nested job
    pids = processes_naming(str(nested))
    grid("jobs", "cancel", job, check=0)
    wait_until(lambda: grid.job(job)["outcome"] == "cancelled", 30)
    assert [pid for pid in pids if is_running(pid)] == []


def _allowed_cores(pid: int | None) -> set[int]:
    assert pid is not None
    return os.sched_getaffinity(pid)


def _nice(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)
