"""`grid run-shared` as a person uses it: output, exit codes, stopping, limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import is_running
from tests.support.shell import GRID, Shell, wait_until

PYTHON = sys.executable
TWO_CORES = len(os.sched_getaffinity(0)) >= 2


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 137", 137),
        ("kill -TERM $$", 143),
        ("kill -9 $$", 137),
        ("kill -SEGV $$", 139),
    ],
)
def test_the_exit_code_is_the_commands_own(shared_grid: Shell, command: str, code: int) -> None:
    assert shared_grid("run-shared", "--shell", command).returncode == code


def test_an_exit_of_137_and_a_kill_are_told_apart(shared_grid: Shell) -> None:
    left = shared_grid.detach("-j", "left", "--shell", "exit 137")
    shot = shared_grid.detach("-j", "shot", "--shell", "kill -9 $$")
    shared_grid("jobs", "wait", left, shot)
    assert (shared_grid.job(left)["outcome"], shared_grid.job(left)["exit_code"], shared_grid.job(left)["signal"]) == (
        "exited",
        137,
        None,
    )
    assert (shared_grid.job(shot)["outcome"], shared_grid.job(shot)["exit_code"], shared_grid.job(shot)["signal"]) == (
        "signalled",
        None,
        9,
    )


def test_merged_output_is_on_stdout_in_the_order_of_writing(shared_grid: Shell) -> None:
    command = "for i in 1 2 3; do echo out $i; echo err $i >&2; done"
    lines = "".join(f"out {i}\nerr {i}\n" for i in (1, 2, 3))
    done = shared_grid("run-shared", "--merge", "-j", "merged", "--shell", command)
    assert (done.stdout, done.stderr) == (lines, "")
    assert shared_grid("jobs", "logs", "merged").stdout == lines
    apart = shared_grid("run-shared", "--shell", command)
    assert (apart.stdout, apart.stderr) == ("out 1\nout 2\nout 3\n", "err 1\nerr 2\nerr 3\n")


def test_output_is_shown_while_the_command_runs(shared_grid: Shell) -> None:
    code = "import time; print('first'); time.sleep(60)"
    process = shared_grid.start("run-shared", PYTHON, "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130


def test_stdout_and_stderr_stay_apart_and_whole(shared_grid: Shell) -> None:
    done = shared_grid("run-shared", "--shell", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


def test_fifty_megabytes_arrive_whole(shared_grid: Shell) -> None:
    code = "import sys; [sys.stdout.buffer.write(bytes([i]) * 1_000_000) for i in range(50)]"
    process = shared_grid.start("run-shared", PYTHON, "-c", code, stderr=subprocess.DEVNULL)
    output, _ = process.communicate(timeout=60)
    assert len(output) == 50_000_000
    assert all(output[i * 1_000_000] == output[(i + 1) * 1_000_000 - 1] == i for i in range(50))
    assert process.returncode == 0


def test_output_that_is_not_text_arrives_as_it_is(shared_grid: Shell) -> None:
    raw = bytes(range(256))
    process = shared_grid.start("run-shared", PYTHON, "-c", f"import sys; sys.stdout.buffer.write({raw!r})")
    assert process.communicate(timeout=30)[0] == raw


def test_a_command_that_closes_its_output_runs_on(shared_grid: Shell) -> None:
    code = "import os, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(5)"
    assert shared_grid("run-shared", PYTHON, "-c", code).returncode == 5


def test_a_reader_that_goes_away_ends_the_job(shared_grid: Shell) -> None:
    shared_grid("status")
    pipe = f"{GRID[0]} run-shared yes | head -n 1"
    done = subprocess.run(
        ["bash", "-c", pipe], env=shared_grid.env, cwd=shared_grid.cwd, capture_output=True, timeout=30
    )
    assert done.stdout == b"y\n"
    assert b"Traceback" not in done.stderr
    wait_until(lambda: not shared_grid.observe("status")["jobs"])


def test_control_c_stops_the_whole_tree(shared_grid: Shell, tmp_path: Path) -> None:
    """Also what put itself into another session, and what ignores being asked."""
    pids = tmp_path / "pids"
    code = f"""
import os, signal, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "300"])
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        open({str(pids)!r}, "w").write(str(os.getpid()))
        time.sleep(300)
    os._exit(0)
time.sleep(300)
"""
    process = shared_grid.start("run-shared", "--grace", "0.5", PYTHON, "-c", code)
    pid = int(wait_until(lambda: pids.exists() and pids.read_text()))
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert not is_running(pid)
    assert shared_grid.json("status")["allocations"] == []


def test_cancel_from_another_terminal_ends_the_first(shared_grid: Shell) -> None:
    process = shared_grid.start("run-shared", "-j", "long", "sleep", "300")
    wait_until(lambda: any(job["state"] == "running" for job in shared_grid.observe("status")["jobs"]))
    assert "cancelled" in shared_grid("jobs", "cancel", "long", check=0).stdout
    assert process.wait(20) == 130


def test_a_timeout_stops_the_job(shared_grid: Shell) -> None:
    done = shared_grid("run-shared", "--timeout", "0.5", "sleep", "300", check=124)
    assert "timed out after 0.5 s" in done.stderr


def test_more_memory_than_leased_is_stopped_and_said(shared_grid: Shell) -> None:
    code = "x = bytearray(900 * 2**20); import time; time.sleep(60)"
    began = time.monotonic()
    done = shared_grid("run-shared", "-r", "memory", "-a", "0.25", PYTHON, "-c", code, check=137)
    assert "over limit: used" in done.stderr
    assert "of 0.25 GB" in done.stderr
    assert time.monotonic() - began < 30, "the job was left to sleep"


def test_within_its_memory_a_job_is_left_alone(shared_grid: Shell) -> None:
    code = "x = bytearray(50 * 2**20); print(len(x))"
    assert (
        shared_grid("run-shared", "-r", "memory", "-a", "0.5", PYTHON, "-c", code, check=0).stdout == f"{50 * 2**20}\n"
    )


@pytest.mark.skipif(not TWO_CORES, reason="needs two cores")
def test_two_leases_are_pinned_to_different_cores(grid: Shell) -> None:
    code = "import os; print(sorted(os.sched_getaffinity(0)), flush=True); import time; time.sleep(300)"
    names = [grid.detach("-j", name, PYTHON, "-c", code) for name in ("one", "two")]
    jobs = [wait_until(lambda name=name: (job := grid.job(name))["state"] == "running" and job) for name in names]
    allowed = []
    for job in jobs:
        status = Path(f"/proc/{job['attempts'][0]['pid']}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
        allowed.append(line.split()[1])
        assert [str(core) for core in job["attempts"][0]["cores"]] == [allowed[-1]]
    assert allowed[0] != allowed[1]


def test_the_environment_is_clean_and_what_was_passed(shared_grid: Shell) -> None:
    secret = {"MY_SECRET": "hunter2", "PASS_ME": "on"}
    done = shared_grid("run-shared", "-e", "GIVEN=1", "-e", "PASS_ME", "env", check=0, env=secret)
    variables = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert "MY_SECRET" not in variables
    assert (variables["GIVEN"], variables["PASS_ME"]) == ("1", "on")
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "GRID_ROLE" not in variables
    assert oct(Path(variables["GRID_JOB_DIR"]).stat().st_mode)[-3:] == "700"


def test_a_job_runs_where_it_was_typed_and_isolated_ones_do_not(shared_grid: Shell) -> None:
    assert shared_grid("run-shared", "pwd", check=0).stdout.strip() == str(shared_grid.cwd)
    done = shared_grid("run-shared", "--isolated", "--shell", 'pwd; echo "$GRID_JOB_DIR"; ls', check=0)
    here, own = done.stdout.split()
    assert here == own != str(shared_grid.cwd)


def test_the_command_is_run_as_typed_without_a_shell(shared_grid: Shell) -> None:
    assert shared_grid("run-shared", "echo", "$HOME", ";", "*", "-n", check=0).stdout == "$HOME ; * -n\n"


def test_commands_that_cannot_run_say_so(shared_grid: Shell) -> None:
    done = shared_grid("run-shared", "no-such-command", check=127)
    assert done.stderr.strip() == "grid: no such command: no-such-command"
    (shared_grid.cwd / "plain").write_text("text")
    assert "not executable" in shared_grid("run-shared", "./plain", check=126).stderr


def test_failures_are_run_again_as_often_as_asked(shared_grid: Shell) -> None:
    script = 'echo run >> count; test "$(wc -l < count)" -ge 3'
    shared_grid("run-shared", "-j", "flaky", "--retries", "5", "--shell", script, check=0)
    assert (shared_grid.cwd / "count").read_text() == "run\n" * 3
    assert [attempt["exit_code"] for attempt in shared_grid.job("flaky")["attempts"]] == [1, 1, 0]


def test_two_terminals_see_the_same_grid(grid: Shell) -> None:
    both = [grid.start("run-shared", "-j", name, "sleep", "300") for name in ("a", "b")]
    wait_until(lambda: {job["job_id"] for job in grid.observe("status")["jobs"]} == {"a", "b"})
    assert len({grid.json("daemon", "status")["pid"] for _ in both}) == 1


def test_the_lease_is_given_back_when_the_command_ends(shared_grid: Shell) -> None:
    before = shared_grid.json("shared-status")["offers"]
    shared_grid("run-shared", "-r", "memory", "-a", "2", "true", check=0)
    after = shared_grid.json("shared-status")
    assert after["allocations"] == []
    for kind, may_differ in (("cpu", 0), ("memory", 1)):  # other programs use memory, too
        there, here = (
            [one["amount"] for one in offers if one["resource_type"] == kind] for offers in (before, after["offers"])
        )
        assert here == pytest.approx(there, abs=may_differ)


def test_killing_the_command_line_leaves_the_job_to_be_found(shared_grid: Shell) -> None:
    gate = shared_grid.cwd / "killed"
    script = f"until [ -e {gate} ]; do sleep 0.1; done; echo still here"
    process = shared_grid.start("run-shared", "-j", "orphan", "--shell", script)
    wait_until(lambda: any(job["state"] == "running" for job in shared_grid.observe("status")["jobs"]))
    process.kill()
    process.wait()
    gate.touch()
    shared_grid("jobs", "wait", "orphan", check=0)
    assert shared_grid("jobs", "logs", "orphan", check=0).stdout == "still here\n"


def test_python_is_found_even_where_the_system_has_none(shared_grid: Shell) -> None:
    done = shared_grid("run-shared", "python", "-c", "print('found')", check=0, env={"PATH": "/nowhere"})
    assert done.stdout == "found\n"


def test_a_second_control_c_does_not_wait(shared_grid: Shell) -> None:
    process = shared_grid.start(
        "run-shared", "-j", "stubborn", "--grace", "60", "--shell", 'trap "" TERM; echo up; sleep 100'
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    wait_until(lambda: shared_grid.job("stubborn")["state"] == "stopping")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1] == "grid: the job is being stopped; not waiting for it"
    pid = wait_until(lambda: shared_grid.job("stubborn")["attempts"][0]["pid"])  # it was stopped as soon as it ran
    os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: shared_grid.job("stubborn")["state"] == "ended")


def test_control_c_while_waiting_leaves_the_line(grid: Shell) -> None:
    grid.detach("-j", "all", "-a", str(len(os.sched_getaffinity(0))), "sleep", "300")
    process = grid.start("run-shared", "-j", "second", "true")
    wait_until(lambda: grid.observe("status")["waiting"] == 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert grid.json("status")["waiting"] == 0
    assert grid.job("second")["outcome"] == "cancelled"
