"""Start estimate of a waiting request.

Everybody before it in the queue is planned first, each where it could start soonest, and counts as holding that from
now until its expected end. Later arrivals and backfill are not foreseen. Where the start depends on something of
unknown length the estimate is None, with the reason.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from msgspec import Struct

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Claim
from distributed_grid.domain.states import LeaseState
from distributed_grid.scheduling.placement.placement import find_placement
from distributed_grid.scheduling.queue.backfill import NEVER, StartForecast, could_serve, expected_ms, readiness
from distributed_grid.scheduling.queue.fairness import Quotas
from distributed_grid.scheduling.queue.queue import queue_order

MAX_PLANNED = 100
"""Queue positions that are planned."""
CANDIDATE_NODES = 32
"""Nodes that are compared for each request."""


class StartEstimate(Struct, frozen=True):
    """The position in the queue (1 is next), the expected start (None: unknown), and why then."""

    position: int
    starts_at_ms: int | None
    reason: str


def estimate_start(ledger: Ledger, lease: Lease, now: int) -> StartEstimate:
    """The position of a waiting request, its expected start, and why then or why it is unknown."""
    order = queue_order(ledger, now, newcomer=lease)
    known = ledger.leases.get(lease.id, lease)
    position = 1 + (order.position(lease) if known.state is LeaseState.ASKED else len(order))
    exceeded = Quotas(ledger).exceeded(lease.request)
    if exceeded is not None:
        return StartEstimate(position, None, f"when less is held under the {exceeded}")
    if position > MAX_PLANNED:
        return StartEstimate(position, None, f"{position - 1} requests are before it")
    plan = _StartPlan(ledger, now)
    for one in islice(order.in_order(), position - 1):
        plan.add(one)
    at_ms, why = plan.start_of(lease)
    return StartEstimate(position, None if at_ms == NEVER else at_ms, why)


class _StartPlan:
    """What is held on each node until when: by leases, and by the requests planned so far."""

    def __init__(self, ledger: Ledger, now: int) -> None:
        self._ledger = ledger
        self._now = now
        self._forecast = StartForecast(ledger, now)
        self._quotas = Quotas(ledger)
        self._ends: dict[str, list[tuple[int, Lease]]] = {}

    def add(self, lease: Lease) -> None:
        """Plan one of the queue; who is beyond its quota, or fits nowhere, takes nothing."""
        if self._quotas.exceeded(lease.request) is not None:
            return
        found = sorted(self._soonest(lease.request))[: lease.request.gang]
        if not found:
            return
        start, length = found[-1][0], expected_ms(self._ledger, lease)
        end = start + length if start != NEVER and length else NEVER
        for _, _, node in found:
            claim = self._claim_at(lease.request, node, start)
            planned = Lease(lease.id, lease.request, lease.asked_at_ms, node=node, claim=claim)
            self._ends[node] = sorted([*self._held(node), (end, planned)], key=lambda entry: entry[0])

    def start_of(self, lease: Lease) -> tuple[int, str]:
        """When a request can start after all that was planned, and what it waits for."""
        found = sorted(self._soonest(lease.request))[: lease.request.gang]
        if len(found) < lease.request.gang:
            return NEVER, "no open node could serve it"
        at_ms, _, node = found[-1]
        if at_ms > self._now:
            return at_ms, self._waits_for(lease.request, node)
        room = find_placement(self._ledger, lease.request) is not None
        return at_ms, f"{node} has room, and is kept for others at the moment" if room else f"{node} has room"

    def _soonest(self, request: Request) -> list[tuple[int, int, str]]:
        """The candidate nodes: when they could serve, and how much is free already."""
        ready = readiness(self._ledger, request.ask)
        rows = np.flatnonzero(could_serve(self._ledger, request))
        rows = rows[np.argsort(-ready[rows], kind="stable")[: CANDIDATE_NODES + request.gang]]
        names = [(int(ready[row]), self._ledger.columns.names[row]) for row in rows.tolist()]
        return [(self._fits_at(request, name), -ready_now, name) for ready_now, name in names]

    def _held(self, node: str) -> list[tuple[int, Lease]]:
        return self._ends.get(node) or self._forecast.releases(node).ends

    def _fits_at(self, request: Request, node: str) -> int:
        lends, held = self._ledger.lends(node), self._held(node)
        claims = NodeClaims(lease.claim for _, lease in held if lease.claim is not None)
        at_ms = self._now
        for end, lease in held:
            if claims.claim_for(request.ask, lends) is not None:
                break
            if end == NEVER or lease.claim is None:
                return NEVER
            claims.remove(lease.claim)
            at_ms = end
        return at_ms if claims.claim_for(request.ask, lends) is not None else NEVER

    def _claim_at(self, request: Request, node: str, at_ms: int) -> Claim | None:
        """What a request gets on a node at a moment; without a moment, when everybody there is gone."""
        still = [lease.claim for end, lease in self._held(node) if end > at_ms and lease.claim is not None]
        return NodeClaims(still if at_ms != NEVER else ()).claim_for(request.ask, self._ledger.nodes[node].lendable)

    def _waits_for(self, request: Request, node: str) -> str:
        """What has to be over on a node first, or what nobody knows the end of."""
        lends, held = self._ledger.lends(node), self._held(node)
        if NodeClaims().claim_for(request.ask, lends) is None:
            return f"{node} does not lend enough at the moment, whatever is held there"
        claims = NodeClaims(lease.claim for _, lease in held if lease.claim is not None)
        for end, lease in held:
            if end == NEVER:
                doing = "holds" if lease.holds else "waits before it for"
                return f"nobody knows how long {lease.id} takes, which {doing} {node}"
            assert lease.claim is not None
            claims.remove(lease.claim)
            if claims.claim_for(request.ask, lends) is not None:
                doing = "is over" if lease.holds else "has had its turn"
                return f"when {lease.id} {doing} on {node}"
        return f"when {node} is free"
