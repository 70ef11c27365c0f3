"""`python -m tests.fuzz.impatient_agent DIR NODE SOCKET`: a real agent that dials again at once after a refusal."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from websockets.asyncio.client import ClientConnection, unix_connect

from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.files.attempt_files import FetchedWorkDirs
from distributed_grid.agent.hardware import HardwareDetector
from distributed_grid.agent.lent_memory import LentMemory
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.agent.uplink import Timing, Uplink
from distributed_grid.posix.sockets import short_path
from distributed_grid.supervision import end_process_on_failure
from distributed_grid.wire import MAX_MESSAGE_BYTES

TIMING = Timing(first_pause=0.001, max_pause=0.002, refused_pause=0.001)


async def serve(folder: Path, node: str, path: str) -> None:
    async def dial() -> ClientConnection:
        with short_path(path) as name:
            return await unix_connect(
                name,
                "ws://control-plane/v1/agent",
                compression=None,
                ping_interval=None,
                max_size=MAX_MESSAGE_BYTES,
                close_timeout=1,
            )

    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    probe, gpus = MachineProbe(), GpuProbe()
    meter = UsageMeter(probe, gpus)
    uplink = Uplink(node, dial, TIMING)
    agent = Agent(
        (node,),
        folder / "jobs",
        meter,
        uplink,
        capacity=HardwareDetector(probe, gpus).capacity,
        workdirs=lambda send: FetchedWorkDirs(folder / "content", send),
        memory=lambda host, send: LentMemory(
            folder / "memory", node, meter, host, send, addresses=lambda: ["127.0.0.1"]
        ),
    )
    await agent.start()
    tasks = {asyncio.create_task(work) for work in (uplink.run(agent), stopping.wait())}
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await agent.stop()
    for task in done:
        task.result()


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    end_process_on_failure(directory / "failure.txt")
    logging.basicConfig(level=logging.INFO, filename=directory / "agent.log")
    asyncio.run(serve(directory, sys.argv[2], sys.argv[3]))
