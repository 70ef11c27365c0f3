"""`grid agent --end` on what a real host of attempts has left: an attempt, a memory server, an agent, or nothing."""

from __future__ import annotations

import asyncio
import fcntl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.__main__ import has_leftovers
from distributed_grid.agent.agent_process import AgentDir
from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.agent.execution.host import AttemptHost

pytestmark = pytest.mark.e2e


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of an agent that has ended and left nothing."""
    agent_dir = AgentDir(str(tmp_path / "agent"))
    agent_dir.make()
    (agent_dir.path / "agent.lock").touch()
    work_with_host(agent_dir.path, lambda host: host.running())
    return agent_dir.path


def work_with_host(folder: Path, work: Callable[[AttemptHost], object]) -> None:
    async def run() -> None:
        host = AttemptHost(folder / "jobs", report=lambda report: None)
        await host.start()
        found = work(host)
        if asyncio.iscoroutine(found):
            await found
        await host.stop()

    asyncio.run(run())


def end(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distributed_grid.agent", "--dir", str(folder), "--end"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_agent_that_has_ended_has_left_nothing(folder: Path) -> None:
    assert not has_leftovers(str(folder))
    assert end(folder).returncode == 0


def test_an_attempt_whose_end_nobody_has_heard_of_is_left_and_stopped(folder: Path) -> None:
    spec = AttemptSpec("a.1", "job", "here", 1, ("sleep", "1000"), env={"PATH": "/usr/bin:/bin"})
    work_with_host(folder, lambda host: host.launch(spec))
    assert has_leftovers(str(folder))
    assert end(folder).returncode == 0
    running: list[str] = []
    work_with_host(folder, lambda host: running.extend(host.running()))
    assert running == []


@pytest.mark.parametrize("lock", ["agent.lock", "jobs/.control/.host.lock"])
def test_what_another_process_has_locked_is_not_left_alone(folder: Path, lock: str) -> None:
    with (folder / lock).open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert has_leftovers(str(folder))
    assert not has_leftovers(str(folder))


def test_a_directory_with_a_memory_server_has_something_left(folder: Path) -> None:
    lock = AgentDir(str(folder)).locks[1]
    lock.parent.mkdir()
    lock.touch()
    assert has_leftovers(str(folder))


def test_where_it_cannot_be_told_something_may_be_left(folder: Path, tmp_path: Path) -> None:
    assert has_leftovers(str(tmp_path / "nowhere"))
    (folder / "jobs/.control/.live").rmdir()
    assert has_leftovers(str(folder))
