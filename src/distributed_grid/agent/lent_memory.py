"""The memory that a node lends: its memory server kept, orders about copies passed on, the owner's need told.

Rule 1. Nothing of a copy is given up here for the owner's sake: the control plane is told how much is needed, and moves
        copies away whole. Only when a hold has run out does the memory server let go of everything by itself.
Rule 2. The memory server is one for all nodes of an agent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.memory_proxy import MemoryQueryProxy
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.memory.supervisor.supervisor import ServerSupervisor
from distributed_grid.wire import (
    CopiesFreedReport,
    CopyMadeReport,
    Endpoint,
    FreeCopiesOrder,
    MakeCopyOrder,
    MemoryFailedReport,
    MemoryOrder,
    MemoryQuery,
    MemoryReclaimReport,
    MemoryReply,
    MemoryReport,
    MemoryServedReport,
    OwnerRules,
    ServeMemoryOrder,
)

DESK = "query.sock"
LOOK_SECONDS = 0.5
TELL_EVERY = 4
"""A need that lasts is told again after so many looks."""
KEPT_MILLI = 150
"""So much of the memory is free at any time, or less where the rules ask for less."""
RELIEF_MILLI = 1200
"""As much more than what must be free is made free, so that the next byte does not bring the need back."""
log = logging.getLogger(__name__)


class LentMemory:
    """Keeps the memory server of a machine and watches for its owner; `tell` is where its reports go.

    Where the control plane is on another machine (`has_desk`), programs of this one ask their questions here.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Iterable[str],
        meter: UsageMeter,
        host: AttemptHost,
        tell: Callable[[MemoryReport | MemoryQuery], None],
        *,
        addresses: Callable[[], Iterable[str]] = tuple,
        has_desk: bool = True,
    ) -> None:
        self._nodes = tuple(nodes)
        self._meter = meter
        self._host = host
        self._tell = tell
        self._addresses = addresses
        self._supervisor = ServerSupervisor(folder, report=self._heard)
        self.desk = MemoryQueryProxy(folder / DESK, tell) if has_desk else None
        self._orders: asyncio.Queue[MemoryOrder] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.rules: OwnerRules | None = None

    async def start(self) -> None:
        """Find the memory server that outlived the last agent, if there is one; it is started when it is needed."""
        await self._supervisor.start()
        self._meter.count_lent_memory(self._supervisor.measure_bytes)
        if self.desk is not None:
            await self.desk.start()
        self._tasks = [asyncio.create_task(work) for work in (self._obey(), self._watch())]

    async def stop(self) -> None:
        """Stop watching; a memory server that holds something goes on. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.desk is not None:
            await self.desk.stop()
        await self._supervisor.stop()

    def order(self, order: MemoryOrder | MemoryReply) -> None:
        """Take an order in; they are carried out one after the other. Answers go to the program that asked."""
        if not isinstance(order, MemoryReply):
            self._orders.put_nowait(order)
        elif self.desk is not None:
            self.desk.answered(order)

    def unlinked(self) -> None:
        """The link is gone."""
        if self.desk is not None:
            self.desk.unlinked()

    def tell_again(self) -> None:
        """A new link is there: say how the memory can be used."""
        for node in self._nodes:
            served = self._supervisor.served(node)
            if served is not None:
                self._tell(served)

    def hold(self, until_boot_ms: int) -> None:
        """Let everything be kept until then; 0 is without end."""
        self._supervisor.extend_hold(until_boot_ms)

    @property
    def resident_bytes(self) -> int:
        """How much memory the copies here use."""
        return self._supervisor.resident_bytes

    # ------------------------------------------------------------------ orders

    def _heard(self, report: MemoryServedReport | MemoryFailedReport | CopyMadeReport | CopiesFreedReport) -> None:
        if isinstance(report, MemoryServedReport):
            for node in self._nodes:
                self._tell(replace(report, node=node))
        else:
            self._tell(report)

    async def _obey(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                await self._carry_out(order)
            except Exception as failure:  # the outermost loop: the next order may well succeed
                log.warning("a memory order failed", exc_info=failure)
                if isinstance(order, ServeMemoryOrder):
                    self._tell(MemoryFailedReport(order.node, str(failure) or type(failure).__name__))

    async def _carry_out(self, order: MemoryOrder) -> None:
        if isinstance(order, ServeMemoryOrder):
            host = await asyncio.to_thread(own_address, [*self._addresses(), order.host])
            served = self._supervisor.served(order.node)
            if served is not None and _is_as_ordered(served.endpoint, host, order):
                self._heard(served)
            else:
                await self._supervisor.serve(replace(order, host=host))
        elif isinstance(order, MakeCopyOrder):
            self._supervisor.make_copy(order)
        elif isinstance(order, FreeCopiesOrder):
            self._supervisor.free_copies(order.copies)

    # ------------------------------------------------------------------ the owner

    async def _watch(self) -> None:
        """Tell what the owner needs when two looks in a row show it, and again while it lasts."""
        looks = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            wanted = self._wanted()
            looks = looks + 1 if wanted else 0
            if looks % TELL_EVERY == 2:
                log.info("the owner needs %d bytes of what blocks hold", wanted)
                self._tell(MemoryReclaimReport(self._nodes[0], wanted))

    def _wanted(self) -> int:
        if self.rules is None or not self.resident_bytes:
            return 0
        total, used, outside = self._meter.memory(self._host.usage())
        return min(wanted_back(self.rules, total=total, used=used, outside=outside), self.resident_bytes)


def _is_as_ordered(endpoint: Endpoint, host: str, order: ServeMemoryOrder) -> bool:
    """Whether what is served is what is wanted; another certificate is as good as the one it has."""
    return endpoint.host == host and bool(endpoint.fingerprint) == bool(order.certificate)


def wanted_back(rules: OwnerRules, *, total: int, used: int, outside: int) -> int:
    """How many bytes have to go so that the owner has what is the owner's.

    That is everything above the mark, when the owner alone is above it; and at any time a part of the memory that is
    free. That part is below what is never lent, so that lending alone does not bring the need about.
    """
    keep, free = min(rules.memory_min_bytes, total * KEPT_MILLI // 1000), total - used
    short = keep * RELIEF_MILLI // 1000 - free if free < keep else 0
    mark = total * rules.memory_used_max_milli // 1000
    return max(short, used - mark if outside > mark else 0, 0)


def own_address(names: Iterable[str]) -> str:
    """The first of these that is an address of this machine; "local" is this machine alone."""
    for name in names:
        if name == "local":
            return "127.0.0.1"
        for address in _addresses_of(name):
            if _is_ours(address):
                return address
    raise OSError("none of the addresses that the cluster has for this machine is its own")


def address_towards(name: str) -> str:
    """The address from which this machine reaches another; nothing is sent to find out. Empty where it does not."""
    for address in _addresses_of(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return ""


def _addresses_of(name: str) -> list[str]:
    if not name:
        return []
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
