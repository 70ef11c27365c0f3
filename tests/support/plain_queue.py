"""The queue by its plain definition, queue` must decide./one request at a time: the oracle for the grouped queue of
`scheduling/queue`./queue` must decide.

Every waiting request is sorted and tried by itself. Too slow to ship, and the oracle of its property test.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import sqrt

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
from distributed_grid.scheduling.queue.order import (
    NO_DEADLINE,
    OVERTAKEN,
    UNKNOWN_LENGTH_MS,
    Overtaking,
)
from distributed_grid.scheduling.queue.queue import (
    MAX_CONTESTED_TRIES,
    MAX_RESERVATIONS,
    QueueGrant,
    fit_key,
)

QueueKey = tuple[int, int, int, int, float, int, str]


class PlainShares(Shares):
    """The shares, with everybody who waits looked at."""

    @cached_property
    def _active_users(self) -> dict[str, int]:
        ledger = self._ledger
        some = [lease_id for _, _, lease_id in ledger.waiting]
        some += [next(iter(leases)) for leases in ledger.leases_by_user.values() if leases]
        requests = [ledger.leases[lease_id].request for lease_id in some]
        requests += [self._newcomer.request] if self._newcomer is not None else []
        teams = {one.user: one.team for one in requests}
        return {user: max(ledger.policy.weight_of(user, team), 1) for user, team in teams.items()}


class PlainOrder:
    """The waiting requests at one moment, and the sort key of each."""

    def __init__(self, ledger: Ledger, waiting: Iterable[Lease], shares: Shares, now: int) -> None:
        self._ledger = ledger
        self._policy = ledger.policy
        self._now = now
        overdue = now - self._policy.starvation_ms
        oldest: dict[str, tuple[int, str]] = {}
        overtaking = self._overtaking = Overtaking(ledger, shares, now)
        self.without_reservation: set[str] = set()
        self._entries: list[tuple[QueueKey, Lease]] = []
        for lease in waiting:
            request, asked_at = lease.request, lease.asked_at_ms
            if asked_at <= overdue:
                oldest[request.user] = min(oldest.get(request.user, (asked_at, lease.id)), (asked_at, lease.id))
            latest = request.latest_start_ms if request.deadline_ms and self.is_tight(request) else NO_DEADLINE
            excess = shares.excess(request.user, request.team)
            overtaken, ratio = overtaking.is_overtaken(lease), self.wait_ratio(lease)
            rank = OVERTAKEN if overtaken else excess
            place = (1, -request.priority, latest, rank, 0.0 if overtaken else -ratio, asked_at, lease.id)
            if overtaking.is_short(lease) and not self._equals_overtaken(lease):
                place = (-1, 0, 0, 0, -ratio, asked_at, lease.id)
                self.without_reservation.add(lease.id)
            self._entries.append((place, lease))
        self._promoted = {lease_id for user, (_, lease_id) in oldest.items() if self._may_be_promoted(user, overdue)}
        highest = -ledger.waiting[0][0] if ledger.waiting else 0
        for _, lease in self._entries:
            is_overdue = lease.asked_at_ms <= overdue and lease.request.priority >= highest
            if is_overdue and overtaking.is_overtaken(lease):
                self._promoted.add(lease.id)
        if self._promoted:
            self._entries = [
                ((0, 0, 0, 0, 0.0, lease.asked_at_ms, lease.id), lease)
                if lease.id in self._promoted
                else (place, lease)
                for place, lease in self._entries
            ]
        self.without_reservation -= self._promoted
        self._queue: list[Lease] | None = None

    def _may_be_promoted(self, user: str, overdue: int) -> bool:
        account = self._ledger.accounts.get(user)
        return account is None or account.promoted_at_ms <= overdue

    def wait_ratio(self, lease: Lease) -> float:
        """Time from its arrival to its end if it started now, in multiples of its length."""
        length = expected_ms(self._ledger, lease) or UNKNOWN_LENGTH_MS
        return (self._now - lease.asked_at_ms + length) / length

    def first(self) -> Lease:
        """The first request of the queue, which must not be empty."""
        return min(self._entries)[1] if self._queue is None else self._queue[0]

    @property
    def queue(self) -> list[Lease]:
        """All waiting requests, in order."""
        if self._queue is None:
            self._queue = [lease for _, lease in sorted(self._entries)]
        return self._queue

    def _equals_overtaken(self, lease: Lease) -> bool:
        equal = self._ledger.queue_groups[lease.queue_group] if lease.id in self._ledger.leases else []
        return any(self.is_overtaken(self._ledger.leases[lease_id]) for _, lease_id in equal)

    def is_overtaken(self, lease: Lease) -> bool:
        """Whether so much work has overtaken a request that it comes before the others of its priority."""
        return self._overtaking.is_overtaken(lease)

    def is_promoted(self, lease: Lease) -> bool:
        """Whether a request goes before all others because it has waited for so long."""
        return lease.id in self._promoted

    def is_tight(self, request: Request) -> bool:
        """Whether a request has to start before long to be over by its deadline: sooner than it takes."""
        if not request.deadline_ms:
            return False
        return request.latest_start_ms - self._now <= max(request.expects_ms, self._policy.reserve_after_ms)


def next_grant(ledger: Ledger, now: int, tried: frozenset[object] = frozenset()) -> QueueGrant | None:
    """The request that is granted next; the fit keys in `tried` are known not to fit."""
    return PlainScan(ledger, now, tried=tried).next_grant() if ledger.waiting else None


def place_newcomer(ledger: Ledger, lease: Lease, now: int) -> Placement | None:
    """The placement of a request that has just come, or None where it has to wait."""
    if ledger.policy.quotas and Quotas(ledger).exceeded(lease.request) is not None:
        return None
    placement = find_placement(ledger, lease.request)
    if placement is None or not ledger.waiting:
        return placement
    return PlainScan(ledger, now, newcomer=lease).place_passing(lease, placement)


def reserved_nodes(ledger: Ledger, lease: Lease, now: int) -> frozenset[str]:
    """The nodes that are reserved for others before this request: nobody is preempted there for it."""
    return PlainScan(ledger, now, newcomer=lease).reserved_nodes(lease) if ledger.waiting else frozenset()


def queue_order(ledger: Ledger, now: int, *, newcomer: Lease | None = None) -> list[Lease]:
    """All waiting requests in order; a newcomer is put where it would come."""
    return PlainScan(ledger, now, newcomer=newcomer).order.queue


class PlainScan:
    """One scan of the queue with cached placements and reservations."""

    def __init__(
        self, ledger: Ledger, now: int, *, tried: frozenset[object] = frozenset(), newcomer: Lease | None = None
    ) -> None:
        self._ledger = ledger
        self._now = now
        self._shares = PlainShares(ledger, now, newcomer=newcomer)
        self._quotas = Quotas(ledger) if ledger.policy.quotas else None
        self._forecast = StartForecast(ledger, now)
        self._not_fitting = set(tried)
        self._placements: dict[object, Placement] = {}
        self._blocked: list[tuple[int, Lease]] = []
        self._reservations: list[tuple[int, Reservation]] | None = None
        self._refused: dict[object, tuple[int, float]] = {}
        self._low_capacity: LowPriorityCapacity | None = None
        waiting = [ledger.leases[lease_id] for _, _, lease_id in ledger.waiting]
        if newcomer is not None and newcomer.id not in ledger.leases:
            waiting.append(newcomer)
        self.order = PlainOrder(ledger, waiting, self._shares, now)

    def _is_low_priority(self, lease: Lease) -> bool:
        return lease.request.priority <= Priority.LOW and not self.order.is_promoted(lease)

    def next_grant(self) -> QueueGrant | None:
        """The first request that fits, or one that may pass those that do not."""
        first = self.order.first()
        placement = None if self._is_beyond_quota(first) else self._place_alone(first.request)
        if placement is not None:
            return QueueGrant(first, placement, self._tried())
        passing: list[tuple[int, Lease, Placement]] = []
        for at, lease in enumerate(self.order.queue):
            if self._is_beyond_quota(lease):
                continue
            placement = self._place_alone(lease.request)
            if placement is None:
                if lease.id not in self.order.without_reservation:
                    self._blocked.append((at, lease))
            elif self._blocked:
                passing.append((at, lease, placement))
            else:
                return QueueGrant(lease, placement, self._tried())
        passing.sort(key=lambda entry: self._passing_key(entry[1], entry[0]))
        for at, lease, placement in passing:
            found = self._place_without_delay(at, lease, placement)
            if found is not None:
                return QueueGrant(lease, found, self._tried())
        return None

    def place_passing(self, lease: Lease, placement: Placement) -> Placement | None:
        """Where a request is placed now without delaying others; `placement` is where it would go alone."""
        return self._place_without_delay(self._position(lease), lease, placement)

    def reserved_nodes(self, lease: Lease) -> frozenset[str]:
        """The nodes where something that a request asks for is reserved for those before it."""
        at, mine = self._position(lease), resource_kinds(lease.request.ask)
        earlier = (reservation for before, reservation in self._made_reservations() if before < at)
        reserved = (one.held_then for one in earlier if mine & resource_kinds(one.lease.request.ask))
        names = frozenset(name for nodes in reserved for name in nodes)
        if self._is_low_priority(lease):
            return names | self._low_priority_capacity().contested_nodes(lease.request)
        return names

    def _position(self, lease: Lease) -> int:
        """The position of a request; requests before it without room are noted."""
        for at, one in enumerate(self.order.queue):
            if one.id == lease.id:
                return at
            if one.id in self.order.without_reservation or self._is_beyond_quota(one):
                continue
            if self._place_alone(one.request) is None:
                self._blocked.append((at, one))
        return len(self.order.queue)

    def _is_beyond_quota(self, lease: Lease) -> bool:
        return self._quotas is not None and self._quotas.exceeded(lease.request) is not None

    def _place_alone(self, request: Request) -> Placement | None:
        """The placement of a request if nobody else waited."""
        key = fit_key(request)
        if key in self._not_fitting:
            return None
        placement = self._placements.get(_placement_key(request))
        if placement is None:
            placement = find_placement(self._ledger, request)
            if placement is None:
                self._not_fitting.add(key)
            else:
                self._placements[_placement_key(request)] = placement
        return placement

    def _tried(self) -> frozenset[object]:
        """The fit keys that will not fit after more grants; an affinity may be met by one."""
        return frozenset(key for key in self._not_fitting if not key[4])  # type: ignore[index]

    def _passing_key(self, lease: Lease, at: int) -> tuple[int, bool, float, int]:
        """Order of those that may pass: priority, deadline, then the wait in lengths of the request, a request of four
        times the size counting twice."""
        request = lease.request
        rank = max(request.priority, Priority.MEDIUM) if self.order.is_promoted(lease) else request.priority
        size = self._shares.size(rates_of(request.ask)) * request.gang
        return (-int(rank), not self.order.is_tight(request), -self.order.wait_ratio(lease) * sqrt(size), at)

    def _place_without_delay(self, at: int, lease: Lease, placement: Placement) -> Placement | None:
        """A placement that delays no reservation before this request, or None."""
        low = self._is_low_priority(lease)
        length = expected_ms(self._ledger, lease) or float("inf")
        key = (_placement_key(lease.request), low, self._statement_key(lease))
        known = self._refused.get(key)
        if known is not None and known[0] <= at and known[1] <= length:
            return None
        avoid: set[str] = set()
        found: Placement | None = placement
        while found is not None:
            places = ((found.node, found.claim), *found.others)
            taken = {node for node, claim in places if not self._may_use(at, lease, node, claim)}
            if not taken:
                return found
            avoid |= taken
            if low and len(avoid) > MAX_CONTESTED_TRIES:
                avoid |= self._low_priority_capacity().contested_nodes(lease.request)
            found = find_placement(self._ledger, lease.request, avoid=frozenset(avoid))
        self._refused[key] = (at, length)
        return None

    def _statement_key(self, lease: Lease) -> object:
        """Rest of the key of refusals beside a promoted request: its user and its statements."""
        if not any(reservation.overdue_since_ms for _, reservation in self._made_reservations()):
            return None
        return (lease.request.user, lease.request.expects_ms, lease.request.duration_ms)

    def _may_use(self, at: int, lease: Lease, node: str, claim: Claim) -> bool:
        for before, reservation in self._made_reservations():
            if before < at and not self._forecast.does_not_delay(reservation, lease, node, claim):
                return False
        return not self._is_low_priority(lease) or self._low_priority_capacity().allows(lease, node, claim)

    def _low_priority_capacity(self) -> LowPriorityCapacity:
        if self._low_capacity is None:
            higher: dict[object, Request] = {}
            for lease in self.order.queue:
                if lease.request.priority > Priority.LOW and not self._is_beyond_quota(lease):
                    higher.setdefault(fit_key(lease.request), lease.request)
            self._low_capacity = LowPriorityCapacity(self._ledger, self._forecast, higher.values(), self._now)
        return self._low_capacity

    def _made_reservations(self) -> list[tuple[int, Reservation]]:
        """The reservations, each with the position of its request."""
        if self._reservations is None:
            self._reservations = []
            taken: set[str] = set()
            hopeless: set[object] = set()
            unknown_start = False
            for at, lease in self._blocked:
                if len(self._reservations) == MAX_RESERVATIONS or len(taken) == len(self._ledger.nodes):
                    break
                recent = self._now - lease.asked_at_ms <= self._ledger.policy.reserve_after_ms
                if fit_key(lease.request) in hopeless or (recent and (self._reservations or unknown_start)):
                    continue
                reservation = self._reserve(lease, taken, first=not self._reservations)
                if reservation is None:
                    hopeless.add(fit_key(lease.request))
                elif recent and reservation.at_ms == NEVER:
                    unknown_start = True
                else:
                    self._reservations.append((at, reservation))
                    taken |= reservation.held_then.keys()
        return self._reservations

    def _reserve(self, lease: Lease, taken: set[str], *, first: bool) -> Reservation | None:
        overdue_since = lease.asked_at_ms + self._ledger.policy.starvation_ms
        if self.order.is_overtaken(lease):
            overdue_since = max(lease.asked_at_ms, 1)
        if self._now < overdue_since:
            return self._forecast.reserve(lease, exclude=taken)
        return self._forecast.reserve(lease, exclude=taken, overdue_since_ms=overdue_since, all_nodes=first)


def _placement_key(request: Request) -> object:
    """What decides where a request goes: two of one key go to the same node."""
    return (fit_key(request), request.prefer, request.strategy, request.target, request.group)
