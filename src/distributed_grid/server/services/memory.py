"""Memory service: allocates, finds, names and frees blocks, for the socket and for agents.

A block is granted, then served; its user gets it when its bytes can be written. Only its user gets the tickets of a
block. A refusal begins with a documented phrase, followed by each node's reasons not to lend.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import heapq
from collections.abc import Callable

import msgspec

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.memory import (
    BlockDetail,
    BlockList,
    BlockPlace,
    BlockRow,
    LenderRow,
    LocatedBlock,
    MemoryStats,
    RenewedBlocks,
)
from distributed_grid.api.id_prefixes import fits, not_found
from distributed_grid.control.grid import Grid
from distributed_grid.control.memory_gateway import issue_use_ticket
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
    async def allocate(self, op: requests.AllocateBlock, caller: Caller, home: str = "") -> LocatedBlock:
        """Allocate a block, and wait until it can be used; the same id again is the same block."""
        if not self._sharing_enabled:
            raise Refused("Resource sharing not enabled")
        event = BlockAsked(
            id=op.request_id,
            user=caller.user,
            size_bytes=op.size,
            term_ms=round(1000 * (op.ttl_seconds or TERM_SECONDS)),
            copies=op.copies,
            name=op.name,
            meta=op.meta,
            session="" if op.ttl_seconds else op.session,
            home=home,
            prefer=op.preferred_node,
        )
        try:
            await self._grid.handle(event)
            return await self._wait_until_served(op.request_id)
        except asyncio.CancelledError:
            if not self._is_stopping():  # the client hung up: nobody would know of this block
                await asyncio.shield(self._drop(op.request_id, "its client went away"))
            raise

    async def _wait_until_served(self, block_id: str) -> LocatedBlock:
        grid = self._grid

        def located(ledger: Ledger, now: int) -> LocatedBlock | None:
            """The block if all copies can be used; None while one cannot yet."""
            block = ledger.blocks.get(block_id)
            if block is None or block.freeing:
                raise NotFound(f"no block is called {block_id!r}")
            if block.lost:
                raise BlockLost(block.detail)
            is_served = all(_is_served(ledger, place) for place in block.places)
            return self._located(ledger, block, now) if is_served else None

        if (answer := await grid.read(located)) is not None:
            return answer
        changed = grid.watch(block_id)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                while True:
                    changed.clear()
                    if (answer := await grid.read(located)) is not None:
                        return answer
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await changed.wait()
        except TimeoutError:
            reason = f"its nodes did not open their memory within {OPEN_SECONDS:g} s"
            await self._drop(block_id, reason)
            raise TimedOut(f"{ALLOCATION_FAILED}: {reason}; nothing of it is held") from None
        except BlockLost as lost:
            await self._drop(block_id, str(lost))
            raise Refused(f"{ALLOCATION_FAILED}: {lost}; nothing of it is held", (str(lost),)) from lost
        finally:
            grid.unwatch(block_id, changed)

    async def _drop(self, block_id: str, reason: str) -> None:
        block = await self._grid.read(lambda ledger, now: ledger.blocks.get(block_id))
        if block is not None:
            await self._grid.handle(BlockReleased(block_id, block.user, reason))

    @endpoint(READ)
    async def find(self, op: requests.FindBlock, caller: Caller) -> LocatedBlock:
        """The places of a block, with tickets to read and write it there."""

        def find(ledger: Ledger, now: int) -> LocatedBlock:
            block = _resolve(ledger, op.block_id, op.name, caller)
            if block.lost:
                name = f", {block.name!r}" if block.name else ""
                raise BlockLost(f"block {block.id} ({block.size_bytes:,} bytes{name}) is {block.detail}")
            first = block.places[0]
            if not _is_served(ledger, first):
                raise Unreachable(f"{first.node or 'the control plane'} holds block {block.id}, and is not connected")
            return self._located(ledger, block, now)

        return await self._grid.read(find)

    @endpoint(USER, keeps_config=True)
    async def free(self, op: requests.FreeBlock, caller: Caller) -> BlockDetail:
        """Free a block."""
        block = await self._grid.read(lambda ledger, now: _resolve(ledger, op.block_id, op.name, caller))
        answer = await self._grid.handle(BlockReleased(block.id, block.user, f"deallocated by {caller.user}"))
        assert isinstance(answer, BlockAnswer)
        return BlockDetail(BlockRow.of(self._viewer(), answer.block))

    @endpoint(USER)
    async def name(self, op: requests.NameBlock, caller: Caller) -> BlockDetail:
        """Give a block its name; the block that had it is freed in the same step."""
        block = await self._grid.read(lambda ledger, now: _resolve(ledger, op.block_id, "", caller))
        term_ms = round(1000 * op.ttl_seconds)
        answer = await self._grid.handle(BlockNamed(block.id, block.user, op.name, op.meta, term_ms))
        assert isinstance(answer, BlockAnswer)
        return BlockDetail(BlockRow.of(self._viewer(), answer.block))

    @endpoint(USER, keeps_config=True)
    async def renew(self, op: requests.RenewBlocks, caller: Caller) -> RenewedBlocks:
        """Extend the blocks of a running program."""

        def count(ledger: Ledger, now: int) -> int:
            return sum(block.session == op.session and block.user == caller.user for block in ledger.blocks.values())

        await self._grid.handle(BlocksRenewed(op.session, caller.user))
        return RenewedBlocks(await self._grid.read(count))

    @endpoint(READ)
    async def list(self, op: requests.ListBlocks, caller: Caller) -> BlockList:
        """The next page of the blocks that are not being freed, by their ids."""
        viewer = self._viewer()
        blocks = await self._grid.scan(
            lambda ledger: ledger.blocks.values(), lambda block: block.id > op.after and not block.freeing
        )
        rows: builtins.list[BlockRow] = []
        size = 0
        for block in heapq.nsmallest(MAX_PAGE_BLOCKS, blocks, key=lambda block: block.id):
            row = BlockRow.of(viewer, block)
            size += len(msgspec.json.encode(row))
            if rows and size > MAX_PAGE_BYTES:
                break
            rows.append(row)
        return BlockList(rows, more=len(rows) < len(blocks))

    @endpoint(READ)
    async def stats(self, op: requests.GetMemoryStats, caller: Caller) -> MemoryStats:
        """Usage of the pool, in all and by node."""

        def stats(ledger: Ledger, now: int) -> MemoryStats:
            held: dict[str, list[int]] = {}
            for block in ledger.blocks.values():
                for place in block.places:
                    held.setdefault(place.node if not place.on_disk else "disk", []).append(block.size_bytes)
            nodes, columns = [], ledger.columns
            for name, node in ledger.nodes.items():
                if node.is_pull:  # it has no agent, and so no memory server
                    continue
                row, lender, sizes = columns.row_of(name), ledger.memory_servers.get(name), held.get(name, ())
                nodes.append(
                    LenderRow(
                        node=name,
                        blocks=len(sizes),
                        bytes=sum(sizes),
                        free_bytes=max(int(columns.memory[row]), 0) if columns.open[row] else 0,
                        serving=lender is not None,
                        address=f"{lender.host}:{lender.port}" if lender is not None else "",
                    )
                )
            live = [block for block in ledger.blocks.values() if not block.freeing]
            return MemoryStats(
                blocks=len(live),
                bytes=sum(block.size_bytes for block in live),
                bytes_on_disk=sum(held.get("disk", ())),
                moving=sum(block.moving is not None for block in live),
                lost=sum(block.lost for block in live),
                nodes=nodes,
            )

        return await self._grid.read(stats)

    def _located(self, ledger: Ledger, block: Block, now: int) -> LocatedBlock:
        places = [_place(ledger, block, copy, now) for copy in block.places]
        return LocatedBlock(BlockRow.of(self._viewer(), block), places)


def _is_served(ledger: Ledger, place: BlockCopy) -> bool:
    lender, lease = ledger.memory_servers.get(place.node), ledger.leases.get(place.copy)
    if lender is None or (lease is not None and lease.state is not LeaseState.ACTIVE):
        return False
    return place.on_disk or place.incarnation == lender.incarnation


def _place(ledger: Ledger, block: Block, copy: BlockCopy, now: int) -> BlockPlace:
    """The place of a copy with its ticket; without an address if it cannot be used at present."""
    if not _is_served(ledger, copy):
        return BlockPlace(node=copy.node, copy_=copy.copy, on_disk=copy.on_disk)
    lender, ticket = ledger.memory_servers[copy.node], issue_use_ticket(ledger, block, copy, now)
    return BlockPlace(
        node=copy.node,
        copy_=copy.copy,
        on_disk=copy.on_disk,
        host=lender.host,
        port=lender.port,
        fingerprint=lender.fingerprint,
        path=lender.path,
        incarnation=lender.incarnation,
        claims=base64.b64encode(ticket.claims).decode(),
        secret=base64.b64encode(ticket.secret).decode(),
    )


def _resolve(ledger: Ledger, block_id: str, name: str, caller: Caller) -> Block:
    """The block of this id, of this unique prefix, or of this name, if it is the caller's."""
    if name:
        ids = [ledger.block_names.get((caller.user, name), "")]
    elif block_id in ledger.blocks:
        ids = [block_id]
    else:
        ids = [candidate for candidate in ledger.blocks if fits(candidate, block_id)]
    blocks = [block for block in map(ledger.blocks.get, ids) if block is not None and not block.freeing]
    if not blocks:
        raise NotFound(f"no block is called {name!r}") if name else not_found("block", block_id)
    if len(blocks) > 1:
        ids = sorted(block.id for block in blocks)
        raise Ambiguous(f"{block_id!r} fits several: {', '.join(ids[:5])}", ids)
    caller.must_own(blocks[0].user, f"block {blocks[0].id}")
    return blocks[0]
