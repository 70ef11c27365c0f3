"""Decisions about the copies of blocks: places, moves, losses.

A move is: copy, then the new place with the next generation, then the old copy is freed. Until that is decided the
old copies count, and an interrupted move is started again or abandoned, never half done. A copy that has to leave goes
to another lender; where none has room, to the disk of the borrower. A lost copy is made again from another one; a block
is lost with its last copy.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.blocks import Block, BlockCopy, CopyMove, block_of, copy_id
from distributed_grid.domain.events import (
    BlockReleased,
    CopiesFreed,
    CopyLost,
    CopyMade,
    CopyUnwanted,
    MemoryReclaimRequested,
    MemoryServed,
)
from distributed_grid.domain.followups import Cause, RestoreCopy
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import first_node
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.resources import Amounts, Priority
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import LeaseEnd, LeaseState, NodeState, Step, advance
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.reactor.lease_transitions import end_lease, grant
from distributed_grid.scheduling.placement.placement import Placement
from distributed_grid.scheduling.preemption.weighted_cover import CoverItem, lightest_cover
from distributed_grid.scheduling.queue.queue import place_in_automatic_lease, place_newcomer

RETRY_MS = 5_000
"""Pause after a copy that found no room or could not be made."""
MIN_DISK_MS = 30_000
"""Time that a copy stays on disk before it is brought back to memory."""
LOST_BLOCK_MS = 24 * 3_600_000
"""Time that a lost block stays listed."""
MAX_COPIES_AT_ONCE = 16
"""Copies that leave a node that is short of memory, at one look."""
_UNLIMITED = 1 << 100


def copy_request(ledger: Ledger, block: Block, now: int, *, besides: tuple[str, ...] = ()) -> Request:
    """Request for the next copy of a block, on a node without one that is not the borrower's own."""
    taken = (*(place.node for place in block.everywhere), *besides)
    own = {block.home}  # nodes of the borrower's own machine, if other machines could lend
    if not block.home:
        here = {node.name for node in ledger.nodes.values() if node.host == "local"}
        own = here if len(here) < len(ledger.nodes) - len(ledger.pull_nodes) else set()
    own -= {block.prefer}
    return Request(
        id=copy_id(block.id, block.next_copy),
        user=block.user,
        ask=Amounts(memory_bytes=block.size_bytes),
        priority=Priority.MEDIUM,
        prefer=(block.prefer,) if block.prefer in ledger.nodes else (),
        wait_ms=0,
        duration_ms=max(block.ends_at_ms - now, 1),
        anti_affinity=tuple(name for name in dict.fromkeys((*taken, *sorted(own))) if name in ledger.nodes),
        block=block.id,
        origin=block.home or first_node(node for node in ledger.nodes.values() if node.host == "local"),
    )


def spot_for(
    ledger: Ledger, block: Block, now: int, *, besides: tuple[str, ...] = (), at_home: bool = True
) -> tuple[Lease, Placement] | None:
    """Placement of the next copy of a block: elsewhere, or (`at_home`) on the borrower's own machine."""
    request = copy_request(ledger, block, now, besides=besides)
    taken = {*(place.node for place in block.everywhere), *besides}
    anywhere = replace(request, anti_affinity=tuple(name for name in request.anti_affinity if name in taken))
    for wanted in (request, anywhere) if at_home and anywhere != request else (request,):
        asked = Lease(id=wanted.id, request=wanted, asked_at_ms=now)
        placement = place_newcomer(ledger, asked, now) or place_in_automatic_lease(ledger, asked, now, waits=True)
        if placement is not None:
            return asked, placement
    return None


def add_copy(ledger: Ledger, block: Block, decision: Decision, now: int) -> Block:
    """The block with one copy more, where there is room; its lease is put into the decision."""
    place = _grant(ledger, block, decision, now)
    assert place is not None
    return replace(block, places=(*block.places, place), next_copy=block.next_copy + 1)


def _grant(
    ledger: Ledger, block: Block, decision: Decision, now: int, *, at_home: bool = True, avoid: tuple[str, ...] = ()
) -> BlockCopy | None:
    """The next copy, with its lease; None where no node has room."""
    spot = spot_for(ledger, block, now, besides=avoid, at_home=at_home)
    if spot is None:
        return None
    decided, lease, _ = grant(ledger, *spot, now, job=None)
    decision.changes += decided.changes
    decision.records += decided.records
    decision.follow += decided.follow
    lender = ledger.memory_servers.get(lease.node)
    return BlockCopy(lease.id, lease.node, lender.incarnation if lender is not None else "")


# ------------------------------------------------------------------ moving


def on_unwanted(ledger: Ledger, event: CopyUnwanted, now: int) -> Decision:
    """Start to move a copy away: to another lender, else to the borrower's disk, where it may."""
    block = ledger.blocks.get(event.block_id)
    if block is None or block.freeing or block.moving is not None:
        return Decision()
    source = next((place for place in block.places if place.copy == event.copy), None)
    if source is None or source.on_disk:
        return Decision()
    decision = Decision()
    target = _grant(ledger, block, decision, now, at_home=False, avoid=event.avoid)
    if target is None and not event.spills:
        return Decision()
    if target is None:
        target = BlockCopy(copy_id(block.id, block.next_copy), block.home, on_disk=True)
    return _start_move(block, source, target, decision, now, keep=False, why=event.why)


def restore_copy(ledger: Ledger, order: RestoreCopy, now: int) -> Decision:
    """Start a copy that is missing, or bring one back from disk; try again later where no node has room."""
    block = ledger.blocks.get(order.block_id)
    if block is None or block.freeing or block.moving is not None or not block.places:
        return Decision()
    source = next((place for place in block.places if place.on_disk), block.places[0])
    decision = Decision()
    target = _grant(ledger, block, decision, now, at_home=False)
    if target is None:
        return Decision([replace(block, tried_at_ms=now)])
    back = source.on_disk
    reason = "there is room in memory again" if back else "a copy is missing"
    return _start_move(block, source, target, decision, now, keep=not back, why=reason)


def _start_move(
    block: Block, source: BlockCopy, target: BlockCopy, decision: Decision, now: int, *, keep: bool, why: str
) -> Decision:
    moving = CopyMove(source.copy, target, block.generation + 1, keep, why)
    changed = replace(block, moving=moving, next_copy=block.next_copy + 1, tried_at_ms=now)
    decision.changes.insert(0, changed)
    where = "disk" if target.on_disk else target.node
    record = Record("block-moving", block.user, block.id, source.node, why, data={"to": where, "keep": keep})
    decision.records.append(record)
    return decision


def on_made(ledger: Ledger, event: CopyMade, now: int) -> Decision:
    """Add the finished copy to its block; abandon one that failed."""
    block = ledger.blocks.get(block_of(event.source))
    moving = block.moving if block is not None else None
    if block is None or moving is None or (moving.source, moving.generation) != (event.source, event.generation):
        return Decision()
    source = next(place for place in block.places if place.copy == moving.source)
    if event.nodes and source.node not in event.nodes:
        return Decision()
    if event.problem:
        return _abandon_move(ledger, block, moving, event.problem, now)
    target, record = moving.place, Record("block-moved", block.user, block.id, moving.place.node, moving.why)
    if moving.keep:
        places = (*block.places, target)
        return Decision([replace(block, generation=moving.generation, moving=None, places=places)], [record])
    places = tuple(target if place is source else place for place in block.places)
    moved = replace(
        block, generation=moving.generation, moving=None, places=places, leaving=(*block.leaving, source), prefer=""
    )
    return Decision([moved, *leaving_lease(ledger, source, moving.why)], [record])


def _abandon_move(ledger: Ledger, block: Block, moving: CopyMove, problem: str, now: int) -> Decision:
    """Free the remains of a copy that could not be made; the source may be written to again."""
    kept = replace(
        block,
        generation=moving.generation + 1,
        moving=None,
        leaving=(*block.leaving, moving.place),
        tried_at_ms=now,
        prefer="",
    )
    rows = [kept, *leaving_lease(ledger, moving.place, problem)]
    return Decision(rows, [Record("block-not-moved", block.user, block.id, moving.place.node, problem)])


def leaving_lease(ledger: Ledger, place: BlockCopy, why: str) -> list[Row]:
    """The lease of a copy that has to be freed, unless it is releasing; a copy on disk or a lost one has none."""
    lease = ledger.leases.get(place.copy)
    if lease is None or lease.state not in (LeaseState.RESERVING, LeaseState.ACTIVE):
        return []
    return [replace(lease, state=advance(lease.state, Step.RELEASE), detail=why)]


# ------------------------------------------------------------------ freed and lost


def on_freed(ledger: Ledger, event: CopiesFreed, now: int) -> Decision:
    """Handle the first of the copies that are freed, then the others."""
    copy, *others = event.copies
    block = ledger.blocks.get(block_of(copy))
    place = next((place for place in block.leaving if place.copy == copy), None) if block is not None else None
    decision = Decision()
    if block is not None and place is not None and (not event.nodes or place.node in event.nodes):
        left = replace(block, leaving=_without(block.leaving, copy))
        decision = _end_copy(ledger, left, place, LeaseEnd.RELEASED, "", now)
    if others:
        decision.follow.append(CopiesFreed(tuple(others), event.nodes))
    return decision


def on_lost(ledger: Ledger, event: CopyLost, now: int) -> Decision:
    """Remove a lost copy; the block is lost with its last one."""
    block = ledger.blocks.get(event.block_id)
    place = next((place for place in block.everywhere if place.copy == event.copy), None) if block is not None else None
    if block is None or place is None:
        return Decision()
    if block.moving is not None and event.copy in (block.moving.source, block.moving.place.copy):
        decision = _abandon_move(ledger, block, block.moving, event.why, now)
        decision.follow.append(event)
        return decision
    left = replace(block, places=_without(block.places, event.copy), leaving=_without(block.leaving, event.copy))
    records: list[Record] = []
    if left.places != block.places:
        left = replace(left, generation=block.generation + 1)
        records.append(Record("copy-lost", block.user, block.id, place.node, event.why))
        if not left.places:
            left = replace(
                left, lost=True, tried_at_ms=now, detail=f"lost with {place.node or 'its disk'}: {event.why}"
            )
            records.append(Record("block-lost", block.user, block.id, place.node, event.why))
    decision = _end_copy(ledger, left, place, LeaseEnd.LOST, event.why, now)
    decision.records += records
    return decision


def _end_copy(ledger: Ledger, block: Block, place: BlockCopy, end: LeaseEnd, why: str, now: int) -> Decision:
    """The block without one of its copies, and the end of that copy's lease."""
    lease = ledger.leases.get(place.copy)
    decision = end_lease(ledger, lease, end, why or lease.detail, now) if lease is not None else Decision()
    decision.changes.insert(0, block)
    return decision


def _without(places: tuple[BlockCopy, ...], copy: str) -> tuple[BlockCopy, ...]:
    return tuple(place for place in places if place.copy != copy)


# ------------------------------------------------------------------ memory servers, owners, timers


def on_served(ledger: Ledger, event: MemoryServed, now: int) -> Decision:
    """Record the memory server of a node; copies of another incarnation are lost, new ones belong to this one."""
    lender = event.lender
    decision = Decision([lender])
    if lender.is_over:
        if not event.problem:
            return decision
        # New copies on a node whose memory cannot be used are lost; older ones may come back.
        blocks = [ledger.blocks[block_id] for block_id in ledger.blocks_at.get(lender.node, ())]
        problem = f"{lender.node}: {event.problem}" if lender.node else event.problem
        for block in blocks:
            there = [place for place in block.everywhere if place.node == lender.node and not place.incarnation]
            new = [place for place in there if not place.on_disk or place not in block.places]
            decision.follow += [CopyLost(block.id, place.copy, problem) for place in new]
        return decision
    for block_id in ledger.blocks_at.get(lender.node, ()):
        block = ledger.blocks[block_id]
        there = [place for place in block.everywhere if place.node == lender.node]
        lost = [place.copy for place in there if _is_lost(block, place, lender.incarnation, event.on_disk)]
        reason = f"the memory of {lender.node or 'the control plane'} was lost with its processes"
        decision.follow += [CopyLost(block_id, copy, reason) for copy in lost]
        fresh = [place.copy for place in there if not place.on_disk and not place.incarnation]
        if fresh:
            decision.changes.append(_with_incarnation(block, fresh, lender.incarnation))
    return decision


def _is_lost(block: Block, place: BlockCopy, incarnation: str, on_disk: tuple[str, ...]) -> bool:
    if place.on_disk:
        return place in block.places and place.copy not in on_disk
    return bool(place.incarnation) and place.incarnation != incarnation


def _with_incarnation(block: Block, copies: list[str], incarnation: str) -> Block:
    def known(place: BlockCopy) -> BlockCopy:
        return replace(place, incarnation=incarnation) if place.copy in copies else place

    moving = block.moving
    return replace(
        block,
        places=tuple(known(place) for place in block.places),
        leaving=tuple(known(place) for place in block.leaving),
        moving=replace(moving, place=known(moving.place)) if moving is not None else None,
    )


def on_memory_reclaim_requested(ledger: Ledger, event: MemoryReclaimRequested, now: int) -> Decision:
    """Move away as many copies from a node as its owner needs, with as few bytes as possible."""
    here = [ledger.blocks[block_id] for block_id in ledger.blocks_at.get(event.node, ())]
    short, free = event.memory_bytes, []
    for block in here:
        copies = [place for place in block.places if place.node == event.node and not place.on_disk]
        going = any(place.node == event.node and not place.on_disk for place in block.leaving)
        if going or (copies and block.moving is not None and block.moving.source == copies[0].copy):
            short -= block.size_bytes
        elif copies and block.moving is None:
            free.append((block, copies[0]))
    if short <= 0 or not free:
        return Decision()
    items = [CoverItem(block.size_bytes, 0, (block.size_bytes,)) for block, _ in free]
    cover = lightest_cover(items, (short,), _UNLIMITED)
    chosen = free if cover is None else [free[number] for number in cover]
    reason = f"the owner of {event.node} needs its memory"
    return Decision(follow=[CopyUnwanted(block.id, place.copy, reason) for block, place in chosen])


def copies_to_move(
    ledger: Ledger, node: str, size_bytes: int, now: int, *, why: str, spills: bool, avoid: tuple[str, ...]
) -> list[CopyUnwanted]:
    """The largest copies on a node, `size_bytes` together with those that leave already, at most `MAX_COPIES_AT_ONCE`.
    Without a spill to disk only those that another node has room for."""
    here = [ledger.blocks[block_id] for block_id in ledger.blocks_at.get(node, ())]
    chosen: list[CopyUnwanted] = []
    for block in sorted(here, key=lambda block: (-block.size_bytes, block.id)):
        if size_bytes <= 0 or len(chosen) >= MAX_COPIES_AT_ONCE:
            break
        copies = [place for place in block.places if place.node == node and not place.on_disk]
        if any(place.node == node and not place.on_disk for place in block.leaving):
            size_bytes -= block.size_bytes
        elif copies and block.moving is not None:
            size_bytes -= block.size_bytes if block.moving.source == copies[0].copy and not block.moving.keep else 0
        elif copies and (spills or spot_for(ledger, block, now, besides=avoid, at_home=False) is not None):
            chosen.append(CopyUnwanted(block.id, copies[0].copy, why, spills, avoid))
            size_bytes -= block.size_bytes
    return chosen


def overdue(ledger: Ledger, now: int) -> list[Cause]:
    """Causes that concern blocks and are due by time alone."""
    due: list[Cause] = []
    for node in ledger.nodes.values():
        if node.state is NodeState.DRAINING and node.name in ledger.blocks_at:
            for block_id in ledger.blocks_at[node.name]:
                block = ledger.blocks[block_id]
                if block.moving is None and now - block.tried_at_ms >= RETRY_MS:
                    there = (place for place in block.places if place.node == node.name and not place.on_disk)
                    due += [CopyUnwanted(block_id, place.copy, f"{node.name} is being drained") for place in there]
    for block_id in ledger.unsettled_blocks:
        block = ledger.blocks[block_id]
        gone = [place.copy for place in block.leaving if place.node and place.node not in ledger.nodes]
        is_stale = block.lost and now - block.tried_at_ms >= LOST_BLOCK_MS
        if not block.freeing and (is_stale or block.ends_at_ms <= now):
            due.append(BlockReleased(block_id, GRID_USER, "its time is over"))
        elif gone:
            due.append(CopiesFreed(tuple(gone)))
        elif not block.freeing and block.moving is None and block.places:
            pause_ms = MIN_DISK_MS if any(place.on_disk for place in block.places) else RETRY_MS
            if now - block.tried_at_ms >= pause_ms:
                due.append(RestoreCopy(block_id))
    return due
