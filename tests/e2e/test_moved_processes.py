"""Moves of processes that the grid did not start: ended here and run again there, never two and never none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

CONFIG = """
nodes:
- {name: left, host: local, simulated: true, cpu_count: 4, memory_gb: 8}
- {name: right, host: local, simulated: true, cpu_count: 4, memory_gb: 8}
"""
COMPUTE = """
import fcntl, os, pathlib, sys, time
where = os.environ.get("GRID_NODE", "here")
begun = pathlib.Path(sys.argv[1])
with begun.open("a") as file:
    file.write(f"{where} {os.getpid()}\\n")
print("begins on", where, flush=True)
pathlib.Path("state", "n").write_text("0")
n, held = 0, None
moves = begun.with_suffix(".moves")
while n < 10 or not begun.with_suffix(".go").exists():
    n += 1
    if where == "here" and held is None and moves.exists():
        state, *known = moves.read_text().split("\\n")
        if {top for top, _, names in os.walk(state) if "journal" in names} <= {*known}:
            continue
        held = open("input.txt")
        fcntl.flock(held, fcntl.LOCK_EX)
    pathlib.Path("state", "n").write_text(str(n))
    time.sleep(0.02)
pathlib.Path("result.txt").write_text(f"{pathlib.Path('input.txt').read_text()} {os.environ.get('SEED', 'none')}")
print("finished on", where, flush=True)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A grid of two simulated nodes; the processes of this machine are those of the left one."""
    folder: Path = tmp_path_factory.mktemp("pair")
    (folder / "here").mkdir()
    (folder / "here" / "pair.yaml").write_text(CONFIG)
    shell = Shell(folder / "state", folder / "here")
    shell("daemon", "start", "--config", "pair.yaml", check=0)
    yield shell
    shell.close()


class Work:
    """A process of its own in a directory of its own, and what it leaves there."""

    def __init__(self, folder: Path) -> None:
        self.cwd = folder / "cwd"
        (self.cwd / "state").mkdir(parents=True)
        (self.cwd / "input.txt").write_text("forty-two")
        (self.cwd / "compute.py").write_text(COMPUTE)
        self.begun = folder / "begun"
        starter = """
import subprocess, sys
with open("out.log", "wb") as out:
    null = subprocess.DEVNULL
    found = subprocess.Popen(sys.argv[1:], stdin=null, stdout=out, stderr=null, start_new_session=True)
    print(found.pid)
    found.returncode = 0
"""
        command = [sys.executable, "-c", starter, sys.executable, "compute.py", str(self.begun)]
        env = {"PATH": os.environ["PATH"], "SEED": "17"}
        done = subprocess.run(command, cwd=self.cwd, env=env, capture_output=True, text=True, check=True)
        self.pid = int(done.stdout)
        wait_until(lambda: (self.cwd / "state" / "n").exists())

    @property
    def places(self) -> list[str]:
        """Where it began, each time."""
        return [line.split()[0] for line in self.begun.read_text().splitlines()]

    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")

    def goes_on(self) -> bool:
        """Whether it runs and counts."""
        before = (self.cwd / "state" / "n").read_text()
        return bool(wait_until(lambda: (self.cwd / "state" / "n").read_text() != before))

    def lock_once_it_is_moved(self, grid: Shell) -> None:
        """From now on it takes a lock as soon as there is the journal of a move, which is after the request."""
        known = [top for top, _, names in os.walk(grid.state_dir) if "journal" in names]
        listed = self.begun.with_suffix(".listed")
        listed.write_text("\n".join([str(grid.state_dir), *known]))
        listed.rename(self.begun.with_suffix(".moves"))

    def let_finish(self) -> None:
        self.begun.with_suffix(".go").touch()

    def end(self) -> None:
        if is_running(self.pid):
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    found = Work(tmp_path)
    yield found
    found.let_finish()
    found.end()


def move_of(grid: Shell, move_id: str) -> dict[str, Any]:
    found = grid.query("get_move", move_id=move_id)
    return found["move"] if found else grid.json("offload", "status", move_id)


def is_over(grid: Shell, move_id: str) -> dict[str, Any] | None:
    row = move_of(grid, move_id)
    return row if row["end"] is not None else None


def test_a_process_is_moved_finishes_elsewhere_and_its_files_come_back(pair: Shell, work: Work) -> None:
    rows = pair.json("offload", "scan", "-n", "left")["proposals"]
    (row,) = [one for one in rows if one["pid"] == work.pid]
    assert (row["movable"], row["needs_consent"], row["way"], row["target_node"]) == (
        *(True, True, "process_restart"),
        "right",
    )
    refused = pair("offload", "execute", str(work.pid))
    assert "a restart repeats side effects" in refused.stderr
    assert work.goes_on()
    moved = pair.json("offload", "execute", str(work.pid), "--consent", "--env", "SEED")
    assert not is_running(work.pid)
    wait_until(lambda: work.places == ["here", "right"])
    work.let_finish()
    ended = wait_until(lambda: is_over(pair, moved["move_id"]), seconds=30)
    assert (ended["end"], ended["result"], ended["problem"], ended["kept_files"]) == ("done", "exited 0", None, [])
    assert (work.cwd / "result.txt").read_text() == "forty-two 17"
    assert (work.cwd / "out.log").read_text() == "begins on here\nbegins on right\nfinished on right\n"
    assert ended["frozen_seconds"] is not None
    assert work.places == ["here", "right"]


def test_secrets_of_a_moved_process_stay_where_they_are_and_are_named(pair: Shell, work: Work) -> None:
    token = os.urandom(8).hex()
    (work.cwd / ".ssh").mkdir()
    for name in (".env", ".ssh/id_rsa"):
        (work.cwd / name).write_text(token)
    moved = pair("offload", "execute", str(work.pid), "--consent", check=0)
    assert (
        moved.stderr.splitlines().count(
            "grid: not shipped with it: .env: looks like a secret, .ssh/: looks like a secret"
        )
        == 1
    )
    move_id = moved.stdout.partition(":")[0]
    assert move_of(pair, move_id)["left_out_files"] == [".env: looks like a secret", ".ssh/: looks like a secret"]
    assert "not shipped: .env: looks like a secret" in pair("offload", "status", move_id, check=0).stdout
    work.let_finish()
    wait_until(lambda: is_over(pair, move_id), seconds=30)
    kept = [path for path in pair.state_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert kept == []
    assert (work.cwd / ".env").read_text() == token


def test_a_process_in_a_home_directory_is_not_moved(tmp_path: Path) -> None:
    work = Work(tmp_path)
    (tmp_path / "pair.yaml").write_text(CONFIG)
    shell = Shell(tmp_path / "state", tmp_path)
    shell.env["HOME"] = str(work.cwd)
    try:
        shell("daemon", "start", "--config", "pair.yaml", check=0)
        refused = shell("offload", "execute", str(work.pid), "--consent", check=1)
        assert "is a home directory or above one, which is never shipped" in refused.stderr
        assert work.goes_on()
    finally:
        work.let_finish()
        work.end()
        shell.close()


def test_a_file_that_was_changed_meanwhile_is_kept(pair: Shell, work: Work) -> None:
    moved = pair.json("offload", "execute", str(work.pid), "--consent")
    (work.cwd / "result.txt").write_text("mine")
    work.let_finish()
    ended = wait_until(lambda: is_over(pair, moved["move_id"]), seconds=30)
    assert ended["kept_files"] == ["result.txt"]
    assert (work.cwd / "result.txt").read_text() == "mine"
    assert (work.cwd / f"result.txt.from-{moved['move_id']}").read_text() == "forty-two none"


def test_a_move_that_cannot_be_or_is_not_wanted_leaves_the_original_as_it_was(pair: Shell, work: Work) -> None:
    with (work.cwd / "large").open("wb") as file:
        file.truncate(101 << 20)
    failed = pair("offload", "execute", str(work.pid), "--consent", "--json")
    assert failed.returncode == 1
    assert "too large to ship" in json.loads(failed.stdout)["problem"]
    (work.cwd / "large").unlink()
    (work.cwd / "out").symlink_to("/etc")
    assert "leads outside" in pair("offload", "execute", str(work.pid), "--consent", "--json").stdout
    (work.cwd / "out").unlink()
    assert work.goes_on()
    moved = pair.json("offload", "execute", str(work.pid), "--consent", "--no-wait")
    cancelled = pair("offload", "cancel", moved["move_id"])
    if cancelled.returncode:  # it was too late
        assert "grid jobs cancel" in cancelled.stderr
        wait_until(lambda: work.places == ["here", "right"])
    else:
        over = wait_until(lambda: is_over(pair, moved["move_id"]) or work.places == ["here", "right"])
        if over is not True:  # the guard had not decided by then
            assert over["end"] == "cancelled"
            assert work.goes_on()
            assert work.places == ["here"]


def test_a_process_that_takes_a_lock_after_the_request_goes_on_and_the_move_says_so(pair: Shell, work: Work) -> None:
    (work.cwd / "data").write_bytes(os.urandom(60 << 20))  # the files take a moment
    work.lock_once_it_is_moved(pair)
    failed = pair("offload", "execute", str(work.pid), "--consent", "--json")
    assert failed.returncode == 1
    row = json.loads(failed.stdout)
    assert row["end"] == "failed"
    assert row["problem"].startswith("it has changed since the request: it holds a lock: flock write on ")
    assert work.goes_on()
    assert work.places == ["here"]


def test_a_consent_for_one_directory_is_none_for_another(pair: Shell, tmp_path: Path) -> None:
    first, second = Work(tmp_path / "first"), Work(tmp_path / "second")
    try:
        pair.json("offload", "execute", str(first.pid), "--consent", "--env", "SEED")
        listed = pair("offload", "consents", check=0).stdout
        assert str(first.cwd) in listed
        refused = pair("offload", "execute", str(second.pid))
        assert refused.returncode != 0
        assert "your consent is for " in refused.stderr
        assert str(first.cwd) in refused.stderr
        assert second.goes_on()
        assert second.places == ["here"]
    finally:
        for work in (first, second):
            work.let_finish()
            work.end()


@pytest.mark.parametrize("victim", ["original", "target"])
def test_end_of_the_process_ends_its_move(pair: Shell, work: Work, victim: str) -> None:
    moved = pair.json("offload", "execute", str(work.pid), "--consent", "--no-wait")
    if victim == "original":
        work.end()
        row = wait_until(lambda: _settled(pair, moved["move_id"]), seconds=30)
        assert row["end"] == "not_needed" or row["state"] == "running"  # it was ended by whoever came first
        wait_until(lambda: len(work.places) == 1 + (row["end"] is None))
    else:
        row = wait_until(lambda: _settled(pair, moved["move_id"]), seconds=30)
        pair("jobs", "cancel", row["job_id"], check=0)
        ended = wait_until(lambda: is_over(pair, moved["move_id"]), seconds=30)
        assert (ended["end"], ended["result"]) == ("done", "cancelled")


def _settled(grid: Shell, move_id: str) -> dict[str, Any] | None:
    row = move_of(grid, move_id)
    return row if row["end"] is not None or row["state"] == "running" else None


def test_killing_the_control_plane_again_and_again_loses_and_doubles_nothing(pair: Shell, work: Work) -> None:
    moved = pair.json("offload", "execute", str(work.pid), "--consent", "--no-wait")
    for state in ("reserved", "shipped", "frozen", "decided", "dead"):
        wait_until(lambda state=state: _has_reached(pair, moved["move_id"], state), seconds=30)
        pair.kill_daemon()
        pair("daemon", "start", "--config", "pair.yaml", check=0)
    work.let_finish()
    ended = wait_until(lambda: is_over(pair, moved["move_id"]), seconds=60)
    if ended["end"] == "done":
        assert (work.places, (work.cwd / "result.txt").read_text()) == (["here", "right"], "forty-two none")
    else:  # its time to stand still was over before the control plane was back
        assert (ended["end"], work.places) == ("failed", ["here"])
        wait_until(lambda: not is_running(work.pid))
        assert (work.cwd / "result.txt").read_text() == "forty-two 17"


STATES = ["proposed", "reserved", "shipped", "frozen", "decided", "dead", "running", "ended"]


def _has_reached(grid: Shell, move_id: str, state: str) -> bool:
    return STATES.index(move_of(grid, move_id)["state"]) >= STATES.index(state)
