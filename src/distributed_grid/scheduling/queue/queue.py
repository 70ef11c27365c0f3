"""The queue of waiting requests: its order, and which request is granted next.

Order: priority; tight deadlines; users below their share, then the others by their excess; waiting time relative to
length; age. A request that has waited for `starvation_ms` is promoted before all others, if it is the oldest of its
user and none of that user's was promoted within the last `starvation_ms`: a flood of requests gains nothing by age.

The first request that fits is granted. The first that does not fit gets a reservation (`backfill`), and so do those
behind it that have waited for `reserve_after_ms`, on nodes of their own; where the start is unknown, only after that
time. A later request may pass if it delays no reservation before it; among several, the one that has waited longest for
its length and size. `low` only takes what no higher priority could use, unless promoted. Who is beyond its quota blocks
nobody.

Bounded waiting. Let L be the longest that anything is held, p `preemptions_max`, U the number of users, S
`starvation_ms`, and r a request that some open nodes could serve within its quota, with k older ones of its user and m
older ones of others in the queue. After S the oldest of each user is promoted, at least one in each S. Before it are
then only older promoted ones, at most m, which have waited for S, too. For the first of them nobody takes what it waits
for, except who ends in time by a term, which the grid enforces, or by the estimate of a user who has not overrun one
since (so each user can break one); nor is anybody preempted there for others. It starts within (U + 1) L (`backfill`),
and the next is first. What is preempted comes back with its age, at most p times. With W = (m + 1) (p + 1) (U + 1) L
nobody waits longer than S + (k + 1) (S + W); where all estimates hold, U counts as 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from msgspec import Struct

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Claim, Priority
from distributed_grid.scheduling.placement.placement import Placement, find_placement
from distributed_grid.scheduling.queue.backfill import (
    NEVER,
    LowPriorityCapacity,
    Reservation,
    StartForecast,
    expected_ms,
    resource_kinds,
)
from distributed_grid.scheduling.queue.fairness import Quotas, Shares, rates_of

NO_DEADLINE = 2**62
UNKNOWN_LENGTH_MS = 3_600_000
"""What nobody knows the length of counts as this long."""
QueueKey = tuple[int, int, int, int, float, int, str]


class QueueOrder:
    """The waiting at one moment, and the place of each among them."""

    def __init__(self, ledger: Ledger, waiting: Iterable[Lease], shares: Shares, now: int) -> None:
        self._ledger = ledger
        self._policy = ledger.policy
        self._now = now
        overdue = now - self._policy.starvation_ms
        eldest: dict[str, tuple[int, str]] = {}
        self._found: list[tuple[QueueKey, Lease]] = []
        for lease in waiting:
            request, asked_at = lease.request, lease.asked_at_ms
            if asked_at <= overdue:
                eldest[request.user] = min(eldest.get(request.user, (asked_at, lease.id)), (asked_at, lease.id))
            latest = request.latest_start_ms if request.deadline_ms and self.is_tight(request) else NO_DEADLINE
            excess = shares.excess(request.user, request.team)
            place = (1, -request.priority, latest, excess, -self.need(lease), asked_at, lease.id)
            self._found.append((place, lease))
        self._lifted = {lease_id for user, (_, lease_id) in eldest.items() if self._has_waited(user, overdue)}
        if self._lifted:
            self._found = [
                ((0, 0, 0, 0, 0.0, lease.asked_at_ms, lease.id), lease) if lease.id in self._lifted else (place, lease)
                for place, lease in self._found
            ]
        self._line: list[Lease] | None = None

    def _has_waited(self, user: str, overdue: int) -> bool:
        account = self._ledger.accounts.get(user)
        return account is None or account.promoted_at_ms <= overdue

    def need(self, lease: Lease) -> float:
        """How long one of the waiting has waited and will take, in lengths of it."""
        length = expected_ms(self._ledger, lease) or UNKNOWN_LENGTH_MS
        return (self._now - lease.asked_at_ms + length) / length

    def first(self) -> Lease:
        """Whose turn is next; somebody must wait."""
        return min(self._found)[1] if self._line is None else self._line[0]

    @property
    def line(self) -> list[Lease]:
        """Everybody, in order."""
        if self._line is None:
            self._line = [lease for _, lease in sorted(self._found)]
        return self._line

    def is_lifted(self, lease: Lease) -> bool:
        """Whether one of the waiting goes before all others for having waited so long."""
        return lease.id in self._lifted

    def is_tight(self, request: Request) -> bool:
        """Whether a request has to start before long to be over by its deadline: sooner than it takes."""
        if not request.deadline_ms:
            return False
        return request.latest_start_ms - self._now <= max(request.expects_ms, self._policy.reserve_after_ms)


MAX_RESERVATIONS = 16
"""For so many of the line a place is kept at once."""
MAX_CONTESTED_TRIES = 8
"""So many coveted nodes are tried for a `low` request before all of them are given up."""


class QueueGrant(Struct, frozen=True):
    """The next waiting request that can be served, its place, and the shapes found not to fit on the way to it."""

    lease: Lease
    placement: Placement
    tried: frozenset[object]


def fit_key(request: Request) -> object:
    """What decides whether there is room: two requests of one shape fit or fail together."""
    return (request.ask, request.gang, request.require, request.labels, request.affinity, request.anti_affinity)


def next_grant(ledger: Ledger, now: int, tried: frozenset[object] = frozenset()) -> QueueGrant | None:
    """The one of the line that is served next; shapes in `tried` are known not to fit."""
    return QueueScan(ledger, now, tried=tried).turn() if ledger.waiting else None


def place_newcomer(ledger: Ledger, lease: Lease, now: int) -> Placement | None:
    """The place that a request gets that has just come, or None where it has to wait."""
    if ledger.policy.quotas and Quotas(ledger).beyond(lease.request) is not None:
        return None
    room = find_placement(ledger, lease.request)
    return room if room is None or not ledger.waiting else QueueScan(ledger, now, newcomer=lease).place_of(lease, room)


def reserved_nodes(ledger: Ledger, lease: Lease, now: int) -> frozenset[str]:
    """The nodes where what a request asks for is kept for those before it: nobody is displaced there for its sake."""
    return QueueScan(ledger, now, newcomer=lease).kept_from(lease) if ledger.waiting else frozenset()


def queue_order(ledger: Ledger, now: int, *, newcomer: Lease | None = None) -> list[Lease]:
    """Everybody who waits, whose turn is next first; a newcomer is put where it would come."""
    return QueueScan(ledger, now, newcomer=newcomer).order.line


class QueueScan:
    """One look at the line: what is found out on the way is found out once."""

    def __init__(
        self, ledger: Ledger, now: int, *, tried: frozenset[object] = frozenset(), newcomer: Lease | None = None
    ) -> None:
        self._ledger = ledger
        self._now = now
        self._shares = Shares(ledger, now, newcomer=newcomer)
        self._quotas = Quotas(ledger) if ledger.policy.quotas else None
        self._prospects = StartForecast(ledger, now)
        self._full = set(tried)
        self._rooms: dict[object, Placement] = {}
        self._blocked: list[tuple[int, Lease]] = []
        self._places: list[tuple[int, Reservation]] | None = None
        self._refused: dict[object, tuple[int, float]] = {}
        self._left: LowPriorityCapacity | None = None
        waiting = [ledger.leases[lease_id] for _, _, lease_id in ledger.waiting]
        if newcomer is not None and newcomer.id not in ledger.leases:
            waiting.append(newcomer)
        self.order = QueueOrder(ledger, waiting, self._shares, now)

    def _takes_leftovers(self, lease: Lease) -> bool:
        return lease.request.priority <= Priority.LOW and not self.order.is_lifted(lease)

    def turn(self) -> QueueGrant | None:
        """Who is served next: the first that fits, or who may pass those that do not."""
        first = self.order.first()
        room = None if self._is_beyond_quota(first) else self._room(first.request)
        if room is not None:
            return QueueGrant(first, room, self._tried())
        passing: list[tuple[int, Lease, Placement]] = []
        for at, lease in enumerate(self.order.line):
            if self._is_beyond_quota(lease):
                continue
            room = self._room(lease.request)
            if room is None:
                self._blocked.append((at, lease))
            elif self._blocked:
                passing.append((at, lease, room))
            else:
                return QueueGrant(lease, room, self._tried())
        passing.sort(key=lambda entry: self._need(entry[1], entry[0]))
        for at, lease, room in passing:
            found = self._past_others(at, lease, room)
            if found is not None:
                return QueueGrant(lease, found, self._tried())
        return None

    def place_of(self, lease: Lease, room: Placement) -> Placement | None:
        """Where one of the line is served now, out of turn if it has to; `room` is where it would go by itself."""
        return self._past_others(self._up_to(lease), lease, room)

    def kept_from(self, lease: Lease) -> frozenset[str]:
        """The nodes where something of what one of the line asks for is kept for those before it."""
        at, mine = self._up_to(lease), resource_kinds(lease.request.ask)
        places = (
            kept for before, kept in self._kept() if before < at and mine & resource_kinds(kept.lease.request.ask)
        )
        names = frozenset(name for kept in places for name in kept.stays)
        return names | self._leftovers().coveted(lease.request) if self._takes_leftovers(lease) else names

    def _up_to(self, lease: Lease) -> int:
        """The place of one of the line; who of those before it has no room is noted."""
        for at, one in enumerate(self.order.line):
            if one.id == lease.id:
                return at
            if not self._is_beyond_quota(one) and self._room(one.request) is None:
                self._blocked.append((at, one))
        return len(self.order.line)

    def _is_beyond_quota(self, lease: Lease) -> bool:
        return self._quotas is not None and self._quotas.beyond(lease.request) is not None

    def _room(self, request: Request) -> Placement | None:
        """Where a request would go if nobody else waited."""
        key = fit_key(request)
        if key in self._full:
            return None
        room = self._rooms.get(_placement_key(request))
        if room is None:
            room = find_placement(self._ledger, request)
            if room is None:
                self._full.add(key)
            else:
                self._rooms[_placement_key(request)] = room
        return room

    def _tried(self) -> frozenset[object]:
        """The shapes that will not fit when more is granted; who wants to be near to something may be lucky."""
        return frozenset(key for key in self._full if not key[4])  # type: ignore[index]

    def _need(self, lease: Lease, at: int) -> tuple[int, bool, float, int]:
        """Who goes first among those who may pass: by priority, then the wait in lengths of the request, those four
        times as large counting twice."""
        request = lease.request
        rank = max(request.priority, Priority.MEDIUM) if self.order.is_lifted(lease) else request.priority
        size = self._shares.size(rates_of(request.ask)) * request.gang
        return (-int(rank), not self.order.is_tight(request), -self.order.need(lease) * sqrt(size), at)

    def _past_others(self, at: int, lease: Lease, room: Placement) -> Placement | None:
        """A place for one of the line that delays nobody before it, or None."""
        leftovers = self._takes_leftovers(lease)
        length = expected_ms(self._ledger, lease) or float("inf")
        key = (_placement_key(lease.request), leftovers, self._credit(lease))
        known = self._refused.get(key)
        if known is not None and known[0] <= at and known[1] <= length:
            return None
        avoid: set[str] = set()
        found: Placement | None = room
        while found is not None:
            places = ((found.node, found.claim), *found.others)
            taken = {node for node, claim in places if not self._may_take(at, lease, node, claim)}
            if not taken:
                return found
            avoid |= taken
            if leftovers and len(avoid) > MAX_CONTESTED_TRIES:
                avoid |= self._leftovers().coveted(lease.request)
            found = find_placement(self._ledger, lease.request, avoid=frozenset(avoid))
        self._refused[key] = (at, length)
        return None

    def _credit(self, lease: Lease) -> object:
        """What else decides over a place, where somebody is owed one: whose word it is, and what it is."""
        if not any(kept.owed_since_ms for _, kept in self._kept()):
            return None
        return (lease.request.user, lease.request.expects_ms, lease.request.duration_ms)

    def _may_take(self, at: int, lease: Lease, node: str, claim: Claim) -> bool:
        for before, kept in self._kept():
            if before < at and not self._prospects.leaves_alone(kept, lease, node, claim):
                return False
        return not self._takes_leftovers(lease) or self._leftovers().include(lease, node, claim)

    def _leftovers(self) -> LowPriorityCapacity:
        if self._left is None:
            higher: dict[object, Request] = {}
            for lease in self.order.line:
                if lease.request.priority > Priority.LOW and not self._is_beyond_quota(lease):
                    higher.setdefault(fit_key(lease.request), lease.request)
            self._left = LowPriorityCapacity(self._ledger, self._prospects, higher.values(), self._now)
        return self._left

    def _kept(self) -> list[tuple[int, Reservation]]:
        """The places that are kept, with the place in line of whom they are kept for."""
        if self._places is None:
            self._places = []
            taken: set[str] = set()
            hopeless: set[object] = set()
            nobody_knows = False
            for at, lease in self._blocked:
                if len(self._places) == MAX_RESERVATIONS or len(taken) == len(self._ledger.nodes):
                    break
                patient = self._now - lease.asked_at_ms <= self._ledger.policy.reserve_after_ms
                if fit_key(lease.request) in hopeless or (patient and (self._places or nobody_knows)):
                    continue
                kept = self._place_kept_for(lease, taken, first=not self._places)
                if kept is None:
                    hopeless.add(fit_key(lease.request))
                elif patient and kept.at_ms == NEVER:
                    nobody_knows = True
                else:
                    self._places.append((at, kept))
                    taken |= kept.stays.keys()
        return self._places

    def _place_kept_for(self, lease: Lease, taken: set[str], *, first: bool) -> Reservation | None:
        owed_since = lease.asked_at_ms + self._ledger.policy.starvation_ms
        if self._now < owed_since:
            return self._prospects.keep(lease, besides=taken)
        return self._prospects.keep(lease, besides=taken, owed_since_ms=owed_since, every=first)


def _placement_key(request: Request) -> object:
    """What decides where a request goes: two of one wish go to the same place."""
    return (fit_key(request), request.prefer, request.strategy, request.target, request.group)
