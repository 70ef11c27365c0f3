"""Start estimate of a waiting request.

Everybody before it in the queue is planned first, each where it could start soonest, and counts as holding that from
now until its expected end. Later arrivals and backfill are not foreseen. Where the start depends on something of
unknown length the estimate is None, with the reason.

A length is known from a term, from what its user said, or from earlier runs of the same command; after twice the
estimate the length counts as unknown. Unlike backfill, which has to decide, this does not guess from other commands of
a user.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import nsmallest
from itertools import islice

import numpy as np
from msgspec import Struct

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.states import LeaseState
from distributed_grid.scheduling.placement.placement import find_placement
from distributed_grid.scheduling.queue.backfill import (
    NEVER,
    UNKNOWN,
    could_serve,
    projected_end_ms,
    readiness,
    stated_ms,
)
from distributed_grid.scheduling.queue.fairness import Quotas
from distributed_grid.scheduling.queue.order import is_tight, queue_order
from distributed_grid.scheduling.queue.queue import fit_key

MAX_PLANNED = 100  # queue positions that are planned
MAX_PLANNED_FOR_NEWCOMER = 20
"""The same in the answer to a submission: who submits many jobs at once must not wait for as many plans."""
CANDIDATE_NODES = 32  # nodes that are compared for each request


class StartEstimate(Struct, frozen=True):
    """The position in the queue (1 is next), the expected start (None: unknown), and why then."""

    position: int
    starts_at_ms: int | None
    reason: str


def known_length_ms(ledger: Ledger, lease: Lease) -> int:
    """Length of a lease by its term, its statement or earlier runs of its command; 0 if unknown."""
    return stated_ms(lease) or _run_ms(ledger, lease)


def known_end_ms(ledger: Ledger, lease: Lease, now: int) -> int:
    """Expected end of a held lease, always after now; 0 if unknown."""
    end = projected_end_ms(ledger, lease, now, estimates=False)
    length = lease.request.expects_ms or _run_ms(ledger, lease)
    if end or not length:
        return end
    began = lease.granted_at_ms
    return next((at for at in (began + length, began + 2 * length) if at > now), UNKNOWN)


def _run_ms(ledger: Ledger, lease: Lease) -> int:
    """Run time of a job by earlier runs of its command; 0 if there were none."""
    job = ledger.jobs.get(lease.job)
    return job.estimate.run_ms if job is not None and job.estimate is not None else UNKNOWN


def estimate_newcomer_start(ledger: Ledger, lease: Lease, now: int) -> int | None:
    """The expected start of a request that was just made; None where it is unknown, or too many are before it."""
    if not is_tight(ledger, lease.request, now):
        # Whatever the shares, those of higher priorities and the older ones of its user come before it.
        rank = (-int(lease.request.priority),)
        own = ledger.waiting_index.by_user.get(lease.request.user, ())
        before = bisect_left(ledger.waiting, rank) + bisect_left(own, lease.queue_key) - bisect_left(own, rank)
        if before >= MAX_PLANNED_FOR_NEWCOMER:
            return None
    return estimate_start(ledger, lease, now, max_planned=MAX_PLANNED_FOR_NEWCOMER).starts_at_ms


def estimate_start(ledger: Ledger, lease: Lease, now: int, *, max_planned: int = MAX_PLANNED) -> StartEstimate:
    """The position of a waiting request, its expected start, and why then or why it is unknown."""
    order = queue_order(ledger, now, newcomer=lease)
    known = ledger.leases.get(lease.id, lease)
    position = 1 + (order.position(lease) if known.state is LeaseState.ASKED else len(order))
    exceeded = Quotas(ledger).exceeded(lease.request)
    if exceeded is not None:
        return StartEstimate(position, None, f"when less is held under the {exceeded}")
    if position > max_planned:
        return StartEstimate(position, None, f"{position - 1} requests are before it")
    plan = _StartPlan(ledger, now)
    for one in islice(order.in_order(), position - 1):
        plan.add(one)
    at_ms, reason = plan.start_of(lease)
    return StartEstimate(position, None if at_ms == NEVER else at_ms, reason)


class _Releases:
    """Claims on a node with their ends, by leases and by planned requests, soonest first.

    For each ask it caches the number of claims that have to end first. Further plans never lower it, so all requests of
    one ask together pass over the ends once.
    """

    def __init__(self, ends: list[tuple[int, Lease]], lends: Capacity) -> None:
        self.ends = list(ends)
        self._lends = lends
        self._over: dict[Amounts, int] = {}
        self._left: dict[Amounts, NodeClaims] = {}

    def add(self, end: int, planned: Lease) -> None:
        at = bisect_right(self.ends, end, key=_end_of)
        self.ends.insert(at, (end, planned))
        for ask, over in self._over.items():
            if at < over:
                self._over[ask] = over + 1
            elif planned.claim is not None:
                self._left[ask].add(planned.claim)

    def fits_at(self, ask: Amounts, now: int) -> int:
        """When an ask fits; NEVER where that depends on something of unknown length."""
        left = self._left.get(ask)
        if left is None:
            left = self._left[ask] = NodeClaims(lease.claim for _, lease in self.ends if lease.claim is not None)
        over = self._over.get(ask, 0)
        while left.claim_for(ask, self._lends) is None:
            end, lease = self.ends[over] if over < len(self.ends) else (NEVER, None)
            if end == NEVER or lease is None or lease.claim is None:
                self._over[ask] = over
                return NEVER
            left.remove(lease.claim)
            over += 1
        self._over[ask] = over
        return self.ends[over - 1][0] if over else now

    def claims_after(self, at_ms: int) -> NodeClaims:
        """Claims still held at a moment; none at NEVER."""
        ends = self.ends[bisect_right(self.ends, at_ms, key=_end_of) :] if at_ms != NEVER else []
        return NodeClaims(lease.claim for _, lease in ends if lease.claim is not None)


def _end_of(entry: tuple[int, Lease]) -> int:
    return entry[0]


class _StartPlan:
    """Claims on each node with their ends: of leases, and of the requests planned so far."""

    def __init__(self, ledger: Ledger, now: int) -> None:
        self._ledger = ledger
        self._now = now
        self._quotas = Quotas(ledger)
        self._nodes: dict[str, _Releases] = {}
        self._candidates: dict[object, list[tuple[int, str]]] = {}

    def add(self, lease: Lease) -> None:
        """Plan a request of the queue; a request beyond its quota, or without a node, takes nothing."""
        if self._quotas.exceeded(lease.request) is not None:
            return
        found = self._soonest(lease.request)
        if not found:
            return
        start, length = found[-1][0], known_length_ms(self._ledger, lease)
        end = start + length if start != NEVER and length else NEVER
        for _, _, node in found:
            releases, lendable = self._releases(node), self._ledger.nodes[node].lendable
            claim = releases.claims_after(start).claim_for(lease.request.ask, lendable)
            releases.add(
                end, Lease(id=lease.id, request=lease.request, asked_at_ms=lease.asked_at_ms, node=node, claim=claim)
            )

    def start_of(self, lease: Lease) -> tuple[int, str]:
        """Earliest start of a request after the planned ones, and the reason."""
        found = self._soonest(lease.request)
        if len(found) < lease.request.gang:
            return NEVER, "no open node could serve it"
        at_ms, _, node = found[-1]
        if at_ms > self._now:
            return at_ms, self._waits_for(lease.request, node)
        room = find_placement(self._ledger, lease.request) is not None
        return at_ms, f"{node} has room, and is kept for others at the moment" if room else f"{node} has room"

    def _soonest(self, request: Request) -> list[tuple[int, int, str]]:
        """The nodes that could serve first, as many as it needs: when, and how much is free already (negated)."""
        key = fit_key(request)
        names = self._candidates.get(key)
        if names is None:
            ready = readiness(self._ledger, request.ask)
            rows = np.flatnonzero(could_serve(self._ledger, request))
            rows = rows[np.argsort(-ready[rows], kind="stable")[: CANDIDATE_NODES + request.gang]]
            names = [(-int(ready[row]), self._ledger.columns.names[row]) for row in rows.tolist()]
            self._candidates[key] = names
        found = ((self._releases(name).fits_at(request.ask, self._now), ready, name) for ready, name in names)
        return nsmallest(request.gang, found) if request.gang > 1 or not names else [min(found)]

    def _releases(self, node: str) -> _Releases:
        found = self._nodes.get(node)
        if found is None:
            leases = self._ledger.leases_of(node)
            ends = [(known_end_ms(self._ledger, lease, self._now) or NEVER, lease) for lease in leases]
            found = self._nodes[node] = _Releases(sorted(ends, key=_end_of), self._ledger.lends(node))
        return found

    def _waits_for(self, request: Request, node: str) -> str:
        """The lease that has to end first on a node, or the one of unknown length."""
        lends, held = self._ledger.lends(node), self._releases(node).ends
        if NodeClaims().claim_for(request.ask, lends) is None:
            return f"{node} does not lend enough at the moment, whatever is held there"
        claims = NodeClaims(lease.claim for _, lease in held if lease.claim is not None)
        for end, lease in held:
            if end == NEVER:
                doing = "holds" if lease.holds else "waits before it for"
                return f"nobody knows how long {self._name_of(lease)} takes, which {doing} {node}"
            assert lease.claim is not None
            claims.remove(lease.claim)
            if claims.claim_for(request.ask, lends) is not None:
                doing = "is over" if lease.holds else "has had its turn"
                return f"when {self._name_of(lease)} {doing} on {node}"
        return f"when {node} is free"

    def _name_of(self, lease: Lease) -> str:
        """The id of a lease's job, or its own."""
        known = self._ledger.leases.get(lease.id, lease)
        job = self._ledger.jobs.get(known.job)
        return lease.id if job is None else job.id
