"""Checkpoint marks all the way: a job touches a file on its node, the grid knows, and displaces whom it costs least."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.e2e.agents.conftest import FarGrid, wait_until

pytestmark = pytest.mark.e2e
Make = Callable[..., FarGrid]
MARKS = 'while [ ! -e "{go}" ]; do sleep 0.1; done; touch "$GRID_CHECKPOINT"; exec sleep 1000'


def marked_at(grid: FarGrid, job: str) -> str | None:
    """When the last attempt marked its last checkpoint; never before it started."""
    attempts = grid.job(job)["attempts"]
    marked = attempts[-1]["checkpoint_at"] if attempts else None
    assert marked is None or marked >= attempts[-1]["started_at"]
    return marked


@pytest.mark.parametrize("node", ["gpu2", "here"])
def test_the_last_mark_is_shown_and_outlives_daemon_and_agent(far_grid: Make, node: str) -> None:
    grid = far_grid("gpu2")
    job = grid.detach(*grid.on(node), "sh", "-c", 'touch "$GRID_CHECKPOINT"; exec sleep 1000')
    grid.pid_of(job)
    wait_until(lambda: marked_at(grid, job), 20)
    assert "last checkpoint" in grid("jobs", "show", job, check=0).stdout
    grid.kill_daemon()
    assert marked_at(grid, job)
    if node == "gpu2":
        os.kill(grid.agents["gpu2"].process.pid, signal.SIGKILL)
        grid.agents["gpu2"].process.wait()
        grid.agents["gpu2"].start()
        grid.until_alive("gpu2", seconds=30)
        assert marked_at(grid, job)


def test_job_with_a_checkpoint_is_preempted_before_one_without(far_grid: Make) -> None:
    grid = far_grid("gpu2")
    go = grid.cwd.parent / "go"
    one_core = ("-r", "cpu", "-a", "1", "-p", "low", *grid.on("gpu2"), "--workdir", "none")
    old = grid.detach(*one_core, "sh", "-c", MARKS.format(go=go))
    grid.pid_of(old)
    young = grid.detach(*one_core, "sleep", "1000")
    grid.pid_of(young)
    go.touch()
    wait_until(lambda: marked_at(grid, old), 20)
    urgent = ("-r", "cpu", "-a", "1", "-p", "urgent", *grid.on("gpu2"), "--workdir", "none")
    done = grid("run-shared", *urgent, "sh", "-c", "echo $GRID_NODE", check=0)
    assert done.stdout == "gpu2\n"
    first = grid.job(old)["attempts"][0]
    assert first["outcome"] == "preempted"
    assert first["checkpoint_at"] is not None
    assert [attempt["outcome"] for attempt in grid.job(young)["attempts"]] == [None]
    wait_until(lambda: grid.job(old)["state"] == "running", 20)
