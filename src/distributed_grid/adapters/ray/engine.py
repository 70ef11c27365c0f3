"""A Ray cluster as an engine, through a child process that is started when needed and kept alive.

Rule 1: Ray never runs in the process that owns the ledger: a driver dies with its Ray node.
Rule 2: a child that dies is replaced, at growing intervals. Whoever waited for it hears that Ray is away, and asks the
        next one; `on_up` tells that there is one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from distributed_grid.adapters.child_process import child
from distributed_grid.adapters.node.messages import AgentLinkChanged, RunFinished, StepDone
from distributed_grid.adapters.ray.messages import (
    AWAY,
    Close,
    Closed,
    Connect,
    Connected,
    Environ,
    ExtendHold,
    FreeGroups,
    GroupsFreed,
    GroupsObserved,
    GroupSpec,
    GroupsReserved,
    ObserveGroups,
    Order,
    Report,
    ReserveGroups,
    next_report,
    packed,
)
from distributed_grid.adapters.ray.messages import RayRefused as NotConnected
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import EngineNode
from distributed_grid.errors import Refused, Unreachable
from distributed_grid.ports import EngineGroup, EngineView
from distributed_grid.posix.unix_sockets import short_path

FIRST_PAUSE, LAST_PAUSE, FINAL_PAUSE = 0.5, 15.0, 30.0
LOOK_SECONDS, CLOSE_SECONDS = 25.0, 90.0
BUSY, GATHER_SECONDS = 4, 0.01
log = logging.getLogger(__name__)


class RayEngine:
    """What is asked of a Ray cluster, and what is known from it."""

    def __init__(
        self,
        *,
        on_up: Callable[[Connected], None] = lambda connected: None,
        on_link: Callable[[AgentLinkChanged | StepDone | RunFinished], None] = lambda report: None,
    ) -> None:
        self._on_up, self._on_link = on_up, on_link
        self._settings: Connect | None = None
        self._through = ""
        self._environ = Environ({}, "")
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._reserving: dict[str, asyncio.Future[str]] = {}
        self._freeing: dict[str, asyncio.Future[str]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._to_reserve: dict[float, list[GroupSpec]] = {}
        self._to_free: list[str] = []
        self._sending: asyncio.Handle | None = None
        self.connected: Connected | None = None
        self.problem = ""
        self.is_final = False

    # ------------------------------------------------------------------ being there

    def connect(self, settings: Connect, through: str = "") -> None:
        """Be connected with this cluster from now on; with the same one again, try at once.

        The child is a process of this machine, or what is behind the socket `through`.
        """
        if (
            (settings, through) == (self._settings, self._through)
            and self._task is not None
            and self.connected is not None
        ):
            return
        self._settings, self._through = settings, through
        self.problem, self.is_final = "", False
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._run(self._task))

    async def stop(self) -> None:
        """Let the child go; what it made in Ray stays. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def use(self, environ: dict[str, str], wheels: str) -> None:
        """From now on use these variables to fetch packages with; they stay in memory."""
        self._environ = Environ(environ or self._environ.environ, wheels)
        self.tell(self._environ)

    def tell(self, order: Order) -> None:
        """Pass an order on to the child, if there is one: what must be told again is the caller's to tell."""
        if self._writer is not None and self.connected is not None:
            self._writer.write(packed(order))

    # ------------------------------------------------------------------ the port

    async def reserve(self, group: EngineGroup, *, seconds: float) -> None:
        self._make_sure_it_is_there()
        future = self._reserving.get(group.name)
        if future is None:
            future = self._reserving[group.name] = asyncio.get_running_loop().create_future()
            self._to_reserve.setdefault(seconds, []).append(item_of(group))
            self._send_soon()
        problem = await asyncio.shield(future)
        if problem.startswith(AWAY):
            raise Unreachable(f"Ray does not answer: {problem.removeprefix(AWAY)}")
        if problem:
            raise Refused(problem)

    async def free(self, name: str) -> None:
        self._make_sure_it_is_there()
        future = self._freeing.get(name)
        if future is None:
            future = self._freeing[name] = asyncio.get_running_loop().create_future()
            self._to_free.append(name)
            self._send_soon()
        problem = await asyncio.shield(future)
        if problem:
            raise Unreachable(f"Ray does not answer: {problem.removeprefix(AWAY)}")

    async def look(self, *, full: bool) -> EngineView:
        seen = await self._ask(lambda number: ObserveGroups(number, full), LOOK_SECONDS)
        if seen.problem:
            raise Unreachable(f"Ray does not answer: {seen.problem}")
        return view_of(seen.view)

    async def hold(self, seconds: float, terms: Mapping[str, float]) -> None:
        self._make_sure_it_is_there()
        self.tell(ExtendHold(seconds, dict(terms)))

    async def clear(self) -> None:
        closed = await self._ask(Close, CLOSE_SECONDS)
        if closed.problem:
            raise Unreachable(f"Ray could not be cleared: {closed.problem}")

    async def _ask(self, order: Callable[[int], Order], seconds: float) -> Any:
        self._make_sure_it_is_there()
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(order(number))
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise Unreachable(f"Ray did not answer within {seconds:g} s") from None
        finally:
            self._asked.pop(number, None)

    def _make_sure_it_is_there(self) -> None:
        if self.connected is None:
            raise Unreachable(self.problem or "Ray is not connected")

    def _send_soon(self) -> None:
        """One message for all that is asked for in one turn of the loop, or in a moment where Ray is busy already."""
        if self._sending is None:
            busy = len(self._reserving) + len(self._freeing) > BUSY
            self._sending = asyncio.get_running_loop().call_later(GATHER_SECONDS if busy else 0, self._send)

    def _send(self) -> None:
        self._sending = None
        if self._to_free:
            self.tell(FreeGroups(tuple(self._to_free)))
            self._to_free = []
        for seconds, items in self._to_reserve.items():
            self.tell(ReserveGroups(tuple(items), seconds))
        self._to_reserve = {}

    # ------------------------------------------------------------------ the child

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        """One child after the other."""
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        pause = FIRST_PAUSE
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._one_child()
            except OSError as failure:
                self.problem = f"its process could not be started: {failure}"
                log.error("the Ray process could not be started: %s", failure)
            if asyncio.get_running_loop().time() - began > 60:
                pause = FIRST_PAUSE
            await asyncio.sleep(FINAL_PAUSE if self.is_final else pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _one_child(self) -> None:
        assert self._settings is not None
        if self._through:
            with short_path(self._through) as path:
                await self._serve_line(*await asyncio.open_unix_connection(path))
            return
        async with child("distributed_grid.adapters.ray") as line:
            await self._serve_line(*line)

    async def _serve_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak with a child until either side has enough of it."""
        assert self._settings is not None
        self._writer = writer
        try:
            writer.write(packed(self._settings))
            while (report := await next_report(reader)) is not None:
                self._take(report)
        except (OSError, ValueError, msgspec.DecodeError) as failure:
            log.error("the Ray process broke off: %s", failure)
        finally:
            self._was_lost()
            writer.close()  # which is what ends it

    def _take(self, report: Report) -> None:
        match report:
            case Connected():
                self.connected, self.problem, self.is_final = report, "", False
                log.info("connected with Ray %s, session %s", report.ray, report.session)
                self.tell(self._environ)
                self._on_up(report)
            case NotConnected():
                if report.why != self.problem:
                    log.warning("Ray: %s", report.why)
                self.problem, self.is_final = report.why, report.final
            case GroupsReserved():
                _settle(self._reserving.pop(report.name, None), report.problem)
            case GroupsFreed():
                _settle(self._freeing.pop(report.name, None), report.problem)
            case GroupsObserved() | Closed():
                _settle(self._asked.pop(report.number, None), report)
            case AgentLinkChanged() | StepDone() | RunFinished():
                self._on_link(report)

    def _was_lost(self) -> None:
        """The child is gone: what it was doing is not known."""
        self._writer = None
        if self.connected is not None:
            self.connected, self.problem = None, "its process ended; another one is started"
        self._to_reserve, self._to_free = {}, []
        waiting = [*self._reserving.values(), *self._freeing.values()]
        self._reserving, self._freeing = {}, {}
        for future in waiting:
            _settle(future, AWAY + (self.problem or "its process ended"))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Unreachable("the Ray process ended while it worked"))


def _settle(future: asyncio.Future[Any] | None, result: object) -> None:
    if future is not None and not future.done():
        future.set_result(result)


def item_of(group: EngineGroup) -> GroupSpec:
    """A group in Ray's words: cores and GPUs as fractions, memory in bytes."""
    resources = {"CPU": group.cpu_milli / 1000, "memory": float(group.memory_bytes), "GPU": group.gpu_milli / 1000}
    resources |= {name: float(count) for name, count in group.custom}
    return GroupSpec(group.name, group.place, {kind: amount for kind, amount in resources.items() if amount})


def view_of(seen: Mapping[str, Any]) -> EngineView:
    """What the keeper says, in the grid's words."""
    nodes = tuple(
        EngineNode(
            node["id"],
            node["name"],
            node["address"],
            node["hostname"],
            node["head"],
            EngineResources(*node["has"]),
            EngineResources(*node["room"]),
        )
        for node in seen["nodes"]
    )
    groups = seen["groups"]
    return EngineView(
        seen["session"], nodes, None if groups is None else tuple((name, place) for name, place in groups)
    )
