"""The SSH child: its state for the control plane comes back by itself after a failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from distributed_grid.adapters.ssh.process import Hop, RunRayDriver, SshTarget
from distributed_grid.adapters.ssh.worker import SshWorker


def test_a_socket_for_ray_drivers_that_cannot_be_made_is_made_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "not yet" / "driver.sock"
    target = SshTarget(name="n1", grid="g1", local_socket="", hop=Hop("127.0.0.1"))
    command = RunRayDriver(target, str(path), {"python": "python3"})

    async def story() -> None:
        worker = SshWorker(lambda report: None)
        worker.handle(command)
        async with asyncio.timeout(30):
            while "the socket for Ray drivers failed; it begins anew" not in caplog.text:
                await asyncio.sleep(0.01)
            path.parent.mkdir()
            while not path.is_socket():
                await asyncio.sleep(0.01)
        worker.handle(RunRayDriver(target, str(path), {}))
        async with asyncio.timeout(30):
            while path.exists():
                await asyncio.sleep(0.01)

    asyncio.run(story())
