"""Guards with real process trees: a frozen tree continues by itself or is dead as a whole, whatever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.offloading.guard_core import GuardRecord
from distributed_grid.agent.offloading.move_journal import encode_record, read_journal
from distributed_grid.domain.processes import ProcessIdentity
from distributed_grid.domain.states import MoveState
from distributed_grid.posix.boot_clock import boot_ms
from tests.component.agent.offloading.conftest import MOVE, Original, Source, kill, read_start
from tests.support.small_disks import SmallDisk, small_disk

__all__ = ["small_disk"]
MakeOriginal = Callable[..., Original]
FIFTY = """
import os, sys, time
for _ in range(50):
    if not os.fork():
        time.sleep(600)
open(sys.argv[1] + "/ready", "w").close()
time.sleep(600)
"""
FORKS = """
import os, sys
while True:
    if not os.fork():
        if os.fork():
            os.wait()
        os._exit(0)
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]: break
        except ChildProcessError: break
"""
SPAWNS = """
import subprocess, sys
while True:
    subprocess.run([sys.executable, "-S", "-c", "", sys.argv[1]], close_fds=False)
"""
STUBBORN = """
import os, signal, sys, threading, time
for signum in (signal.SIGTERM, signal.SIGTSTP, signal.SIGCONT, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(int, 1)], daemon=True).start()
os.fork()
open(sys.argv[1] + "/ready", "w").close()
while True: time.sleep(0.001)
"""
ORPHANS = """
import os, sys, time
if not os.fork():
    if not os.fork():
        open(sys.argv[1] + "/ready", "w").close()
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(600)
"""
OTHER_SESSION = """
import os, sys, time
if not os.fork():
    os.setsid()
    open(sys.argv[1] + "/ready", "w").close()
    time.sleep(600)
time.sleep(600)
"""


def ready(source: Source, process: Original) -> None:
    source.until(lambda: (process.folder / "ready").exists())


@pytest.mark.parametrize("code", [FIFTY, STUBBORN, ORPHANS], ids=["fifty", "stubborn", "orphans"])
def test_a_tree_is_opened_frozen_decided_and_dead(source: Source, original: MakeOriginal, code: str) -> None:
    process = original(code)
    ready(source, process)
    source.open(process.identity)
    report = source.freeze(process.identity)
    assert process.is_frozen()
    assert 15_000 < report.left_ms <= 20_000
    source.order("commit", process.identity)
    source.reported("decided")
    assert source.reported("dead").frozen_ms <= 20_000
    assert not process.tree()
    source.until(lambda: not source.guards())


@pytest.mark.parametrize("code", [FORKS, SPAWNS], ids=["forks", "spawns"])
def test_a_tree_that_forks_without_end_is_frozen_goes_on_and_is_killed(
    source: Source, original: MakeOriginal, code: str
) -> None:
    process = original(code)
    for number in range(2):
        move = f"move-thaw-{number}"
        source.open(process.identity, move=move)
        source.freeze(process.identity, move=move)
        assert process.is_frozen()
        source.order("thaw", process.identity, move=move)
        source.reported("thawed", move=move)
        source.until(process.goes_on)
    source.open(process.identity)
    source.freeze(process.identity)
    source.order("commit", process.identity)
    source.reported("dead")
    assert not process.tree()


def test_a_process_that_its_user_had_stopped_stays_stopped(source: Source, original: MakeOriginal) -> None:
    process = original(FIFTY)
    ready(source, process)
    stopped = max(process.tree())
    os.kill(stopped, signal.SIGSTOP)
    source.open(process.identity)
    source.freeze(process.identity)
    source.order("thaw", process.identity)
    source.reported("thawed")
    source.until(lambda: process.states() == "ST")
    states = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in process.tree()}
    assert [pid for pid, state in states.items() if state == "T"] == [stopped]
    os.kill(stopped, signal.SIGCONT)


def test_children_in_another_session_keep_a_tree_from_being_frozen(source: Source, original: MakeOriginal) -> None:
    process = original(OTHER_SESSION)
    ready(source, process)
    source.open(process.identity)
    source.order("freeze", process.identity, freeze_ms=20_000)
    assert "is in another session" in source.reported("thawed").detail
    assert process.goes_on()


def test_a_process_of_the_same_pid_that_began_at_another_time_is_not_the_one(
    source: Source, original: MakeOriginal
) -> None:
    process = original()
    other = ProcessIdentity(process.pid, process.identity.pid_start - 1, process.identity.boot)
    source.order("open", other)
    assert "not there any more" in source.reported("gone").detail
    assert not source.guards()
    assert source.moves.listed("here") == ()


def test_a_tree_that_the_agent_itself_belongs_to_is_not_frozen(source: Source) -> None:
    me = os.getpid()
    source.open(ProcessIdentity(me, read_start(me), Path("/proc/sys/kernel/random/boot_id").read_text().strip()))
    source.order("freeze", freeze_ms=1_000)
    assert "a process of the grid runs below it" in source.reported("thawed").detail


def test_what_is_not_committed_goes_on_when_its_lease_ends(source: Source, original: MakeOriginal) -> None:
    process = original()
    source.open(process.identity)
    source.freeze(process.identity, ms=500)
    report = source.reported("thawed")
    assert "lease" in report.detail
    assert report.frozen_ms >= 500
    assert process.goes_on()
    source.order("commit", process.identity)
    assert "lease" in source.reported("thawed").detail
    source.stop()
    source.start()
    source.order("commit", process.identity)
    source.reported("thawed")
    assert process.goes_on()


def test_somebody_who_continues_a_frozen_tree_prevents_its_end(source: Source, original: MakeOriginal) -> None:
    process = original()
    source.open(process.identity)
    source.freeze(process.identity)
    os.kill(process.pid, signal.SIGCONT)
    source.until(process.goes_on)
    source.order("commit", process.identity)
    assert "continued" in source.reported("thawed").detail
    assert process.goes_on()


def test_an_original_that_ends_by_itself_is_gone(source: Source, original: MakeOriginal) -> None:
    process = original(FIFTY)
    ready(source, process)
    source.open(process.identity)
    source.freeze(process.identity)
    os.kill(process.pid, signal.SIGKILL)
    source.reported("gone")
    source.until(process.goes_on)  # its children, which nobody has ended


# ---------------------------------------------------------------------- kill -9


@pytest.mark.parametrize("victim", ["guard", "standby", "agent", "all guards", "everybody"])
@pytest.mark.parametrize("state", ["opened", "frozen"])
def test_whoever_is_killed_the_move_goes_on(source: Source, original: MakeOriginal, victim: str, state: str) -> None:
    process = original()
    source.open(process.identity)
    if state == "frozen":
        source.freeze(process.identity)
    source.until(lambda: len(source.guards()) == 2)
    guard, standby = source.guards()
    if victim in ("agent", "everybody"):
        source.stop()
    if victim == "guard":
        kill(guard)
    if victim == "standby":
        kill(standby)
    if victim in ("all guards", "everybody"):
        os.kill(guard, signal.SIGSTOP)  # so that it starts no other standby
        kill(standby)
        kill(guard)
    if victim in ("agent", "everybody"):
        source.reports.clear()
        source.start()
        source.reported(state)
    source.until(lambda: len(source.guards()) == 2)
    if state == "opened":
        source.freeze(process.identity)
    assert process.is_frozen()
    source.order("commit", process.identity)
    source.reported("dead")
    assert not process.tree()


def test_a_guard_that_is_killed_does_not_make_the_lease_longer(source: Source, original: MakeOriginal) -> None:
    process = original()
    source.open(process.identity)
    source.freeze(process.identity, ms=2_000)
    source.stop()  # the agent is away, too
    for _ in range(3):
        source.until(lambda: len(source.guards()) == 2)
        kill(source.guards()[0])
    source.until(process.goes_on)
    assert read_journal(source.root / MOVE)[1][-1].step == "thawed"


def test_a_guard_that_stands_still_itself_is_killed_when_the_lease_is_over(
    source: Source, original: MakeOriginal
) -> None:
    process = original(FIFTY)
    ready(source, process)
    source.open(process.identity)
    source.freeze(process.identity, ms=2_000)
    os.kill(source.guards()[0], signal.SIGSTOP)
    source.until(process.goes_on)
    assert source.reported("thawed").detail == "its freeze lease has ended"


def test_a_guard_that_died_after_the_decision_is_followed_by_one_that_kills(
    source: Source, original: MakeOriginal
) -> None:
    process = original(FIFTY)
    ready(source, process)
    source.open(process.identity)
    source.freeze(process.identity)
    source.stop()
    _kill_guards(source)
    frozen = read_journal(source.root / MOVE)[1][-1]
    _append(source, encode_record(frozen._replace(step=MoveState.DECIDED, at_ms=boot_ms())))
    source.start()
    source.reported("decided")
    source.reported("dead")
    assert not process.tree()


def test_a_guard_that_died_while_it_stopped_the_tree_is_followed_by_one_that_thaws(
    source: Source, original: MakeOriginal
) -> None:
    process = original()
    source.open(process.identity)
    source.stop()
    _kill_guards(source)
    now = boot_ms()
    _append(source, encode_record(GuardRecord(MoveState.FREEZING, now, now + 60_000)))
    os.kill(process.pid, signal.SIGSTOP)
    source.start()
    source.reported("thawed")
    assert process.goes_on()


@pytest.mark.parametrize(("before", "after"), [("opened", "gone"), ("frozen", "gone"), ("decided", "dead")])
def test_after_a_restart_of_the_machine_nobody_is_signalled(
    source: Source, original: MakeOriginal, before: str, after: str
) -> None:
    process = original()
    source.open(process.identity)
    if before != "opened":
        source.freeze(process.identity)
    source.stop()
    _kill_guards(source)
    os.kill(process.pid, signal.SIGCONT)
    journal = source.root / MOVE / "journal"
    text = journal.read_text().replace(process.identity.boot, "another boot")
    journal.write_text(text.replace('"frozen"', '"decided"') if before == "decided" else text)
    if before == "decided":
        _append(source, encode_record(GuardRecord(MoveState.FROZEN, 1, 2)))
        _append(source, encode_record(GuardRecord(MoveState.DECIDED, 1, 2)))
    source.start()
    source.reported(after)
    source.until(lambda: not source.guards())
    assert process.goes_on()


def test_a_line_that_was_cut_short_hides_nothing(source: Source, original: MakeOriginal) -> None:
    process = original()
    source.open(process.identity)
    source.freeze(process.identity)
    source.stop()
    _kill_guards(source)
    _append(source, b'{"step": "decided", "at_m')
    source.start()
    source.reported("frozen")
    source.order("thaw", process.identity)
    source.reported("thawed")
    assert [record.step for record in read_journal(source.root / MOVE)[1]] == ["freezing", "frozen", "thawed"]


# ---------------------------------------------------------------------- disks and directories


def test_on_a_full_disk_nothing_is_frozen_and_no_decision_is_made(
    source: Source, original: MakeOriginal, small_disk: Callable[..., SmallDisk]
) -> None:
    process = original()
    source.root.mkdir(parents=True)
    disk = small_disk(source.root)
    source.open(process.identity)
    _fill_page(source)
    disk.fill()
    source.order("freeze", process.identity, freeze_ms=20_000)
    assert "No space left" in source.reported("failed").detail
    assert process.goes_on()
    disk.free()
    source.freeze(process.identity)
    _fill_page(source)
    disk.fill()
    source.order("commit", process.identity)
    assert "No space left" in source.reported("thawed").detail
    assert process.goes_on()
    source.order("commit", process.identity)
    source.reported("thawed")
    disk.free()
    source.until(lambda: not source.guards())
    assert read_journal(source.root / MOVE)[1][-1].step == "thawed"
    disk.fill()
    source.order("open", process.identity, move="move-2")
    assert "No space left" in source.reported("failed", move="move-2").detail
    assert source.moves.listed("here") == (MOVE,)


def test_without_its_directory_a_tree_goes_on(source: Source, original: MakeOriginal) -> None:
    process = original()
    source.open(process.identity)
    source.freeze(process.identity)
    source.stop()
    folder = source.root / MOVE
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    source.until(process.goes_on)
    source.until(lambda: not source.guards())
    source.start()
    source.order("commit", process.identity)
    assert "nothing is known" in source.reported("thawed").detail


@pytest.mark.parametrize("state", ["opened", "frozen", "thawed"])
def test_a_move_that_is_closed_leaves_nothing_here(source: Source, original: MakeOriginal, state: str) -> None:
    process = original()
    source.open(process.identity)
    if state != "opened":
        source.freeze(process.identity)
    if state == "thawed":
        source.order("thaw", process.identity)
        source.reported("thawed")
    assert source.moves.listed("here") == (MOVE,)
    assert source.moves.listed("elsewhere") == ()
    source.order("close")
    source.until(lambda: not list(source.root.iterdir()))
    source.until(lambda: not source.guards())
    source.until(lambda: source.moves.listed("here") == ())
    assert process.goes_on()
    source.order("close")


def _kill_guards(source: Source) -> None:
    guard, standby = source.guards()
    os.kill(guard, signal.SIGSTOP)
    kill(standby)
    kill(guard)


def _fill_page(source: Source) -> None:
    """The next line of the journal needs a page of its own."""
    size = (source.root / MOVE / "journal").stat().st_size
    with open(source.root / MOVE / "journal", "ab") as journal:
        journal.write(b"\n" * (-size % 4096))


def _append(source: Source, line: bytes) -> None:
    with open(source.root / MOVE / "journal", "ab") as journal:
        journal.write(b"\n" + line)
