"""Full disks, of the control plane or of a node, end no job that runs: holds are renewed without a byte of room."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.files import job_dir
from distributed_grid.posix.boot_clock import boot_ms
from tests.e2e.agents.conftest import FarAgent, FarGrid, is_running, wait_until
from tests.support.small_disks import SmallDisk, small_disk

pytestmark = pytest.mark.e2e
Make = Callable[..., FarGrid]
HOLD = 20.0
"""Longer than a daemon and an agent take to be started again, also where others use the processors."""
__all__ = ["small_disk"]


def held_until(agent: FarAgent) -> int:
    """The hold deadline of a node, as the shims of its jobs read it; 0 while it is being written."""
    first, _, second = (agent.folder / "jobs" / job_dir.HOLD).read_text().split()
    return int(first) if first == second else 0


def see_its_hold_renewed(agent: FarAgent, pid: int) -> None:
    """Wait until the control plane has answered a heartbeat that was sent after this call, while a command runs on."""
    now = boot_ms()
    wait_until(lambda: held_until(agent) > now + 1000 * HOLD)
    assert is_running(pid), "its hold was not renewed"


def outlive_its_hold(pid: int) -> None:
    """See a command run on for longer than a hold that is not renewed."""
    end = time.monotonic() + HOLD + 1
    while time.monotonic() < end:
        assert is_running(pid), "its hold was not renewed"
        time.sleep(0.2)


def test_with_the_control_planes_disk_full_the_holds_of_all_nodes_are_renewed(
    small_disk: Callable[..., SmallDisk], far_grid: Make, tmp_path: Path
) -> None:
    disk = small_disk(tmp_path / "state0")
    grid = far_grid("gpu1", "gpu2", hold=HOLD)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    ends = grid.detach(*grid.on("gpu1"), "--workdir", "none", "sh", "-c", f"read x < {gate}; exit 3")
    goes_on = grid.detach(*grid.on("gpu2"), "--workdir", "none", "sleep", "1000")
    grid.pid_of(ends)
    pid = grid.pid_of(goes_on)
    disk.fill()
    gate.write_text("go\n")  # from now on the end of a job waits to be stored
    see_its_hold_renewed(grid.agents["gpu2"], pid)
    grid.agents["gpu2"].kill()
    grid.agents["gpu2"].start()
    see_its_hold_renewed(grid.agents["gpu2"], pid)
    outlive_its_hold(pid)

    disk.free()
    assert grid("jobs", "wait", ends, "--timeout", "20").returncode == 3
    assert grid.job(goes_on)["state"] == "running"
    assert len(grid.job(goes_on)["attempts"]) == 1
    grid("jobs", "cancel", goes_on, check=0)
    wait_until(lambda: not is_running(pid))


def test_with_a_nodes_disk_full_its_holds_are_renewed_also_by_the_next_agent(
    small_disk: Callable[..., SmallDisk], far_grid: Make
) -> None:
    disks: list[SmallDisk] = []
    grid = far_grid("gpu2", hold=HOLD, furnish=lambda folder: disks.append(small_disk(folder)))
    agent, (disk,) = grid.agents["gpu2"], disks
    job = grid.detach(*grid.on("gpu2"), "--workdir", "none", "sleep", "1000")
    pid = grid.pid_of(job)
    disk.fill()
    see_its_hold_renewed(agent, pid)
    agent.kill()
    agent.start()
    see_its_hold_renewed(agent, pid)
    assert json.loads((agent.folder / "agent.pid").read_text())["pid"] == agent.process.pid
    grid.kill_daemon()  # the next one has another epoch, which cannot be recorded
    grid.until_alive("gpu2")
    see_its_hold_renewed(agent, pid)
    outlive_its_hold(pid)

    disk.free()
    assert grid.job(job)["state"] == "running"
    assert len(grid.job(job)["attempts"]) == 1
    grid("jobs", "cancel", job, check=0)
    wait_until(lambda: not is_running(pid))
