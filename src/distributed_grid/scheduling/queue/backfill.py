"""Backfill: expected durations, reservations for waiting requests, and who may start before them.

Durations. A stated length counts, within the term. Where only a term is known, the mean of the user's last two run
times may shorten it; leases without a command are not estimated. What has outlived its estimate is expected to run up
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
RELEASE_MS = 10_000
"""What has been told to go, or is due, is expected to be gone within this."""


def stated_ms(lease: Lease) -> int:
    """How long a lease will be held by its term or by what was said of it, whichever is less."""
    said, term = lease.request.expects_ms, lease.request.duration_ms
    return min(said, term) if said and term else said or term


def estimated_ms(ledger: Ledger, lease: Lease) -> int:
    """How long a job will take, going by its user's last two."""
    account = ledger.accounts.get(lease.request.user) if lease.job else None
    return max(sum(account.runs) // 2, 1) if account is not None and len(account.runs) == 2 else UNKNOWN


def expected_ms(ledger: Ledger, lease: Lease) -> int:
    """How long a lease will be held, as far as anybody knows; 0 where nobody does."""
    if lease.request.expects_ms:
        return stated_ms(lease)
    term, guess = lease.request.duration_ms, estimated_ms(ledger, lease)
    return min(term, guess) if term and guess else term or guess


def projected_end_ms(ledger: Ledger, lease: Lease, now: int, *, guess: bool = True) -> int:
    """When a lease that is held will be over, always after now; 0 where nobody knows. Without `guess` only words
    and terms count, and a word that was broken does not count any more."""
    if lease.state is LeaseState.RELEASING:
        return now + RELEASE_MS
    said = lease.expected_end_ms
    if said and said + RELEASE_MS > now:
        return max(said, now + 1)
    if lease.ends_at_ms:
        return max(lease.ends_at_ms, now + 1)
    if not guess:
        return UNKNOWN
    length = lease.request.expects_ms or estimated_ms(ledger, lease)
    if not length:
        return UNKNOWN
    held = now - lease.granted_at_ms
    while length <= held:
        length *= 2
    return lease.granted_at_ms + length


NEVER = 2**62
"""Later than anything: nobody knows when."""
CANDIDATE_NODES = 16
"""Of so many promising nodes the best one is kept; for who is owed its place, of all."""


StartCandidate = tuple[int, bool, int, int, int]
"""When a node could serve, whether its owner is in the way, when it last lent something, how much of the ask is there
already (negated), and its row: the lowest is the best."""


class Reservation(Struct, frozen=True):
    """Nodes that are kept for a request, from when on, and what will still be held on each of them then."""

    lease: Lease
    at_ms: int
    stays: dict[str, NodeClaims]
    owed_since_ms: int


class ReleaseTimeline(Struct, frozen=True):
    """Who holds something on a node, soonest gone first, and when the last of them came."""

    ends: list[tuple[int, Lease]]
    last_grant_ms: int

    def staying(self, at_ms: int) -> NodeClaims:
        """What is still held at a moment."""
        return NodeClaims(lease.claim for end, lease in self.ends if end > at_ms and lease.claim is not None)


class StartForecast:
    """When things will come free, seen from one moment; a node is looked at once, when it is first asked about."""

    def __init__(self, ledger: Ledger, now: int) -> None:
        self._ledger = ledger
        self._now = now
        self._departures: dict[tuple[str, bool], ReleaseTimeline] = {}
        self._breaking: dict[str, bool] = {}
        self._known: dict[tuple[Amounts, bool], dict[int, StartCandidate | None]] = {}

    def departures(self, node: str, *, guess: bool = True) -> ReleaseTimeline:
        """Who leaves a node when; without `guess` only by terms, and by words that are not broken yet."""
        found = self._departures.get((node, guess))
        if found is None:
            leases = list(self._ledger.leases_of(node))
            ends = [(projected_end_ms(self._ledger, lease, self._now, guess=guess) or NEVER, lease) for lease in leases]
            ends.sort(key=lambda entry: entry[0])
            found = ReleaseTimeline(ends, max((lease.granted_at_ms for lease in leases), default=0))
            self._departures[node, guess] = found
        return found

    def earliest_ms(self, ask: Amounts, node: str, *, guess: bool = True) -> int:
        """When an ask will fit on a node if nobody else comes; NEVER where nobody knows."""
        lends, held = self._ledger.lends(node), self._ledger.node_claims.get(node) or NodeClaims()
        if held.claim_for(ask, lends) is not None:
            return self._now
        claims = held.copy()
        for end, lease in self.departures(node, guess=guess).ends:
            if end == NEVER:
                break
            assert lease.claim is not None
            claims.give_back(lease.claim)
            if claims.claim_for(ask, lends) is not None:
                return end
        return NEVER

    def keep(
        self, lease: Lease, *, besides: Set[str], owed_since_ms: int = 0, every: bool = False
    ) -> Reservation | None:
        """The place to keep for a request, on nodes that are not kept yet; None where none could serve it."""
        guess = not owed_since_ms
        chosen = sorted(self._promising(lease.request, besides, guess=guess, every=every))[: lease.request.gang]
        if len(chosen) < lease.request.gang:
            return None
        at_ms = max(entry[0] for entry in chosen)
        names = [self._ledger.columns.names[entry[-1]] for entry in chosen]
        stays = {name: self.departures(name, guess=guess).staying(at_ms) for name in names}
        return Reservation(lease, at_ms, stays, owed_since_ms)

    def _promising(self, request: Request, besides: Set[str], *, guess: bool, every: bool) -> list[StartCandidate]:
        """The nodes that could serve, and when."""
        ledger, ask = self._ledger, request.ask
        ready = readiness(ledger, ask)
        rows = np.flatnonzero(could_serve(ledger, request))
        if len(rows) > CANDIDATE_NODES + len(besides) and not every:
            rows = rows[np.argsort(-ready[rows], kind="stable")[: CANDIDATE_NODES + len(besides)]]
        known = self._known.setdefault((ask, guess), {})
        found = []
        for row in rows.tolist():
            name = ledger.columns.names[row]
            if name in besides:
                continue
            if row not in known:
                known[row] = self._promise(ask, row, int(ready[row]), guess=guess)
            promise = known[row]
            if promise is not None:
                found.append(promise)
        return found

    def _promise(self, ask: Amounts, row: int, ready: int, *, guess: bool) -> StartCandidate | None:
        """What a node could do for an ask, or None where it could never serve it."""
        ledger, nobody, name = self._ledger, NodeClaims(), self._ledger.columns.names[row]
        if nobody.claim_for(ask, ledger.nodes[name].lendable) is None:
            return None
        at_ms = self.earliest_ms(ask, name, guess=guess)
        owner = at_ms == NEVER and nobody.claim_for(ask, ledger.lends(name)) is None
        return at_ms, owner, self.departures(name, guess=guess).last_grant_ms, -ready, row

    def leaves_alone(self, kept: Reservation, lease: Lease, node: str, claim: Claim) -> bool:
        """Whether a lease that starts on a node now does not delay the one that the node is kept for."""
        stays = kept.stays.get(node)
        if stays is None:
            return True
        if kept.at_ms == NEVER:
            return not resource_kinds(lease.request.ask) & resource_kinds(kept.lease.request.ask)
        return self._is_over_by(kept, lease) or self.fits_beside(kept.lease.request.ask, node, stays, claim)

    def fits_beside(self, ask: Amounts, node: str, stays: NodeClaims, claim: Claim) -> bool:
        """Whether an ask still fits beside what stays on a node and this claim."""
        stays.take(claim)
        fits = stays.claim_for(ask, self._ledger.lends(node)) is not None
        stays.give_back(claim)
        return fits

    def _is_over_by(self, kept: Reservation, lease: Lease) -> bool:
        length = expected_ms(self._ledger, lease)
        if kept.owed_since_ms:
            length = lease.request.duration_ms
            if not length and self._keeps_its_word(lease.request.user, kept.owed_since_ms):
                length = stated_ms(lease)
        return bool(length) and self._now + length <= kept.at_ms

    def _keeps_its_word(self, user: str, since_ms: int) -> bool:
        """Whether everything a user said about its leases was true since then."""
        account = self._ledger.accounts.get(user)
        if account is not None and account.overran_at_ms >= since_ms:
            return False
        breaking = self._breaking.get(user)
        if breaking is None:
            held = (self._ledger.leases[lease_id] for lease_id in self._ledger.leases_by_user.get(user, ()))
            breaking = self._breaking[user] = any(overran_estimate(lease, self._now) for lease in held)
        return not breaking


def could_serve(ledger: Ledger, request: Request) -> Mask:
    """The open nodes that would have room if nobody held anything there, by their columns."""
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
    """The kinds of resource that an ask is about."""
    found = {name for name, _ in ask.custom}
    if ask.cpu_milli:
        found.add("cpu")
    if ask.memory_bytes:
        found.add("memory")
    if ask.gpu_milli:
        found.add("gpu")
    return frozenset(found)


MAX_COMPETING_REQUESTS = 64
"""With more different requests of higher priorities than this in the line, nothing is left over."""


class LowPriorityCapacity:
    """What those of higher priorities could use, seen from one moment; `higher` has one request of each shape."""

    def __init__(self, ledger: Ledger, prospects: StartForecast, higher: Iterable[Request], now: int) -> None:
        self._ledger = ledger
        self._prospects = prospects
        self._now = now
        requests = list(higher)
        self._wanted = [
            (one, resource_kinds(one.ask), could_serve(ledger, one)) for one in requests[:MAX_COMPETING_REQUESTS]
        ]
        self._too_many = len(requests) > MAX_COMPETING_REQUESTS

    def include(self, lease: Lease, node: str, claim: Claim) -> bool:
        """Whether a lease may take this of a node."""
        if self._too_many:
            return False
        row, mine = self._ledger.columns.rows[node], resource_kinds(lease.request.ask)
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
        names, mine = self._ledger.columns.names, resource_kinds(request.ask)
        masks = [could for _, theirs, could in self._wanted if mine & theirs]
        return {names[row] for could in masks for row in could.nonzero()[0].tolist()}
