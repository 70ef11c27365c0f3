"""The process table is read right, whatever a process calls itself, and never mistakes one for another."""

import os
import subprocess
import sys
import time
from pathlib import Path

from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.process_tree import over_limit_message, resident_bytes, share_bytes


def test_a_process_with_a_nasty_name_is_read_right() -> None:
    code = "open('/proc/self/comm', 'w').write(') Z 1 (x'); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as child:
        assert child.stdout
        child.stdout.readline()
        proc = process_tree.read_process(child.pid)
        found = [found.pid for found in process_tree.descendants(os.getpid(), process_tree.nobody)]
        quick = [found.pid for found in process_tree.listed_descendants(os.getpid(), process_tree.nobody)]
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


def test_who_locked_a_file_exclusively_is_known_by_the_file(tmp_path: Path) -> None:
    lock, copy = tmp_path / "lock", tmp_path / "copy"
    lock.touch()
    os.link(lock, copy)
    for option, exempt in (("-x", True), ("-s", False)):
        script = "echo 1; read x"
        with subprocess.Popen(["flock", option, str(copy), "sh", "-c", script], stdin=-1, stdout=-1,
                              start_new_session=True) as child:  # fmt: skip
            assert child.stdout
            child.stdout.readline()
            grid = process_tree.GridProcesses((str(lock),), lambda: ())
            shims = process_tree.GridProcesses((), lambda: [str(tmp_path / "gone"), str(lock)])
            other = process_tree.GridProcesses((str(tmp_path),), lambda: ())
            proc = process_tree.read_process(child.pid)
            assert proc is not None
            answers = [one.besides(0)(proc) for one in (grid, shims, other)]
            answers.append(grid.besides(proc.pid)(proc))
            found = {one.pid for one in process_tree.descendants(os.getpid(), grid.besides(0))}
            quick = {one.pid for one in process_tree.listed_descendants(os.getpid(), grid.besides(0))}
            child.communicate(b"\n")
        assert answers == [exempt, exempt, False, False]
        assert (child.pid in found, child.pid in quick) == (not exempt, not exempt)


def test_what_carries_the_marks_is_found_with_what_it_started(tmp_path: Path) -> None:
    env = {"GRID_ATTEMPT_ID": "a.1", "GRID_JOB_DIR": str(tmp_path), "PATH": "/bin:/usr/bin"}
    script = "env -i sleep 1000 & echo $!; GRID_ROLE=daemon sleep 1000 & echo $!; wait"
    find, nobody = process_tree.find_attempt_processes, process_tree.nobody
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=-1, start_new_session=True) as child:
        assert child.stdout
        cleared, daemon = int(child.stdout.readline()), int(child.stdout.readline())
        environ = process_tree.read_environ
        while b"GRID_ROLE=daemon" not in environ(daemon) or environ(cleared) != {b""}:
            time.sleep(0.001)  # until both are what they will be
        marked = {proc.pid for proc in find("a.1", str(tmp_path), nobody)}
        other = find("a.1", "/elsewhere/work", nobody)
        sessions = {proc.pid for proc in find("none", "none", nobody, session=child.pid)}
        too_old = find("none", "none", nobody, session=child.pid, since=1 << 60)
        for pid in (daemon, cleared):
            os.kill(pid, 9)
    assert marked == sessions == {child.pid, cleared, daemon}
    assert other == too_old == []


def test_shares_count_less_than_residents_for_shared_pages() -> None:
    assert 0 < share_bytes(os.getpid()) <= resident_bytes(os.getpid()) * 1.1
    assert share_bytes(2**22 + 1) == 0


def test_the_sentence_about_an_overrun() -> None:
    gb = 1 << 30
    assert over_limit_message(21 * gb // 10, gb) == "over limit: used 2.1 GB of 1.0 GB"
    assert over_limit_message(gb, gb // 4) == "over limit: used 1.00 GB of 0.25 GB"
    assert over_limit_message(gb, gb // 2) == "over limit: used 1.0 GB of 0.5 GB"
