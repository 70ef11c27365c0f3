"""A node that comes back with another directory: what its old agent runs is not run a second time meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.agents.conftest import FarAgent, FarGrid, is_running, wait_until

pytestmark = pytest.mark.e2e
Make = Callable[..., FarGrid]


def test_a_job_runs_again_only_when_the_hold_of_its_old_agent_is_over(far_grid: Make, tmp_path: Path) -> None:
    grid = far_grid("gpu2", hold=8)
    words = ("--retries", "1", "--workdir", "none", "--grace", "0.5", "sleep", "1000")
    job = grid.detach(*grid.on("gpu2"), *words)
    first = grid.pid_of(job)
    old = grid.agents["gpu2"]
    old.unplug()
    old.kill()
    new = grid.agents["new"] = FarAgent("gpu2", tmp_path / "fresh", grid.host_dir / "links" / "gpu2.sock")
    new.start()
    grid.until_alive("gpu2")

    def again() -> int:
        attempts = grid.job(job)["attempts"]
        if len(attempts) > 1:
            assert not is_running(first), "two attempts of one job ran at once"
        return int(attempts[-1]["pid"] or 0) if len(attempts) > 1 else 0

    second = wait_until(again, 40)
    assert grid.job(job)["attempts"][0]["outcome"] == "lost"
    grid("jobs", "cancel", job, check=0)
    wait_until(lambda: not is_running(second))


def test_on_this_machine_a_job_whose_record_is_lost_runs_again_only_when_its_process_is_gone(far_grid: Make) -> None:
    grid = far_grid()
    job = grid.detach("--retries", "1", "sh", "-c", "trap '' TERM; sleep 6; sleep 1")
    first = grid.pid_of(job)
    grid.kill_daemon()
    jobs = grid.host_dir / "jobs"
    jobs.rename(grid.host_dir / "jobs.lost")
    grid("status", check=0)
    try:
        assert len(grid.job(job)["attempts"]) == 1
        assert is_running(first)
        assert grid.job(job)["state"] == "running"
        wait_until(lambda: not is_running(first), 30)
        wait_until(lambda: len(grid.job(job)["attempts"]) == 2, 20)
        grid("jobs", "cancel", job, check=0)
    finally:
        shutil.rmtree(grid.host_dir / "jobs.lost", ignore_errors=True)
