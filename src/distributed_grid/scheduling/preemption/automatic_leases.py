"""What the grid holds for its own nodes makes way for whoever asks, however urgent.

Rule 1: only automatic leases go, as few as are enough, and never for another automatic request.
Rule 2: only where the request may run, on a node that is alive and heard.
"""

from __future__ import annotations

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.states import NodeState
from distributed_grid.scheduling.placement.filters import forbidden_by
from distributed_grid.scheduling.preemption.preemption import Preemption
from distributed_grid.scheduling.rebalancing.pressure import automatic


def way_past_the_grid(ledger: Ledger, request: Request, *, avoid: frozenset[str] = frozenset()) -> Preemption | None:
    """The place that a request gets when automatic leases go, or None where that is not enough; never on a node to
    avoid."""
    if is_automatic(request) or request.gang > 1:
        return None
    on: dict[str, list[Lease]] = {}
    for lease in automatic(ledger):
        if lease.node not in avoid:
            on.setdefault(lease.node, []).append(lease)
    ways = (_way(ledger, request, node, leases) for node, leases in on.items())
    found = [way for way in ways if way is not None]
    return min(found, key=lambda way: (way.node not in request.prefer, len(way.victims), way.node), default=None)


def _way(ledger: Ledger, request: Request, node: str, mine: list[Lease]) -> Preemption | None:
    if ledger.nodes[node].state is not NodeState.ALIVE or forbidden_by(ledger, request, node) is not None:
        return None
    lends, going = ledger.lends(node), {lease.id for lease in mine}
    book = NodeClaims(
        lease.claim for lease in ledger.leases_of(node) if lease.id not in going and lease.claim is not None
    )
    if book.claim_for(request.ask, lends) is None:
        return None
    for lease in mine:
        if lease.claim is None:
            continue
        book.take(lease.claim)
        if book.claim_for(request.ask, lends) is not None:
            going.discard(lease.id)
        else:
            book.give_back(lease.claim)
    claim = book.claim_for(request.ask, lends)
    if claim is None or not going:
        return None
    gone = tuple(lease.id for lease in mine if lease.id in going)
    return Preemption(node, claim, gone, gone)
