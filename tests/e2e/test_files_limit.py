"""One job's files cannot fill the disk of all: above its limit a job is paused and ended, on a full disk the largest
writer is ended, and nothing is deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.agents.conftest import FarGrid, far_grid, is_running
from tests.support.shell import Shell, wait_until
from tests.support.small_disks import SmallDisk, small_disk

pytestmark = pytest.mark.e2e
__all__ = ["far_grid", "small_disk"]
MB = 1 << 20
REASON = "its files on the node take 0.0195 GB (limit 0.00977 GB, max_files_gb)"


def test_files_above_the_limit_pause_a_job_and_then_end_it(grid: Shell, tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"nodes: [{{name: desk, host: local}}]\nmax_files_gb: {10 * MB / 2**30}\n")
    grid("--config", str(config), "daemon", "start", check=0)
    own = tmp_path / "own"
    own.mkdir()
    in_place = f"cd {own}; head -c 20000000 /dev/zero > big; exec sleep 1000"
    other = grid("run-shared", "--detach", "sh", "-c", in_place, check=0).stdout.strip()
    flood = f"head -c {20 * MB} /dev/zero > $GRID_CHECKPOINT_DIR/big; exec sleep 1000"
    job = grid("run-shared", "--detach", "--grace", "3", "sh", "-c", flood, check=0).stdout.strip()
    wait_until(lambda: grid.job(job)["state"] == "paused")
    assert grid("jobs", "wait", job, "--timeout", "30").returncode == 137
    shown = grid("jobs", "show", job, check=0).stdout
    assert "over limit" in shown
    assert REASON in shown
    trail = grid("events", "--json", check=0).stdout
    assert REASON in trail
    assert len(list(grid.state_dir.glob("**/jobs/*/checkpoints/big"))) == 1, "nothing is deleted"
    assert grid.job(other)["state"] == "running", "a directory that is used in place is not measured"
    grid("jobs", "cancel", other, check=0)


def test_on_a_full_disk_of_a_node_the_flood_is_ended_and_others_finish(
    small_disk: Callable[..., SmallDisk], far_grid: Callable[..., FarGrid], tmp_path: Path
) -> None:
    grid = far_grid("gpu1", furnish=lambda folder: small_disk(folder, 64 * MB))
    gate = tmp_path / "gate"
    read = ("-r", "cpu", "-a", "0.4", "--workdir", "none", "sh", "-c")
    ends = [grid.detach(*grid.on("gpu1"), *read, f"until [ -e {gate} ]; do sleep 0.05; done; exit 3") for _ in range(3)]
    for job in ends:
        grid.pid_of(job)
    flood = grid.detach(*grid.on("gpu1"), *read, "cat /dev/zero > $GRID_JOB_DIR/flood; sleep 1000")
    assert grid("jobs", "wait", flood, "--timeout", "30").returncode == 137
    assert "the disk of its node is full" in grid("jobs", "show", flood, check=0).stdout
    (file,) = grid.agents["gpu1"].folder.glob("jobs/*/work/flood")
    assert file.stat().st_size > 40 * MB, "nothing is deleted"
    pids = [grid.pid_of(job) for job in ends]
    assert all(map(is_running, pids))
    gate.touch()
    for job in ends:
        assert grid("jobs", "wait", job, "--timeout", "30").returncode == 3
