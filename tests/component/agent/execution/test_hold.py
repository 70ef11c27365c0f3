"""Holds are kept whatever delays, outlasts or crosses them: nothing runs that the control plane has given up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from itertools import cycle
from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid import wire
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.domain.jobs import Ending
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.trees.manifest import Manifest
from tests.component.agent.execution.conftest import Driver, a_spec, is_alive, is_hold_expired
from tests.component.agent.execution.test_refusals import Control, a_start, until
from tests.support import odd_files
from tests.support.small_disks import SmallDisk, small_disk

pytestmark = pytest.mark.e2e
__all__ = ["small_disk"]


def test_a_hold_of_an_earlier_boot_says_nothing_about_this_one(root: Path, new_driver: Callable[..., Driver]) -> None:
    job_dir.make_root(str(root))
    job_dir.write_hold(str(root), boot_ms() + 1_000_000_000, "another boot")
    driver = new_driver()
    driver.launch("a.1", "sleep", "1000", hold_ms=800, grace_ms=100)
    assert is_hold_expired(driver.ended("a.1"))
    key = json.loads((root / ".control/a.1/spec.json").read_text().splitlines()[0])["hold_key"]
    assert job_dir.read_hold(str(root), key) > 0
    assert job_dir.read_hold(str(root), "another boot") == 0


def test_a_forged_hold_keeps_nothing_alive(driver: Driver) -> None:
    driver.launch("a.1", "sleep", "1000", hold_ms=1500, grace_ms=100)
    for name in (boot_id(), "x", "-"):
        job_dir.write_hold(str(driver.root), boot_ms() + 1_000_000, name)
    assert is_hold_expired(driver.ended("a.1"))


@pytest.mark.parametrize("kind", ["pipe", "full directory"])
def test_a_hold_that_was_replaced_is_renewed_all_the_same(new_driver: Callable[..., Driver], kind: str) -> None:
    hold_ms = 4000  # a busy machine may take seconds from one renewal to the next, and to start another agent
    driver = new_driver(use_cgroups=False)
    driver.launch("a.1", "sleep", "1000", hold_ms=hold_ms, grace_ms=100, memory_bytes=1 << 30)  # which polls
    began, pauses = boot_ms(), cycle((0.2, 0.37, 0.53))  # not in step with the looks of the shim
    while boot_ms() < began + 1.2 * hold_ms:
        driver.pass_time(next(pauses))
        hold = driver.root / job_dir.HOLD
        hold.unlink()
        odd_files.put(kind, hold)
        driver.pass_time(0.1)
        driver.host.extend_hold(boot_ms() + hold_ms)
    assert driver.host.running() == ("a.1",)
    driver.close()
    driver = new_driver(use_cgroups=False)
    driver.host.extend_hold(boot_ms() + hold_ms)
    driver.pass_time(0.5 * hold_ms / 1000)
    assert driver.host.running() == ("a.1",)
    assert is_hold_expired(driver.ended("a.1"))


def test_a_hold_is_renewed_on_a_full_disk(
    small_disk: Callable[..., SmallDisk], root: Path, new_driver: Callable[..., Driver]
) -> None:
    disk = small_disk(root)
    driver = new_driver()
    pid = driver.launch("a.1", "sleep", "1000", hold_ms=3000, grace_ms=100).pid
    disk.fill()
    for _ in range(10):
        driver.pass_time(0.4)
        driver.host.extend_hold(boot_ms() + 3000)
        assert is_alive(pid)
    assert is_hold_expired(driver.ended("a.1"))  # and no longer than that
    disk.free()


def test_who_reads_a_hold_while_it_is_written_sees_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    root, boot, written = str(tmp_path), boot_id(), {10**12 * digit + 5 for digit in range(1, 9)}
    job_dir.make_root(root)
    job_dir.write_hold(root, 10**12 + 5, boot)
    stopping = threading.Event()

    def write() -> None:
        while not stopping.is_set():
            for deadline in written:
                job_dir.write_hold(root, deadline, boot)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert {job_dir.read_hold(root, boot) for _ in range(5000)} <= written
    finally:
        stopping.set()
        writer.join()


def test_a_grace_does_not_outlast_the_hold(driver: Driver) -> None:
    stubborn = "trap '' TERM; echo 1; while :; do sleep 0.1; done"
    driver.launch("a.1", "/bin/sh", "-c", stubborn, hold_ms=1500)
    driver.numbers("a.1", 1)
    assert driver.stop("a.1", grace_ms=1_000_000).ending == "cancelled"


def test_what_gets_to_start_after_its_hold_is_over_does_not_start(driver: Driver, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    os.kill(driver.host.spawner_pid, signal.SIGSTOP)
    try:
        driver.run_coroutine(driver.host.launch(a_spec("a.1", "touch", str(trace), hold_ms=300)))
        driver.pass_time(0.6)
    finally:
        os.kill(driver.host.spawner_pid, signal.SIGCONT)
    assert is_hold_expired(driver.ended("a.1"))
    assert not trace.exists()


# ------------------------------------------------------------------ orders


class Files:
    """Brings nothing, when it is told to."""

    is_local = False

    def __init__(self) -> None:
        self.asked = 0
        self.arrive = asyncio.Event()

    async def lay_out(self, digest: str, target: Path) -> None:
        self.asked += 1
        await self.arrive.wait()

    async def read_tree(self, digest: str) -> Manifest:
        raise AssertionError(digest)

    def received(self, piece: wire.FetchedChunk) -> None:
        """Nothing is asked for."""

    def unlinked(self) -> None:
        """Nothing is on its way."""


Scenario = Callable[[Agent, AttemptHost, Control, Files], Awaitable[None]]


def with_files(root: Path, scenario: Scenario) -> None:
    """A real agent of another machine, whose files come when the test says so."""

    async def play() -> None:
        control, files = Control(), Files()
        agent = Agent(("gpu1",), root, UsageMeter(MachineProbe()), control, workdirs=lambda send: files)
        host = agent.host
        await agent.start()
        try:
            async with asyncio.timeout(30):
                await scenario(agent, host, control, files)
        finally:
            for attempt_id in host.running():
                await host.stop_attempt(attempt_id, ending=Ending.CANCELLED, grace_ms=0)
            while host.running():
                await asyncio.sleep(0.01)
            await agent.stop()

    asyncio.run(play())


def with_workdir(order: wire.StartAttemptOrder, hold_ms: int = 60_000) -> wire.StartAttemptOrder:
    return replace(order, command=replace(order.command, workdir="0" * 64), hold_ms=hold_ms)


def test_what_is_prepared_until_its_hold_is_over_is_refused(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control, files: Files) -> None:
        agent.send(with_workdir(a_start("a.1", "sleep", "1000"), hold_ms=400))
        await until(lambda: files.asked)
        assert agent.greeting("gpu1")[0].attempts == ("a.1",)
        await asyncio.sleep(0.6)
        files.arrive.set()
        await until(control.ends)
        assert control.ends()[0].outcome.ending is Ending.RECLAIMED
        assert host.running() == ()

    with_files(tmp_path / "jobs", scenario)


def test_a_hold_that_is_renewed_too_late_gives_up_what_was_being_prepared(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control, files: Files) -> None:
        agent.send(with_workdir(a_start("a.1", "sleep", "1000"), hold_ms=400))
        await until(lambda: files.asked)
        await asyncio.sleep(0.6)
        agent.send(wire.HeartbeatReply(beat=boot_ms(), hold_ms=60_000))
        await until(control.ends)
        files.arrive.set()
        await asyncio.sleep(0.1)
        assert (control.ends()[0].outcome.ending, len(control.ends())) == (Ending.RECLAIMED, 1)
        assert host.running() == ()

    with_files(tmp_path / "jobs", scenario)


def test_a_hold_that_is_renewed_in_time_lets_it_be_prepared_and_run(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control, files: Files) -> None:
        agent.send(with_workdir(a_start("a.1", "true"), hold_ms=30_000))
        await until(lambda: files.asked)
        agent.send(wire.HeartbeatReply(beat=boot_ms(), hold_ms=60_000))
        files.arrive.set()
        await until(control.ends)
        assert control.ends()[0].outcome.exit_code == 0

    with_files(tmp_path / "jobs", scenario)


def test_a_stop_while_files_are_brought_ends_it_under_the_fence_it_was_ordered_with(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control, files: Files) -> None:
        agent.send(with_workdir(a_start("a.1", "sleep", "1000", fence=7)))
        await until(lambda: files.asked)
        agent.send(wire.StopAttemptOrder("a.1", 7, Ending.CANCELLED, "", 0))
        await until(control.ends)
        assert [(end.lease_id, end.fence) for end in control.ends()] == [("a.1", 7)]
        assert control.ends()[0].outcome.ending is Ending.NEVER_STARTED

    with_files(tmp_path / "jobs", scenario)


def test_an_order_that_crosses_its_refusal_starts_nothing(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control, files: Files) -> None:
        agent.send(replace(a_start("a.1", "sleep", "1000"), beat=boot_ms() - 3_600_000))
        await until(control.ends)
        agent.send(a_start("a.1", "sleep", "1000"))
        agent.send(wire.AcknowledgeReport(control.ends()[0].seq))
        agent.send(a_start("a.2", "true"))
        await until(lambda: len(control.ends()) == 2)
        assert host.running() == ()
        assert [end.lease_id for end in control.ends()] == ["a.1", "a.2"]

    with_files(tmp_path / "jobs", scenario)


def test_an_order_for_what_runs_already_does_not_touch_its_files_again(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control, files: Files) -> None:
        files.arrive.set()
        order = with_workdir(a_start("a.1", "sleep", "1000"))
        agent.send(order)
        await until(control.starts)
        agent.send(order)
        await until(lambda: len(control.starts()) == 2)
        assert files.asked == 1

    with_files(tmp_path / "jobs", scenario)
