"""The state directory is removed at some stage of an attempt: nothing of it stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.agent.files.job_dir import RECORD_BYTES
from tests.component.agent.execution.conftest import Driver, a_spec, is_alive, python
from tests.component.agent.execution.test_stopping import STUBBORN_FAMILY
from tests.e2e.crashes.conftest import needs_root
from tests.lab.disks import Disk
from tests.support.processes import processes_using
from tests.support.shell import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
GONE_SECONDS = 20.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

AGENT = """
import asyncio, msgspec, sys
from pathlib import Path
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.domain.jobs import Ending

async def main():
    host = AttemptHost(Path(sys.argv[1]), report=lambda report: print(type(report).__name__, flush=True))
    await host.start()
    print("ready", flush=True)
    await host.launch(msgspec.json.decode(sys.stdin.buffer.readline(), type=AttemptSpec))
    print("launched", flush=True)
    await asyncio.to_thread(sys.stdin.buffer.readline)
    await host.stop_attempt("a.1", ending=Ending.CANCELLED, grace_ms=60_000)
    print("stopping", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


class Agent:
    """An agent in a process of its own, with one attempt."""

    def __init__(self, root: Path) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", AGENT, str(root)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self.until("ready")

    def send(self, line: bytes = b"") -> None:
        assert self.process.stdin
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def launch(self, spec: AttemptSpec) -> None:
        self.send(msgspec.json.encode(spec))

    def until(self, said: str) -> None:
        assert self.process.stdout
        while line := self.process.stdout.readline():
            if line.decode().strip() == said:
                return
        raise AssertionError("the agent ended")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def remove(root: Path) -> None:
    """As `rm -rf` until it is gone, also while others write there."""

    def removed() -> bool:
        shutil.rmtree(root, ignore_errors=True)
        return not root.exists()

    wait_until(removed)


def left(root: Path) -> list[int]:
    """Processes that have to do with the root: they name it, or have something open there."""
    return [pid for pid in processes_using(str(root)) if pid != os.getpid()]


def family(root: Path) -> list[int]:
    """The pids of the stubborn family, once all of them are there."""
    out = root / "a.1/stdout"
    wait_until(lambda: out.exists() and len(out.read_text().split()) >= 3)
    return [int(pid) for pid in out.read_text().split()]


@pytest.mark.parametrize("agent_dies", [False, True], ids=["agent stays", "agent dies"])
@pytest.mark.parametrize("stage", ["idle", "launching", "starting", "running", "stopping", "ended"])
def test_nothing_stays_behind_when_the_root_is_removed(root: Path, stage: str, agent_dies: bool) -> None:
    agent, pids = Agent(root), []
    try:
        command = ("true",) if stage == "ended" else python(STUBBORN_FAMILY)
        if stage != "idle":
            agent.launch(a_spec("a.1", *command, memory_bytes=1 << 30, cpu_milli=500))
        if stage == "starting":
            agent.until("launched")
        elif stage == "ended":
            agent.until("AttemptExit")
        elif stage in ("running", "stopping"):
            agent.until("AttemptLaunch")
            pids = family(root)
        if stage == "stopping":
            agent.send()
            agent.until("stopping")
        if agent_dies:
            agent.kill()
        remove(root)
        expected = [] if agent_dies else [agent.process.pid]
        wait_until(lambda: not any(map(is_alive, pids)), GONE_SECONDS)
        if agent_dies:
            wait_until(lambda: not left(root), GONE_SECONDS)
        else:  # its spawner and the shims that wait for work go with it
            agent.kill()
            wait_until(lambda: not left(root), GONE_SECONDS)
    finally:
        if agent.process.poll() is None:
            agent.kill()
    assert not expected or agent.process.returncode is not None


def test_the_agent_hears_that_an_attempt_is_lost_with_its_directory(driver: Driver) -> None:
    driver.launch("a.1", *python(STUBBORN_FAMILY))
    pids = driver.numbers("a.1", 3)
    remove(driver.root)
    ended = driver.ended("a.1")
    assert ended.ending == "lost"
    assert "removed" in ended.detail
    assert not any(map(is_alive, pids))


def test_a_shim_that_dies_after_its_directory_is_lost_too(driver: Driver) -> None:
    launched = driver.launch("a.1", *python(STUBBORN_FAMILY))
    pids, shim = driver.numbers("a.1", 3), driver.shim_pid("a.1")
    remove(driver.root)
    os.kill(shim, signal.SIGKILL)
    assert driver.ended("a.1").ending == "lost"
    assert not any(map(is_alive, [*pids, launched.pid]))


def test_a_launch_into_a_root_that_is_gone_is_refused_and_a_stop_is_not_held_up(driver: Driver) -> None:
    driver.launch("a.1", "sleep", "1000")
    remove(driver.root)
    driver.run_coroutine(driver.host.launch(a_spec("b.1", "true")))
    assert driver.ended("b.1").ending == "never_started"
    assert driver.stop("a.1", grace_ms=0).ending in ("cancelled", "lost")


def test_a_shim_that_retries_its_record_ends_with_its_directory(root: Path, new_driver: Callable[..., Driver]) -> None:
    needs_root("mount a small disk")
    root.mkdir(parents=True)
    disk = Disk(root, 4 * 1024 * 1024)
    disk.make()
    try:
        driver = new_driver()
        driver.launch("a.1", "sleep", "1")
        shim = driver.shim_pid("a.1")
        with open(root / ".control/a.1/spec.json", "ab") as journal:
            journal.write(b"\n" * RECORD_BYTES)  # beyond the blocks that are reserved for it
            journal.write(b"\n" * (PAGE_BYTES - journal.tell() % PAGE_BYTES))  # the next line needs a page of its own
        disk.fill()
        driver.close()
        time.sleep(2)
        assert is_alive(shim)
        assert not (root / ".control/a.1/exit.json").exists()
        for path in root.iterdir():
            shutil.rmtree(path)
        wait_until(lambda: not is_alive(shim), GONE_SECONDS)
    finally:
        disk.free()
        subprocess.run(["umount", "-l", str(root)], check=True)
