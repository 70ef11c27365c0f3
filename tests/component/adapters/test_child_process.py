"""A child that dies is replaced; whoever waited for it hears of it, or gets the answer of the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from distributed_grid.adapters.child_process import ChildProcess
from distributed_grid.adapters.node.node_messages import RunFinished
from distributed_grid.adapters.ssh.process import REPORTS, Hop, RunOnNode, Settings, SshReport, SshTarget
from distributed_grid.errors import Unreachable

MODULE = "distributed_grid.adapters.ssh.worker"


class Owner:
    """Keeps a child, and counts the ones it had."""

    def __init__(self) -> None:
        self.connected = self.lost = 0
        self.child: ChildProcess[SshReport] = ChildProcess(
            MODULE,
            REPORTS,
            label="SSH",
            on_connect=self._on_connect,
            on_report=lambda report: None,
            on_exit=self._on_exit,
        )

    def _on_connect(self) -> None:
        self.connected += 1
        self.child.mark_ready([Settings()])

    def _on_exit(self, problem: str) -> None:
        self.lost += 1

    async def resolve(self, python: str = "", *, resend: bool = False, seconds: float = 30) -> RunFinished:
        """The address of localhost, by the script that the child runs on this machine with this interpreter."""
        target = SshTarget(name="n1", grid="g1", local_socket="", hop=Hop("local"), python=python)
        return await self.child.request(
            RunFinished,
            lambda number: RunOnNode(number, "resolve-address", target, {"host": "127.0.0.1"}),
            seconds=seconds,
            resend=resend,
        )


def children() -> list[int]:
    """The children of this process that run the module; other tests may have left zombies."""
    found = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if MODULE in one.cmdline():
                found.append(one.pid)
    return found


def kill_child() -> None:
    (child,) = children()
    os.kill(child, signal.SIGKILL)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def slow_once(tmp_path: Path) -> tuple[str, Path]:
    """An interpreter that hangs the first time, and the file that tells that it was started."""
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(
        f'#!/bin/sh\nif [ -e {started} ]; then exec {sys.executable} "$@"; fi\ntouch {started}\ncat >/dev/null\n'
    )
    python.chmod(0o755)
    return str(python), started


def test_answers_come_to_those_who_asked_and_stopping_twice_is_harmless() -> None:
    async def story() -> None:
        owner = Owner()
        waiting = asyncio.create_task(owner.resolve())  # before there is a child
        await asyncio.sleep(0)
        owner.child.start()
        owner.child.start()
        found = await asyncio.gather(waiting, *(owner.resolve() for _ in range(3)))
        assert [one.answer for one in found] == [{"address": "127.0.0.1"}] * 4
        await owner.child.stop()
        await owner.child.stop()
        assert (owner.connected, owner.lost) == (1, 1)
        assert not children()

    asyncio.run(story())


def test_a_lost_child_fails_its_requests_and_the_next_one_answers(slow_once: tuple[str, Path]) -> None:
    async def story() -> None:
        owner = Owner()
        owner.child.start()
        waiting = asyncio.create_task(owner.resolve(slow_once[0]))
        await until(slow_once[1].exists)
        kill_child()
        with pytest.raises(Unreachable, match="the SSH process ended while it worked; try again"):
            await waiting
        assert (await owner.resolve()).answer == {"address": "127.0.0.1"}
        assert (owner.connected, owner.lost) == (2, 1)
        await owner.child.stop()

    asyncio.run(story())


def test_a_request_that_is_to_survive_is_sent_again_to_the_next_child(slow_once: tuple[str, Path]) -> None:
    async def story() -> None:
        owner = Owner()
        owner.child.start()
        waiting = asyncio.create_task(owner.resolve(slow_once[0], resend=True))
        await until(slow_once[1].exists)
        kill_child()
        assert (await waiting).answer == {"address": "127.0.0.1"}
        assert owner.connected == 2
        await owner.child.stop()

    asyncio.run(story())


def test_a_request_that_takes_too_long_is_given_up(slow_once: tuple[str, Path]) -> None:
    async def story() -> None:
        owner = Owner()
        owner.child.start()
        with pytest.raises(TimeoutError):
            await owner.resolve(slow_once[0], seconds=1)
        assert (await owner.resolve()).answer == {"address": "127.0.0.1"}
        await owner.child.stop()

    asyncio.run(story())
