"""The queue of waiting requests: its order, and which request is granted next.

Order: priority; tight deadlines; users below their share, then the others by their excess; waiting time relative to
length; age. A request that has waited for `starvation_ms` is promoted before all others, if it is the oldest of its
user and none of that user's was promoted within the last `starvation_ms`: a flood of requests gains nothing by age.

A request that much later work has overtaken comes before the others of its priority, and is promoted after
`starvation_ms` if no higher priority waits; short terms may pass it (`order`).

Requests that differ only in id, wait and age are a group (`Ledger.queue_groups`), in which the older one always comes
first; so only the oldest of each group competes. Of many groups a limited number competes in one scan (`order`):
its cost does not grow with the queue, whatever waits there.

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
and the next is first. A preempted request comes back with its age, at most p times. With W = (m + 1) (p + 1) (U + 1) L
nobody waits longer than S + (k + 1) (S + W); where all estimates hold, U counts as 0. Short terms that pass overtaken
requests add at most the time in which the grid starts the work of its largest recent backlog: after that they do not.
"""

from __future__ import annotations

from functools import cached_property
from math import sqrt

from msgspec import Struct

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Claim, Priority
from distributed_grid.scheduling.placement.machine_limits import node_ends, outlived_nodes
from distributed_grid.scheduling.placement.placement import Placement, find_placement
from distributed_grid.scheduling.pressure.loans import carve_placement
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
    SHORT,
    Members,
    QueueEntry,
    QueueKey,
    QueueOrder,
    WaitingGroup,
    contending_groups,
    walk_in_order,
)

MAX_RESERVATIONS = 16  # reservations at one moment
MAX_CONTESTED_TRIES = 8  # contested nodes that are tried for a `low` request before all of them are excluded


class QueueGrant(Struct, frozen=True):
    """The next waiting request that can be granted, its placement, and the fit keys that were found not to fit."""

    lease: Lease
    placement: Placement
    tried: frozenset[object]


def fit_key(request: Request) -> tuple[object, ...]:
    """Key of requests that fit or fail together."""
    uses_memory = request.limits_memory or bool(request.block)
    where = (request.require, request.labels, request.affinity, request.anti_affinity, request.runs_on)
    return (request.ask, request.gang, *where, uses_memory, request.starts_without_cores, request.closed)


def next_grant(ledger: Ledger, now: int, tried: frozenset[object] = frozenset()) -> QueueGrant | None:
    """The next request to grant; the fit keys in `tried` are known not to fit."""
    found = QueueScan(ledger, now, tried=tried).next_grant() if ledger.waiting else None
    carved = place_in_automatic_lease(ledger, found.lease, now) if found is not None else None
    return found if found is None or carved is None else QueueGrant(found.lease, carved, found.tried)


def place_newcomer(ledger: Ledger, lease: Lease, now: int) -> Placement | None:
    """The placement of a request that has just come, or None where it has to wait."""
    if ledger.policy.quotas and Quotas(ledger).exceeded(lease.request) is not None:
        return None
    placement = place_in_automatic_lease(ledger, lease, now)
    if placement is not None:
        return placement
    outlived = outlived_nodes(lease.request, node_ends(ledger), now) if ledger.workers else frozenset()
    placement = find_placement(ledger, lease.request, avoid=outlived)
    if placement is None or not ledger.waiting:
        return placement
    return QueueScan(ledger, now, newcomer=lease).place_passing(lease, placement)


def place_in_automatic_lease(ledger: Ledger, lease: Lease, now: int, *, waits: bool = False) -> Placement | None:
    """The part of its node's automatic leases that a request gets, or None; not where it is reserved for others."""
    placement = carve_placement(ledger, lease.request, waits=waits)
    if placement is None or not ledger.waiting:
        return placement
    avoid = reserved_nodes(ledger, lease, now)
    return carve_placement(ledger, lease.request, waits=waits, avoid=avoid) if placement.node in avoid else placement


def reserved_nodes(ledger: Ledger, lease: Lease, now: int) -> frozenset[str]:
    """The nodes reserved for requests before this one: no preemption there for it."""
    return QueueScan(ledger, now, newcomer=lease).reserved_nodes(lease) if ledger.waiting else frozenset()


class QueueScan:
    """One scan of the queue with cached placements, reservations and refusals."""

    def __init__(
        self, ledger: Ledger, now: int, *, tried: frozenset[object] = frozenset(), newcomer: Lease | None = None
    ) -> None:
        self._ledger = ledger
        self._now = now
        self._quotas = Quotas(ledger) if ledger.policy.quotas else None
        self._forecast = StartForecast(ledger, now)
        self._not_fitting = set(tried)
        self._placements: dict[object, Placement] = {}
        self._blocked: list[QueueEntry] = []
        self._reservations: list[tuple[QueueKey, Reservation]] | None = None
        self._refused: dict[object, tuple[QueueKey, float]] = {}
        self._low_capacity: LowPriorityCapacity | None = None
        self._newcomer = newcomer
        self._ends = node_ends(ledger) if ledger.workers else ()

    @cached_property
    def order(self) -> QueueOrder:
        return QueueOrder(self._ledger, self._shares, self._now, newcomer=self._newcomer, contending=self._contending)

    @cached_property
    def _contending(self) -> list[Members]:
        return contending_groups(self._ledger, self._now)

    @cached_property
    def _shares(self) -> Shares:
        return Shares(self._ledger, self._now, newcomer=self._newcomer)

    def _is_low_priority(self, lease: Lease) -> bool:
        return lease.request.priority <= Priority.LOW and not self.order.is_promoted(lease)

    def next_grant(self) -> QueueGrant | None:
        """The first request that fits, or one that may pass those that do not."""
        leases = self._ledger.leases
        if all(self._place_alone(leases[members[0][1]].request) is None for members in self._contending):
            return None  # the usual case after a grant: in which order they wait does not matter
        _, group, at = min(self.order.heads)
        first = group.lease(at)
        placement = None if self._is_beyond_quota(first) else self._place_alone(first.request)
        if placement is not None:
            return QueueGrant(first, placement, self._tried())
        passing: list[tuple[QueueKey, Lease, Placement]] = []
        for head in sorted(self.order.heads):
            key, group, at = head
            lease = group.lease(at)
            if self._is_beyond_quota(lease):
                continue
            placement = self._place_alone(lease.request)
            if placement is None:
                if key[0] != SHORT:
                    self._blocked.append(head)
            elif self._blocked:
                passing.append((key, lease, placement))
            else:
                return QueueGrant(lease, placement, self._tried())
        passing.sort(key=lambda entry: self._passing_key(entry[1], entry[0]))
        for key, lease, placement in passing:
            found = self._place_without_delay(key, lease, placement)
            if found is not None:
                return QueueGrant(lease, found, self._tried())
        return None

    def place_passing(self, lease: Lease, placement: Placement) -> Placement | None:
        """Placement of a request that delays no other; `placement` is the one it would get alone."""
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

    def _position(self, lease: Lease) -> QueueKey:
        """The sort key of a request; groups before it without room are noted."""
        position = self.order.key_of(lease)
        for head in self.order.heads:
            key, group, at = head
            first = group.lease(at)
            if key >= position or key[0] == SHORT or self._is_beyond_quota(first):
                continue
            if self._place_alone(first.request) is None:
                self._blocked.append(head)
        return position

    def _is_beyond_quota(self, lease: Lease) -> bool:
        return self._quotas is not None and self._quotas.exceeded(lease.request) is not None

    def _place_alone(self, request: Request) -> Placement | None:
        """Placement of a request if no other waited."""
        key, at, outlived = fit_key(request), _placement_key(request), frozenset[str]()
        if self._ends:
            outlived = outlived_nodes(request, self._ends, self._now)
            key, at = (*key, outlived), (at, outlived)
        if key in self._not_fitting:
            return None
        placement = self._placements.get(at)
        if placement is None:
            placement = find_placement(self._ledger, request, avoid=outlived)
            if placement is None:
                self._not_fitting.add(key)
            else:
                self._placements[at] = placement
        return placement

    def _tried(self) -> frozenset[object]:
        """Fit keys that further grants cannot make fit; an affinity may be met by one."""
        return frozenset(key for key in self._not_fitting if not key[4])  # type: ignore[index]

    def _passing_key(self, lease: Lease, at: QueueKey) -> tuple[int, bool, float, QueueKey]:
        """Order of those that may pass: priority, deadline, then the wait in lengths of the request, a request of four
        times the size counting twice."""
        request = lease.request
        rank = max(request.priority, Priority.MEDIUM) if self.order.is_promoted(lease) else request.priority
        size = self._shares.size(rates_of(request.ask)) * request.gang
        return (-int(rank), not self.order.is_tight(request), -self.order.wait_ratio(lease) * sqrt(size), at)

    def _place_without_delay(self, at: QueueKey, lease: Lease, placement: Placement) -> Placement | None:
        """A placement that delays no reservation before this request, or None."""
        low = self._is_low_priority(lease)
        length = expected_ms(self._ledger, lease) or float("inf")
        outlived = outlived_nodes(lease.request, self._ends, self._now)
        statement = None  # beside a promoted request a refusal depends on the user and the stated lengths
        if any(reservation.overdue_since_ms for _, reservation in self._made_reservations()):
            statement = (lease.request.user, lease.request.expects_ms, lease.request.duration_ms)
        key = (_placement_key(lease.request), low, statement, outlived)
        known = self._refused.get(key)
        if known is not None and known[0] <= at and known[1] <= length:
            return None
        avoid = set(outlived)
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

    def _may_use(self, at: QueueKey, lease: Lease, node: str, claim: Claim) -> bool:
        for before, reservation in self._made_reservations():
            if before < at and not self._forecast.does_not_delay(reservation, lease, node, claim):
                return False
        return not self._is_low_priority(lease) or self._low_priority_capacity().allows(lease, node, claim)

    def _low_priority_capacity(self) -> LowPriorityCapacity:
        if self._low_capacity is None:
            higher: dict[object, Request] = {}
            for _, group, at in sorted(self.order.heads):
                lease = group.lease(at)
                if lease.request.priority > Priority.LOW and not self._is_beyond_quota(lease):
                    higher.setdefault(fit_key(lease.request), lease.request)
            self._low_capacity = LowPriorityCapacity(self._ledger, self._forecast, higher.values(), self._now)
        return self._low_capacity

    def _made_reservations(self) -> list[tuple[QueueKey, Reservation]]:
        """The reservations, each with the sort key of its request."""
        if self._reservations is None:
            self._reservations = []
            taken: set[str] = set()
            hopeless: set[object] = set()
            finished: set[WaitingGroup] = set()
            unknown_start = False
            for key, group, at in walk_in_order(self._blocked, finished):
                if len(self._reservations) == MAX_RESERVATIONS or len(taken) == len(self._ledger.nodes):
                    break
                lease = group.lease(at)
                if key[0] == SHORT:
                    finished.add(group)
                    continue
                recent = self._now - lease.asked_at_ms <= self._ledger.policy.reserve_after_ms
                if fit_key(lease.request) in hopeless or (recent and (self._reservations or unknown_start)):
                    finished.add(group)  # those behind it are as hopeless, or as recent
                    continue
                exclude = taken | outlived_nodes(lease.request, self._ends, self._now)
                overdue_since = lease.asked_at_ms + self._ledger.policy.starvation_ms
                if self.order.is_overtaken(lease):
                    overdue_since = max(lease.asked_at_ms, 1)
                is_overdue = self._now >= overdue_since
                reservation = self._forecast.reserve(
                    lease,
                    exclude=exclude,
                    overdue_since_ms=overdue_since if is_overdue else 0,
                    all_nodes=is_overdue and not self._reservations,
                )
                if reservation is None:
                    hopeless.add(fit_key(lease.request))
                elif recent and reservation.at_ms == NEVER:
                    unknown_start = True
                else:
                    self._reservations.append((key, reservation))
                    taken |= reservation.held_then.keys()
        return self._reservations


def _placement_key(request: Request) -> object:
    """Key of requests that are placed on the same node."""
    return (fit_key(request), request.prefer, request.strategy, request.target, request.group)
