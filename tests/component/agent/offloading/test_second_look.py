"""A process that changes between the request of its move and its freeze goes on, and the move names the change."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.offloading.move_journal import read_journal
from distributed_grid.domain.states import MoveState
from tests.component.agent.offloading.conftest import MOVE, Original, Source, kill

MakeOriginal = Callable[..., Original]
CHANGES = """
import fcntl, mmap, os, socket, subprocess, sys, threading, time
here = sys.argv[1]
os.makedirs(here + "/sub", exist_ok=True)
open(here + "/held", "w").close()
(open(here + "/ready", "w")).close()
while not os.path.exists(here + "/go"): time.sleep(0.002)
{change}
open(here + "/done", "w").close()
time.sleep(600)
"""
AGAIN = "import sys, time; open(sys.argv[1] + '/done', 'w').close(); time.sleep(600)"
HOLDS_LOCK = """
import fcntl, sys, time
held = open(sys.argv[1] + "/held"); fcntl.flock(held, fcntl.LOCK_EX)
open(sys.argv[1] + "/child", "w").close(); time.sleep(600)
"""
CONNECTS = """
a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname())
c, _ = a.accept(); a.close(); c.close()
"""
SHARES_MEMORY = """
fd = os.open('/dev/shm/' + os.path.basename(here) + str(os.getpid()), os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4096); m = mmap.mmap(fd, 4096)
"""
STARTS_CHILD = """
subprocess.Popen([sys.executable, '-S', '-c', {code!r}, here])
while not os.path.exists(here + '/child'): time.sleep(0.002)
"""
STARTS_THREAD = """
held = open(here + '/held', 'r+')
def work(): fcntl.lockf(held, fcntl.LOCK_EX); open(here + '/child', 'w').close(); time.sleep(600)
threading.Thread(target=work, daemon=True).start()
while not os.path.exists(here + '/child'): time.sleep(0.002)
"""
OTHER_ENVIRONMENT = """
if 'CHANGED' not in os.environ: os.execve(sys.executable, [*sys.orig_argv], {'CHANGED': '1'})
"""
CASES = {
    "exec": (f"os.execv(sys.executable, [sys.executable, '-S', '-c', {AGAIN!r}, here])", "its command line is `"),
    "environment": (OTHER_ENVIRONMENT, "its environment is another one"),
    "lock": ("held = open(here + '/held'); fcntl.flock(held, fcntl.LOCK_EX)", "it holds a lock: flock write on "),
    "listens": ("s = socket.create_server(('127.0.0.1', 0))", "it listens on "),
    "connects": (CONNECTS, "connection"),
    "outside": ("out = open(here + '.outside', 'w')", "open for writing outside of "),
    "reads outside": ("data = open(here + '.input')", ".input, which was not compared with the target"),
    "stdout": ("os.dup2(os.open(here + '/log', os.O_WRONLY | os.O_CREAT), 1)", "stdout is /"),
    "directory": ("os.chdir(here + '/sub')", "it has changed its working directory"),
    "shared memory": (SHARES_MEMORY, "it shares memory: "),
    "child with a lock": (STARTS_CHILD.format(code=HOLDS_LOCK), "it holds a lock: flock write on "),
    "thread with a lock": (STARTS_THREAD, "it holds a lock: posix write on "),
}


def begun(source: Source, original: MakeOriginal, change: str) -> Original:
    process = original(CHANGES.format(change=change))
    Path(f"{process.folder}.input").write_text("data")
    source.until(lambda: (process.folder / "ready").exists())
    source.open(process.identity)
    return process


def changed(source: Source, process: Original) -> None:
    (process.folder / "go").touch()
    source.until(lambda: (process.folder / "done").exists())


@pytest.mark.parametrize("name", CASES)
def test_a_process_that_changes_before_its_freeze_goes_on_and_the_change_is_named(
    source: Source, original: MakeOriginal, name: str
) -> None:
    change, cause = CASES[name]
    process = begun(source, original, change)
    try:
        changed(source, process)
        source.order("freeze", process.identity, freeze_ms=20_000)
        thawed = source.reported("thawed")
        assert cause in thawed.detail
        source.order("commit", process.identity)
        source.until(process.goes_on)
        assert "decided" not in source.steps()
        assert read_journal(source.root / MOVE)[1][-1].why == thawed.detail
    finally:
        for path in Path("/dev/shm").glob(f"{process.folder.name}{process.pid}"):
            path.unlink()


def test_children_that_come_and_threads_that_begin_are_no_change(source: Source, original: MakeOriginal) -> None:
    child = "import sys, time; open(sys.argv[1] + '/child', 'w').close(); time.sleep(600)"
    thread = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    process = begun(source, original, STARTS_CHILD.format(code=child) + thread)
    changed(source, process)
    source.freeze(process.identity)
    source.order("commit", process.identity)
    source.reported("dead")
    assert not process.tree()


def test_the_result_of_the_second_look_is_in_the_journal_before_the_decision(
    source: Source, original: MakeOriginal
) -> None:
    process = original()
    source.open(process.identity)
    source.freeze(process.identity)
    source.order("commit", process.identity)
    source.reported("dead")
    _, records = read_journal(source.root / MOVE)
    steps = [record.step for record in records]
    assert steps == ["freezing", "frozen", "checked", "decided", "dead"]


@pytest.mark.parametrize("victim", ["guard", "both", "agent"])
def test_after_a_second_look_that_is_recorded_the_move_goes_on_whoever_is_killed(
    source: Source, original: MakeOriginal, victim: str
) -> None:
    process = original()
    source.open(process.identity)
    source.freeze(process.identity)
    source.until(lambda: read_journal(source.root / MOVE)[1][-1].step is MoveState.CHECKED)
    if victim == "agent":
        source.stop()
        source.start()
    else:
        for pid in source.guards()[: 1 if victim == "guard" else 2][::-1]:
            kill(pid)
    assert process.is_frozen()
    source.order("commit", process.identity)
    source.reported("dead")
    assert not process.tree()


def test_an_agent_that_begins_while_it_is_frozen_looks_again_before_the_end(
    source: Source, original: MakeOriginal
) -> None:
    process = begun(source, original, "held = open(here + '/held'); fcntl.flock(held, fcntl.LOCK_EX)")
    changed(source, process)
    source.order("freeze", process.identity, freeze_ms=20_000, look=None)  # nothing to compare with
    source.reported("frozen")
    source.stop()
    source.start()
    assert process.is_frozen()
    source.order("commit", process.identity)
    assert "it holds a lock" in source.reported("thawed").detail
    source.until(process.goes_on)


def test_an_order_without_what_was_seen_first_ends_nothing(source: Source, original: MakeOriginal) -> None:
    process = original()
    source.open(process.identity)
    source.order("freeze", process.identity, freeze_ms=20_000, look=None)
    source.reported("frozen")
    source.order("commit", process.identity, look=None)
    assert "type the command again" in source.reported("thawed").detail
    source.until(process.goes_on)


def test_a_process_that_was_removed_from_under_its_look_is_gone(source: Source, original: MakeOriginal) -> None:
    process = original()
    source.open(process.identity)
    source.freeze(process.identity)
    os.kill(process.pid, signal.SIGKILL)
    source.reported("gone")
