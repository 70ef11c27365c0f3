"""The Ray child of the control plane: connected with one Ray cluster, does there what it is told.

Rule 1: a dying Ray takes this process with it, and nothing else; the control plane starts another.
Rule 2: every call has a deadline; one that is missed is told as a problem, and the next order may do better.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from distributed_grid.adapters.node.installation import InstallSources
from distributed_grid.adapters.ray import placement_group_actor
from distributed_grid.adapters.ray.attached_agents import AttachedAgents
from distributed_grid.adapters.ray.connection import RayConnectError, connect, is_connected
from distributed_grid.adapters.ray.messages import (
    AWAY,
    Close,
    Closed,
    Connect,
    DropAttachedNode,
    Environ,
    ExtendHold,
    FreeGroups,
    GroupsFreed,
    GroupsObserved,
    GroupSpec,
    GroupsReserved,
    KeepAttachedNode,
    ObserveGroups,
    Order,
    RayRefused,
    Report,
    ReserveGroups,
    RunOnAttachedNode,
    next_order,
    packed,
)

NAME = "grid-placement-groups"
CALL_SECONDS, CONNECT_SECONDS = 20.0, 60.0
FIRST_PATIENCE, PATIENCE = 0.2, 2.0
MOST_CALLS = 64
WATCH_SECONDS, MOST_MISSES = 1.0, 3
BUILD = hashlib.sha256(Path(placement_group_actor.__file__).read_bytes()).hexdigest()[:12]
log = logging.getLogger(__name__)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Do what is asked on this line until it ends."""

    def report(message: Report) -> None:
        writer.write(packed(message))

    first = await next_order(reader)
    if not isinstance(first, Connect):
        return
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            connected = await asyncio.to_thread(connect, first)
            child = RayDriver(first, report, await asyncio.to_thread(_keeper_of, first))
            seen = await child.look(full=False)
    except TimeoutError:
        report(RayRefused(f"Ray at {first.address} did not answer within {CONNECT_SECONDS:g} s"))
    except RayConnectError as refusal:
        report(RayRefused(str(refusal), refusal.final))
    except Exception as failure:  # Ray raises what it likes while it is being met
        report(RayRefused(f"Ray at {first.address} failed: {_line(failure)}"))
    else:
        report(type(connected)(seen["session"], connected.ray, connected.python, connected.authenticated))
        taking, broken = asyncio.create_task(_take_all(reader, child)), asyncio.create_task(child.until_broken())
        await asyncio.wait((taking, broken), return_when=asyncio.FIRST_COMPLETED)
        if taking.done():
            return
        report(RayRefused(f"Ray at {first.address} broke off"))
    await writer.drain()


async def _take_all(reader: asyncio.StreamReader, child: RayDriver) -> None:
    while (order := await next_order(reader)) is not None:
        child.take(order)


class RayFailed(Exception):
    """A call to Ray that did not come to its end, in one line; nobody knows what became of it."""


class RayDriver:
    """Holds the way to the keeper, and nothing that is not told again by the next control plane."""

    def __init__(self, settings: Connect, report: Callable[[Report], None], actor: Any) -> None:
        self._report = report
        self._actor = actor
        self._settings = settings
        self._supplies = InstallSources()
        self._supplies.cache = Path(settings.wheels)
        self._adopter = AttachedAgents(report, self._supplies)
        self._tasks: set[asyncio.Task[None]] = set()
        self._misses = 0

    async def until_broken(self) -> None:
        """Return when the connection with Ray is gone for good: only another process gets a new one."""
        while self._misses < MOST_MISSES and is_connected():
            await asyncio.sleep(WATCH_SECONDS)

    def take(self, order: Order) -> None:
        """Begin what an order asks for."""
        match order:
            case ReserveGroups():
                self._begin(self._reserve(list(order.items), order.seconds))
            case FreeGroups():
                self._begin(self._free(order.names))
            case ObserveGroups():
                self._begin(self._look(order))
            case ExtendHold():
                self._begin(self._hold(order))
            case Close():
                self._begin(self._close(order))
            case Environ():
                self._supplies.environ, self._supplies.cache = order.environ, Path(order.wheels)
            case KeepAttachedNode():
                self._adopter.adopt(order.target)
            case DropAttachedNode():
                self._adopter.let_go(order.node)
            case RunOnAttachedNode():
                self._adopter.do(order.number, order.deed, order.target)
            case Connect():
                log.error("told to connect twice")

    def _begin(self, deed: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(deed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """The keeper's answer, within so many seconds; raises RayFailed."""
        if self._actor is None:
            raise RayFailed("everything of the grid in this Ray cluster was removed")
        try:
            reference = getattr(self._actor, method).remote(*arguments)
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(reference.future())
        except Exception as failure:  # Ray raises what it likes, what the keeper raised included
            raise RayFailed(_line(failure)) from failure

    async def _reserve(self, items: list[GroupSpec], seconds: float) -> None:
        """Answer each item as soon as it is known; one that takes its time does not hold up the others."""
        patience = FIRST_PATIENCE
        try:
            while items:
                asked = [(item.name, item.node, item.resources) for item in items]
                answers = await self._call("reserve", asked, seconds, patience, seconds=seconds + CALL_SECONDS)
                for item, answer in zip(items, answers, strict=True):
                    if answer is not None:
                        self._report(GroupsReserved(item.name, answer))
                items = [item for item, answer in zip(items, answers, strict=True) if answer is None]
                patience = PATIENCE
        except RayFailed as failure:
            for item in items:
                self._report(GroupsReserved(item.name, f"{AWAY}{failure}"))

    async def _free(self, names: tuple[str, ...]) -> None:
        problem = ""
        try:
            await self._call("free", list(names), seconds=CALL_SECONDS + len(names) / 20)
        except RayFailed as failure:
            problem = str(failure)
        for name in names:
            self._report(GroupsFreed(name, problem))

    async def look(self, *, full: bool) -> dict[str, Any]:
        """What the keeper sees."""
        view: dict[str, Any] = await self._call("look", full)
        return view

    async def _look(self, order: ObserveGroups) -> None:
        try:
            self._report(GroupsObserved(order.number, await self.look(full=order.full)))
        except RayFailed as failure:
            self._misses += 1
            self._report(GroupsObserved(order.number, {}, str(failure)))
        else:
            self._misses = 0

    async def _hold(self, order: ExtendHold) -> None:
        try:
            await self._call("hold", order.seconds, order.terms)
        except RayFailed as failure:
            log.warning("the keeper was not told that the grid is there: %s", failure)

    async def _close(self, order: Close) -> None:
        problem = ""
        try:
            if self._actor is not None:
                await self._call("close", seconds=60.0)
                await asyncio.to_thread(_end, self._actor)
                self._actor = None
        except RayFailed as failure:
            problem = str(failure)
        self._report(Closed(order.number, problem))


def _line(failure: Exception) -> str:
    words = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {words[:300]}" if words else type(failure).__name__


def _keeper_of(settings: Connect) -> Any:
    """The keeper of this grid, made where there is none, and made anew where it is of another build; blocks."""
    ray: Any = importlib.import_module("ray")
    pinned: Any = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    ray.cloudpickle.register_pickle_by_value(placement_group_actor)
    head = [node["NodeID"] for node in ray.nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"]]
    options: dict[str, Any] = {
        "name": NAME,
        "namespace": settings.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": MOST_CALLS,
    }
    if head:
        options["scheduling_strategy"] = pinned(head[0], soft=True)
    for _ in range(3):
        actor = (
            ray.remote(placement_group_actor.PlacementGroupActor)
            .options(**options)
            .remote(settings.grid, BUILD, settings.hold_seconds)
        )
        grid, build = ray.get(actor.identity.remote(), timeout=CALL_SECONDS)
        if grid != settings.grid:
            raise RayConnectError(
                f"another grid ({grid}) uses the namespace {settings.namespace!r} of that Ray cluster; "
                "detach that one first",
                final=True,
            )
        if build == BUILD:
            return actor
        _end(actor)
    raise RayConnectError("the keeper of an older build does not go")


def _end(actor: Any) -> None:
    """Let Ray end an actor for good; blocks. Raises RayFailed."""
    ray: Any = importlib.import_module("ray")
    try:
        ray.kill(actor, no_restart=True)
    except Exception as failure:  # Ray raises what it likes
        raise RayFailed(_line(failure)) from failure
