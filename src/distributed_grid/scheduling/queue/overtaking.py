"""Overtaking: how much work has passed a waiting request, and which requests come first because of it.

Work is the part of the grid that a request asks for, times its expected length. By age alone, a request has its turn
as soon as all the work has started that waited when it arrived. Work that starts after its turn has overtaken it. The
scale is the backlog of this grid, so nothing has to be set: once `LIMIT` of the largest recent backlog has overtaken
a request, it comes before the others of its priority, by age, whatever the share of its user. A flood of one user does
not gain by its age, only by the work of others that overtakes it.

While a request is overtaken, requests with a short term of users below their share come first all the same, without
reservations: they take little of the grid, and a wait is longest for them in relation to their length. Nothing does any
more once work as large as the largest recent backlog has overtaken the oldest request. That does not hold for those
that are equal to an overtaken one: among equal requests the older one comes first.

Up to `EXACT_SHARE_USERS` users share exactly, and nothing of this applies.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from msgspec.structs import replace

from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.statistics import QueueProgress
from distributed_grid.scheduling.queue.backfill import expected_ms
from distributed_grid.scheduling.queue.fairness import Shares, rates_of

UNKNOWN_LENGTH_MS = 3_600_000
"""Length of a request of which nobody knows how long it takes."""
LIMIT = 1 / 3
"""The part of the largest recent backlog that may overtake a request."""
SHORT = 1 / 250
"""A request is short if the grid takes so much longer for the largest recent backlog."""
HALF_LIFE_MS = 30 * 24 * 3_600_000
"""A backlog counts half after this."""
MAX_LENGTH_MS = 7 * 24 * 3_600_000
"""No request counts as longer."""

OVERTAKEN = -1
"""Rank in the order of the queue, before the users below their share (0)."""


def work_of(ledger: Ledger, lease: Lease, shares: Shares) -> int:
    """The work of a request, as expected now."""
    length_ms = min(expected_ms(ledger, lease) or UNKNOWN_LENGTH_MS, MAX_LENGTH_MS)
    return round(1000 * length_ms * min(shares.size(rates_of(lease.request.ask)) * lease.request.gang, 1.0))


def with_turn(ledger: Ledger, lease: Lease, now: int) -> Lease:
    """A request that has just arrived, with its work and its turn."""
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
        self._short_ms = SHORT * peak / 1000

    @cached_property
    def _oldest_turn(self) -> float:
        oldest = self._ledger.waiting_index.oldest_of_users
        return self._ledger.leases[oldest[0][1]].turn if oldest else math.inf

    @cached_property
    def _anybody_is(self) -> bool:
        return self._oldest_turn < self._limit and not self._shares.is_exact

    def count(self, equal: Sequence[tuple[int, str]]) -> int:
        """How many of these equal requests are overtaken; they are given by age and id, the oldest first."""
        leases = self._ledger.leases
        return bisect_left(equal, self._limit, key=lambda entry: leases[entry[1]].turn) if self._anybody_is else 0

    def is_overtaken(self, lease: Lease) -> bool:
        """Whether a waiting request is overtaken."""
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
