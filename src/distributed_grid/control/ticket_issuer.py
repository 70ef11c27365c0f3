"""Tickets: what lets a program, or another node, use a copy of a block for a while.

Rule 1. A ticket names one copy, one generation and one life of its lender's memory; nothing else can be used with it.
Rule 2. Its times are the lender's own: counted from the last heartbeat that was heard of it.
"""

from __future__ import annotations

from distributed_grid.domain.blocks import Block, BlockCopy, MemoryServerRow
from distributed_grid.domain.ledger import Ledger
from distributed_grid.memory.protocol.authentication import (
    FILL,
    READ,
    TICKET_LIFE_MS,
    WRITE,
    TicketClaims,
    issue_ticket,
)
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import Endpoint, Ticket


def ticket_to_use(ledger: Ledger, block: Block, place: BlockCopy, now: int) -> Ticket:
    """The ticket for a place of a block, as its places are now."""
    return _ticket(ledger, block, place, block.generation, READ | WRITE, now)


def ticket_to_fill(ledger: Ledger, block: Block, now: int) -> Ticket:
    """The ticket for the copy that is being made of a block."""
    assert block.moving is not None
    return _ticket(ledger, block, block.moving.place, block.moving.generation, READ | WRITE | FILL, now)


def endpoint_of(lender: MemoryServerRow) -> Endpoint:
    """Where the memory of a node is served."""
    return Endpoint(lender.host, lender.port, lender.fingerprint, lender.path, lender.incarnation)


def _ticket(ledger: Ledger, block: Block, place: BlockCopy, generation: int, rights: int, now: int) -> Ticket:
    lender = ledger.memory_servers[place.node]
    there = _boot_time(ledger, place.node, now)
    claims = TicketClaims(
        place.copy,
        generation,
        block.size_bytes,
        rights,
        there + TICKET_LIFE_MS,
        there + max(block.ends_at_ms - now, 0),
        lender.incarnation,
        place.on_disk,
    )
    return issue_ticket(lender.key_bytes, claims)


def _boot_time(ledger: Ledger, node: str, now: int) -> int:
    """How long the machine of a node has been running, by its own clock: a heartbeat's number is when it was sent."""
    seen = ledger.observations.get(node)
    return seen.beat + max(now - seen.at_ms, 0) if seen is not None and seen.beat else boot_ms()
