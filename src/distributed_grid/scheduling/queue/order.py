"""Order of the queue: sort keys of waiting requests, the groups that compete in one scan, and overtaking.

Requests that differ only in id, wait and age are a group; the older one always comes first, so only the oldest of each
group competes.

Contenders. Where the groups together weigh at most `MAX_CONTENDERS`, all compete. Beyond that a quarter each are: the
first by priority and age; the first deadlines of each priority; the first of the users whose oldest request has waited
longest, each user as many as any other; and a part of the others, chosen by the clock. So the request that is promoted
next, an urgent one, a tight deadline and a user with few requests always compete, whatever others have put into the
queue, and everybody else does from time to time. A request that names many nodes, labels or jobs weighs more.

Overtaking. Work is the part of the grid that a request asks for, times its expected length. By age alone, a request has
its turn as soon as all the work has started that waited when it arrived. Work that starts after its turn has overtaken
it. The scale is the backlog of this grid, so nothing has to be set: once `LIMIT` of the largest recent backlog has
overtaken a request, it comes before the others of its priority, by age, whatever the share of its user. A flood of one
user does not gain by its age, only by the work of others that overtakes it.

While a request is overtaken, requests with a short term of users below their share come first all the same, without
reservations: they take little of the grid, and a wait is longest for them in relation to their length. Nothing does any
more once work as large as the largest recent backlog has overtaken the oldest request. That does not hold for requests
equal to an overtaken one: among equal requests the older one comes first.

Up to `EXACT_SHARE_USERS` users share exactly, and nothing of overtaking applies.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.statistics import QueueProgress
from distributed_grid.scheduling.queue.backfill import expected_ms
from distributed_grid.scheduling.queue.fairness import Shares, rates_of

UNKNOWN_LENGTH_MS = 3_600_000  # length of a request of which nobody knows how long it takes
LIMIT = 1 / 3  # the part of the largest recent backlog that may overtake a request
SHORT_PART = 1 / 250  # a request is short if the grid takes so much longer for the largest recent backlog
HALF_LIFE_MS = 30 * 24 * 3_600_000  # a backlog counts half after this
MAX_LENGTH_MS = 7 * 24 * 3_600_000  # no request counts as longer

OVERTAKEN = -1  # rank in the order of the queue, before the users below their share (0)


def work_of(ledger: Ledger, lease: Lease, shares: Shares) -> int:
    length_ms = min(expected_ms(ledger, lease) or UNKNOWN_LENGTH_MS, MAX_LENGTH_MS)
    return round(1000 * length_ms * min(shares.size(rates_of(lease.request.ask)) * lease.request.gang, 1.0))


def with_turn(ledger: Ledger, lease: Lease, now: int) -> Lease:
    """A newly arrived request with its work and its turn."""
    turn = ledger.queue_progress.started + ledger.waiting_index.work
    return replace(lease, work=work_of(ledger, lease, Shares(ledger, now)), turn=turn)


def progress_started(ledger: Ledger, lease: Lease, now: int) -> list[QueueProgress]:
    """The progress after a request has started; without a queue nothing is overtaken."""
    if not ledger.waiting or not lease.work:
        return []
    progress, backlog = ledger.queue_progress, ledger.waiting_index.work
    if backlog > recent_peak(progress, now):
        progress = replace(progress, peak=backlog, peak_at_ms=now)
    return [replace(progress, started=progress.started + lease.work)]


def recent_peak(progress: QueueProgress, now: int) -> float:
    """The largest recent backlog."""
    return progress.peak * math.exp2(-max(now - progress.peak_at_ms, 0) / HALF_LIFE_MS)


class Overtaking:
    """The overtaken requests at one moment.

    Of equal requests, the overtaken ones are the older ones: those that arrived in the same millisecond are ordered by
    their ids, whatever their turns.
    """

    def __init__(self, ledger: Ledger, shares: Shares, now: int) -> None:
        self._ledger = ledger
        self._shares = shares
        peak = recent_peak(ledger.queue_progress, now)
        self._limit = ledger.queue_progress.started - LIMIT * peak
        self._no_short = ledger.queue_progress.started - peak
        self._short_ms = SHORT_PART * peak / 1000

    @cached_property
    def _oldest_turn(self) -> float:
        oldest = self._ledger.waiting_index.oldest_of_users
        return self._ledger.leases[oldest[0][1]].turn if oldest else math.inf

    @cached_property
    def _anybody_is(self) -> bool:
        return self._oldest_turn < self._limit and not self._shares.is_exact

    def count(self, equal: Sequence[tuple[int, str]]) -> int:
        """Number of overtaken requests among equal ones, given by age and id, the oldest first."""
        leases = self._ledger.leases
        return bisect_left(equal, self._limit, key=lambda entry: leases[entry[1]].turn) if self._anybody_is else 0

    def is_overtaken(self, lease: Lease) -> bool:
        if not self._anybody_is or lease.id not in self._ledger.leases:
            return False
        equal = self._ledger.queue_groups[lease.queue_group]
        return bisect_left(equal, lease.age_key) < self.count(equal)

    def is_short(self, lease: Lease) -> bool:
        """Whether a request comes before the overtaken ones: it has a short term, no higher priority waits, its user is
        below its share, and less than the largest recent backlog has overtaken the oldest request."""
        ledger, request = self._ledger, lease.request
        if not self._anybody_is or not 0 < request.duration_ms <= self._short_ms:
            return False
        if -request.priority > ledger.waiting[0][0] or self._oldest_turn < self._no_short:
            return False
        return self._shares.excess(lease.request.user, lease.request.team) == 0


MAX_CONTENDERS = 256
"""Weight of the groups that compete in one scan; a group that names less than 16 nodes, labels or jobs weighs 1."""
MAX_PREEMPTORS = 64  # groups of a long queue for which a preemption is looked for in one scan
_PART = MAX_CONTENDERS // 4
_MULTIPLIER = 2_654_435_761
"""Spreads moments that follow each other over the whole queue (Knuth's multiplicative hash)."""

Members = Sequence[tuple[int, str]]  # ages and ids of equal requests, the oldest first


def all_compete(ledger: Ledger) -> bool:
    """True if each group of the queue competes because there are few."""
    return ledger.waiting_index.weight <= MAX_CONTENDERS


def contending_groups(ledger: Ledger, now: int) -> list[Members]:
    if all_compete(ledger):
        return list(ledger.queue_groups.values())
    index = ledger.waiting_index
    chosen: dict[str, None] = {}
    orders = (
        (head for *_, head in index.heads),
        (head for *_, head in index.deadlines),
        _heads_by_user(ledger),
        _others(ledger, now),
    )
    for heads in orders:
        weight = 0  # of this order; groups that were chosen before count, too
        for head in heads:
            weight += index.weights[head]
            if weight > _PART and weight > index.weights[head]:
                break
            chosen[head] = None
    return [index.members[head] for head in chosen]


def preemption_candidates(ledger: Ledger, now: int) -> Iterator[Lease]:
    """The oldest request of each group for which others may be preempted, by priority, then age. Of many groups some:
    the first contenders, and a part of the others, chosen by the clock."""
    if all_compete(ledger):
        return ledger.oldest_waiting()
    heads = (ledger.leases[members[0][1]] for members in contending_groups(ledger, now))
    ordered = sorted(heads, key=lambda lease: lease.queue_key)
    half = MAX_PREEMPTORS // 2
    begin = half + (now * _MULTIPLIER >> 8) % max(len(ordered) - MAX_PREEMPTORS, 1)
    return iter(ordered[:half] + ordered[begin : begin + half])


def _heads_by_user(ledger: Ledger) -> Iterator[str]:
    """The oldest request of each user, then the first ones of each, the users by the age of their oldest."""
    index = ledger.waiting_index
    oldest = index.oldest_of_users[:_PART]
    yield from (head for _, head in oldest)
    users = [ledger.leases[head].request.user for _, head in oldest]
    for user in users:
        yield from (head for *_, head in islice(index.heads_by_user[user], _PART // len(users)))


def _others(ledger: Ledger, now: int) -> Iterator[str]:
    """Heads from a position on that differs from moment to moment."""
    heads = ledger.waiting_index.heads
    begin = (now * _MULTIPLIER >> 8) % len(heads)
    yield from (head for *_, head in heads[begin : begin + _PART])
    yield from (head for *_, head in heads[: max(begin + _PART - len(heads), 0)])


NO_DEADLINE = 2**62
NEVER_ARRIVED = -1  # before the arrival of every request
SHORT, PROMOTED = -1, 0
QueueKey = tuple[int, int, int, int, float, int, str]
"""Short (-1), promoted (0) or neither (1), priority, deadline, rank, waiting time, age, id: the lowest is the first."""


class WaitingGroup(Struct, frozen=True, eq=False, kw_only=True):
    """Equal requests at one moment: each of them comes after the older ones."""

    leases: Mapping[str, Lease]
    members: Sequence[tuple[int, str]]
    front: tuple[int, int, int]  # priority, tight deadline, excess over the share: before the waiting time
    length_ms: int
    overtaken: int
    overdue_ms: int
    now: int
    short: bool

    def __len__(self) -> int:
        return len(self.members)

    def lease(self, at: int) -> Lease:
        return self.leases[self.members[at][1]]

    def key(self, at: int) -> QueueKey:
        asked_at, lease_id = self.members[at]
        priority, deadline, rank = self.front
        if at < self.overtaken and asked_at <= self.overdue_ms:
            return (PROMOTED, 0, 0, 0, 0.0, asked_at, lease_id)
        if at < self.overtaken:
            return (1, priority, deadline, OVERTAKEN, 0.0, asked_at, lease_id)
        ratio = (self.now - asked_at + self.length_ms) / self.length_ms
        if self.short:
            return (SHORT, 0, 0, 0, -ratio, asked_at, lease_id)
        return (1, priority, deadline, rank, -ratio, asked_at, lease_id)


QueueEntry = tuple[QueueKey, WaitingGroup, int]  # the sort key of a request, its group, and its position there


class QueueOrder:
    """The waiting requests at one moment, in groups of equal ones, and the sort key of each.

    Only the `heads` compete: the oldest of each group, and beside it the one that was promoted. Where there are too
    many groups to compare, positions are by priority and age.
    """

    def __init__(
        self,
        ledger: Ledger,
        shares: Shares,
        now: int,
        *,
        newcomer: Lease | None = None,
        contending: Sequence[Members] | None = None,
    ) -> None:
        self._ledger = ledger
        self._shares = shares
        self._policy = ledger.policy
        self._now = now
        self._newcomer = newcomer if newcomer is not None and newcomer.id not in ledger.leases else None
        self._contending = contending
        self._overtaking = Overtaking(ledger, shares, now)
        self._is_complete = all_compete(ledger)

    @cached_property
    def _groups(self) -> list[WaitingGroup]:
        contending = contending_groups(self._ledger, self._now) if self._contending is None else self._contending
        groups = [self._group(self._ledger.leases, members) for members in contending]
        if self._newcomer is not None:
            groups.append(self._group({self._newcomer.id: self._newcomer}, [self._newcomer.age_key]))
        return groups

    @cached_property
    def heads(self) -> list[QueueEntry]:
        heads: list[QueueEntry] = []
        for group in self._groups:
            first = 0
            if (head := group.lease(0)).id in self._promoted and group.key(0)[0] != PROMOTED:
                heads.append((_promoted_key(head), group, 0))
                first = 1
            if first < len(group):
                heads.append((group.key(first), group, first))
        return heads

    def _group(self, leases: Mapping[str, Lease], members: Sequence[tuple[int, str]]) -> WaitingGroup:
        lease = leases[members[0][1]]
        overtaken = self._overtaking.count(members) if leases is self._ledger.leases else 0
        request = lease.request
        latest = request.latest_start_ms if self.is_tight(request) else NO_DEADLINE
        front = (-request.priority, latest, self._shares.excess(request.user, request.team))
        overdue_ms = self._overdue_ms(request)
        short = not overtaken and self._overtaking.is_short(lease)
        length_ms = self._length_ms(lease)
        return WaitingGroup(
            leases=leases,
            members=members,
            front=front,
            length_ms=length_ms,
            overtaken=overtaken,
            overdue_ms=overdue_ms,
            now=self._now,
            short=short,
        )

    def _overdue_ms(self, request: Request) -> int:
        """Overtaken requests that arrived up to then are promoted; none while a higher priority waits."""
        waiting = self._ledger.waiting
        return (
            self._now - self._policy.starvation_ms if waiting and -request.priority <= waiting[0][0] else NEVER_ARRIVED
        )

    @cached_property
    def _promoted(self) -> frozenset[str]:
        overdue, oldest_of = self._now - self._policy.starvation_ms, self._ledger.waiting_index.oldest_of
        oldest: dict[str, tuple[int, str]] = {}
        for group in self._groups:
            lease = group.lease(0)
            if lease.asked_at_ms <= overdue:
                user = lease.request.user
                oldest[user] = min(oldest.get(user) or oldest_of(user) or lease.age_key, lease.age_key)
        accounts = self._ledger.accounts
        return frozenset(
            lease_id
            for user, (_, lease_id) in oldest.items()
            if (account := accounts.get(user)) is None or account.promoted_at_ms <= overdue
        )

    def _length_ms(self, lease: Lease) -> int:
        return expected_ms(self._ledger, lease) or UNKNOWN_LENGTH_MS

    def wait_ratio(self, lease: Lease) -> float:
        """Time from its arrival to its end if it started now, in multiples of its length."""
        length = self._length_ms(lease)
        return (self._now - lease.asked_at_ms + length) / length

    def key_of(self, lease: Lease) -> QueueKey:
        if self.is_promoted(lease):
            return _promoted_key(lease)
        equal = self._ledger.queue_groups[lease.queue_group] if lease.id in self._ledger.leases else None
        if equal is None:
            return self._group({lease.id: lease}, [lease.age_key]).key(0)
        return self._group(self._ledger.leases, equal).key(bisect_left(equal, lease.age_key))

    def in_order(self) -> Iterator[Lease]:
        """All waiting requests from the first on, each found on demand."""
        if self._is_complete:
            return (group.lease(at) for _, group, at in walk_in_order(self.heads))
        return (self._ledger.leases[lease_id] for *_, lease_id in self._ledger.waiting)

    def position(self, lease: Lease) -> int:
        """How many requests come before this one."""
        if not self._is_complete:
            return bisect_left(self._ledger.waiting, lease.queue_key)
        key = self.key_of(lease)
        before = 0
        for first, group, at in self.heads:
            if first[0] == PROMOTED != group.key(at)[0]:
                before += first < key
            else:
                before += bisect_left(range(at, len(group)), key, key=group.key)
        return before

    def __len__(self) -> int:
        return len(self._ledger.waiting) + (self._newcomer is not None)

    def is_promoted(self, lease: Lease) -> bool:
        """True if a request comes before all others because of its long wait."""
        if lease.id in self._promoted:
            return True
        return lease.asked_at_ms <= self._overdue_ms(lease.request) and self.is_overtaken(lease)

    def is_overtaken(self, lease: Lease) -> bool:
        return self._overtaking.is_overtaken(lease)

    def is_tight(self, request: Request) -> bool:
        return is_tight(self._ledger, request, self._now)


def is_tight(ledger: Ledger, request: Request, now: int) -> bool:
    """True if the latest start for its deadline is nearer than the request is long."""
    if not request.deadline_ms:
        return False
    return request.latest_start_ms - now <= max(request.expects_ms, ledger.policy.reserve_after_ms)


def _promoted_key(lease: Lease) -> QueueKey:
    return (PROMOTED, 0, 0, 0, 0.0, *lease.age_key)


def walk_in_order(heads: Iterable[QueueEntry], finished: Set[WaitingGroup] = frozenset()) -> Iterator[QueueEntry]:
    """The heads and the requests behind them, in the order of the queue; none of a group that the caller has added to
    `finished`."""
    ahead = list(heads)
    heapify(ahead)
    while ahead:
        entry = key, group, at = heappop(ahead)
        yield entry
        is_alone = key[0] == PROMOTED != group.key(at)[0]
        if not is_alone and at + 1 < len(group) and group not in finished:
            heappush(ahead, (group.key(at + 1), group, at + 1))


def queue_order(ledger: Ledger, now: int, *, newcomer: Lease | None = None) -> QueueOrder:
    return QueueOrder(ledger, Shares(ledger, now, newcomer=newcomer), now, newcomer=newcomer)
