"""An agent whose GPU driver hangs: its heartbeats go on, and what cannot be measured counts as the owner's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.nvml.nvml_machine import GpuMachine

AGENT = """
import asyncio, logging, sys
from pathlib import Path
from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.wire import Heartbeat

class ControlPlane:
    def received(self, message, via):
        if isinstance(message, Heartbeat):
            print(*(gpu.busy_milli for gpu in message.usage.gpus), flush=True)

async def main():
    await Agent(("gpu1",), Path(sys.argv[1]), UsageMeter(MachineProbe(), GpuProbe()), ControlPlane()).start()
    await asyncio.sleep(1000)

logging.basicConfig()
asyncio.run(main())
"""


def test_a_gpu_driver_that_hangs_does_not_stop_the_heartbeats(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path).has(0)
    machine["hang nvmlDeviceGetUtilizationRates"] = 600
    command = [sys.executable, "-c", AGENT, str(tmp_path / "jobs")]
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(command, env=machine.environment, stdout=subprocess.PIPE, stderr=log, text=True) as agent,
    ):
        try:
            assert agent.stdout is not None
            assert "1000\n" in agent.stdout  # one heartbeat after the other
        finally:
            agent.kill()
    assert "the measurement of GPUs takes longer than 1.5 s" in (tmp_path / "log").read_text()
