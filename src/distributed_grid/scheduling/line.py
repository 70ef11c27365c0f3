"""Whose turn it is among the waiting.

Rule 1: the order is priority, then age.
Rule 2: a later request may go first only while the earlier one does not fit.
Rule 3: who has waited beyond the line's patience gets one node kept for it: nobody behind it
takes there what it waits for, so what comes free there adds up until it fits.
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.books import Book
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.lives import NodeState
from distributed_grid.domain.resources import Amounts
from distributed_grid.scheduling.placement import Placement, place

PATIENCE_MS = 30_000


class Turn(Struct, frozen=True):
    """The next waiting request that fits, its place, and the shapes found not to fit on the way to it."""

    lease: Lease
    placement: Placement
    tried: frozenset[object]


class Kept(Struct, frozen=True):
    """A node that is kept for somebody who waited long, and the kinds of resource that are kept there."""

    node: str
    kinds: frozenset[str]


def shape(request: Request) -> object:
    """What decides whether a request fits: two requests of one shape fit or fail together."""
    return (request.ask, request.require)


def next_turn(ledger: Ledger, now: int, tried: frozenset[object] = frozenset()) -> Turn | None:
    """The first of the line that can be served now; shapes in `tried` are known not to fit."""
    failed = set(tried)
    kept: list[Kept] = []
    for _, asked_at, lease_id in ledger.waiting:
        lease = ledger.leases[lease_id]
        key = shape(lease.request)
        if key not in failed:
            placement = place(ledger, lease.request, avoid=avoided(kept, lease.request.ask))
            if placement is not None:
                return Turn(lease, placement, frozenset(failed))
            failed.add(key)
        if now - asked_at > PATIENCE_MS:
            _keep(ledger, lease.request, kept)
    return None


def kept_from(ledger: Ledger, request: Request, now: int) -> frozenset[str]:
    """The nodes a request that has just come must leave to those who have waited long before it."""
    kept: list[Kept] = []
    for negative_priority, asked_at, lease_id in ledger.waiting:
        if -negative_priority < request.priority:
            break
        if now - asked_at > PATIENCE_MS:
            _keep(ledger, ledger.leases[lease_id].request, kept)
    return avoided(kept, request.ask)


def avoided(kept: list[Kept], ask: Amounts) -> frozenset[str]:
    """The kept nodes on which this ask would take something that is kept."""
    if not kept:
        return frozenset()
    wanted = _kinds(ask)
    return frozenset(entry.node for entry in kept if entry.kinds & wanted)


def _keep(ledger: Ledger, request: Request, kept: list[Kept]) -> None:
    """Keep the most promising node for a request, if one is there."""
    taken = {entry.node for entry in kept}
    names = request.require or tuple(ledger.nodes)
    promising = [
        (int(ledger.columns.slack[ledger.columns.rows[name]]), name)
        for name in names
        if name not in taken
        and (node := ledger.nodes.get(name)) is not None
        and node.state is NodeState.ALIVE
        and Book().claim_for(request.ask, node.lendable) is not None
    ]
    if promising:
        kept.append(Kept(max(promising)[1], _kinds(request.ask)))


def _kinds(ask: Amounts) -> frozenset[str]:
    kinds = {name for name, _ in ask.custom}
    if ask.cpu_milli:
        kinds.add("cpu")
    if ask.memory_bytes:
        kinds.add("memory")
    if ask.gpu_milli:
        kinds.add("gpu")
    return frozenset(kinds)
