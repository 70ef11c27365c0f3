"""In which order the waiting come.

Rule 1: priority; then deadlines that get tight; then those whose user has less than its part (`fairness`), and after
them the rest by how much it is beyond; then who has waited longest for its length; then age.
Rule 2: a request that has waited for `starvation_ms` is owed its place and comes before all others, whatever its
priority and however much its user has had, if it is the oldest of its user and none of that user's was lifted so within
the last `starvation_ms`: a flood of requests does not become a right by growing old.
"""

from __future__ import annotations

from collections.abc import Iterable

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.scheduling.queue.durations import expected_ms
from distributed_grid.scheduling.queue.fairness import Shares

NO_DEADLINE = 2**62
UNTOLD_MS = 3_600_000
"""What nobody knows the length of counts as this long."""
Place = tuple[int, int, int, int, float, int, str]


class Order:
    """The waiting at one moment, and the place of each among them."""

    def __init__(self, ledger: Ledger, waiting: Iterable[Lease], shares: Shares, now: int) -> None:
        self._ledger = ledger
        self._policy = ledger.policy
        self._now = now
        overdue = now - self._policy.starvation_ms
        eldest: dict[str, tuple[int, str]] = {}
        self._found: list[tuple[Place, Lease]] = []
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
        return account is None or account.lifted_at_ms <= overdue

    def need(self, lease: Lease) -> float:
        """How long one of the waiting has waited and will take, in lengths of it."""
        length = expected_ms(self._ledger, lease) or UNTOLD_MS
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
        return request.latest_start_ms - self._now <= max(request.expects_ms, self._policy.patience_ms)
