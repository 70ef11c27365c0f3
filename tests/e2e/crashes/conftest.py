"""Shared parts of the crash tests: more grids, the daemon seen from outside, and proof that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.client.client import Client
from distributed_grid.errors import Unreachable
from distributed_grid.posix.sockets import short_path
from distributed_grid.state_dir import StateDir
from tests.support.processes import is_running, processes_naming
from tests.support.shell import Shell, wait_until

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Fail where a process of a test outlives it; fixtures of the test are torn down before this one."""
    yield
    wait_until(lambda: not processes_naming(str(tmp_path)), 10)


@pytest.fixture
def new_grid(tmp_path: Path) -> Iterator[Callable[..., Shell]]:
    """Makes grids in state directories of the test's choice."""
    made: list[Shell] = []

    def make(state_dir: Path, cwd: Path | None = None) -> Shell:
        cwd = cwd or tmp_path / "here"
        cwd.mkdir(exist_ok=True)
        made.append(Shell(state_dir, cwd))
        return made[-1]

    yield make
    for shell in made:
        shell.close()


def places(shell: Shell) -> StateDir:
    return StateDir(shell.state_dir)


def daemon_pid(shell: Shell) -> int | None:
    """Who listens on the socket, without asking it anything."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        with short_path(places(shell).socket) as path:
            connection.connect(path)
        pid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid
    return None


def kill_nine(shell: Shell) -> int:
    """kill -9 of the daemon that listens; its pid, once it is gone."""
    pid = daemon_pid(shell)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid) and not is_locked(shell))  # its threads may outlive it by a moment
    return pid


def spawner_pid(shell: Shell) -> int:
    """The process that forks this grid's shims: the only direct child of the daemon."""
    daemon = daemon_pid(shell)
    (child,) = [pid for pid in processes_naming(str(shell.state_dir)) if parent_of(pid) == daemon]
    return child


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def call(shell: Shell, op: str, **arguments: Any) -> dict[str, Any]:
    """Ask the running daemon, as a program would; where none runs, a command starts it first."""
    while True:
        try:
            with Client(places(shell), may_start=False) as client:
                return client.call(op, **arguments)
        except Unreachable:
            shell("status", check=0)


def submission(shell: Shell, script: str, *words: str, **changes: Any) -> dict[str, Any]:
    """A request for a small job that runs a shell script with these words as its $1, $2, …"""
    asked: dict[str, Any] = {
        "request_id": uuid.uuid4().hex,
        "argv": ["/bin/sh", "-c", script, "sh", *words],
        "amount": 0.05,
        "cwd": str(shell.cwd),
        "env": {"PATH": shell.env["PATH"]},
    }
    return asked | changes


def run_python(shell: Shell, code: str, *words: str) -> subprocess.Popen[bytes]:
    """A program of the user's that uses the client's classes, started; it is ended with the test."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen([PYTHON, "-c", code, *words], cwd=shell.cwd, env=shell.env, **pipes)
    shell._started.append(process)
    return process


def a_gate(shell: Shell, name: str) -> Path:
    """A named pipe: a job that runs `read x < NAME` stands still there until `open_gate`."""
    gate = shell.cwd / name
    os.mkfifo(gate)
    return gate


def open_gate(gate: Path) -> None:
    """Let the job that stands at this gate go on."""

    def opened() -> bool:
        try:
            end = os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody has come to it yet
            return False
        os.write(end, b"go\n")
        os.close(end)
        return True

    wait_until(opened)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def is_locked(shell: Shell) -> bool:
    """Whether somebody holds the daemon's lock."""
    return places(shell).is_locked()


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def one_line(done: subprocess.CompletedProcess[str], *, code: int = 1) -> str:
    """The one clear line of a command that failed with this exit code."""
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert len(said) == 1, done.stderr
    assert said[0].startswith("grid: ")
    assert "bug" not in said[0]
    assert "Errno" not in said[0]
    return said[0]


def needs_root(what: str) -> None:
    """Skip where this user may not do that."""
    if os.geteuid() != 0:
        pytest.skip(f"only root may {what}")


def mount(*words: str) -> None:
    """Mount, or skip with the reason."""
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode == 0:
        return
    pytest.skip(f"mount {' '.join(words)}: {done.stderr.strip()}")


def unmount(place: Path) -> None:
    subprocess.run(["umount", str(place)], check=True, capture_output=True)
