"""Backfill: expected durations, reservations for waiting requests, and who may start before them.

Durations. A stated length counts, within the term. Where only a term is known, the mean of the user's last two run
times may shorten it; leases without a command are not estimated. A lease beyond its estimate is expected to run up
to its term, else for as long again, doubling.

Reservations. A reservation is a set of nodes and the moment when enough will be free there. Others may start there if
they are over by then, or fit beside the request even then. Where the moment is unknown nobody takes there what the
request waits for, and what comes free adds up; the node whose last grant is longest ago is reserved: nobody joins it,
so the choice only ever moves to a node that is free sooner. A promoted request is not passed on an estimate: only terms
count, and the statements of users who have not overrun one since.

Low priority. On a node that a waiting request of higher priority could use, `low` takes nothing of the same kinds,
unless it is over before that could start there, or leaves enough for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Claim
from distributed_grid.domain.states import LeaseState
from distributed_grid.scheduling.placement.placement import Mask, allowed_rows
from distributed_grid.scheduling.queue.fairness import overran_estimate

UNKNOWN = 0
RELEASE_MS = 10_000  # what is being released, or is due, is expected to be gone within this


def stated_ms(lease: Lease) -> int:
    stated, term = lease.request.expects_ms, lease.request.duration_ms
    return min(stated, term) if stated and term else stated or term


def estimated_ms(ledger: Ledger, lease: Lease) -> int:
    account = ledger.accounts.get(lease.request.user) if lease.job else None
    return max(sum(account.runs) // 2, 1) if account is not None and len(account.runs) == 2 else UNKNOWN


def expected_ms(ledger: Ledger, lease: Lease) -> int:
    """The expected length of a lease; 0 where it is unknown."""
    if lease.request.expects_ms:
        return stated_ms(lease)
    term, estimates = lease.request.duration_ms, estimated_ms(ledger, lease)
    return min(term, estimates) if term and estimates else term or estimates


def projected_end_ms(ledger: Ledger, lease: Lease, now: int, *, estimates: bool = True) -> int:
    """When a lease that is held will be over, always after now; 0 where that is unknown. Without `estimates` only
    terms count, and statements that are not overrun."""
    if lease.state is LeaseState.RELEASING:
        return now + RELEASE_MS
    end_ms = lease.expected_end_ms
    if end_ms and end_ms + RELEASE_MS > now:
        return max(end_ms, now + 1)
    if lease.ends_at_ms:
        return max(lease.ends_at_ms, now + 1)
    if not estimates:
        return UNKNOWN
    length = lease.request.expects_ms or estimated_ms(ledger, lease)
    if not length:
        return UNKNOWN
    held = now - lease.granted_at_ms
    while length <= held:
        length *= 2
    return lease.granted_at_ms + length


NEVER = 2**62  # later than anything: the moment is unknown
CANDIDATE_NODES = 16  # nodes that are compared for a reservation; for the first promoted request all are


StartCandidate = tuple[int, bool, int, int, int]
"""When a node could serve, whether its owner is in the way, its last grant, how much of the ask is free already
(negated), and its row: the lowest is the best."""


class Reservation(Struct, frozen=True):
    """Nodes reserved for a request from a moment on, and the claims still held there then."""

    lease: Lease
    at_ms: int
    held_then: dict[str, NodeClaims]
    overdue_since_ms: int


class ReleaseTimeline(Struct, frozen=True):
    """The expected ends of the leases on a node, soonest first, and its last grant."""

    ends: list[tuple[int, Lease]]
    last_grant_ms: int

    def held_after(self, at_ms: int) -> NodeClaims:
        return NodeClaims(lease.claim for end, lease in self.ends if end > at_ms and lease.claim is not None)


class StartForecast:
    """When capacity will come free, seen from one moment; each node is evaluated once, on first use."""

    def __init__(self, ledger: Ledger, now: int) -> None:
        self._ledger = ledger
        self._now = now
        self._timelines: dict[tuple[str, bool], ReleaseTimeline] = {}
        self._overruns: dict[str, bool] = {}
        self._known: dict[tuple[Amounts, bool], dict[int, StartCandidate | None]] = {}

    def releases(self, node: str, *, estimates: bool = True) -> ReleaseTimeline:
        """When the leases of a node end; without `estimates` only by terms and statements not yet overrun."""
        found = self._timelines.get((node, estimates))
        if found is None:
            leases = list(self._ledger.leases_of(node))
            ends = [
                (projected_end_ms(self._ledger, lease, self._now, estimates=estimates) or NEVER, lease)
                for lease in leases
            ]
            ends.sort(key=lambda entry: entry[0])
            found = ReleaseTimeline(ends, max((lease.granted_at_ms for lease in leases), default=0))
            self._timelines[node, estimates] = found
        return found

    def earliest_ms(self, ask: Amounts, node: str, *, estimates: bool = True) -> int:
        """Earliest moment when an ask fits on a node if no other request comes; NEVER if unknown."""
        lends, held = self._ledger.lends(node), self._ledger.node_claims.get(node) or NodeClaims()
        if held.claim_for(ask, lends) is not None:
            return self._now
        claims = held.copy()
        for end, lease in self.releases(node, estimates=estimates).ends:
            if end == NEVER:
                break
            assert lease.claim is not None
            claims.remove(lease.claim)
            if claims.claim_for(ask, lends) is not None:
                return end
        return NEVER

    def reserve(
        self, lease: Lease, *, exclude: Set[str], overdue_since_ms: int = 0, all_nodes: bool = False
    ) -> Reservation | None:
        """The best reservation for a request on other nodes than the excluded ones; None where none could serve it."""
        estimates = not overdue_since_ms
        chosen = sorted(self._candidates(lease.request, exclude, estimates=estimates, all_nodes=all_nodes))[
            : lease.request.gang
        ]
        if len(chosen) < lease.request.gang:
            return None
        at_ms = max(entry[0] for entry in chosen)
        names = [self._ledger.columns.names[entry[-1]] for entry in chosen]
        held_then = {name: self.releases(name, estimates=estimates).held_after(at_ms) for name in names}
        return Reservation(lease, at_ms, held_then, overdue_since_ms)

    def _candidates(
        self, request: Request, exclude: Set[str], *, estimates: bool, all_nodes: bool
    ) -> list[StartCandidate]:
        ledger, ask = self._ledger, request.ask
        ready = readiness(ledger, ask)
        rows = np.flatnonzero(could_serve(ledger, request))
        if len(rows) > CANDIDATE_NODES + len(exclude) and not all_nodes:
            rows = rows[np.argsort(-ready[rows], kind="stable")[: CANDIDATE_NODES + len(exclude)]]
        known = self._known.setdefault((ask, estimates), {})
        found = []
        for row in rows.tolist():
            name = ledger.columns.names[row]
            if name in exclude:
                continue
            if row not in known:
                known[row] = None  # it could never serve the ask
                nobody = NodeClaims()
                if nobody.claim_for(ask, ledger.nodes[name].lendable) is not None:
                    at_ms = self.earliest_ms(ask, name, estimates=estimates)
                    owner = at_ms == NEVER and nobody.claim_for(ask, ledger.lends(name)) is None
                    last_grant_ms = self.releases(name, estimates=estimates).last_grant_ms
                    known[row] = (at_ms, owner, last_grant_ms, -int(ready[row]), row)
            candidate = known[row]
            if candidate is not None:
                found.append(candidate)
        return found

    def does_not_delay(self, reservation: Reservation, lease: Lease, node: str, claim: Claim) -> bool:
        """Whether a lease that starts on a node now does not delay the reservation there."""
        held_then = reservation.held_then.get(node)
        if held_then is None:
            return True
        if reservation.at_ms == NEVER:
            return not resource_kinds(lease.request.ask) & resource_kinds(reservation.lease.request.ask)
        length = expected_ms(self._ledger, lease)
        if reservation.overdue_since_ms:
            length = lease.request.duration_ms
            if not length and self._estimates_hold(lease.request.user, reservation.overdue_since_ms):
                length = stated_ms(lease)
        return (bool(length) and self._now + length <= reservation.at_ms) or self.fits_beside(
            reservation.lease.request.ask, node, held_then, claim
        )

    def fits_beside(self, ask: Amounts, node: str, held_then: NodeClaims, claim: Claim) -> bool:
        """True if an ask fits beside this claim and the claims still held then."""
        held_then.add(claim)
        fits = held_then.claim_for(ask, self._ledger.lends(node)) is not None
        held_then.remove(claim)
        return fits

    def _estimates_hold(self, user: str, since_ms: int) -> bool:
        """Whether no lease of a user has outlasted its stated length since then."""
        account = self._ledger.accounts.get(user)
        if account is not None and account.overran_at_ms >= since_ms:
            return False
        overruns = self._overruns.get(user)
        if overruns is None:
            held = (self._ledger.leases[lease_id] for lease_id in self._ledger.leases_by_user.get(user, ()))
            overruns = self._overruns[user] = any(overran_estimate(lease, self._now) for lease in held)
        return not overruns


def could_serve(ledger: Ledger, request: Request) -> Mask:
    """The open nodes that would have room if they were empty, by their columns."""
    columns, ask = ledger.columns, request.ask
    mask = columns.open & (columns.lends_cpu >= ask.cpu_milli) & (columns.lends_memory >= ask.memory_bytes)
    if ask.gpu_milli:
        mask &= columns.lends_gpus >= max(ask.gpu_milli // WHOLE_GPU, 1)
    if ask.gpu_models:
        mask &= columns.has_model(ask.gpu_models)
    musts = allowed_rows(ledger, request)
    return mask if musts is None else mask & musts


def readiness(ledger: Ledger, ask: Amounts) -> NDArray[np.int64]:
    """How much of an ask each node has free, in thousandths of the scarcest kind."""
    columns = ledger.columns
    ready = np.full(len(columns.open), 1000, dtype=np.int64)
    if ask.cpu_milli:
        np.minimum(ready, columns.cpu * 1000 // ask.cpu_milli, out=ready)
    if ask.memory_bytes:
        mib = max(ask.memory_bytes >> 20, 1)
        np.minimum(ready, (columns.memory >> 20) * 1000 // mib, out=ready)
    if ask.gpu_milli >= WHOLE_GPU:
        np.minimum(ready, columns.gpu_whole * 1000 // (ask.gpu_milli // WHOLE_GPU), out=ready)
    elif ask.gpu_milli:
        np.minimum(ready, columns.gpu_part * 1000 // ask.gpu_milli, out=ready)
    return ready


def resource_kinds(ask: Amounts) -> frozenset[str]:
    found = {name for name, _ in ask.custom}
    if ask.cpu_milli:
        found.add("cpu")
    if ask.memory_bytes:
        found.add("memory")
    if ask.gpu_milli:
        found.add("gpu")
    return frozenset(found)


MAX_COMPETING_REQUESTS = 64
"""With more different requests of higher priorities in the queue, nothing is left for `low`."""


class LowPriorityCapacity:
    """Capacity that waiting requests of higher priorities leave for `low`; `higher` has one request of each fit key."""

    def __init__(self, ledger: Ledger, forecast: StartForecast, higher: Iterable[Request], now: int) -> None:
        self._ledger = ledger
        self._forecast = forecast
        self._now = now
        requests = list(higher)
        self._competing = [
            (request, resource_kinds(request.ask), could_serve(ledger, request))
            for request in requests[:MAX_COMPETING_REQUESTS]
        ]
        self._too_many = len(requests) > MAX_COMPETING_REQUESTS

    def allows(self, lease: Lease, node: str, claim: Claim) -> bool:
        if self._too_many:
            return False
        row, mine = self._ledger.columns.rows[node], resource_kinds(lease.request.ask)
        competing = [one for one, theirs, could in self._competing if could[row] and mine & theirs]
        length = expected_ms(self._ledger, lease) if competing else 0
        for other in competing:
            start = self._forecast.earliest_ms(other.ask, node)
            if (
                start == NEVER
            ):  # nobody knows when; or never at all, where a mask of columns says more than the node has
                if NodeClaims().claim_for(other.ask, self._ledger.nodes[node].lendable) is not None:
                    return False
            elif not length or self._now + length > start:
                held_then = self._forecast.releases(node).held_after(start)
                if not self._forecast.fits_beside(other.ask, node, held_then, claim):
                    return False
        return True

    def contested_nodes(self, request: Request) -> set[str]:
        """Nodes where a request of higher priority could use the same kinds of resources."""
        names, mine = self._ledger.columns.names, resource_kinds(request.ask)
        masks = [could for _, theirs, could in self._competing if mine & theirs]
        return {names[row] for could in masks for row in could.nonzero()[0].tolist()}
