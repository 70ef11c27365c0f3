"""Whom urgent work leaves alone is what the cluster file says, also after it has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
NODE = "nodes: [{name: one, host: local, cpu_count: 2, memory_gb: 2, trust_declared: true}]"
URGENT = ("run-shared", "-a", "2", "-p", "urgent", "-w", "0", "true")


@pytest.fixture
def full(grid: Shell) -> Shell:
    """A node that one job fills; nobody is spared."""
    grid.env["GRID_CONFIG"] = str(grid.cwd / "cluster.yaml")
    says(grid, "{minimum_run_seconds: 0}")
    grid("daemon", "start", check=0)
    grid.detach("-j", "tenant", "-a", "2", "-p", "low", "sleep", "300")
    wait_until(lambda: attempts_of(grid) == 1)
    return grid


def says(grid: Shell, preemption: str) -> None:
    Path(grid.env["GRID_CONFIG"]).write_text(f"{NODE}\npreemption: {preemption}\n")


def restart_with(grid: Shell, preemption: str) -> None:
    """Change the file and start anew; what runs goes on."""
    says(grid, preemption)
    grid("daemon", "stop", check=0)
    grid("daemon", "start", check=0)
    wait_until(lambda: attempts_of(grid))


def attempts_of(grid: Shell) -> int:
    """How many attempts the tenant has had by now, when the last of them runs."""
    job = grid.job("tenant")
    return len(job["attempts"]) if job["state"] == "running" else 0


def test_job_below_the_configured_run_time_is_not_preempted(full: Shell) -> None:
    restart_with(full, "{minimum_run_seconds: 3600}")
    full(*URGENT, check=1)
    assert attempts_of(full) == 1
    restart_with(full, "{minimum_run_seconds: 0}")
    full(*URGENT, check=0)
    assert wait_until(lambda: attempts_of(full)) == 2


def test_a_job_is_displaced_no_more_often_than_the_file_says(full: Shell) -> None:
    restart_with(full, "{minimum_run_seconds: 0, max_per_job: 1}")
    full(*URGENT, check=0)
    assert wait_until(lambda: attempts_of(full)) == 2
    full(*URGENT, check=1)
    restart_with(full, "{minimum_run_seconds: 0, max_per_job: 2}")
    full(*URGENT, check=0)
    assert wait_until(lambda: attempts_of(full)) == 3
