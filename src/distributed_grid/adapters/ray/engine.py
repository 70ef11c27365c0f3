"""A Ray cluster as an engine, through a child process that is the driver.

Ray never runs in the process that owns the ledger: a driver dies with its Ray node. When the child is lost, its callers
get `Unreachable`, and ask the next one; `on_connected` is called for a new child, and returns the desired state for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeVar

from distributed_grid.adapters.child_process import ChildAnswer, ChildCommand, ChildProcess, Say, encode_command
from distributed_grid.adapters.node.node_messages import AgentLinkChanged, RunFinished
from distributed_grid.adapters.ray import driver_messages as messages
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import EngineNode
from distributed_grid.errors import Refused, Unreachable
from distributed_grid.ports import EngineGroup, EngineView

FINAL_PAUSE = 30.0
OBSERVE_SECONDS, CLOSE_SECONDS = 25.0, 90.0
BUSY_CALLS, GATHER_SECONDS = 4, 0.01
log = logging.getLogger(__name__)
A = TypeVar("A", bound=ChildAnswer)
T = TypeVar("T")


class RayEngine:
    """Commands to a Ray cluster, and its last known state."""

    def __init__(
        self,
        *,
        on_connected: Callable[[], Iterable[ChildCommand]] = lambda: (),
        on_link: Callable[[AgentLinkChanged], None] = lambda link: None,
    ) -> None:
        self._on_connected, self._on_link = on_connected, on_link
        self._child: ChildProcess[messages.RayReport] = ChildProcess(
            "distributed_grid.adapters.ray.driver",
            messages.COMMANDS,
            messages.REPORTS,
            label="Ray",
            on_connect=self._connect_child,
            on_report=self._receive,
            on_exit=self._child_exited,
            min_pause=lambda: FINAL_PAUSE if self.is_final else 0.0,
        )
        self._settings: messages.Connect | None = None
        self._socket = ""
        self._packages = messages.PackageSettings({}, "")
        self._reserving: dict[str, asyncio.Future[str]] = {}
        self._freeing: dict[str, asyncio.Future[str]] = {}
        self._to_reserve: dict[float, list[messages.GroupSpec]] = {}
        self._to_free: list[str] = []
        self._sending: asyncio.Handle | None = None
        self._lost = asyncio.Event()
        self.connected: messages.Connected | None = None
        self.problem = ""
        self.is_final = False

    # ------------------------------------------------------------------ the connection

    def connect(self, settings: messages.Connect, socket_path: str = "") -> None:
        """Be connected with this cluster from now on; with the same one again, try at once.

        The driver is a process of this machine, or what is behind the socket.
        """
        is_same = (settings, socket_path) == (self._settings, self._socket)
        if is_same and self._child.is_started and self.connected is not None:
            return
        try:
            encode_command(settings, messages.COMMANDS)
        except Refused as refused:
            self.problem, self.is_final = str(refused), True
            return
        self._settings, self._socket = settings, socket_path
        self.problem, self.is_final = "", False
        self._child.restart(socket_path)

    def retry(self) -> None:
        self._child.retry()

    async def wait_for_loss(self, seconds: float) -> None:
        """Return when a connection was lost since the last call, else after this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        self._lost.clear()

    async def stop(self) -> None:
        """End the child; groups in Ray stay. Safe twice."""
        await self._child.stop()

    def configure_packages(self, environ: dict[str, str], wheels: str) -> None:
        """From now on use these variables to fetch packages with; they stay in memory."""
        packages = messages.PackageSettings(environ or self._packages.environ, wheels)
        encode_command(packages, messages.COMMANDS)
        self._packages = packages
        self.send(self._packages)

    def send(self, command: ChildCommand) -> None:
        """Send a command to a connected child; the caller repeats a lost one."""
        self._child.send(command)

    async def run_on_node(
        self, operation: str, target: messages.AttachedNode, *, seconds: float, say: Say
    ) -> RunFinished:
        """Run an operation on an attached node, over every loss of the child. Raises TimeoutError."""
        return await self._child.request(
            RunFinished,
            lambda number: messages.RunOnAttachedNode(number, operation, target),
            seconds=seconds,
            on_step=say,
            resend=True,
        )

    # ------------------------------------------------------------------ the port

    async def reserve(self, group: EngineGroup, *, seconds: float) -> None:
        self._check_connected()
        future = self._reserving.get(group.name)
        if future is None:
            spec = group_spec(group)
            encode_command(
                messages.ReserveGroups((spec,), seconds), messages.COMMANDS
            )  # refused by itself, not with those beside it
            future = self._reserving[group.name] = asyncio.get_running_loop().create_future()
            self._to_reserve.setdefault(seconds, []).append(spec)
            self._send_soon()
        problem = await asyncio.shield(future)
        if problem.startswith(messages.AWAY):
            raise Unreachable(f"Ray does not answer: {problem.removeprefix(messages.AWAY)}")
        if problem:
            raise Refused(problem)

    async def free(self, name: str) -> None:
        self._check_connected()
        future = self._freeing.get(name)
        if future is None:
            future = self._freeing[name] = asyncio.get_running_loop().create_future()
            self._to_free.append(name)
            self._send_soon()
        problem = await asyncio.shield(future)
        if problem:
            raise Unreachable(f"Ray does not answer: {problem.removeprefix(messages.AWAY)}")

    async def observe(self, *, full: bool) -> EngineView:
        seen = await self._request(
            messages.GroupsObserved, lambda number: messages.ObserveGroups(number, full), OBSERVE_SECONDS
        )
        if seen.problem or seen.view is None:
            raise Unreachable(f"Ray does not answer: {seen.problem}")
        return parse_view(seen.view)

    async def extend_hold(self, seconds: float, terms: Mapping[str, float]) -> Collection[str]:
        missing: list[str] = []
        for part in batched(terms.items()) or [()]:
            held = await self._request(
                messages.HoldExtended,
                partial(messages.ExtendGroupHold, seconds=seconds, terms=dict(part)),
                OBSERVE_SECONDS,
            )
            if held.problem:
                raise Unreachable(f"Ray does not answer: {held.problem}")
            missing += held.missing
        return missing

    async def clear(self) -> None:
        closed = await self._request(messages.Closed, messages.Close, CLOSE_SECONDS)
        if closed.problem:
            raise Unreachable(f"Ray could not be cleared: {closed.problem}")

    async def _request(self, answer: type[A], command: Callable[[int], ChildCommand], seconds: float) -> A:
        self._check_connected()
        try:
            return await self._child.request(answer, command, seconds=seconds)
        except TimeoutError:
            raise Unreachable(f"Ray did not answer within {seconds:g} s") from None

    def _check_connected(self) -> None:
        if self.connected is None:
            raise Unreachable(self.problem or "Ray is not connected")

    def _send_soon(self) -> None:
        """One message for all requests of one turn of the loop, or of a moment while Ray is busy."""
        if self._sending is None:
            busy = len(self._reserving) + len(self._freeing) > BUSY_CALLS
            self._sending = asyncio.get_running_loop().call_later(GATHER_SECONDS if busy else 0, self._send_gathered)

    def _send_gathered(self) -> None:
        self._sending = None
        for names in batched(self._to_free):
            self.send(messages.FreeGroups(names))
        for seconds, items in self._to_reserve.items():
            for part in batched(items):
                self.send(messages.ReserveGroups(part, seconds))
        self._to_free, self._to_reserve = [], {}

    # ------------------------------------------------------------------ the child

    def _connect_child(self) -> None:
        assert self._settings is not None
        self._child.write(self._settings)

    def _receive(self, report: messages.RayReport) -> None:
        match report:
            case messages.Connected():
                self.connected, self.problem, self.is_final = report, "", False
                log.info("connected with Ray %s, session %s", report.ray, report.session)
                self._child.mark_ready((self._packages, *self._on_connected()))
            case messages.RayRefused():
                if report.why != self.problem:
                    log.warning("Ray: %s", report.why)
                self.problem, self.is_final = report.why, report.final
            case messages.PlacementGroupReserved():
                _settle(self._reserving.pop(report.name, None), report.problem)
            case messages.PlacementGroupFreed():
                _settle(self._freeing.pop(report.name, None), report.problem)
            case AgentLinkChanged():
                self._on_link(report)

    def _child_exited(self, problem: str) -> None:
        """Fail the calls under way: their outcome is unknown."""
        if self.connected is not None:
            self.connected, self.problem = None, "its process ended; another one is started"
            self._lost.set()
        self.problem = problem or self.problem
        self._to_reserve, self._to_free = {}, []
        waiting = [*self._reserving.values(), *self._freeing.values()]
        self._reserving, self._freeing = {}, {}
        for future in waiting:
            _settle(future, messages.AWAY + (self.problem or "its process ended"))


def batched(items: Iterable[T]) -> list[tuple[T, ...]]:
    rest = tuple(items)
    return [rest[start : start + messages.MAX_GROUPS] for start in range(0, len(rest), messages.MAX_GROUPS)]


def _settle(future: asyncio.Future[str] | None, result: str) -> None:
    if future is not None and not future.done():
        future.set_result(result)


def group_spec(group: EngineGroup) -> messages.GroupSpec:
    """A group in Ray's terms: cores and GPUs as fractions, memory in bytes."""
    resources = {"CPU": group.cpu_milli / 1000, "memory": float(group.memory_bytes), "GPU": group.gpu_milli / 1000}
    resources |= {name: float(count) for name, count in group.custom}
    used = {kind: amount for kind, amount in resources.items() if amount}
    return messages.GroupSpec(group.name, group.place, used, group.left_seconds)


def parse_view(seen: messages.RayView) -> EngineView:
    """The placement group actor's report in the grid's terms."""
    nodes = tuple(
        EngineNode(
            id=node.id,
            name=node.name,
            address=node.address,
            hostname=node.hostname,
            head=node.head,
            has=EngineResources(*node.has),
            room=EngineResources(*node.room),
        )
        for node in seen.nodes
    )
    return EngineView(seen.session, nodes, seen.groups, seen.in_use)
