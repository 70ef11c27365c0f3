"""What nodes still have to do about the memory they lend, derived from state alone."""

from __future__ import annotations

from collections.abc import Iterable

from distributed_grid.domain.blocks import Block, Lender
from distributed_grid.domain.changes import Row
from distributed_grid.domain.effects import FreeCopies, MakeCopy, MemoryEffect, ServeMemory
from distributed_grid.domain.ledger import Ledger


def lent(ledger: Ledger, node: str | None = None) -> list[MemoryEffect]:
    """Every effect that blocks call for, of one node or of all; performing one twice is harmless."""
    names = ledger.blocks if node is None else ledger.blocks_at.get(node, ())
    found = _effects(ledger, (ledger.blocks[block_id] for block_id in names))
    return found if node is None else [effect for effect in found if effect.node == node]


def lent_for(ledger: Ledger, changed: Iterable[Row]) -> list[MemoryEffect]:
    """The effects that these changed rows may have called for."""
    touched: dict[str, None] = {}
    for row in changed:
        if isinstance(row, Block):
            touched[row.id] = None
        elif isinstance(row, Lender):
            touched.update(dict.fromkeys(ledger.blocks_at.get(row.node, ())))
    return _effects(ledger, (ledger.blocks[block_id] for block_id in touched if block_id in ledger.blocks))


def _effects(ledger: Ledger, blocks: Iterable[Block]) -> list[MemoryEffect]:
    unserved: dict[str, None] = {}
    freed: dict[str, list[str]] = {}
    moves: list[MemoryEffect] = []
    for block in blocks:
        for place in block.leaving:
            freed.setdefault(place.node, []).append(place.copy)
        unserved.update((place.node, None) for place in block.places if place.node not in ledger.lenders)
        moving = block.moving
        if moving is None:
            continue
        source = next(place for place in block.places if place.copy == moving.source)
        missing = [name for name in (source.node, moving.place.node) if name not in ledger.lenders]
        unserved.update(dict.fromkeys(missing))
        if not missing and (moving.place.on_disk or moving.place.incarnation):
            moves.append(MakeCopy(source.node, block))
    frees = [FreeCopies(node, tuple(copies)) for node, copies in freed.items()]
    return [*(ServeMemory(node) for node in unserved), *moves, *frees]
