"""Terminals that close, readers that leave and disks that are full, while a real `grid` runs: jobs go on, every command
ends with its documented code, and nothing of it is a bug."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.shell import GRID, Shell, wait_until
from tests.support.terminals import Terminal

pytestmark = [pytest.mark.e2e]

GATE = 'echo before; until [ -e "$0" ]; do sleep 0.05; done; echo after'
"""A script that ends when a file is there."""
Open = Callable[..., Terminal]


@pytest.fixture(autouse=True)
def clean_grid(shared_grid: Shell) -> Iterator[None]:
    """No test leaves a job that holds a core, or a bug report."""
    yield
    for job in shared_grid.observe("status")["jobs"]:
        shared_grid("jobs", "cancel", job["uid"], check=0)
    assert not reports(shared_grid)


@pytest.fixture
def terminal(shared_grid: Shell) -> Iterator[Open]:
    """Opens a terminal in which a `grid` command runs."""
    opened: list[Terminal] = []
    shared_grid("status", check=0)

    def open_terminal(*words: str, command: tuple[str, ...] = (), columns: int = 80) -> Terminal:
        env = shared_grid.env | {"TERM": "xterm"}
        opened.append(Terminal([*command, *GRID, *words], shared_grid.cwd, env, columns=columns))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()
        one.wait()


def reports(grid: Shell) -> list[str]:
    return [path.read_text() for path in grid.state_dir.rglob("bug-*.txt")]


@pytest.mark.parametrize("command", [(), ("bash", "-ic", '"$0" "$@"; true')], ids=["alone", "in a shell"])
def test_closing_the_terminal_detaches_a_job_and_the_next_terminal_finds_it(
    shared_grid: Shell, terminal: Open, tmp_path: Path, command: tuple[str, ...]
) -> None:
    name, gate = f"job-of-{'bash' if command else 'nobody'}", tmp_path / "gate"
    window = terminal("run-shared", "-j", name, "sh", "-c", GATE, str(gate), command=command)
    window.read_until(b"before")
    window.close()
    wait_until(lambda: shared_grid.job(name)["detached_at"])
    wait_until(lambda: shared_grid.job(name)["state"] == "running")  # its output may be quicker than this report
    shown = terminal("jobs", "show", name).read_to_end().decode()
    assert f", the terminal closed; its output: grid jobs logs -f {name}" in shown
    for words in (("status",), ("jobs", "list")):
        assert f": grid jobs logs -f {name}\n" in shared_grid(*words, check=0).stdout
    assert [one["job_id"] for one in shared_grid.events("detached")][-1] == name
    follower = terminal("jobs", "logs", "-f", name)
    follower.read_until(b"before")
    gate.touch()
    follower.read_until(b"after")
    shared_grid("jobs", "wait", name, check=0)
    assert shared_grid("jobs", "logs", name, check=0).stdout == "before\nafter\n"


def test_a_command_without_a_signal_notices_at_its_next_output_that_the_terminal_closed(
    shared_grid: Shell, terminal: Open, tmp_path: Path
) -> None:
    words = ("run-shared", "-j", "chatty", "sh", "-c", 'until [ -e "$0" ]; do echo x; sleep 0.05; done')
    window = terminal(*words, str(tmp_path / "gate"), command=("setsid", "--wait"))
    window.read_until(b"x")
    window.close()
    wait_until(lambda: shared_grid.job("chatty")["detached_at"])
    wait_until(lambda: shared_grid.job("chatty")["state"] == "running")
    (tmp_path / "gate").touch()
    shared_grid("jobs", "wait", "chatty", check=0)


def test_a_job_that_waits_keeps_its_place_and_its_limit_when_the_terminal_closes(
    shared_grid: Shell, terminal: Open
) -> None:
    cores = shared_grid.observe("status")["nodes"][0]["cpu_cores"]
    hog = shared_grid("run-shared", "--detach", "-r", "cpu", "-a", str(cores), "sleep", "60", check=0).stdout.strip()
    window = terminal("run-shared", "-r", "cpu", "-a", "1", "-w", "77", "-j", "patient", "echo", "served")
    window.read_until(b"patient waits")
    window.close()
    assert window.wait() == 129
    assert shared_grid.job("patient")["state"] == "queued"
    shared_grid("jobs", "cancel", hog, check=0)
    shared_grid("jobs", "wait", "patient", check=0)
    assert shared_grid("jobs", "logs", "patient", check=0).stdout == "served\n"


def test_a_hang_up_says_on_a_stderr_that_is_left_how_to_come_back(shared_grid: Shell, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    process = shared_grid.start("run-shared", "-j", "left", "--fetch", "out/*", "sh", "-c", GATE, str(gate))
    assert process.stdout is not None
    assert process.stdout.readline() == b"before\n"
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=30)
    way_back = b"follow it with: grid jobs logs -f left; its files come when it has ended"
    assert (process.returncode, err) == (129, b"grid: the terminal closed; left goes on; " + way_back + b"\n")
    gate.touch()
    shared_grid("jobs", "wait", "left", check=0)


def test_nohup_keeps_a_foreground_job_followed(shared_grid: Shell, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = ["nohup", *GRID, "run-shared", "sh", "-c", GATE, str(gate)]
    process = subprocess.Popen(
        command, cwd=shared_grid.cwd, env=shared_grid.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"before\n"
        process.send_signal(signal.SIGHUP)
        gate.touch()
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, b"after\n")


def test_a_hang_up_during_the_submission_lets_it_finish(shared_grid: Shell, tmp_path: Path) -> None:
    """The control plane is stopped when the request comes, so that it cannot answer before the hang-up."""
    shared_grid("status", check=0)
    daemon = shared_grid.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)
    try:
        process = shared_grid.start("run-shared", "-j", "early", "sh", "-c", GATE, str(tmp_path / "gate"))
        wait_until(lambda: waits_at_a_socket(process.pid))
        process.send_signal(signal.SIGHUP)
    finally:
        os.kill(daemon, signal.SIGCONT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 129
    assert err == b"grid: the terminal closed; early goes on; follow it with: grid jobs logs -f early\n"
    (tmp_path / "gate").touch()
    shared_grid("jobs", "wait", "early", check=0)


def waits_at_a_socket(pid: int) -> bool:
    """Whether a process sleeps that has connected to another."""
    targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    asleep = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    return asleep and any(target.startswith("socket:") for target in targets)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_long_command_without_a_bug(shared_grid: Shell, terminal: Open, number: int) -> None:
    job = shared_grid.detach("sh", "-c", "echo begun; exec sleep 60")
    long_commands = [("jobs", "logs", "-f", job), ("events", "-f"), ("offload", "watch")]
    windows = [terminal(*words) for words in long_commands]
    for window in windows:
        window.read_until(b"\n")
        os.kill(window.pid, number)
    for window in windows:
        assert b"Traceback" not in window.read_to_end()
        assert window.exit_code in (0, 130, -number)
    assert shared_grid.job(job)["state"] != "ended"
    shared_grid("jobs", "cancel", job, check=0)


@pytest.mark.parametrize(
    "words", ["status", "jobs list --json", "events", "--help", "config show", "run-shared echo x"]
)
@pytest.mark.parametrize(
    ("redirection", "reason"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_output_that_cannot_be_written_is_one_line_and_exit_1(
    shared_grid: Shell, words: str, redirection: str, reason: str
) -> None:
    shared_grid("status", check=0)
    done = in_shell(shared_grid, f"{words} {redirection}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"grid: cannot write the output: {reason}")
    assert done.stderr.count("\n") == 1


def test_a_job_whose_output_cannot_be_written_goes_on(shared_grid: Shell, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    done = in_shell(shared_grid, f"run-shared -j heavy sh -c '{GATE}' {gate} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == (
        "grid: cannot write the output: No space left on device; heavy goes on; "
        "follow it with: grid jobs logs -f heavy\n"
    )
    gate.touch()
    shared_grid("jobs", "wait", "heavy", check=0)
    assert shared_grid("jobs", "logs", "heavy", check=0).stdout == "before\nafter\n"


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "<&-", "<&- 2>&-"])
def test_a_command_needs_no_stderr_and_no_stdin(shared_grid: Shell, redirection: str) -> None:
    done = in_shell(shared_grid, f"run-shared --json -w 9 echo shown {redirection}")
    assert (done.returncode, done.stdout) == (0, "shown\n")


def test_the_first_command_with_closed_streams_starts_a_control_plane(grid: Shell) -> None:
    """Its pipes must not take the places of the streams."""
    done = in_shell(grid, "run-shared --detach -j first true <&- >&- 2>&-")
    assert done.returncode == 1  # the id of the job could not be printed
    grid("jobs", "wait", "first", check=0)
    assert not reports(grid)


def test_a_reader_that_leaves_ends_a_look_quietly(shared_grid: Shell) -> None:
    shared_grid("status", check=0)
    for words in ("status", "events", "jobs list", "--help"):
        done = in_shell(shared_grid, f"{words} | true")
        assert done.stderr == ""


def in_shell(grid: Shell, words: str) -> subprocess.CompletedProcess[str]:
    """A `grid` command line with redirections."""
    return subprocess.run(
        ["bash", "-c", f'"$GRID" {words}'],
        cwd=grid.cwd,
        env=grid.env | {"GRID": GRID[0]},
        capture_output=True,
        text=True,
        timeout=60,
    )
