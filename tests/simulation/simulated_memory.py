"""Simulated memory of a machine: the copies of blocks in its memory server and on its disk, and the orders about them.

A memory server outlives its agent. What it has in memory ends with the power, or with the hold of its machine; then the
next incarnation begins. What is on disk stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from distributed_grid.memory.protocol.frames import read_claims
from distributed_grid.replay.event_queue import EventQueue
from distributed_grid.wire import (
    CopiesFreedReport,
    CopyMadeReport,
    Endpoint,
    FreeCopiesOrder,
    FromAgent,
    MakeCopyOrder,
    MemoryOrder,
    MemoryServedReport,
    ServeMemoryOrder,
)

KEY = b"k" * 32
MAX_COPY_MS, MAX_ORDER_MS = 5_000, 50


class SimulatedMemory:
    """Copies in the memory server of one machine; `incarnation` is empty while none runs."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.incarnation = ""
        self.in_memory: set[str] = set()
        self.on_disk: set[str] = set()
        self._freed: set[str] = set()
        self._incarnations = 0

    def serve(self) -> None:
        """Have a server run; safe twice."""
        if not self.incarnation:
            self._incarnations += 1
            self.incarnation = f"{self.node}-{self._incarnations}"

    def lose(self) -> None:
        """The power is gone, and with it the server and what was in memory."""
        self.in_memory.clear()
        self.incarnation = ""

    def expire(self) -> None:
        """The hold is over: everything in memory is freed, and another incarnation begins."""
        if self.incarnation:
            self.lose()
            self.serve()

    def put(self, copy: str, *, on_disk: bool = False) -> None:
        """A client has written to a copy, so that it exists; freed copies stay freed."""
        if copy not in self._freed:
            (self.on_disk if on_disk else self.in_memory).add(copy)

    def free(self, copies: tuple[str, ...]) -> None:
        """Have these no more; those that are not here are no error."""
        self._freed.update(copies)
        self.in_memory.difference_update(copies)
        self.on_disk.difference_update(copies)

    def served(self) -> MemoryServedReport:
        endpoint = Endpoint(self.node, 1, incarnation=self.incarnation)
        return MemoryServedReport(
            node=self.node,
            endpoint=endpoint,
            key=KEY,
            copies=tuple(sorted(self.in_memory)),
            on_disk=tuple(sorted(self.on_disk)),
        )


class SimulatedLending:
    """Carries out an agent's orders about memory; `reaches` says whether a machine can be reached from here."""

    def __init__(
        self,
        memories: Mapping[str, SimulatedMemory],
        node: str,
        queue: EventQueue,
        random: Random,
        *,
        send: Callable[[FromAgent], None],
        is_alive: Callable[[], bool],
        reaches: Callable[[str], bool],
    ) -> None:
        self._memories = memories
        self._memory = memories[node]
        self._queue = queue
        self._random = random
        self._send = send
        self._is_alive = is_alive
        self._reaches = reaches
        self._making: set[tuple[str, int]] = set()

    def report_served(self) -> None:
        """Report how the memory can be used, as on a new link."""
        if self._memory.incarnation:
            self._send(self._memory.served())

    def receive(self, order: MemoryOrder) -> None:
        """Carry an order out in a moment; one that makes a copy takes a while, and is carried out once."""
        delay = self._random.randint(1, MAX_ORDER_MS)
        if isinstance(order, MakeCopyOrder):
            if (order.source, order.generation) in self._making:
                return
            self._making.add((order.source, order.generation))
            delay = self._random.randint(MAX_ORDER_MS, MAX_COPY_MS)
        self._queue.after(delay, lambda: self._carry_out(order))

    def _carry_out(self, order: MemoryOrder) -> None:
        if not self._is_alive():
            return
        if isinstance(order, ServeMemoryOrder):
            self._memory.serve()
            self.report_served()
        elif isinstance(order, FreeCopiesOrder):
            self._memory.free(order.copies)
            self._send(CopiesFreedReport(order.copies))
        else:
            self._making.discard((order.source, order.generation))
            self._send(CopyMadeReport(order.source, order.generation, self._make_copy(order)))

    def _make_copy(self, order: MakeCopyOrder) -> str:
        """Make it at the other machine; why that did not work, or nothing."""
        claims, target = read_claims(order.ticket.claims), self._memories[order.target.host]
        if not self._memory.incarnation:
            return f"{order.source} is not here"
        if not self._reaches(target.node) or target.incarnation != order.target.incarnation:
            return f"{target.node} does not answer"
        target.put(claims.copy, on_disk=claims.on_disk)
        return ""
