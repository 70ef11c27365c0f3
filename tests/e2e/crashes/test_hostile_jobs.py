"""A job that damages itself and the files around it harms nothing else: the grid answers, and other jobs run."""

from __future__ import annotations

import time

import pytest

from tests.e2e.crashes.conftest import kill_nine
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

REPLACE = {
    "pipe": "mkfifo {}",
    "link": "ln -s /dev/zero {}",
    "directory": "mkdir {}",
    "device": "mknod {} c 1 5 || mkfifo {}",
    "huge": "truncate -s 1T {}",
    "unreadable": "touch {}; chmod 000 {}",
}


@pytest.fixture
def grid(shared_grid: Shell) -> Shell:
    """One grid for all of these: it answers on whatever the jobs before have done."""
    return shared_grid


@pytest.mark.parametrize("what", REPLACE)
def test_output_that_a_job_replaced_hangs_nobody(grid: Shell, what: str) -> None:
    replace = " ".join(
        f"rm -f ../{name}; {REPLACE[what].format(*[f'../{name}'] * 2)};" for name in ("stdout", "stderr")
    )
    job = grid.detach("--isolated", "sh", "-c", f"echo before; {replace} sleep 0.2; exit 5")
    wait_until(lambda: grid.job(job)["state"] == "ended")
    assert grid.job(job)["exit_code"] == 5
    began = time.monotonic()
    logs = grid.start("jobs", "logs", job)
    if what == "huge":
        time.sleep(0.5)
        logs.kill()  # it has much to show
    logs.communicate(timeout=20)
    assert grid("run-shared", "echo", "fine", check=0).stdout == "fine\n"
    assert grid.json("status")["nodes"]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("role", ["daemon", "spawner", "memory"])
def test_a_role_in_the_environment_excuses_from_nothing(grid: Shell, role: str) -> None:
    script = f"env GRID_ROLE={role} setsid sh -c 'echo $$; exec sleep 1000' & wait"
    job = grid.detach("--isolated", "-a", "0.1", "sh", "-c", script)
    pid = int(wait_until(lambda: grid("jobs", "logs", job).stdout.strip()))
    assert is_running(pid)
    grid("jobs", "cancel", job, check=0)
    wait_until(lambda: grid.job(job)["outcome"] == "cancelled")
    assert not is_running(pid)


def test_a_job_that_removes_all_it_finds_next_to_it_loses_itself_only(grid: Shell) -> None:
    other = grid.detach("--isolated", "-a", "0.1", "sleep", "1000")
    wait_until(lambda: grid.job(other)["state"] == "running")
    done = grid("run-shared", "--isolated", "sh", "-c", "cd ..; rm -rf * .[!.]*; mkfifo stop.json spec.json; exit 3")
    assert done.returncode == 3
    assert grid("run-shared", "--isolated", "pwd", check=0).stdout
    assert grid.job(other)["state"] == "running"
    grid("jobs", "cancel", other, check=0)


@pytest.mark.parametrize("damage", ["echo '{{}}' >", "rm -f {}; mkfifo", "rm -f {}; mkdir", ":>"])
def test_a_damaged_record_ends_that_job_as_lost_and_no_other(grid: Shell, damage: str) -> None:
    jobs = [grid.detach("--isolated", "-a", "0.1", "sleep", "1000") for _ in range(2)]
    pids = [wait_until(lambda job=job: grid.job(job)["attempts"][-1]["pid"]) for job in jobs]
    spec = grid.host_dir / "jobs/.control" / f"{grid.job(jobs[0])['uid']}.1" / "spec.json"
    grid("run-shared", "-a", "0.1", "sh", "-c", f"{damage.format(spec)} {spec}", check=0)
    kill_nine(grid)
    wait_until(lambda: grid.job(jobs[0])["outcome"] == "lost")
    assert not is_running(pids[0])
    assert is_running(pids[1])
    assert grid.job(jobs[1])["state"] == "running"
    grid("jobs", "cancel", jobs[1], check=0)
