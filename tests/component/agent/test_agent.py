"""Heartbeats of an agent: those of one whose GPU driver hangs go on; one that is asked to detects anew what it has; one
whose machine is taken away says so, however often it could not read that. And its answers about processes and files."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from distributed_grid.adapters.clock import AgeClock
from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.machine_end import CONTROL_PLANE, Ec2Notices, MetadataClient
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.domain.resources import Capacity
from distributed_grid.wire import (
    PROTOCOL,
    AgentSide,
    AnnouncedEnd,
    CheckFiles,
    FilesChecked,
    FromAgent,
    Heartbeat,
    HeartbeatReply,
    ListProcesses,
    OwnerRules,
    PendingClockJump,
    ProcessListing,
    Welcome,
)
from tests.support.clouds.metadata import metadata_service
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


class Listening:
    """A control plane that remembers what was detected."""

    def __init__(self) -> None:
        self.detected: list[int] = []
        self.ends: list[AnnouncedEnd] = []
        self.jump: PendingClockJump | None = None
        self.beats = asyncio.Event()

    def received(self, message: FromAgent, via: AgentSide) -> None:
        if isinstance(message, Heartbeat):
            self.detected += [message.capacity.cpu_milli] if message.capacity is not None else []
            self.ends += [message.end] if message.end is not None else []
            self.jump = message.clock_jump
            self.beats.set()


def test_an_agent_detects_its_capacity_anew_once_when_it_is_asked_to(tmp_path: Path) -> None:
    sizes = count(1000, 1000)

    async def story() -> list[int]:
        control = Listening()
        meter = UsageMeter(MachineProbe(), GpuProbe())
        agent = Agent(("gpu1",), tmp_path / "jobs", meter, control, capacity=lambda: Capacity(next(sizes)))
        await agent.start()
        try:
            agent.send(HeartbeatReply(beat=0, hold_ms=0, node="gpu1", report_capacity=True))
            for _ in range(3):
                control.beats.clear()
                await asyncio.wait_for(control.beats.wait(), 20)
        finally:
            await agent.stop()
        return control.detected

    assert len(asyncio.run(story())) == 1


def test_a_machine_that_became_dedicated_yields_to_no_owner_any_more(tmp_path: Path) -> None:
    agent = Agent(("gpu1",), tmp_path / "jobs", UsageMeter(MachineProbe(), GpuProbe()), Listening())
    rules = OwnerRules(
        cpu_busy_max_milli=300,
        memory_used_max_milli=500,
        memory_min_bytes=0,
        gpu_busy_max_milli=200,
        gpu_memory_min_bytes=0,
    )
    agent.send(Welcome(protocol=PROTOCOL, version="0.2.0", epoch=1, hold_ms=0, heartbeat_ms=2000, owner=rules))
    assert agent.guard.rules == rules
    agent.send(Welcome(protocol=PROTOCOL, version="0.2.0", epoch=1, hold_ms=0, heartbeat_ms=2000))
    assert agent.guard.rules is None


def test_an_agent_says_that_its_clock_jumped_until_somebody_confirms_it(tmp_path: Path) -> None:
    ahead_ms = 0
    ages = AgeClock(tmp_path / "age.json", wall=lambda: time.time_ns() // 1_000_000 + ahead_ms)

    async def story() -> None:
        nonlocal ahead_ms
        control = Listening()
        agent = Agent(("gpu1",), tmp_path / "jobs", UsageMeter(MachineProbe()), control, ages=ages)
        await agent.start()
        try:
            assert control.jump is None
            ahead_ms = 40 * 86_400_000
            while control.jump is None:
                control.beats.clear()
                await asyncio.wait_for(control.beats.wait(), 20)
            assert abs(control.jump.by_ms - ahead_ms) < 1_000
            agent.send(HeartbeatReply(beat=0, hold_ms=0, node="gpu1", clock_confirmed=True))
            while control.jump is not None:
                control.beats.clear()
                await asyncio.wait_for(control.beats.wait(), 20)
        finally:
            await agent.stop()

    asyncio.run(story())
    assert ages.may_delete()


def test_an_agent_says_at_once_that_its_machine_is_taken_away_and_hears_it_from_the_control_plane(
    tmp_path: Path,
) -> None:
    async def story(url: str) -> AnnouncedEnd:
        control = Listening()
        meter = UsageMeter(MachineProbe(), GpuProbe())
        agent = Agent(("gpu1",), tmp_path / "jobs", meter, control, notices=Ec2Notices(MetadataClient(url)))
        await agent.start()
        try:
            while not control.ends:
                control.beats.clear()
                await asyncio.wait_for(control.beats.wait(), 20)
            assert not agent.machine_end.is_known_to(CONTROL_PLANE)
            agent.send(
                HeartbeatReply(beat=0, hold_ms=0, node="gpu1", end=AnnouncedEnd("its lifetime is over then", 600_000))
            )
            assert agent.machine_end.is_known_to(CONTROL_PLANE)
            assert agent.machine_end.end is not None
            assert agent.machine_end.end.why == "EC2 spot notice (terminate)", "the earlier end counts"
        finally:
            await agent.stop()
        return control.ends[0]

    with metadata_service() as service:
        service.interrupt(100)
        service.interrupted = None
        said = asyncio.run(story(service.url))
    assert said.why == "EC2 spot notice (terminate)"
    assert said.ends_in_ms is not None
    assert 50_000 < said.ends_in_ms <= 101_000


class Answers:
    """A control plane that waits for the answers to its questions."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[ProcessListing | FilesChecked] = asyncio.Queue()

    def received(self, message: FromAgent, via: AgentSide) -> None:
        if isinstance(message, ProcessListing | FilesChecked):
            self.queue.put_nowait(message)


def test_an_agent_lists_processes_of_the_node_on_which_people_type_and_checks_files(tmp_path: Path) -> None:
    here = str(Path(sys.executable).resolve())

    async def story() -> list[ProcessListing | FilesChecked]:
        answers = Answers()
        agent = Agent(("gpu1", "gpu2"), tmp_path / "jobs", UsageMeter(MachineProbe()), answers, typed_on="gpu2")
        await agent.start()
        try:
            found = []
            for question in (
                ListProcesses(1, "gpu2", pid=sleeper.pid),
                ListProcesses(2, "gpu1", pid=sleeper.pid),
                ListProcesses(3, "gpu2", pid=2**22),
                CheckFiles(4, ((here, 0), (here, 1), (str(tmp_path / "none"), 0))),
            ):
                agent.send(question)
                found.append(await asyncio.wait_for(answers.queue.get(), 30))
            return found
        finally:
            await agent.stop()

    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        try:
            listed, elsewhere, gone, checked = asyncio.run(story())
        finally:
            sleeper.kill()
    assert isinstance(listed, ProcessListing)
    assert [(one.pid, one.name) for one in listed.processes] == [(sleeper.pid, "sleep")]
    assert elsewhere == ProcessListing(2)
    assert gone == ProcessListing(3)
    assert checked == FilesChecked(4, (here, str(tmp_path / "none")))
