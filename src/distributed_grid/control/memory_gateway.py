"""Gateway to the memory that nodes lend: reports become events, effects become orders, users get tickets."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from distributed_grid.control.agent_sessions import LedgerOwner
from distributed_grid.domain import events
from distributed_grid.domain.blocks import Block, BlockCopy, MemoryServerRow, block_of
from distributed_grid.domain.ledger import Ledger
from distributed_grid.memory.protocol.frames import (
    FILL,
    READ,
    TICKET_LIFE_MS,
    WRITE,
    TicketClaims,
    issue_ticket,
)
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.reactor.effects import (
    FreeCopies,
    MemoryEffect,
    ServeMemory,
    memory_effects,
    overdue_memory,
)
from distributed_grid.wire import (
    MAX_CONNECTIONS_PER_PEER,
    MAX_COPIES,
    MAX_IDS,
    AgentSide,
    CopiesFreedReport,
    CopiesPage,
    CopyMadeReport,
    Endpoint,
    FreeCopiesOrder,
    MakeCopyOrder,
    MemoryFailedReport,
    MemoryReclaimReport,
    MemoryReport,
    MemoryServedReport,
    ServeMemoryOrder,
    Ticket,
    pages,
)

MAX_COPIES_PER_EVENT = 200  # between two events others have their turn at the ledger
log = logging.getLogger(__name__)


class IssueCertificate(Protocol):
    def __call__(self, node: str) -> tuple[bytes, bytes]:
        """A certificate for the memory server of a node and its key, as PEM; empty where the network is trusted."""


class MemoryGateway:
    """Sends orders for memory effects to the connected agents, and handles their reports."""

    def __init__(
        self,
        grid: LedgerOwner,
        agents: Mapping[str, AgentSide],
        issue_certificate: IssueCertificate = lambda node: (b"", b""),
        max_connections_per_peer: int = MAX_CONNECTIONS_PER_PEER,
    ) -> None:
        self._grid = grid
        self._agents = agents
        self._issue_certificate = issue_certificate
        self._max_connections_per_peer = max_connections_per_peer
        self._local: AgentSide | None = None
        self._unwanted: dict[str, dict[str, None]] = {}  # by node, copies that no block has
        self._listing: dict[tuple[AgentSide, str], MemoryServedReport] = {}

    def attach_local(self, agent: AgentSide) -> None:
        """Attach the agent of the control plane's own machine: it serves the node without a name, too."""
        self._local = agent

    def perform(self, effect: MemoryEffect) -> None:
        """Send the order of an effect to its agent; for an absent node it is derived again when it is back."""
        agent = self._agent(effect.node)
        if agent is None:
            return
        ledger = self._grid.ledger
        if isinstance(effect, FreeCopies):
            self._free(effect.copies, effect.node, agent)
        elif isinstance(effect, ServeMemory):
            certificate, key = self._issue_certificate(effect.node)
            node = ledger.nodes.get(effect.node)
            host = node.host if node is not None else "local"
            agent.send(ServeMemoryOrder(effect.node, certificate, key, host, self._max_connections_per_peer))
        else:
            moving = effect.block.moving
            assert moving is not None
            lender = ledger.memory_servers[moving.place.node]
            target = Endpoint(lender.host, lender.port, lender.fingerprint, lender.path, lender.incarnation)
            rights, now = READ | WRITE | FILL, self._grid.now_ms()
            ticket = _issue(ledger, effect.block, moving.place, moving.generation, rights, now)
            agent.send(MakeCopyOrder(moving.source, moving.generation, target, ticket, effect.node))

    def catch_up(self, node: str) -> None:
        """Send again all pending orders to a node that has just (re)appeared."""
        for effect in memory_effects(self._grid.ledger, node=node):
            self.perform(effect)

    def resend(self, node: str) -> None:
        """Send the orders again that a node has not reported done, and to free copies that no block has."""
        agent = self._agent(node)
        for name in (node, "") if agent is self._local else (node,):
            for effect in overdue_memory(self._grid.ledger, name):
                self.perform(effect)
        unwanted = tuple(self._unwanted.get(node, ()))[:MAX_IDS]
        if agent is not None and unwanted:
            agent.send(FreeCopiesOrder(unwanted, node))

    async def unknown(self, node: str) -> None:
        """Forget the address of a new agent's memory server until it reports it."""
        if node in self._grid.ledger.memory_servers:
            await self._grid.handle_with_retry(events.MemoryServed(MemoryServerRow(node=node, gone=True)))

    def gone(self, via: AgentSide) -> None:
        """An agent's connection has ended: drop its incomplete lists. Safe twice."""
        for key in [key for key in self._listing if key[0] is via]:
            del self._listing[key]

    async def received(self, message: MemoryReport, via: AgentSide) -> None:
        """Handle a report; a repeated one changes nothing. One in pages counts when the last is there."""
        nodes = (*via.nodes, "") if via is self._local else via.nodes
        if not isinstance(message, CopyMadeReport | CopiesFreedReport) and message.node not in nodes:
            return
        if isinstance(message, MemoryServedReport | CopiesPage):
            whole = self._completed(message, via)
            if whole is None:
                return
            message = whole
        if isinstance(message, CopiesFreedReport):
            for start in range(0, len(message.copies), MAX_COPIES_PER_EVENT):
                await self._grid.handle_with_retry(
                    events.CopiesFreed(message.copies[start : start + MAX_COPIES_PER_EVENT], nodes)
                )
            for node in nodes:
                unwanted = self._unwanted.get(node, {})
                for copy in message.copies:
                    unwanted.pop(copy, None)
            return
        await self._grid.handle_with_retry(event_of(message, nodes))
        if isinstance(message, MemoryServedReport):
            unknown = await self._grid.read(lambda ledger, now: _unknown_copies(ledger, message))
            self._unwanted[message.node] = dict.fromkeys(unknown)
            self._free(unknown, message.node, via)

    def _completed(self, page: MemoryServedReport | CopiesPage, via: AgentSide) -> MemoryServedReport | None:
        """The report with all of its pages; None while one is missing."""
        before = self._listing.pop((via, page.node), None)
        if isinstance(page, MemoryServedReport):
            whole = page
        elif before is None:
            return None
        else:
            copies, on_disk = before.copies + page.copies, before.on_disk + page.on_disk
            whole = replace(before, copies=copies, on_disk=on_disk, more=page.more)
        if len(whole.copies) + len(whole.on_disk) > MAX_COPIES:
            log.warning("%s lists more than %d copies: none of them counts", page.node, MAX_COPIES)
            return None
        if whole.more:
            self._listing[via, page.node] = whole
            return None
        return whole

    @staticmethod
    def _free(copies: Sequence[str], node: str, agent: AgentSide) -> None:
        for page in pages(len(copies), MAX_IDS) if copies else ():
            agent.send(FreeCopiesOrder(tuple(copies[page]), node))

    def _agent(self, node: str) -> AgentSide | None:
        return self._agents.get(node) or (self._local if not node else None)


def event_of(
    message: MemoryServedReport | MemoryFailedReport | CopyMadeReport | MemoryReclaimReport, nodes: tuple[str, ...]
) -> events.Event:
    if isinstance(message, MemoryServedReport):
        endpoint = message.endpoint
        lender = MemoryServerRow(
            node=message.node,
            host=endpoint.host,
            port=endpoint.port,
            fingerprint=endpoint.fingerprint,
            path=endpoint.path,
            incarnation=endpoint.incarnation,
            key_bytes=message.key,
        )
        return events.MemoryServed(lender, message.on_disk)
    if isinstance(message, MemoryFailedReport):
        return events.MemoryServed(MemoryServerRow(node=message.node, gone=True), problem=message.problem)
    if isinstance(message, CopyMadeReport):
        return events.CopyMade(message.source, message.generation, message.problem, nodes)
    return events.MemoryReclaimRequested(message.node, message.memory_bytes)


def _unknown_copies(ledger: Ledger, message: MemoryServedReport) -> list[str]:
    """The copies that a node holds and no block has."""

    def is_known(copy: str) -> bool:
        block = ledger.blocks.get(block_of(copy))
        return block is not None and any(place.copy == copy for place in block.everywhere)

    return [copy for copy in (*message.copies, *message.on_disk) if not is_known(copy)]


def issue_use_ticket(ledger: Ledger, block: Block, copy: BlockCopy, now: int) -> Ticket:
    return _issue(ledger, block, copy, block.generation, READ | WRITE, now)


def _issue(ledger: Ledger, block: Block, copy: BlockCopy, generation: int, rights: int, now: int) -> Ticket:
    lender, seen = ledger.memory_servers[copy.node], ledger.observations.get(copy.node)
    # times in tickets are by the node's boot clock; the number of its last heartbeat is when that was sent
    node_now = seen.beat + max(now - seen.at_ms, 0) if seen is not None and seen.beat else boot_ms()
    claims = TicketClaims(
        copy.copy,
        generation,
        block.size_bytes,
        rights,
        expires_boot_ms=node_now + TICKET_LIFE_MS,
        ends_boot_ms=node_now + max(block.ends_at_ms - now, 0),
        incarnation=lender.incarnation,
        on_disk=copy.on_disk,
    )
    return issue_ticket(lender.key_bytes, claims)
