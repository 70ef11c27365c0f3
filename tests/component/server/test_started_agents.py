"""What runs on a node that left the config is stopped: its raylets, too, by what was recorded at their start."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from distributed_grid.adapters.clock import GridClock
from distributed_grid.adapters.ssh.process import Hop, SshProcess, SshTarget
from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.grid import Grid
from distributed_grid.posix.boot_clock import boot_id
from distributed_grid.server.cluster import StartedAgents

GRID = "0123456789abcdef"


def a_target(name: str) -> SshTarget:
    return SshTarget(name=name, grid=GRID, local_socket="", hop=Hop("local"))


def a_ray_process(home: Path, node: str) -> subprocess.Popen[bytes]:
    """A process that counts as Ray of this node: it has the mark that is on record."""
    record = home / ".distributed_grid" / "agents" / GRID / node / "ray" / "started.json"
    record.parent.mkdir(parents=True, mode=0o700)
    record.write_text(json.dumps({"mark": f"mark-{node}", "boot": boot_id(), "role": "worker"}))
    return subprocess.Popen(["sleep", "1000"], env={**os.environ, "GRID_RAY_MARK": f"mark-{node}"})


@pytest.mark.e2e
def test_ray_of_a_node_that_left_the_config_is_stopped_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "agents.json"
    processes = {name: a_ray_process(tmp_path, name) for name in ("gpu1", "gpu2")}

    async def story() -> None:
        grid, ssh = Grid(InMemoryStore(), GridClock()), SshProcess(tmp_path / "wheels")
        await grid.start()
        try:
            earlier = StartedAgents(file, grid, ssh)
            for name in processes:
                earlier.add(a_target(name))
            started = StartedAgents(file, grid, ssh)
            async with asyncio.timeout(60):
                await started.stop_unnamed(lambda target: target.name == "gpu1")
        finally:
            await ssh.stop()
            await grid.stop()

    try:
        asyncio.run(story())
        assert processes["gpu2"].wait(30) < 0
        assert processes["gpu1"].poll() is None
        assert list(json.loads(file.read_text())) == ["gpu1"]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
