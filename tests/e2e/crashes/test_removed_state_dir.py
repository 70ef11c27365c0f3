"""The directories of a whole grid are removed while it runs: no process of any kind stays behind."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.agent.agent_process import POLL_SECONDS
from distributed_grid.client.client import Client
from distributed_grid.state_dir import StateDir
from tests.e2e.agents.conftest import FarGrid, far_grid, is_running
from tests.support.processes import processes_using
from tests.support.shell import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
GONE_SECONDS = 40.0
STUBBORN = "trap '' TERM; echo $$ > {pid}; while :; do sleep 0.1; done"
__all__ = ["far_grid"]


def remove(*folders: Path) -> None:
    def removed() -> bool:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return not any(folder.exists() for folder in folders)

    wait_until(removed)


@pytest.fixture
def grid(far_grid: Callable[..., FarGrid]) -> FarGrid:
    """This machine and a far node, whose directories lie in one folder."""
    return far_grid("gpu2")


@pytest.fixture
def ray(grid: FarGrid) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a Ray that the grid has started on the far node, as its record there says."""
    record = {"mark": "f00dcafe", "role": "worker"}
    folder = grid.agents["gpu2"].folder / "ray"
    folder.mkdir()
    with subprocess.Popen(["sleep", "1000"], env={"GRID_RAY_MARK": record["mark"]}, cwd="/") as process:
        (folder / "started.json").write_text(json.dumps(record))
        yield process
        process.kill()


def stubborn_job(grid: FarGrid, node: str) -> tuple[str, int]:
    """A job that ignores SIGTERM, and its pid."""
    noted = grid.cwd / f"pid-{node}"
    words = ["--grace", "60", "--workdir", "none", *grid.on(node), "sh", "-c", STUBBORN.format(pid=noted)]
    job = grid.detach(*words)
    return job, int(wait_until(lambda: noted.exists() and noted.read_text().strip()))


def lend_memory(grid: FarGrid, *folders: Path) -> None:
    """Have a memory server run on each node."""
    with Client(StateDir(grid.state_dir), may_start=False) as client:
        for name in ("here", "gpu2"):
            client.call("allocate_block", request_id=f"block-{name}", size=1 << 20, preferred_node=name)
    for folder in folders:
        wait_until(lambda folder=folder: any("distributed_grid.memory" in command(pid) for pid in users(folder)))


def users(folder: Path) -> list[int]:
    return processes_using(str(folder))


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@pytest.mark.parametrize("stage", ["idle", "running", "stopping", "ended"])
def test_nothing_of_a_grid_stays_behind(grid: FarGrid, ray: subprocess.Popen[bytes], stage: str) -> None:
    pids: list[int] = []
    if stage == "ended":
        grid("run-shared", *grid.on("gpu2"), "true", check=0)
        grid("run-shared", *grid.on("here"), "true", check=0)
    elif stage != "idle":
        jobs = [stubborn_job(grid, name) for name in ("here", "gpu2")]
        pids = [pid for _, pid in jobs]
    if stage == "stopping":
        grid("jobs", "cancel", *(job for job, _ in jobs), check=0)
        assert all(map(is_running, pids))
    folders = (grid.state_dir, grid.agents["gpu2"].folder)
    lend_memory(grid, *folders)
    before = {pid: command(pid) for folder in folders for pid in users(folder)}
    kinds = ("server", "agent --dir", "agent.execution.spawner", "memory")
    missing = [kind for kind in kinds if not any(f"distributed_grid.{kind}" in said for said in before.values())]
    assert not missing
    time.sleep(POLL_SECONDS + 1)  # by then the agent knows of Ray
    remove(*folders)
    wait_until(lambda: not any(map(is_running, [*pids, *before, ray.pid])), GONE_SECONDS)
    wait_until(lambda: not any(map(users, folders)), GONE_SECONDS)
