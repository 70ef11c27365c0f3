"""The control plane's end of the memory that nodes lend: reports become events, effects become orders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from distributed_grid.control.grid import Grid
from distributed_grid.control.ticket_issuer import endpoint_of, ticket_to_fill
from distributed_grid.domain import events
from distributed_grid.domain.blocks import MemoryServerRow, block_of
from distributed_grid.domain.effects import FreeCopies, MakeCopy, MemoryEffect, ServeMemory
from distributed_grid.domain.ledger import Ledger
from distributed_grid.reactor import pending_memory
from distributed_grid.wire import (
    AgentSide,
    CopiesFreedReport,
    CopyMadeReport,
    FreeCopiesOrder,
    MakeCopyOrder,
    MemoryFailedReport,
    MemoryOrder,
    MemoryReclaimReport,
    MemoryReport,
    MemoryServedReport,
    ServeMemoryOrder,
)

MOST_AT_ONCE = 10_000
"""So many copies are named in one order."""
MOST_IN_ONE_EVENT = 200
"""So many are settled at once; whoever else waits for the ledger comes in between."""


class Certificates(Protocol):
    """What proves memory servers to those who use them."""

    def __call__(self, node: str) -> tuple[bytes, bytes]:
        """A certificate for the memory of a node and its key, as PEM; nothing where the network is trusted."""


class MemoryGateway:
    """Orders what blocks call for from the agents that are connected, and takes in what they say of it."""

    def __init__(self, agents: Mapping[str, AgentSide]) -> None:
        self._agents = agents
        self._grid: Grid | None = None
        self._certificates: Certificates = lambda node: (b"", b"")
        self._local: AgentSide | None = None

    def start(self, grid: Grid, certificates: Certificates | None = None) -> None:
        self._grid = grid
        self._certificates = certificates or self._certificates

    def attach_local(self, agent: AgentSide) -> None:
        """The agent of the control plane's own machine is there: it serves the node without a name, too."""
        self._local = agent

    def perform(self, effects: list[MemoryEffect]) -> None:
        """Send the orders that make the effects happen; those for a node that is away are derived anew when it is
        back."""
        for effect in effects:
            agent = self._agent(effect.node)
            if agent is not None:
                self._order(effect, agent)

    def catch_up(self, node: str) -> None:
        """Order again what blocks call for on a node that has just (re)appeared."""
        assert self._grid is not None
        self.perform(pending_memory(self._grid.ledger, node))

    async def unknown(self, node: str) -> None:
        """An agent is new: how the memory of its node can be used is not known until it says so."""
        assert self._grid is not None
        if node in self._grid.ledger.memory_servers:
            await self._grid.handle_with_retry(events.MemoryServed(MemoryServerRow(node, gone=True)))

    async def received(self, message: MemoryReport, via: AgentSide) -> None:
        """Take a report in; a repeated one changes nothing."""
        assert self._grid is not None
        nodes = (*via.nodes, "") if via is self._local else via.nodes
        if (
            isinstance(message, MemoryServedReport | MemoryFailedReport | MemoryReclaimReport)
            and message.node not in nodes
        ):
            return
        if isinstance(message, CopiesFreedReport):
            for at in range(0, len(message.copies), MOST_IN_ONE_EVENT):
                await self._grid.handle_with_retry(
                    events.CopiesFreed(message.copies[at : at + MOST_IN_ONE_EVENT], nodes)
                )
            return
        await self._grid.handle_with_retry(event_of(message, nodes))
        if isinstance(message, MemoryServedReport):
            unwanted = await self._grid.read(lambda ledger, now: _unwanted(ledger, message))
            for at in range(0, len(unwanted), MOST_AT_ONCE):
                via.send(FreeCopiesOrder(tuple(unwanted[at : at + MOST_AT_ONCE])))

    def _agent(self, node: str) -> AgentSide | None:
        return self._agents.get(node) or (self._local if not node else None)

    def _order(self, effect: MemoryEffect, agent: AgentSide) -> None:
        assert self._grid is not None
        if isinstance(effect, FreeCopies):
            for at in range(0, len(effect.copies), MOST_AT_ONCE):
                agent.send(FreeCopiesOrder(effect.copies[at : at + MOST_AT_ONCE]))
            return
        agent.send(self._order_of(effect))

    def _order_of(self, effect: ServeMemory | MakeCopy) -> MemoryOrder:
        assert self._grid is not None
        ledger = self._grid.ledger
        if isinstance(effect, ServeMemory):
            certificate, key = self._certificates(effect.node)
            node = ledger.nodes.get(effect.node)
            return ServeMemoryOrder(effect.node, certificate, key, node.host if node is not None else "local")
        moving = effect.block.moving
        assert moving is not None
        target = endpoint_of(ledger.memory_servers[moving.place.node])
        ticket = ticket_to_fill(ledger, effect.block, self._grid.now_ms())
        return MakeCopyOrder(moving.source, moving.generation, target, ticket)


def event_of(
    message: MemoryServedReport | MemoryFailedReport | CopyMadeReport | MemoryReclaimReport, nodes: tuple[str, ...]
) -> events.Event:
    """What a report of an agent that serves these nodes means."""
    if isinstance(message, MemoryServedReport):
        at = message.endpoint
        lender = MemoryServerRow(message.node, at.host, at.port, at.fingerprint, at.path, at.incarnation, message.key)
        return events.MemoryServed(lender, message.on_disk)
    if isinstance(message, MemoryFailedReport):
        return events.MemoryServed(MemoryServerRow(message.node, gone=True), problem=message.problem)
    if isinstance(message, CopyMadeReport):
        return events.CopyMade(message.source, message.generation, message.problem, nodes)
    return events.MemoryWanted(message.node, message.memory_bytes)


def _unwanted(ledger: Ledger, message: MemoryServedReport) -> list[str]:
    """The copies that a node has and no block knows of."""
    return [copy for copy in (*message.copies, *message.on_disk) if not _is_known(ledger, copy)]


def _is_known(ledger: Ledger, copy: str) -> bool:
    block = ledger.blocks.get(block_of(copy))
    return block is not None and any(place.copy == copy for place in block.everywhere)
