"""A node that is heard and starts nothing gets nothing: its jobs run elsewhere, once, and it says why it rests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from websockets.asyncio.client import unix_connect

from distributed_grid import __version__, wire
from distributed_grid.agent.limits import process_tree
from distributed_grid.domain.nodes import Usage
from distributed_grid.posix.boot_clock import boot_ms
from tests.e2e.agents.conftest import FarAgent, FarGrid, wait_until
from tests.support.small_disks import SmallDisk, small_disk

pytestmark = pytest.mark.e2e
Make = Callable[..., FarGrid]
START = 2.0
__all__ = ["small_disk"]


def spawner_of(agent: FarAgent) -> int:
    """The spawner of an agent."""
    assert agent.process is not None
    children = process_tree.children_of(agent.process.pid)
    (spawner,) = [one.pid for one in children if b"execution.spawner" in Path(f"/proc/{one.pid}/cmdline").read_bytes()]
    return spawner


def keeps(grid: FarGrid, name: str) -> str:
    """Why a node lends nothing."""
    return "; ".join(grid.node(name)["keeps"])


def test_jobs_of_a_node_whose_spawner_stands_still_run_elsewhere_once_and_can_be_cancelled(
    far_grid: Make, tmp_path: Path
) -> None:
    grid = far_grid("gpu1", start=START)
    trace = tmp_path / "ran"
    spawner = spawner_of(grid.agents["gpu1"])
    os.kill(spawner, signal.SIGSTOP)
    try:
        insists = grid.detach(*grid.on("gpu1"), "--workdir", "none", "true")
        grid("jobs", "cancel", insists, check=0)
        wait_until(lambda: grid.job(insists)["outcome"] == "cancelled")
        prefers = grid.detach("-n", "gpu1", "--workdir", "none", "sh", "-c", f"echo ran >> {trace}")
        assert grid("jobs", "wait", prefers, "--timeout", "30").returncode == 0
        first, second = grid.job(prefers)["attempts"]
        assert (first["node_id"], first["outcome"]) == ("gpu1", "never_started")
        assert second["node_id"] == "here"
        assert "rests for" in keeps(grid, "gpu1")
    finally:
        os.kill(spawner, signal.SIGCONT)
    again = grid.detach(*grid.on("gpu1"), "--workdir", "none", "true")  # waits until the node has rested
    assert grid.job(again)["state"] == "queued"
    assert trace.read_text() == "ran\n"


def test_jobs_of_a_node_that_only_sends_heartbeats_run_elsewhere(far_grid: Make) -> None:
    grid = far_grid("gpu1", start=START)
    grid.agents["gpu1"].kill()
    link = grid.host_dir / "links" / "gpu1.sock"

    async def be_a_black_hole(job: asyncio.Future[str]) -> None:
        folder = os.open(link.parent, os.O_PATH | os.O_DIRECTORY)
        async with unix_connect(
            f"/proc/self/fd/{folder}/{link.name}", "ws://grid/v1/agent", compression=None, max_size=None
        ) as socket:
            await socket.send(
                wire.encode(wire.AgentHello(protocol=wire.PROTOCOL, version=__version__, node="gpu1", boot="hole"))
            )
            while not job.done():
                await socket.send(wire.encode(wire.Heartbeat(node="gpu1", usage=Usage(), beat=boot_ms())))
                await asyncio.sleep(0.3)
        os.close(folder)

    async def whole() -> str:
        def work() -> str:
            grid.until_alive("gpu1")
            job = grid.detach("-n", "gpu1", "--workdir", "none", "true")
            assert grid("jobs", "wait", job, "--timeout", "40").returncode == 0
            return job

        job = asyncio.ensure_future(asyncio.to_thread(work))
        hole = asyncio.ensure_future(be_a_black_hole(job))
        await asyncio.wait((job, hole), return_when=asyncio.FIRST_COMPLETED)
        found = await job
        await hole
        return found

    first, second = grid.job(asyncio.run(whole()))["attempts"]
    assert (first["node_id"], first["outcome"], second["node_id"]) == ("gpu1", "never_started", "here")


def test_a_node_with_a_full_disk_lends_nothing_until_there_is_room(
    small_disk: Callable[..., SmallDisk], far_grid: Make
) -> None:
    disks: list[SmallDisk] = []
    grid = far_grid("gpu2", furnish=lambda folder: disks.append(small_disk(folder)))
    runs = grid.detach(*grid.on("gpu2"), "--workdir", "none", "sleep", "1000")
    grid.pid_of(runs)
    disks[0].fill()
    wait_until(lambda: "its disk is full (0 MB left)" in keeps(grid, "gpu2"))
    prefers = grid.detach("-n", "gpu2", "--workdir", "none", "true")
    assert grid("jobs", "wait", prefers, "--timeout", "20").returncode == 0
    assert [one["node_id"] for one in grid.job(prefers)["attempts"]] == ["here"]
    assert grid.job(runs)["state"] == "running"
    disks[0].free()
    wait_until(lambda: "disk" not in keeps(grid, "gpu2"))
    assert grid("run-shared", *grid.on("gpu2"), "--workdir", "none", "true").returncode == 0
