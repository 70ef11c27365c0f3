"""The `grid` command as a person types it, and waiting for what it does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_grid.client.client import Client
from distributed_grid.errors import GridError
from distributed_grid.state_dir import StateDir
from tests.support.processes import is_running, processes_naming

GRID = [str(Path(sys.executable).with_name("grid"))]
QUERIES: dict[tuple[str, ...], tuple[str, dict[str, Any], str]] = {
    ("boost", "status"): ("list_boosts", {}, ""),
    ("cluster", "status"): ("manage_cluster", {"verb": "status"}, "nodes"),
    ("jobs", "list"): ("list_jobs", {}, "jobs"),
    ("offload", "status"): ("list_moves", {}, "moves"),
    ("scale", "status"): ("get_scaling", {}, "scaling"),
    ("status",): ("get_status", {}, ""),
    ("workers", "list"): ("list_workers", {}, ""),
    ("workers", "list", "--all"): ("list_workers", {"all": True}, ""),
}
"""What commands that only show something ask, and the part of the answer that they print with --json."""
MAX_EVENTS = 1000
MAX_PAUSE_SECONDS = 0.05


class Shell:
    """Runs `grid` commands against one state directory, and cleans up after itself."""

    def __init__(self, state_dir: Path, cwd: Path) -> None:
        self.state_dir = state_dir
        self.cwd = cwd
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(_home_beside(state_dir, cwd)),
            "GRID_STATE_DIR": str(state_dir),
            "LANG": "C.UTF-8",
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def __call__(
        self, *words: str, timeout: float = 60, check: int | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; with `check`, its exit code must be that."""
        self._make_home()
        done = subprocess.run(
            [*GRID, *words],
            capture_output=True,
            text=True,
            errors="replace",
            cwd=self.cwd,
            env=self.env | (env or {}),
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert "Traceback" not in done.stderr, done.stderr
        if check is not None:
            assert done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str, **options: Any) -> Any:
        """Answer of a command with --json; it must succeed."""
        return json.loads(self(*words, "--json", check=0, **options).stdout)

    def start(self, *words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command and go on; it is ended with the test."""
        self._make_home()
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
        command = [*GRID, *words]
        process = subprocess.Popen(command, cwd=self.cwd, env=self.env | (env or {}), text=False, **streams)
        self._started.append(process)
        return process

    def _make_home(self) -> None:
        with contextlib.suppress(OSError):  # a test may have a disk that takes nothing
            Path(self.env["HOME"]).mkdir(parents=True, exist_ok=True)

    @property
    def host_dir(self) -> Path:
        """The folder of this machine in the state directory."""
        return next((self.state_dir / "hosts").iterdir())

    @property
    def trust(self) -> ssl.SSLContext:
        """Trust in the certificate of this grid's control plane, and in no other."""
        return ssl.create_default_context(cafile=self.host_dir / "certificate.pem")

    def query(self, op: str, **arguments: Any) -> Any:
        """Answer of a running control plane, without the start of a process; None without one."""
        with (
            contextlib.suppress(GridError, OSError),
            Client(StateDir(self.state_dir), may_start=False, query_only=True) as client,
        ):
            return client.call(op, **arguments)
        return None

    def observe(self, *words: str) -> Any:
        """The same as `json`, fifty times as cheap where a control plane runs: for what is asked again and again."""
        op, arguments, part = QUERIES[words]
        found = self.query(op, **arguments)
        if found is None:
            return self.json(*words)
        return found[part] if part else found

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Lines of these types in the audit trail."""
        with (
            contextlib.suppress(GridError, OSError),
            Client(StateDir(self.state_dir), may_start=False, query_only=True) as client,
        ):
            parts = [part for _, part in client.stream("list_events", types=kinds, limit=MAX_EVENTS)]
            return [part for part in parts if isinstance(part, dict) and "seq" in part]
        words = [word for kind in kinds for word in ("--type", kind)]
        lines = self("events", "--json", "--limit", str(MAX_EVENTS), *words, check=0).stdout.splitlines()
        return [json.loads(line) for line in lines]

    def daemon_pid(self) -> int:
        found = self.query("get_daemon_info") or self.json("daemon", "status")
        return int(found["pid"])

    def kill_daemon(self) -> None:
        """kill -9 the control plane, and wait until it is gone."""
        pid = self.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))

    def detach(self, *words: str) -> str:
        """Submit a job and return its id."""
        return self("run-shared", "--detach", *words, check=0).stdout.strip()

    def job(self, job_id: str) -> dict[str, Any]:
        """Everything known about a job; where no control plane runs, the command starts one."""
        answer = self.query("get_job", job_id=job_id)
        found: dict[str, Any] = answer["job"] if answer else self.json("jobs", "show", job_id)
        return found

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        if not self._stop_over_the_socket() and processes_naming(str(self.state_dir)):
            self._stop_by_commands()  # no daemon, but a job of one that was killed: the next one finds and ends it

    def _stop_over_the_socket(self) -> bool:
        """Cancel all jobs and stop the daemon; False where none answers."""
        with contextlib.suppress(GridError, OSError), Client(StateDir(self.state_dir), may_start=False) as client:
            pid = int(client.call("get_daemon_info")["pid"])
            names = [job["uid"] for job in client.call("list_jobs", limit=10_000)["jobs"] if job["state"] != "ended"]
            for name in names:
                client.call("cancel_job", job_id=name)
            for name in names:
                client.call("wait_for_job", job_id=name, timeout_seconds=20)
            client.call("stop_daemon", force=True)
            wait_until(lambda: not is_running(pid), 40)
            return True
        return False

    def _stop_by_commands(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            going_on = json.loads(self("jobs", "list", "--json", timeout=30).stdout or "[]")
            names = [job["uid"] for job in going_on if job["state"] != "ended"]
            if names:
                self("jobs", "cancel", *names, timeout=30)
                self("jobs", "wait", *names, "--timeout", "20", timeout=40)
        with contextlib.suppress(subprocess.SubprocessError):
            self("daemon", "stop", "--force", timeout=40)


def wait_until(condition: Callable[[], Any], seconds: float = 20.0, pause: float = 0.02) -> Any:
    """The condition's first true value; fails when it does not come.

    What is waited for needs the processors, too: a condition that takes long, such as one that runs a command, is
    looked at a third of the time at most, and one that does not come soon twenty times a second.
    """
    start = time.monotonic()
    while (began := time.monotonic()) < start + seconds:
        if value := condition():
            return value
        waited, took = began - start, time.monotonic() - began
        time.sleep(max(pause, min(waited / 20, MAX_PAUSE_SECONDS), 2 * took))
    raise AssertionError(f"did not happen within {seconds} s")


def _home_beside(state_dir: Path, cwd: Path) -> Path:
    """A home that is neither the current directory nor below it: such a directory is never shipped unasked."""
    is_around = cwd in state_dir.parents
    return cwd.with_name(f"{cwd.name}-home") if is_around else state_dir.with_name("home")
