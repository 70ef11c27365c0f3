"""Memory service: allocates, finds, names and frees blocks, for the socket and for agents.

A block is granted, then served; its user gets it when its bytes can be written. Only its user gets the tickets of a
block. A refusal begins with a documented phrase, and goes on with what keeps each node from lending.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import heapq
from collections.abc import Callable
from typing import Any

import msgspec

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.id_prefixes import fits, not_found
from distributed_grid.control.grid import Grid
from distributed_grid.control.memory_gateway import issue_use_ticket
from distributed_grid.control.views import View
from distributed_grid.domain.blocks import Block, BlockCopy
from distributed_grid.domain.events import BlockAsked, BlockNamed, BlockReleased, BlocksRenewed
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import Ambiguous, BlockLost, NotFound, Refused, TimedOut, Unreachable
from distributed_grid.reactor import BlockAnswer
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import READ, USER, endpoint

TERM_SECONDS = 3600.0
"""How long a block lasts after its program last renewed it."""
OPEN_SECONDS = 30.0
"""How long a node may take to serve its memory for the first time, or an engine to reserve it."""
POLL_SECONDS = 0.2
MAX_PAGE_BLOCKS, MAX_PAGE_BYTES = 1000, 128 * 1024
ALLOCATION_FAILED = "Failed to allocate memory block"


class MemoryService:
    """Serves the requests of memory pools.

    `is_stopping` tells a client that hung up from a daemon that stops: only the former loses what it waited for.
    """

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        *,
        sharing_enabled: bool,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._sharing_enabled = sharing_enabled
        self._is_stopping = is_stopping

    @endpoint(USER)
    async def allocate(self, op: requests.AllocateBlock, caller: Caller, home: str = "") -> View:
        """Allocate a block, and wait until it can be used; with the same id again it is the same block."""
        if not self._sharing_enabled:
            raise Refused("Resource sharing not enabled")
        event = BlockAsked(
            op.request_id,
            caller.user,
            op.size,
            round(1000 * (op.ttl_seconds or TERM_SECONDS)),
            op.copies,
            op.name,
            op.meta,
            "" if op.ttl_seconds else op.session,
            home,
            op.preferred_node,
        )
        try:
            await self._grid.handle(event)
            return await self._wait_until_served(op.request_id)
        except asyncio.CancelledError:
            if not self._is_stopping():  # the client hung up: nobody would know of this block
                await asyncio.shield(self._drop(op.request_id, "its client went away"))
            raise

    async def _wait_until_served(self, block_id: str) -> View:
        grid = self._grid
        found = await grid.read(lambda ledger, now: self._view_if_served(ledger, block_id, now))
        if found is not None:
            return found
        changed = grid.watch(block_id)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                while True:
                    changed.clear()
                    found = await grid.read(lambda ledger, now: self._view_if_served(ledger, block_id, now))
                    if found is not None:
                        return found
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await changed.wait()
        except TimeoutError:
            why = f"its nodes did not open their memory within {OPEN_SECONDS:g} s"
            await self._drop(block_id, why)
            raise TimedOut(f"{ALLOCATION_FAILED}: {why}; nothing of it is held") from None
        except BlockLost as lost:
            await self._drop(block_id, str(lost))
            raise Refused(f"{ALLOCATION_FAILED}: {lost}; nothing of it is held", (str(lost),)) from lost
        finally:
            grid.unwatch(block_id, changed)

    async def _drop(self, block_id: str, why: str) -> None:
        block = await self._grid.read(lambda ledger, now: ledger.blocks.get(block_id))
        if block is not None:
            await self._grid.handle(BlockReleased(block_id, block.user, why))

    def _view_if_served(self, ledger: Ledger, block_id: str, now: int) -> View | None:
        """The answer about a block whose copies can all be used; None where one cannot yet."""
        block = ledger.blocks.get(block_id)
        if block is None or block.freeing:
            raise NotFound(f"no block is called {block_id!r}")
        if block.lost:
            raise BlockLost(block.detail)
        if all(_is_served(ledger, place) for place in block.places):
            return self._with_tickets(ledger, block, now)
        return None

    @endpoint(READ)
    async def find(self, op: requests.FindBlock, caller: Caller) -> View:
        """Where a block is now, with tickets to read and write it there."""
        return await self._grid.read(lambda ledger, now: self._found(ledger, op, caller, now))

    def _found(self, ledger: Ledger, op: requests.FindBlock, caller: Caller, now: int) -> View:
        block = _resolve(ledger, op.block_id, op.name, caller)
        if block.lost:
            raise BlockLost(f"block {block.id} ({block.size_bytes:,} bytes{_name_suffix(block)}) is {block.detail}")
        first = block.places[0]
        if not _is_served(ledger, first):
            raise Unreachable(f"{first.node or 'the control plane'} holds block {block.id}, and is not connected")
        return self._with_tickets(ledger, block, now)

    @endpoint(USER)
    async def free(self, op: requests.FreeBlock, caller: Caller) -> View:
        """Free a block."""
        block = await self._grid.read(lambda ledger, now: _resolve(ledger, op.block_id, op.name, caller))
        answer = await self._grid.handle(BlockReleased(block.id, block.user, f"deallocated by {caller.user}"))
        assert isinstance(answer, BlockAnswer)
        return {"block": self.view(answer.block)}

    @endpoint(USER)
    async def name(self, op: requests.NameBlock, caller: Caller) -> View:
        """Give a block its name; the block that had it is freed in the same step."""
        block = await self._grid.read(lambda ledger, now: _resolve(ledger, op.block_id, "", caller))
        term_ms = round(1000 * op.ttl_seconds)
        answer = await self._grid.handle(BlockNamed(block.id, block.user, op.name, op.meta, term_ms))
        assert isinstance(answer, BlockAnswer)
        return {"block": self.view(answer.block)}

    @endpoint(USER)
    async def renew(self, op: requests.RenewBlocks, caller: Caller) -> View:
        """Extend the blocks of a running program."""

        def count(ledger: Ledger, now: int) -> int:
            return sum(block.session == op.session and block.user == caller.user for block in ledger.blocks.values())

        await self._grid.handle(BlocksRenewed(op.session, caller.user))
        return {"renewed": await self._grid.read(count)}

    @endpoint(READ)
    async def list(self, op: requests.ListBlocks, caller: Caller) -> View:
        """The next page of the blocks that are not being freed, by their ids."""

        def page(ledger: Ledger, now: int) -> View:
            left = (block.id for block in ledger.blocks.values() if block.id > op.after and not block.freeing)
            ids = heapq.nsmallest(MAX_PAGE_BLOCKS + 1, left)
            rows: builtins.list[View] = []
            size = 0
            for block_id in ids[:MAX_PAGE_BLOCKS]:
                row = self.view(ledger.blocks[block_id])
                size += len(msgspec.json.encode(row))
                if rows and size > MAX_PAGE_BYTES:
                    break
                rows.append(row)
            return {"blocks": rows, "more": len(rows) < len(ids)}

        return await self._grid.read(page)

    @endpoint(READ)
    async def stats(self, op: requests.GetMemoryStats, caller: Caller) -> View:
        """Usage of the pool, in all and by node."""
        return await self._grid.read(_stats)

    def view(self, block: Block) -> View:
        """The JSON form of a block."""
        time = self._viewer().time
        return {
            "block_id": block.id,
            "name": block.name,
            "size": block.size_bytes,
            "user": block.user,
            "state": _state(block),
            "copies": block.copies,
            "nodes": [place.node for place in block.places if not place.on_disk],
            "on_disk": any(place.on_disk for place in block.places),
            "generation": block.generation,
            "created_at": time(block.made_at_ms),
            "expires_at": time(block.ends_at_ms),
            "term_seconds": block.term_ms / 1000,
            "session": bool(block.session),
            "meta": block.meta,
            "detail": block.detail,
        }

    def _with_tickets(self, ledger: Ledger, block: Block, now: int) -> View:
        places = [_copy_view(ledger, block, place, now) for place in block.places]
        return {"block": self.view(block), "places": places}


def _is_served(ledger: Ledger, place: BlockCopy) -> bool:
    """Whether a copy can be used now."""
    lender, lease = ledger.memory_servers.get(place.node), ledger.leases.get(place.copy)
    if lender is None or (lease is not None and lease.state is not LeaseState.ACTIVE):
        return False
    return place.on_disk or place.incarnation == lender.incarnation


def _copy_view(ledger: Ledger, block: Block, place: BlockCopy, now: int) -> dict[str, Any]:
    """Where a copy is, with its ticket; without an address where it cannot be used just now."""
    row: dict[str, Any] = {"node": place.node, "copy": place.copy, "on_disk": place.on_disk}
    if not _is_served(ledger, place):
        return {
            **row,
            "host": "",
            "port": 0,
            "fingerprint": "",
            "path": "",
            "incarnation": "",
            "claims": "",
            "secret": "",
        }
    lender, ticket = ledger.memory_servers[place.node], issue_use_ticket(ledger, block, place, now)
    return {
        **row,
        "host": lender.host,
        "port": lender.port,
        "fingerprint": lender.fingerprint,
        "path": lender.path,
        "incarnation": lender.incarnation,
        "claims": base64.b64encode(ticket.claims).decode(),
        "secret": base64.b64encode(ticket.secret).decode(),
    }


def _resolve(ledger: Ledger, block_id: str, name: str, caller: Caller) -> Block:
    """The block of this id, of this unique prefix, or of this name, if it is the caller's."""
    if name:
        found = [ledger.block_names.get((caller.user, name), "")]
    elif block_id in ledger.blocks:
        found = [block_id]
    else:
        found = [one for one in ledger.blocks if fits(one, block_id)]
    blocks = [ledger.blocks[one] for one in found if one in ledger.blocks and not ledger.blocks[one].freeing]
    if not blocks:
        raise NotFound(f"no block is called {name!r}") if name else not_found("block", block_id)
    if len(blocks) > 1:
        ids = sorted(block.id for block in blocks)
        raise Ambiguous(f"{block_id!r} fits several: {', '.join(ids[:5])}", ids)
    caller.must_own(blocks[0].user, f"block {blocks[0].id}")
    return blocks[0]


def _name_suffix(block: Block) -> str:
    return f", {block.name!r}" if block.name else ""


def _state(block: Block) -> str:
    if block.freeing:
        return "freeing"
    if block.lost:
        return "lost"
    return "moving" if block.moving is not None else "ready"


def _stats(ledger: Ledger, now: int) -> View:
    held: dict[str, list[int]] = {}
    for block in ledger.blocks.values():
        for place in block.places:
            held.setdefault(place.node if not place.on_disk else "disk", []).append(block.size_bytes)
    nodes = [
        {
            "node": name,
            "blocks": len(held.get(name, ())),
            "bytes": sum(held.get(name, ())),
            "free_bytes": _free_bytes(ledger, name),
            "serving": name in ledger.memory_servers,
            "address": _address(ledger, name),
        }
        for name, node in ledger.nodes.items()
        if not node.is_pull  # it has no agent, and so no memory server
    ]
    live = [block for block in ledger.blocks.values() if not block.freeing]
    return {
        "blocks": len(live),
        "bytes": sum(block.size_bytes for block in live),
        "bytes_on_disk": sum(held.get("disk", ())),
        "moving": sum(block.moving is not None for block in live),
        "lost": sum(block.lost for block in live),
        "nodes": nodes,
    }


def _free_bytes(ledger: Ledger, name: str) -> int:
    """The memory that a node still lends; one that is not open lends nothing."""
    row = ledger.columns.row_of(name)
    return max(int(ledger.columns.memory[row]), 0) if ledger.columns.open[row] else 0


def _address(ledger: Ledger, name: str) -> str:
    lender = ledger.memory_servers.get(name)
    return f"{lender.host}:{lender.port}" if lender is not None else ""
