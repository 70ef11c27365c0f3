"""An agent refuses orders that come from the past: old fences, holds that ran out, offers it has withdrawn."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid import wire
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.shim import NOTICE_VARIABLE
from distributed_grid.agent.machine_end import SIGNAL
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.domain.jobs import Command, Ending
from distributed_grid.domain.resources import Claim
from distributed_grid.posix.boot_clock import boot_ms

pytestmark = pytest.mark.e2e
HOLD_MS = 60_000


class Control:
    """Remembers what it receives, and acknowledges nothing by itself."""

    def __init__(self) -> None:
        self.messages: list[wire.FromAgent] = []

    def received(self, message: wire.FromAgent, via: wire.AgentSide) -> None:
        self.messages.append(message)

    def ends(self) -> list[wire.AttemptEndedReport]:
        return [message for message in self.messages if isinstance(message, wire.AttemptEndedReport)]

    def starts(self) -> list[wire.AttemptStartedReport]:
        return [message for message in self.messages if isinstance(message, wire.AttemptStartedReport)]


def a_start(lease: str = "a.1", *argv: str, fence: int = 7) -> wire.StartAttemptOrder:
    command = Command(argv or ("true",), (("PATH", "/usr/bin:/bin"),))
    return wire.StartAttemptOrder(
        node="gpu1",
        lease_id=lease,
        fence=fence,
        job_id="job",
        command=command,
        claim=Claim(),
        hold_ms=HOLD_MS,
        beat=boot_ms(),
    )


Scenario = Callable[[Agent, AttemptHost, Control], Awaitable[None]]


def with_an_agent(root: Path, scenario: Scenario, meter: UsageMeter | None = None) -> None:
    """A real agent with real attempts, over a link that only the test sees."""

    async def play() -> None:
        control = Control()
        agent = Agent(("gpu1",), root, meter or UsageMeter(MachineProbe()), control)
        host = agent.host
        await agent.start()
        try:
            async with asyncio.timeout(30):
                await scenario(agent, host, control)
        finally:
            for attempt_id in host.running():
                await host.stop_attempt(attempt_id, ending=Ending.CANCELLED, grace_ms=0)
            while host.running():
                await asyncio.sleep(0.01)
            await agent.stop()

    asyncio.run(play())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_an_order_in_time_runs_and_is_told_until_it_is_acknowledged(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(a_start())
        await until(control.ends)
        report = control.ends()[0]
        assert report.outcome.exit_code == 0
        assert "a.1" in agent.greeting("gpu1")[0].attempts
        agent.welcomed(wire.Welcome(protocol=wire.PROTOCOL, version="0", epoch=1, hold_ms=HOLD_MS, heartbeat_ms=2000))
        assert control.ends() == [report, report]
        agent.send(wire.AcknowledgeReport(report.seq))
        assert agent.greeting("gpu1")[0].attempts == ()

    with_an_agent(tmp_path / "jobs", scenario)


class RecordingMeter(UsageMeter):
    """Remembers the CPU times that are counted."""

    def __init__(self) -> None:
        super().__init__(MachineProbe())
        self.counted: list[int] = []

    def ended(self, node: str, cpu_ms: int) -> None:
        self.counted.append(cpu_ms)
        super().ended(node, cpu_ms)


def test_the_cpu_time_of_an_end_that_is_reported_again_counts_once(tmp_path: Path) -> None:
    meter = RecordingMeter()

    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(a_start("a.1", "sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"))
        await until(control.ends)
        for times in (2, 3):  # from memory, and when it is acknowledged from its directory
            agent.send(wire.StopAttemptOrder("a.1", 7, Ending.CANCELLED, "", 0))
            await until(lambda times=times: len(control.ends()) == times)
            agent.send(wire.AcknowledgeReport(control.ends()[-1].seq))
        assert meter.counted == [control.ends()[0].outcome.cpu_ms]
        assert meter.counted > [0]

    with_an_agent(tmp_path / "jobs", scenario, meter)


@pytest.mark.parametrize("late_ms", [HOLD_MS, -3_600_000], ids=["its hold is over", "a beat of another boot"])
def test_an_order_whose_hold_is_over_is_refused(tmp_path: Path, late_ms: int) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(replace(a_start(), beat=boot_ms() - late_ms))
        await until(control.ends)
        assert control.ends()[0].outcome.ending is Ending.RECLAIMED
        assert "too late" in control.ends()[0].outcome.detail
        assert host.running() == ()

    with_an_agent(tmp_path / "jobs", scenario)


def test_a_start_on_an_offer_that_was_withdrawn_since_is_refused(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.guard.generation = 50
        agent.send(replace(a_start("a.1"), generation=49))
        await until(control.ends)
        assert control.ends()[0].outcome.ending is Ending.RECLAIMED
        assert "withdrawn" in control.ends()[0].outcome.detail
        agent.send(replace(a_start("a.2"), generation=50))
        await until(lambda: len(control.ends()) == 2)
        assert control.ends()[1].outcome.ending is Ending.EXITED

    with_an_agent(tmp_path / "jobs", scenario)


def test_an_older_fence_neither_starts_nor_stops_anything(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(a_start("a.1", "sleep", "1000", fence=7))
        await until(control.starts)
        before = len(control.starts())
        agent.send(a_start("a.1", "sleep", "1000", fence=6))
        agent.send(wire.StopAttemptOrder("a.1", 6, Ending.CANCELLED, "", 0))
        agent.send(a_start("a.2", "true"))
        await until(control.ends)  # orders are carried out in turn, so the two before are behind us
        assert host.running() == ("a.1",)
        assert len(control.starts()) == before
        agent.send(wire.StopAttemptOrder("a.1", 7, Ending.CANCELLED, "", 0))
        await until(lambda: not host.running())

    with_an_agent(tmp_path / "jobs", scenario)


def test_an_agent_whose_machine_shuts_down_refuses_new_starts_and_knows_those_it_has(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(a_start("a.1", "sleep", "1000"))
        await until(control.starts)
        agent.machine_end.announce(SIGNAL, wire.AnnouncedEnd("SIGTERM", 20_000))
        agent.send(a_start("b.1", "touch", str(tmp_path / "ran")))
        agent.send(a_start("a.1", "sleep", "1000"))
        await until(lambda: control.ends() and len(control.starts()) == 2)
        assert [(end.lease_id, end.outcome.ending) for end in control.ends()] == [("b.1", Ending.RECLAIMED)]
        assert control.ends()[0].outcome.detail == "gpu1: this machine is taken away: SIGTERM"
        assert not (tmp_path / "ran").exists()

    with_an_agent(tmp_path / "jobs", scenario)


def test_the_end_of_the_machine_is_reported_before_the_end_of_a_job_whose_shim_has_heard_of_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, "20")  # SIGTERM says that the machine ends

    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(a_start("a.1", "sleep", "1000"))
        await until(control.starts)
        (tree,) = host.running_trees()
        os.kill(control.starts()[0].pid, signal.SIGTERM)
        os.kill(tree.shim.pid, signal.SIGTERM)
        await until(lambda: not host.running())
        assert not control.ends()
        assert "a.1" in agent.greeting("gpu1")[0].attempts, "it is on record here all the same"
        agent.machine_end.announce(SIGNAL, wire.AnnouncedEnd("SIGTERM", 20_000))
        await until(control.ends)
        assert control.ends()[0].outcome.ending is Ending.RECLAIMED
        kinds = [
            type(message)
            for message in control.messages
            if isinstance(message, wire.AttemptEndedReport) or (isinstance(message, wire.Heartbeat) and message.end)
        ]
        assert kinds[0] is wire.Heartbeat

    with_an_agent(tmp_path / "jobs", scenario)
