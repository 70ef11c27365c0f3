"""Decisions about blocks: allocated, named, renewed, released; `block_copies` has those about their copies.

A block is placed at once, all of its copies on different nodes, or refused; memory is not queued for. Its copies end
together: their leases have the end of the block. A name belongs to one block of a user at a time.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.blocks import MAX_BLOCK_BYTES, MAX_COPIES, MAX_META_CHARS, MAX_NAME_CHARS, Block
from distributed_grid.domain.events import BlockAsked, BlockNamed, BlockReleased, BlocksRenewed
from distributed_grid.domain.followups import AddCopy
from distributed_grid.domain.leases import MAX_DURATION_MS
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import LeaseEnd
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor.block_copies import add_copy, copy_request, leaving_lease, spot_for
from distributed_grid.reactor.decision import BlockAnswer, Decision, Record, RecordType
from distributed_grid.scheduling.queue import reasons

NO_NODES = "No available nodes for memory allocation"


def on_asked(ledger: Ledger, event: BlockAsked, now: int) -> Decision:
    """Place a new block; the same id again gets the same block."""
    known = ledger.blocks.get(event.id)
    if known is not None:
        asked = (event.user, event.size_bytes, event.copies, event.session)
        if (known.user, known.size_bytes, known.copies, known.session) != asked:
            raise Conflict(f"block {event.id} was asked for before with another content")
        return Decision(answer=BlockAnswer(known))
    if not 1 <= event.size_bytes <= MAX_BLOCK_BYTES:
        raise BadInput(f"a block must have 1 to {MAX_BLOCK_BYTES:,} bytes, not {event.size_bytes:,}")
    if not 1 <= event.copies <= MAX_COPIES:
        raise BadInput(f"a block can have 1 to {MAX_COPIES} copies, not {event.copies}")
    _check_lengths(event.name, event.meta)
    _checked_term(event.term_ms)
    if event.prefer and event.prefer not in ledger.nodes:
        raise Refused(f"no node is called {event.prefer}; the nodes are: {', '.join(sorted(ledger.nodes)) or 'none'}")
    block = Block(
        id=event.id,
        user=event.user,
        size_bytes=event.size_bytes,
        made_at_ms=now,
        ends_at_ms=now + event.term_ms,
        copies=event.copies,
        name=event.name,
        meta=event.meta,
        session=event.session,
        term_ms=event.term_ms if event.session else 0,
        home=event.home,
        prefer=event.prefer,
    )
    taken: list[str] = []
    for _ in range(block.copies):
        spot = spot_for(ledger, block, now, besides=tuple(taken))
        if spot is None:
            request = copy_request(ledger, block, now, besides=tuple(taken))
            reason = reasons.why_no_room(ledger, request, now)
            raise Refused(f"{NO_NODES}: {'; '.join(map(str, reason)) or 'the grid has no nodes'}", reason)
        taken.append(spot[1].node)
    decision = Decision()
    block = add_copy(ledger, block, decision, now)
    decision.changes.insert(0, block)
    decision.answer = BlockAnswer(block)
    decision.follow += [AddCopy(block.id)] * (block.copies - 1)
    if block.name:
        decision.follow = [*_release_of_namesake(ledger, block), *decision.follow]
    return decision


def add_further_copy(ledger: Ledger, order: AddCopy, now: int) -> Decision:
    """Add another copy to a new block; without room for it any more it is made later from the first one."""
    block = ledger.blocks.get(order.block_id)
    if block is None or len(block.places) >= block.copies or spot_for(ledger, block, now) is None:
        return Decision()
    decision = Decision()
    block = add_copy(ledger, block, decision, now)
    decision.changes.insert(0, block)
    return decision


def on_released(ledger: Ledger, event: BlockReleased, now: int) -> Decision:
    """Release a block; it is over when its nodes have reported its copies freed."""
    block = owned(ledger, event.block_id, event.by)
    return release(ledger, block, LeaseEnd.RELEASED, event.detail, now)


def release(ledger: Ledger, block: Block, end: LeaseEnd, detail: str, now: int) -> Decision:
    """Free every copy of a block; a second time nothing changes."""
    if block.freeing:
        return Decision(answer=BlockAnswer(block))
    freed = replace(block, freeing=True, places=(), moving=None, leaving=block.everywhere, detail=detail)
    rows: list[Row] = [freed]
    for place in block.everywhere:
        rows += leaving_lease(ledger, place, detail)
    where = ", ".join(dict.fromkeys(place.node for place in block.places))
    kind: RecordType = "block-expired" if end is LeaseEnd.EXPIRED else "block-released"
    record = Record(kind, block.user, block.id, where, detail)
    return Decision(rows, [record], BlockAnswer(freed))


def on_named(ledger: Ledger, event: BlockNamed, now: int) -> Decision:
    """Give a block a name, and with a term a time of its own."""
    block = owned(ledger, event.block_id, event.by)
    if block.freeing or block.lost:
        raise NotFound(f"block {event.block_id} is gone")
    _check_lengths(event.name, event.meta)
    named = replace(block, name=event.name, meta=event.meta or block.meta)
    decision = Decision(records=[Record("block-named", block.user, block.id, reason=event.name)])
    if event.term_ms:
        named = replace(named, session="", term_ms=0, ends_at_ms=now + _checked_term(event.term_ms))
        decision.changes += _leases_until_end(ledger, named)
    decision.changes.insert(0, named)
    decision.answer = BlockAnswer(named)
    decision.follow = [*_release_of_namesake(ledger, named)]
    return decision


def on_renewed(ledger: Ledger, event: BlocksRenewed, now: int) -> Decision:
    """Extend the blocks of a running program by another term."""
    decision = Decision()
    for block in ledger.blocks.values():
        if event.session and block.session == event.session and block.user == event.by and not block.freeing:
            renewed = replace(block, ends_at_ms=now + block.term_ms)
            decision.changes += [renewed, *_leases_until_end(ledger, renewed)]
    return decision


def owned(ledger: Ledger, block_id: str, by: str) -> Block:
    """The block of this id, if it is this user's (the grid itself may use all)."""
    block = ledger.blocks.get(block_id)
    if block is None:
        raise NotFound(f"no block is called {block_id!r}")
    if by not in (block.user, GRID_USER):
        raise Refused(f"block {block_id} belongs to {block.user}")
    return block


def _leases_until_end(ledger: Ledger, block: Block) -> list[Row]:
    """The leases of a block's copies, with the end that the block has."""
    leases = (ledger.leases.get(place.copy) for place in block.everywhere)
    return [replace(lease, ends_at_ms=block.ends_at_ms) for lease in leases if lease is not None]


def _release_of_namesake(ledger: Ledger, block: Block) -> list[BlockReleased]:
    """The release of the block that had this name."""
    before = ledger.block_names.get((block.user, block.name))
    if before is None or before == block.id:
        return []
    return [BlockReleased(before, block.user, f"{block.name} is block {block.id} now")]


def _check_lengths(name: str, meta: str) -> None:
    if len(name) > MAX_NAME_CHARS or len(meta) > MAX_META_CHARS:
        raise BadInput(f"a key has at most {MAX_NAME_CHARS} letters, and the meta of a block {MAX_META_CHARS}")


def _checked_term(term_ms: int) -> int:
    if not 0 < term_ms <= MAX_DURATION_MS:
        raise BadInput("the time of a block must be more than zero and less than 200 years")
    return term_ms
