"""The process table is read right, whatever a process calls itself, and never mistakes one for another."""

import os
import subprocess
import sys
import time
from pathlib import Path

from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.memory_limit import over_limit_message, resident_bytes, share_bytes


def test_a_process_with_a_nasty_name_is_read_right() -> None:
    code = "open('/proc/self/comm', 'w').write(') Z 1 (x'); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as child:
        assert child.stdout
        child.stdout.readline()
        proc = process_tree.read_process(child.pid)
        found = [found.pid for found in process_tree.descendants(os.getpid())]
        quick = [found.pid for found in process_tree.listed_descendants(os.getpid())]
        child.communicate(b"\n")
    assert proc is not None
    assert (proc.parent, proc.dead) == (os.getpid(), False)
    assert proc.pid in found
    assert proc.pid in quick
    assert process_tree.read_process(child.pid) is None
    assert process_tree.send_signal(proc, 0) is False


def test_a_pid_that_was_used_again_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        proc = process_tree.read_process(child.pid)
        assert proc is not None
        mistaken = process_tree.send_signal(proc._replace(start=proc.start - 1), 9)
        alive = child.poll() is None
        assert process_tree.send_signal(proc, 9) is True
    assert (mistaken, alive) == (False, True)
    assert child.returncode == -9


def test_a_grid_daemon_and_all_below_it_are_not_part_of_a_tree() -> None:
    for role, counted in (("daemon", False), ("spawner", False), ("other", True)):
        with subprocess.Popen(
            ["sh", "-c", "sleep 1000 & echo $!; wait"], env={"GRID_ROLE": role, "PATH": "/bin"}, stdout=-1
        ) as child:
            assert child.stdout
            grandchild = int(child.stdout.readline())
            found = {proc.pid for proc in process_tree.descendants(os.getpid())}
            quick = {proc.pid for proc in process_tree.listed_descendants(os.getpid())}
            os.kill(grandchild, 9)
        for pids in (found, quick):
            assert pids.isdisjoint({child.pid, grandchild}) is not counted


def test_what_carries_the_marks_is_found_with_what_it_started(tmp_path: Path) -> None:
    env = {"GRID_ATTEMPT_ID": "a.1", "GRID_JOB_DIR": str(tmp_path), "PATH": "/bin:/usr/bin"}
    script = "env -i sleep 1000 & echo $!; GRID_ROLE=daemon sleep 1000 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=-1, start_new_session=True) as child:
        assert child.stdout
        cleared, daemon = int(child.stdout.readline()), int(child.stdout.readline())
        environ = process_tree.read_environ
        while b"GRID_ROLE=daemon" not in environ(daemon) or environ(cleared) != {b""}:
            time.sleep(0.001)  # until both are what they will be
        marked = {proc.pid for proc in process_tree.find_attempt_processes("a.1", str(tmp_path))}
        other = process_tree.find_attempt_processes("a.1", "/elsewhere/work")
        sessions = {proc.pid for proc in process_tree.find_attempt_processes("none", "none", session=child.pid)}
        too_old = process_tree.find_attempt_processes("none", "none", session=child.pid, since=1 << 60)
        for pid in (daemon, cleared):
            os.kill(pid, 9)
    assert marked == sessions == {child.pid, cleared}
    assert other == too_old == []


def test_shares_count_less_than_residents_for_shared_pages() -> None:
    assert 0 < share_bytes(os.getpid()) <= resident_bytes(os.getpid()) * 1.1
    assert share_bytes(2**22 + 1) == 0


def test_the_sentence_about_an_overrun() -> None:
    gb = 1 << 30
    assert over_limit_message(21 * gb // 10, gb) == "over limit: used 2.1 GB of 1.0 GB"
    assert over_limit_message(gb, gb // 4) == "over limit: used 1.00 GB of 0.25 GB"
    assert over_limit_message(gb, gb // 2) == "over limit: used 1.0 GB of 0.5 GB"
