"""Agents, links and control planes that die while jobs run: nothing is lost, nothing runs twice, holds are kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.agents.conftest import FarGrid, is_running, wait_until

pytestmark = pytest.mark.e2e
Make = Callable[..., FarGrid]


def test_a_job_outlives_its_agent(shared_far_grid: FarGrid) -> None:
    grid = shared_far_grid
    job = grid.detach(*grid.on("gpu2"), "sh", "-c", "sleep 3; echo still here; exit 4")
    grid.pid_of(job)
    grid.agents["gpu2"].kill()
    grid.agents["gpu2"].start()
    assert grid("jobs", "wait", job, "--timeout", "30").returncode == 4
    assert grid("jobs", "logs", job, check=0).stdout == "still here\n"
    assert len(grid.job(job)["attempts"]) == 1


def test_a_job_that_ends_while_its_agent_is_dead_is_reported_by_the_next(shared_far_grid: FarGrid) -> None:
    grid = shared_far_grid
    job = grid.detach(*grid.on("gpu2"), "sh", "-c", "sleep 1; exit 4")
    pid = grid.pid_of(job)
    grid.agents["gpu2"].kill()
    wait_until(lambda: not is_running(pid))
    grid.agents["gpu2"].start()
    assert grid("jobs", "wait", job, "--timeout", "30").returncode == 4


def test_jobs_outlive_the_control_plane(shared_far_grid: FarGrid, tmp_path: Path) -> None:
    grid = shared_far_grid
    tally = tmp_path / "tally"
    jobs = [
        grid.detach(
            "-a", "0.1", *grid.on(node), "--workdir", "none", "sh", "-c", f"echo {node}{number} >> {tally}; sleep 2"
        )
        for number in range(5)
        for node in ("gpu1", "gpu2")
    ]
    wait_until(lambda: tally.exists())
    grid.kill_daemon()
    assert grid("jobs", "wait", *jobs, "--timeout", "40").returncode == 0
    assert sorted(tally.read_text().split()) == sorted(
        f"{node}{number}" for number in range(5) for node in ("gpu1", "gpu2")
    )


def test_a_hold_that_runs_out_ends_the_job_on_the_node_first(far_grid: Make) -> None:
    grid = far_grid("gpu2", hold=6)
    job = grid.detach(*grid.on("gpu2"), "--grace", "0.5", "sleep", "1000")
    pid = grid.pid_of(job)
    agent = grid.agents["gpu2"]
    agent.unplug()
    agent.kill()  # nobody is left to renew, and nobody but the shim to stop it
    wait_until(lambda: not is_running(pid), 15)
    assert grid.job(job)["state"] != "ended", "lent again before the lender had stopped"
    assert wait_until(lambda: grid.job(job)["outcome"], 20) == "lost"
    assert grid.state("gpu2") == "lost"
    agent.plug_in()
    agent.start()
    grid.until_alive("gpu2")
    late = wait_until(lambda: grid.events("late-report"))
    assert grid.job(job)["outcome"] == "lost"
    assert late[0]["node_id"] == "gpu2"
    assert grid("run-shared", *grid.on("gpu2", "true")).returncode == 0


def test_a_short_silence_costs_nothing(shared_far_grid: FarGrid, tmp_path: Path) -> None:
    grid, gate = shared_far_grid, tmp_path / "gate"
    job = grid.detach(*grid.on("gpu2"), "sh", "-c", f"until test -e {gate}; do sleep 0.1; done; echo whole")
    grid.pid_of(job)
    pid = grid.agents["gpu2"].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: grid.state("gpu2") == "suspect", 15)
    finally:
        os.kill(pid, signal.SIGCONT)
    grid.until_alive("gpu2")
    gate.touch()
    assert grid("jobs", "wait", job, "--timeout", "30").returncode == 0
    assert grid("jobs", "logs", job, check=0).stdout == "whole\n"


def test_an_agent_ends_what_the_grid_has_given_up(far_grid: Make) -> None:
    """A ledger that was lost knows nothing of the job: the agent is told to stop it, and new fences are above all
    that it has seen."""
    grid = far_grid("gpu2")
    for _ in range(2):
        grid.kill_daemon()
        grid.until_alive("gpu2", seconds=30)
    job = grid.detach(*grid.on("gpu2"), "sleep", "1000")
    pid = grid.pid_of(job)
    daemon = grid.daemon_pid()
    seen = grid.job(job)["attempts"][0]["fence"]
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not is_running(daemon))
    for left in grid.host_dir.glob("grid.db*"):
        left.unlink()
    grid.until_alive("gpu2", seconds=30)
    wait_until(lambda: not is_running(pid), 20)
    again = grid.detach(*grid.on("gpu2"), "true")
    grid("jobs", "wait", again, "--timeout", "30", check=0)
    assert grid.job(again)["attempts"][0]["fence"] >> 32 > seen >> 32 > 1
