"""A child that dies is replaced; whoever waited for it hears of it, or gets the answer of the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from distributed_grid.adapters.child_process import ChildProcess
from distributed_grid.adapters.node.node_messages import RunFinished
from distributed_grid.adapters.ray import driver_messages
from distributed_grid.adapters.ssh import process as ssh_process
from distributed_grid.adapters.ssh.process import COMMANDS, REPORTS, Hop, RunOnNode, Settings, SshReport, SshTarget
from distributed_grid.errors import Refused, Unreachable

MODULE = "distributed_grid.adapters.ssh.worker"


class Owner:
    """Keeps a child, and counts the ones it had."""

    def __init__(self, *, min_pause: float = 0.0) -> None:
        self.connected = self.lost = 0
        self.child: ChildProcess[SshReport] = ChildProcess(
            MODULE,
            COMMANDS,
            REPORTS,
            label="SSH",
            on_connect=self._on_connect,
            on_report=lambda report: None,
            on_exit=self._on_exit,
            min_pause=lambda: min_pause,
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


def test_the_pause_before_the_next_child_ends_when_that_is_asked_for() -> None:
    async def story() -> None:
        owner = Owner(min_pause=3600)
        owner.child.start()
        await owner.resolve()
        kill_child()
        await until(lambda: owner.lost == 1)
        owner.child.retry()
        assert (await owner.resolve()).answer == {"address": "127.0.0.1"}
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


def test_a_command_beyond_its_limits_is_refused_and_the_child_goes_on() -> None:
    """Sent to it, the child would end, and so would each one after it."""

    async def scenario() -> None:
        owner = Owner()
        owner.child.start()
        try:
            assert (await owner.resolve()).problem == ""
            with pytest.raises(Refused, match=r"RunOnNode is beyond its limits: .*4096"):
                await owner.resolve("/" * 5000)
            owner.child.send(Settings(auth_sock="x" * 5000))
            owner.child.send(Settings(environ=dict.fromkeys(map(str, range(1001)), "")))
            assert (await owner.resolve()).problem == ""
            assert (owner.connected, owner.lost) == (1, 0)
        finally:
            await owner.child.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("commands", [ssh_process.COMMANDS, driver_messages.COMMANDS], ids=["SSH", "Ray"])
def test_every_field_of_every_command_is_bounded(commands: msgspec.msgpack.Decoder[Any]) -> None:
    def unbounded(node: msgspec.inspect.Type, path: str) -> list[str]:
        match node:
            case msgspec.inspect.StrType() | msgspec.inspect.BytesType():
                return [] if node.max_length is not None else [path]
            case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
                return [] if node.le is not None or node.lt is not None else [path]
            case msgspec.inspect.VarTupleType():
                return [*unbounded(node.item_type, f"{path}[]"), *([] if node.max_length is not None else [path])]
            case msgspec.inspect.DictType():
                parts = (*unbounded(node.key_type, f"{path}.key"), *unbounded(node.value_type, f"{path}.value"))
                return [*parts, *([] if node.max_length is not None else [path])]
            case msgspec.inspect.UnionType():
                return [one for part in node.types for one in unbounded(part, path)]
            case msgspec.inspect.StructType():
                named = ((f"{path}.{field.name}", field.type) for field in node.fields)
                return [one for name, part in named for one in unbounded(part, f"{node.cls.__name__}{name}")]
            case msgspec.inspect.BoolType() | msgspec.inspect.NoneType() | msgspec.inspect.AnyType():
                return []  # `Any` is in the arguments of the node script alone: bounded by the frame
            case _:
                return [f"{path}: {node}"]

    assert unbounded(msgspec.inspect.type_info(commands.type), "") == []
