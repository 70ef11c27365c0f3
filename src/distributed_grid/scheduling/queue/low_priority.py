"""What is left for `low`: only what nobody of a higher priority who waits could use.

Rule 1: on a node that a waiting request could be served by, `low` takes nothing of the kinds it waits for.
Rule 2: unless it is over before that could start there, or leaves enough for it even then.
"""

from __future__ import annotations

from collections.abc import Iterable

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Claim
from distributed_grid.scheduling.queue.backfill import NEVER, StartForecast, could_serve, kinds
from distributed_grid.scheduling.queue.durations import expected_ms

COVETED_MOST = 64
"""With more different requests of higher priorities than this in the line, nothing is left over."""


class LowPriorityCapacity:
    """What those of higher priorities could use, seen from one moment; `higher` has one request of each shape."""

    def __init__(self, ledger: Ledger, prospects: StartForecast, higher: Iterable[Request], now: int) -> None:
        self._ledger = ledger
        self._prospects = prospects
        self._now = now
        requests = list(higher)
        self._wanted = [(one, kinds(one.ask), could_serve(ledger, one)) for one in requests[:COVETED_MOST]]
        self._too_many = len(requests) > COVETED_MOST

    def include(self, lease: Lease, node: str, claim: Claim) -> bool:
        """Whether a lease may take this of a node."""
        if self._too_many:
            return False
        row, mine = self._ledger.columns.rows[node], kinds(lease.request.ask)
        wanted = [one for one, theirs, could in self._wanted if could[row] and mine & theirs]
        length = expected_ms(self._ledger, lease) if wanted else 0
        return all(self._leaves_alone(one, node, claim, length) for one in wanted)

    def _leaves_alone(self, other: Request, node: str, claim: Claim, length: int) -> bool:
        start = self._prospects.earliest_ms(other.ask, node)
        if start == NEVER:  # nobody knows when; or never at all, where a mask of columns says more than the node has
            return NodeClaims().claim_for(other.ask, self._ledger.nodes[node].lendable) is None
        if length and self._now + length <= start:
            return True
        staying = self._prospects.departures(node).staying(start)
        return self._prospects.fits_beside(other.ask, node, staying, claim)

    def coveted(self, request: Request) -> set[str]:
        """The nodes where somebody could use some of what a request asks for."""
        names, mine = self._ledger.columns.names, kinds(request.ask)
        masks = [could for _, theirs, could in self._wanted if mine & theirs]
        return {names[row] for could in masks for row in could.nonzero()[0].tolist()}
