"""The SSH child of the control plane: started when somebody needs it, kept alive, told again what to keep.

Rule 1: SSH never runs in the process that owns the ledger: its crypto would delay everybody.
Rule 2: a child that dies is replaced, at growing intervals, and the links are made again. Agents do not notice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_grid.adapters.child_process import child
from distributed_grid.adapters.node.messages import (
    LARGEST_LINE,
    AgentLinkChanged,
    DropAgentLink,
    Forward,
    Forwarded,
    KeepAgentLink,
    NodeFacts,
    Order,
    PortForward,
    RunFinished,
    RunOnNode,
    RunRayDriver,
    Settings,
    StepDone,
    Target,
    line_of,
    report_in,
)
from distributed_grid.errors import Refused, Unreachable

FIRST_PAUSE, LAST_PAUSE = 0.5, 15.0
log = logging.getLogger(__name__)
Say = Callable[[str], None]


class SshProcess:
    """What is asked of SSH, and what is known from it."""

    def __init__(self, wheels: Path) -> None:
        self._settings = Settings(wheels=str(wheels))
        self._kept: dict[str, Target] = {}
        self._asked: dict[int, tuple[RunOnNode, Say, asyncio.Future[RunFinished]]] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self.links: dict[str, AgentLinkChanged] = {}
        self.facts: dict[str, NodeFacts] = {}
        self._forwards: dict[str, Forward] = {}
        self._driving: RunRayDriver | None = None
        self.forwarded: dict[str, dict[str, int]] = {}

    async def stop(self) -> None:
        """Let the child go; links end, agents stay. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def use(self, auth_sock: str, environ: dict[str, str]) -> None:
        """From now on use this SSH agent, and these variables to fetch packages with; both stay in memory."""
        wheels = environ.get("GRID_WHEELS") or self._settings.wheels
        settings = Settings(auth_sock or self._settings.auth_sock, environ or self._settings.environ, wheels)
        if settings != self._settings:
            self._settings = settings
            self._send(settings)

    def keep(self, target: Target) -> None:
        """Keep a link to this node until it is dropped; one that is down is tried again at once."""
        self._kept[target.name] = target
        if target.name not in self.links or self.links[target.name].state == "down":
            self.links[target.name] = AgentLinkChanged(target.name, "connecting")
        self._need()
        self._send(KeepAgentLink(target))

    def drop(self, node: str) -> None:
        """Let go of a link; dropping what is not kept is harmless."""
        self._kept.pop(node, None)
        self.links.pop(node, None)
        self._send(DropAgentLink(node))

    def forward(self, target: Target, ports: dict[str, PortForward]) -> None:
        """Have ports of this machine lead to those of a node; none is to end that."""
        order = Forward(target, ports)
        if ports:
            self._forwards[target.name] = order
            self._need()
        elif self._forwards.pop(target.name, None) is None:
            return
        self._send(order)

    def drive(self, target: Target, socket: str, data: dict[str, Any]) -> None:
        """Have a program on a node speak to Ray there, behind a socket of this machine; no data is to end that."""
        order = RunRayDriver(target, socket, data)
        if data and order != self._driving:
            self._driving = order
            self._need()
        elif data or self._driving is None:
            return
        else:
            self._driving = None
        self._send(order)

    async def do(self, deed: str, target: Target, say: Say) -> str:
        """Do a deed on a node; what was done, in a few words. Raises Refused with the reason it failed."""
        finished = await self._finish(deed, target, {}, say)
        if finished.facts is not None:
            self.facts[target.name] = finished.facts
        return finished.words

    async def ask(
        self, deed: str, target: Target, data: dict[str, Any], say: Say = lambda step: None
    ) -> dict[str, Any]:
        """Do a deed that needs more than its name; what the node answered. Raises Refused as `do` does."""
        return (await self._finish(deed, target, data, say)).data

    async def _finish(self, deed: str, target: Target, data: dict[str, Any], say: Say) -> RunFinished:
        order = RunOnNode(next(self._numbers), deed, target, data)
        done: asyncio.Future[RunFinished] = asyncio.get_running_loop().create_future()
        self._asked[order.number] = (order, say, done)
        try:
            self._need()
            self._send(order)
            finished = await done
        finally:
            self._asked.pop(order.number, None)
        if finished.problem:
            raise Refused(finished.problem)
        return finished

    def _need(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def _send(self, order: Order) -> None:
        if self._writer is not None:
            self._writer.write(line_of(order))

    async def _run(self) -> None:
        """One child after the other."""
        pause = FIRST_PAUSE
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._one_child()
            except OSError as failure:
                log.error("the SSH process could not be started: %s", failure)
            if asyncio.get_running_loop().time() - began > 60:
                pause = FIRST_PAUSE
            self._was_lost()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _one_child(self) -> None:
        async with child("distributed_grid.adapters.ssh", limit=LARGEST_LINE) as (reader, self._writer):
            try:
                orders: list[Order] = [
                    self._settings,
                    *map(KeepAgentLink, self._kept.values()),
                    *self._forwards.values(),
                ]
                orders += [self._driving] if self._driving is not None else []
                for order in (*orders, *(asked[0] for asked in self._asked.values())):
                    self._send(order)
                while line := await reader.readline():
                    self._take(line)
            except (OSError, ValueError) as failure:
                log.error("the SSH process broke off: %s", failure)
            finally:
                self._writer = None

    def _take(self, line: bytes) -> None:
        match report_in(line):
            case AgentLinkChanged() as link:
                if link.node in self._kept:
                    self._note(link)
            case StepDone() as stepped:
                if stepped.number in self._asked:
                    self._asked[stepped.number][1](stepped.step)
            case Forwarded() as forwarded:
                self.forwarded[forwarded.node] = forwarded.ports
            case RunFinished() as finished:
                asked = self._asked.get(finished.number)
                if asked is not None and not asked[2].done():
                    asked[2].set_result(finished)

    def _note(self, link: AgentLinkChanged) -> None:
        before = self.links.get(link.node)
        if before is None or (before.state, before.detail) != (link.state, link.detail):
            log.info("link to %s: %s %s", link.node, link.state, link.detail)
        self.links[link.node] = link
        if link.facts is not None:
            self.facts[link.node] = link.facts

    def _was_lost(self) -> None:
        """The child is gone: what it was doing is not known, links are down until the next one makes them."""
        for _, _, done in self._asked.values():
            if not done.done():
                done.set_exception(Unreachable("the SSH process ended while it worked; try again"))
        self.forwarded.clear()
        for node in self._kept:
            self.links[node] = AgentLinkChanged(node, "down", "the SSH process ended; another one is started")
