"""Overtaking: how much work has passed a waiting request, and which requests come first because of it.

Work is the part of the grid that a request asks for, times its expected length. By age alone, a request has its turn
as soon as all the work has started that waited when it arrived. Work that starts after its turn has overtaken it. The
scale is the backlog of this grid, so nothing has to be set. From its turn on, the share of its user does not put a
request back. Once `LIMIT` of the largest recent backlog has overtaken it, it comes before the others of its priority,
by age. A flood of one user does not gain by its age alone, only by the work of others that overtakes it.

While a request is overtaken, short requests of users below their share come first all the same, without reservations:
they take little of the grid, and a wait is longest for them in relation to their length.

Up to `EXACT_SHARE_USERS` users share exactly, and nothing of this applies.
"""

from __future__ import annotations

import math
from functools import cached_property

from msgspec.structs import replace

from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.statistics import QueueProgress
from distributed_grid.scheduling.queue.backfill import expected_ms, stated_ms
from distributed_grid.scheduling.queue.fairness import Shares, rates_of

UNKNOWN_LENGTH_MS = 3_600_000
"""Length of a request of which nobody knows how long it takes."""
LIMIT = 1 / 4
"""The part of the largest recent backlog that may overtake a request."""
SHORT = 1 / 250
"""A request is short if the grid takes so much longer for the largest recent backlog."""
HALF_LIFE_MS = 30 * 24 * 3_600_000
"""A backlog counts half after this."""
MAX_LENGTH_MS = 7 * 24 * 3_600_000
"""No request counts as longer."""

SHORT_AND_OVERTAKEN, SHORT_BEFORE_OVERTAKEN, OVERTAKEN, BELOW_SHARE = -3, -2, -1, 0
"""Ranks in the order of the queue, before all that exceed their share."""


def work_of(ledger: Ledger, lease: Lease, shares: Shares) -> int:
    """The work of a request, as expected now."""
    length_ms = min(expected_ms(ledger, lease) or UNKNOWN_LENGTH_MS, MAX_LENGTH_MS)
    return round(1000 * length_ms * min(shares.size(rates_of(lease.request.ask)) * lease.request.gang, 1.0))


def with_turn(ledger: Ledger, lease: Lease, now: int) -> Lease:
    """A request that has just come, with its work and its turn. A later one never has an earlier turn."""
    progress = ledger.queue_progress
    turn = max(progress.started + ledger.waiting_index.work, progress.last_turn)
    if progress.last_at_ms == now:
        turn = progress.last_turn
    return replace(lease, work=work_of(ledger, lease, Shares(ledger, now)), turn=turn)


def progress_queued(ledger: Ledger, lease: Lease) -> list[QueueProgress]:
    """The progress after a request was put into the queue."""
    return _changed(ledger, _with_last(ledger.queue_progress, lease))


def progress_started(ledger: Ledger, lease: Lease, now: int) -> list[QueueProgress]:
    """The progress after a request has started; without a queue nothing is overtaken."""
    if not ledger.waiting or not lease.work:
        return []
    progress = ledger.queue_progress
    peak, backlog = recent_peak(progress, now), ledger.waiting_index.work
    if backlog > peak:
        progress = replace(progress, peak=backlog, peak_at_ms=now)
    return _changed(ledger, replace(_with_last(progress, lease), started=progress.started + lease.work))


def _with_last(progress: QueueProgress, lease: Lease) -> QueueProgress:
    if (lease.turn, lease.asked_at_ms) <= (progress.last_turn, progress.last_at_ms):
        return progress
    return replace(progress, last_turn=lease.turn, last_at_ms=lease.asked_at_ms)


def _changed(ledger: Ledger, progress: QueueProgress) -> list[QueueProgress]:
    return [progress] if progress != ledger.queue_progress else []


def recent_peak(progress: QueueProgress, now: int) -> float:
    """The largest recent backlog."""
    return progress.peak * math.exp2(-max(now - progress.peak_at_ms, 0) / HALF_LIFE_MS)


class Overtaking:
    """The overtaken requests at one moment."""

    def __init__(self, ledger: Ledger, shares: Shares, now: int) -> None:
        self._ledger = ledger
        self._shares = shares
        progress, peak = ledger.queue_progress, recent_peak(ledger.queue_progress, now)
        self._started = progress.started
        self._limit = self._started - LIMIT * peak
        self._short_ms = SHORT * peak / 1000

    @cached_property
    def _applies(self) -> bool:
        """Whether anything of it counts: something has overtaken somebody, and users do not share exactly."""
        oldest = self._ledger.waiting_index.oldest_of_users
        return bool(oldest) and self._started > self._ledger.leases[oldest[0][1]].turn and not self._shares.is_exact

    @cached_property
    def _anybody_is(self) -> bool:
        return self._applies and self.is_overtaken(
            self._ledger.leases[self._ledger.waiting_index.oldest_of_users[0][1]]
        )

    def is_overtaken(self, lease: Lease) -> bool:
        """Whether too much has overtaken a waiting request; then it has overtaken all that are older."""
        return self._applies and lease.turn < self._limit and lease.id in self._ledger.leases

    def is_short(self, lease: Lease) -> bool:
        """Whether a request comes before those that are overtaken."""
        if not self._anybody_is or not 0 < stated_ms(lease) <= self._short_ms:
            return False
        return self._shares.excess(lease.request.user, lease.request.team) == 0

    def rank(self, lease: Lease, excess: int) -> int:
        """The rank of a waiting request whose user exceeds its share by so many steps."""
        if not self._applies or lease.id not in self._ledger.leases:
            return excess
        overtaken = self.is_overtaken(lease)
        if self.is_short(lease):
            return SHORT_AND_OVERTAKEN if overtaken else SHORT_BEFORE_OVERTAKEN
        if overtaken:
            return OVERTAKEN
        return BELOW_SHARE if lease.turn < self._started else excess
