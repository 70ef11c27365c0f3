"""With agent and shim both stopped the second watcher ends the command; its job runs elsewhere, never twice at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.limits import process_tree
from tests.e2e.agents.conftest import FarGrid, is_running, wait_until

pytestmark = pytest.mark.e2e
HOLD = 8.0
COMMAND = 'while :; do echo "$GRID_ATTEMPT_ID $(date +%s%N)" >> {trace}; sleep 0.05; done'


def test_a_command_whose_agent_and_shim_are_stopped_never_runs_beside_its_next_attempt(
    far_grid: Callable[..., FarGrid], tmp_path: Path
) -> None:
    grid = far_grid("gpu1", "gpu2", hold=HOLD)
    trace = tmp_path / "trace"
    words = ("--retries", "1", "--workdir", "none", "sh", "-c", COMMAND.format(trace=trace))
    job = grid.detach("-n", "gpu1", *words)
    pid = grid.pid_of(job)
    assert grid.job(job)["attempts"][0]["node_id"] == "gpu1"
    agent = grid.agents["gpu1"].process
    command = process_tree.read_process(pid)
    assert agent is not None
    assert command is not None
    stopped = (agent.pid, command.parent)
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    try:
        wait_until(lambda: not is_running(pid), 4 * HOLD)
        wait_until(lambda: len(grid.job(job)["attempts"]) == 2 and grid.job(job)["state"] == "running", 4 * HOLD)
    finally:
        for process in stopped:
            if is_running(process):
                os.kill(process, signal.SIGCONT)
    grid.until_alive("gpu1")
    assert len(grid.job(job)["attempts"]) == 2, "a late report starts nothing"
    grid("jobs", "cancel", job, check=0)
    wait_until(lambda: grid.job(job)["state"] == "ended")
    ran = [line.split() for line in trace.read_text().splitlines()]
    attempts = [attempt for attempt, _ in ran]
    first, second = dict.fromkeys(attempts)
    assert max(int(at) for attempt, at in ran if attempt == first) < min(
        int(at) for attempt, at in ran if attempt == second
    )
