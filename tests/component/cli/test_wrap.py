"""`grid offload wrap` with real processes and a stand-in for the control plane: what starts here, and what must not."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.api.framing import JSON, STDOUT, Unpacker, frame
from distributed_grid.posix.sockets import short_path
from distributed_grid.state_dir import StateDir
from tests.support.shell import GRID

Answer = Callable[[dict[str, Any]], dict[str, Any] | bytes | None]
WELCOME = {"protocol": 2, "version": "0.2.0", "handing_over": False, "nodes": ["here", "there"], "far_nodes": []}
THERE = {"elsewhere": True, "target_node": "there", "reason": "here is pressed"}
HERE = {"elsewhere": False, "target_node": None, "reason": "here is not pressed"}
NOT_FOUND = {"error": {"type": "NotFound", "message": "no such job", "exit_code": 1}}
HANG_UP = b""
"""Ends the connection instead of answering."""


class StandIn:
    """A socket where a control plane would be, with an answer for each request; None is silence."""

    def __init__(self, path: str, answers: dict[str, Any]) -> None:
        self.answers = {"hello": WELCOME} | answers
        self.asked: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        with short_path(path) as name:
            self._listener.bind(name)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        unpacker = Unpacker()
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                for _, body in unpacker.feed(data):
                    request = json.loads(body)
                    self.asked.append(request["op"])
                    found = self.answers[request["op"]]
                    answer = found(request) if callable(found) else found
                    if answer == HANG_UP:
                        return
                    for one in answer if isinstance(answer, list) else [answer]:
                        if one is not None:
                            kind = STDOUT if isinstance(one, bytes) else JSON
                            text = one if isinstance(one, bytes) else json.dumps(one, separators=(",", ":")).encode()
                            connection.sendall(frame(kind, text))


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    found = StateDir(tmp_path / "state")
    found.create()
    return found


@pytest.fixture
def stand_in(state_dir: StateDir) -> Iterator[Callable[..., StandIn]]:
    made: list[StandIn] = []

    def make(**answers: Any) -> StandIn:
        made.append(StandIn(state_dir.socket, answers))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Wrap:
    """Runs `grid offload wrap` in a folder of its own."""

    def __init__(self, state_dir: StateDir, folder: Path) -> None:
        self.folder = folder
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder.with_name("home")),
            "GRID_STATE_DIR": str(state_dir.root),
        }

    def __call__(
        self, *words: str, env: dict[str, str] | None = None, stdin: int | None = None, before: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*before, *GRID, "offload", "wrap", *words],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder,
            env=self.env | (env or {}),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done


@pytest.fixture
def wrap(state_dir: StateDir, tmp_path: Path) -> Wrap:
    folder = tmp_path / "work"
    folder.mkdir()
    return Wrap(state_dir, folder)


def job(**changes: Any) -> dict[str, Any]:
    ended = {
        "job_id": "job-1", "uid": "uid-1", "state": "ended", "outcome": "exited", "exit_code": 7, "shell_code": 7,
        "detail": None, "sizing": None, "attempts": [{"started_at": "2026-05-01T10:00:00+00:00"}],
    }  # fmt: skip
    return ended | changes


IN_PLACE = {"delivery": {"state": "delivered", "problem": None, "in_place": True}}
NEVER_STARTED = job(
    outcome="never_started", shell_code=127, detail="there: no such program", attempts=[{"started_at": None}]
)


@pytest.mark.parametrize(
    "answers",
    [
        {"advise_command": HERE},
        {"advise_command": None},
        {"hello": None, "advise_command": None},
        {"advise_command": HANG_UP},
        {"advise_command": b"not JSON"},
        {"advise_command": {"error": {"type": "Bug", "message": "a bug", "exit_code": 1}}},
    ],
    ids=["not pressed", "silent", "no welcome", "hangs up", "nonsense", "an error"],
)
def test_without_advice_in_time_it_starts_here(wrap: Wrap, stand_in: Callable[..., StandIn], answers: Any) -> None:
    asked = stand_in(**answers).asked
    done = wrap("sh", "-c", "echo $$ here; exit 3")
    assert (done.returncode, done.stdout.split()[1], done.stderr) == (3, "here", "")
    assert "submit_job" not in asked


def test_without_a_control_plane_it_starts_here_and_none_is_started(wrap: Wrap, state_dir: StateDir) -> None:
    done = wrap("sh", "-c", "exit 3")
    assert (done.returncode, done.stderr) == (3, "")
    assert not os.path.exists(state_dir.socket)
    assert not state_dir.log.exists()


def test_it_becomes_the_command_and_loads_next_to_nothing(wrap: Wrap, stand_in: Callable[..., StandIn]) -> None:
    stand_in(advise_command=HERE)
    shown = wrap("sh", "-c", "echo $$; trap", env={"PYTHONPROFILEIMPORTTIME": "1"})
    loaded = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "distributed_grid.cli.local_start" in loaded
    assert loaded.isdisjoint({"typing", "json", "socket", "re", "enum", "collections", "contextlib", "signal", "click"})
    assert "distributed_grid.cli.session" not in loaded
    done = wrap("-e", "A=1", "--", "sh", "-c", "echo $A; kill -PIPE $$")
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, "1\n")
    assert wrap("no-such-program").returncode == 127
    assert wrap("/").returncode == 126


@pytest.mark.parametrize("kind", ["pipe", "file", "terminal", "job"])
def test_what_reads_or_is_inside_a_job_starts_here_unasked(
    wrap: Wrap, stand_in: Callable[..., StandIn], kind: str
) -> None:
    asked = stand_in(advise_command=THERE, submit_job=HANG_UP).asked
    opened: list[int] = []
    if kind == "pipe":
        opened += os.pipe()
    elif kind == "file":
        opened.append(os.open(sys.executable, os.O_RDONLY))
    elif kind == "terminal":
        main, terminal = pty.openpty()
        opened += [terminal, main]
    env = {"GRID_JOB_ID": "job-1"} if kind == "job" else {}
    try:
        for option in ((), ("-e", "A=1")):
            assert wrap(*option, "sh", "-c", "exit 3", stdin=opened[0] if opened else None, env=env).returncode == 3
    finally:
        for descriptor in opened:
            os.close(descriptor)
    assert asked == []


def test_no_input_says_that_a_terminal_does_not_matter(wrap: Wrap, stand_in: Callable[..., StandIn]) -> None:
    asked = stand_in(advise_command=HERE).asked
    main, terminal = pty.openpty()
    try:
        assert wrap("--no-input", "sh", "-c", "test -t 0", stdin=terminal).returncode == 0
    finally:
        os.close(main)
        os.close(terminal)
    assert asked == ["hello", "advise_command"]


def test_elsewhere_it_is_a_job_with_its_output_and_exit_code(wrap: Wrap, stand_in: Callable[..., StandIn]) -> None:
    submitted: dict[str, Any] = {}

    def submit(request: dict[str, Any]) -> dict[str, Any]:
        submitted.update(request)
        return {"job": job(), "reasons": [], "decision": None}

    stand_in(
        advise_command=THERE,
        submit_job=submit,
        read_logs=[b"from there\n", {"job": job(), "done": True}],
        wait_for_delivery=IN_PLACE,
    )
    done = wrap("-e", "MODE=fast", "sh", "-c", "echo here; touch ran")
    assert (done.returncode, done.stdout, done.stderr) == (7, "from there\n", "")
    assert not (wrap.folder / "ran").exists()
    assert submitted["argv"] == ["sh", "-c", "echo here; touch ran"]
    assert (submitted["require"], submitted["wait_seconds"], submitted["env"]["MODE"]) == (["there"], 0, "fast")
    assert (submitted["fetch"], submitted["fetch_to"]) == (["**"], str(wrap.folder))


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"submit_job": {"error": {"type": "Refused", "message": "no room", "exit_code": 1}}}, "starts here: no room"),
        ({"submit_job": HANG_UP, "get_job": NOT_FOUND}, ""),
        (
            {
                "submit_job": {"job": job(state="assigned"), "reasons": []},
                "read_logs": {"job": NEVER_STARTED, "done": True},
            },
            "nothing of it was started there",
        ),
    ],
    ids=["refused", "never arrived", "never started"],
)
def test_it_falls_back_to_here_where_nothing_was_started(
    wrap: Wrap, stand_in: Callable[..., StandIn], answers: Any, says: str
) -> None:
    stand_in(advise_command=THERE, **answers)
    done = wrap("sh", "-c", "echo here; exit 3")
    assert (done.returncode, done.stdout) == (3, "here\n")
    assert says in done.stderr


@pytest.mark.parametrize(
    "answers",
    [
        {"submit_job": HANG_UP, "get_job": {"job": job()}, "read_logs": {"job": job(), "done": True}},
        {
            "submit_job": {"job": job()},
            "read_logs": {"job": job(outcome="lost", detail="its node is gone"), "done": True},
        },
        {"submit_job": {"job": job()}, "read_logs": {"job": job(outcome="cancelled", shell_code=130), "done": True}},
        {
            "submit_job": {"job": job()},
            "read_logs": {"job": job(outcome="never_started", shell_code=127), "done": True},
        },
    ],
    ids=["the answer was lost", "lost", "cancelled", "an earlier attempt has run"],
)
def test_it_never_starts_here_what_may_have_run_there(
    wrap: Wrap, stand_in: Callable[..., StandIn], answers: Any
) -> None:
    stand_in(advise_command=THERE, wait_for_delivery=IN_PLACE, **answers)
    done = wrap("sh", "-c", "echo here")
    assert done.stdout == ""
    assert done.returncode != 0


def test_an_interrupt_cancels_the_job_there(wrap: Wrap, stand_in: Callable[..., StandIn]) -> None:
    cancelled, follows = threading.Event(), threading.Event()

    def logs(request: dict[str, Any]) -> Any:
        follows.set()
        return {"job": job(outcome="cancelled", shell_code=130), "done": True} if cancelled.is_set() else None

    def cancel(request: dict[str, Any]) -> dict[str, Any]:
        cancelled.set()
        return {"job": job(state="stopping", outcome=None)}

    stand_in(
        advise_command=THERE,
        submit_job={"job": job(state="running")},
        read_logs=logs,
        cancel_job=cancel,
        wait_for_delivery=IN_PLACE,
    )
    command = [*GRID, "offload", "wrap", "sh", "-c", "echo here"]
    process = subprocess.Popen(command, cwd=wrap.folder, env=wrap.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert follows.wait(30)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, b"")
    assert cancelled.is_set()


def test_a_hang_up_leaves_the_job_there_and_starts_nothing_here(wrap: Wrap, stand_in: Callable[..., StandIn]) -> None:
    follows = threading.Event()
    running = job(state="running", outcome=None)
    found = stand_in(
        advise_command=THERE,
        submit_job={"job": running},
        read_logs=lambda request: follows.set(),
        detach_job={"job": running},
    )
    command = [*GRID, "offload", "wrap", "sh", "-c", "echo here"]
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=wrap.folder, env=wrap.env, **streams)
    try:
        assert follows.wait(30)
        process.send_signal(signal.SIGHUP)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (129, b"")
    assert err.endswith(
        b"grid: the terminal closed; job-1 goes on; follow it with: grid jobs logs -f job-1; "
        b"its files come when it has ended\n"
    )
    assert "detach_job" in found.asked
    assert "cancel_job" not in found.asked
