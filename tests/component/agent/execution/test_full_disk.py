"""A stop needs no disk: on a full one the tree is gone all the same, and the kind of the stop is what was asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import AsyncioTasks
from distributed_grid.agent.execution.attempt import AttemptExit
from distributed_grid.agent.owner.borrowed_work import HostedWork
from distributed_grid.agent.owner.guard import OwnerGuard
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.agent.owner.yield_policy import URGENT_GRACE_MS
from distributed_grid.domain.jobs import Ending
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import OwnerRules
from tests.component.agent.execution.conftest import Driver, a_spec, is_alive, python
from tests.component.agent.execution.test_stopping import STUBBORN_FAMILY
from tests.e2e.crashes.conftest import needs_root
from tests.lab.disks import Disk

pytestmark = pytest.mark.e2e
SIZE_BYTES = 4 * 1024 * 1024
KINDS = ("cancelled", "preempted", "reclaimed")


@pytest.fixture
def disk(root: Path) -> Iterator[Disk]:
    """The root is a small disk of its own."""
    needs_root("mount a small disk")
    root.mkdir(parents=True)
    disk = Disk(root, SIZE_BYTES)
    disk.make()
    yield disk
    disk.free()
    os.system(f"umount -l {root}")  # what a failed test left there is ended by the fixture of the root


def has_room(root: Path) -> bool:
    try:
        (root / "probe").write_bytes(b"x")
    except OSError:
        return False
    finally:
        (root / "probe").unlink(missing_ok=True)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_stubborn_tree_is_stopped_on_a_full_disk(disk: Disk, driver: Driver, kind: str) -> None:
    driver.launch("a.1", *python(STUBBORN_FAMILY))
    pids = driver.numbers("a.1", 3)
    disk.fill()
    assert not has_room(driver.root)
    ended = driver.stop("a.1", ending=kind, detail="why", grace_ms=300)
    assert (ended.ending, ended.detail, ended.signal) == (kind, "why", signal.SIGKILL)
    assert not any(map(is_alive, pids))


def test_a_polite_tree_keeps_its_grace_on_a_full_disk(disk: Disk, driver: Driver) -> None:
    driver.launch("a.1", "/bin/sh", "-c", "trap 'sleep 0.3; exit 3' TERM; echo 1; while :; do sleep 0.01; done")
    driver.numbers("a.1", 1)
    disk.fill()
    ended = driver.stop("a.1", ending="reclaimed", grace_ms=10_000)
    assert (ended.ending, ended.exit_code) == ("reclaimed", 3)


def test_the_kind_survives_a_shim_that_is_killed_on_a_full_disk(disk: Disk, driver: Driver) -> None:
    driver.launch("a.1", *python(STUBBORN_FAMILY))
    pids = driver.numbers("a.1", 3)
    disk.fill()
    shim = driver.shim_pid("a.1")
    driver.run_coroutine(driver.host.stop_attempt("a.1", ending=Ending.RECLAIMED, detail="why", grace_ms=60_000))
    os.kill(shim, signal.SIGKILL)
    ended = driver.ended("a.1")
    assert (ended.ending, ended.detail) == ("reclaimed", "why")
    assert not any(map(is_alive, pids))


def test_the_kind_survives_an_agent_that_ends_on_a_full_disk(disk: Disk, new_driver: Callable[..., Driver]) -> None:
    first = new_driver()
    first.launch("a.1", *python(STUBBORN_FAMILY))
    pids = first.numbers("a.1", 3)
    disk.fill()
    first.run_coroutine(first.host.stop_attempt("a.1", ending=Ending.RECLAIMED, detail="why", grace_ms=700))
    first.close()
    second = new_driver()
    second.until(lambda: not any(map(is_alive, pids)))
    disk.free()
    assert second.ended("a.1").ending == "reclaimed"


def test_a_stop_that_could_not_be_written_is_written_when_there_is_room(
    disk: Disk, new_driver: Callable[..., Driver]
) -> None:
    """Then agent and shim may both die, and the kind is still known."""
    first = new_driver()
    first.launch("a.1", *python(STUBBORN_FAMILY))
    first.numbers("a.1", 3)
    disk.fill()
    first.run_coroutine(first.host.stop_attempt("a.1", ending=Ending.RECLAIMED, detail="why", grace_ms=60_000))
    disk.free()
    first.until(lambda: (first.root / ".control/a.1/stop.json").exists())
    shim = first.shim_pid("a.1")
    first.close()
    os.kill(shim, signal.SIGKILL)
    ended = new_driver().ended("a.1")
    assert (ended.ending, ended.detail) == ("reclaimed", "why")


def test_a_stopped_shim_does_not_keep_its_tree_alive(driver: Driver) -> None:
    """A shim that stands still is made to go on."""
    driver.launch("a.1", *python(STUBBORN_FAMILY))
    pids = driver.numbers("a.1", 3)
    os.kill(driver.shim_pid("a.1"), signal.SIGSTOP)
    assert driver.stop("a.1", grace_ms=100).ending == "cancelled"
    assert not any(map(is_alive, pids))


def test_an_end_that_cannot_be_written_is_reported_once(disk: Disk, driver: Driver) -> None:
    """A shim that is killed on a full disk leaves no record, and the host cannot make one."""
    driver.launch("a.1", "sleep", "1000")
    disk.fill()
    os.kill(driver.shim_pid("a.1"), signal.SIGKILL)
    assert driver.ended("a.1").ending == "lost"
    disk.free()
    driver.until(lambda: (driver.root / ".control/a.1/exit.json").exists())
    assert [report.outcome.ending for report in driver.reports if isinstance(report, AttemptExit)] == ["lost"]


def test_an_order_that_comes_again_on_a_full_disk_refuses_nothing(disk: Disk, driver: Driver) -> None:
    """A newer fence cannot be written; what runs goes on under it."""
    driver.launch("a.1", "sleep", "1000", fence=5)
    disk.fill()
    driver.run_coroutine(driver.host.launch(a_spec("a.1", "sleep", "1000", fence=9)))
    assert [report.fence for report in driver.reports] == [5, 9]
    assert driver.stop("a.1").ending == "cancelled"
    assert driver.exit_of("a.1").fence == 9


# ------------------------------------------------------------------ killed at each stage

AGENT = """
import asyncio, json, msgspec, sys
from pathlib import Path
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.domain.jobs import Ending

async def main():
    host = AttemptHost(Path(sys.argv[1]), report=lambda report: print(type(report).__name__, flush=True))
    await host.start()
    await host.launch(msgspec.json.decode(sys.stdin.buffer.readline(), type=AttemptSpec))
    await asyncio.to_thread(sys.stdin.buffer.readline)
    print("stopping", flush=True)
    await host.stop_attempt("a.1", ending=Ending.RECLAIMED, detail="why", grace_ms=500)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
@pytest.mark.parametrize("delay_ms", [0, 1, 2, 5, 20, 300, 700])
def test_an_agent_killed_at_any_moment_of_a_stop_leaves_the_attempt_running_or_reclaimed(
    disk: Disk, root: Path, new_driver: Callable[..., Driver], delay_ms: int, full: bool
) -> None:
    command = [sys.executable, "-c", AGENT, str(root)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as agent:
        assert agent.stdin
        assert agent.stdout
        try:
            agent.stdin.write(msgspec.json.encode(a_spec("a.1", *python(STUBBORN_FAMILY))) + b"\n")
            agent.stdin.flush()
            assert agent.stdout.readline() == b"AttemptLaunch\n"
            out = root / "a.1/stdout"
            while len(out.read_text().split()) < 3:
                time.sleep(0.01)
            if full:
                disk.fill()
            agent.stdin.write(b"\n")
            agent.stdin.flush()
            assert agent.stdout.readline() == b"stopping\n"
            time.sleep(delay_ms / 1000)
        finally:
            agent.kill()
    pids = [int(pid) for pid in out.read_text().split()]
    disk.free()
    driver = new_driver()
    driver.pass_time(1.0)  # a stop that was begun is over by then
    if driver.find(AttemptExit, "a.1") is None and all(map(is_alive, pids)):
        assert driver.stop("a.1", ending="reclaimed", grace_ms=0).ending == "reclaimed"
    assert driver.ended("a.1").ending == "reclaimed"
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
@pytest.mark.parametrize("delay_ms", [0, 1, 5, 100, 290, 310])
def test_a_shim_killed_at_any_moment_of_a_stop_is_reclaimed(
    disk: Disk, driver: Driver, delay_ms: int, full: bool
) -> None:
    driver.launch("a.1", *python(STUBBORN_FAMILY))
    pids = driver.numbers("a.1", 3)
    shim = driver.shim_pid("a.1")
    if full:
        disk.fill()
    driver.run_coroutine(driver.host.stop_attempt("a.1", ending=Ending.RECLAIMED, detail="why", grace_ms=300))
    driver.pass_time(delay_ms / 1000)
    with contextlib.suppress(ProcessLookupError):
        os.kill(shim, signal.SIGKILL)
    ended = driver.ended("a.1")
    assert (ended.ending, ended.detail) == ("reclaimed", "why")
    assert not any(map(is_alive, pids))


# ------------------------------------------------------------------ for the owner

DEAF = """
import os, signal, sys, time
held = b"x" * (64 << 20)
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], "w").close())
if os.fork() == 0: os.setsid()
os.write(1, b"%d\\n" % os.getpid())
while True: time.sleep(1000)
"""
RULES = OwnerRules(
    cpu_busy_max_milli=1000,
    memory_used_max_milli=0,
    memory_min_bytes=1 << 60,  # the owner needs more than there is
    gpu_busy_max_milli=1000,
    gpu_memory_min_bytes=0,
    throttle=False,
    pause=False,
    notice_ms=300,
    grace_ms=URGENT_GRACE_MS,
)


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
def test_who_ignores_sigterm_is_killed_for_the_owner_when_its_grace_is_over(
    disk: Disk, driver: Driver, tmp_path: Path, full: bool
) -> None:
    """SIGTERM first, then SIGKILL; on a full disk without a notice, which cannot be written there."""
    told = tmp_path / "told"
    driver.launch("a.1", *python(DEAF), str(told))
    pids = driver.numbers("a.1", 2)
    if full:
        disk.fill()
    work = HostedWork(driver.host, UsageMeter(MachineProbe()))
    guard = OwnerGuard(work, boot_ms, report_pause=lambda *report: None, on_change=lambda: None)
    guard.rules = RULES
    watching = driver.loop.create_task(guard.watch(AsyncioTasks().sleep))
    driver.until(told.exists)
    assert (driver.root / "a.1/notice").exists() is not full
    driver.until(lambda: not any(map(is_alive, pids)))
    ended = driver.ended("a.1")
    watching.cancel()
    driver.run_coroutine(asyncio.gather(watching, return_exceptions=True))
    assert (ended.ending, ended.signal) == ("reclaimed", signal.SIGKILL)
    assert ended.detail.startswith("its owner needs here's memory: ")
