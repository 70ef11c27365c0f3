"""Index of the waiting requests: the heads of the queue groups in several orders.

A head is the oldest request of a group of equal ones. Deciding reads a part of each order, never all of one, so that
its cost does not grow with the number of groups. Adding or removing a request costs a search in each order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeVar

from distributed_grid.domain.leases import Lease, Request

NAMES_PER_GROUP = 16
"""Names (nodes, labels, jobs) of a request that cost as much again as a request without names."""
AgeKey = tuple[int, str]
RankKey = tuple[int, int, str]
"""Priority (negated), age or latest start, id of the lease."""
K = TypeVar("K", AgeKey, RankKey)


def scan_weight(request: Request) -> int:
    """The cost of comparing a request with the nodes, in requests that name nothing."""
    named = (request.prefer, request.require, request.labels, request.affinity, request.anti_affinity, request.closed)
    ask = request.ask
    return 1 + (sum(map(len, named)) + len(ask.custom) + len(ask.gpu_models)) // NAMES_PER_GROUP


class WaitingIndex:
    """Orders of the waiting requests."""

    __slots__ = (
        "by_user",
        "deadlines",
        "heads",
        "heads_by_user",
        "members",
        "oldest_of_users",
        "weight",
        "weights",
        "work",
    )

    def __init__(self) -> None:
        self.heads: list[RankKey] = []  # the head of each group, by priority, then age
        self.heads_by_user: dict[str, list[RankKey]] = {}
        self.deadlines: list[RankKey] = []  # the heads with a deadline, by priority, then latest start
        self.by_user: dict[str, list[RankKey]] = {}  # all waiting requests of each user, by priority, then age
        self.oldest_of_users: list[AgeKey] = []  # the oldest request of each user, by age
        self.members: dict[str, list[AgeKey]] = {}  # the group of each head, by the id of the head's lease
        self.weights: dict[str, int] = {}  # the scan weight of each group, by the id of the head's lease
        self.weight = 0  # of all groups together
        self.work = 0  # of all waiting requests together

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WaitingIndex):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def add(self, lease: Lease, members: list[AgeKey]) -> None:
        """Note a request that was put into its group."""
        if members[0][1] == lease.id:
            if len(members) > 1:
                self._remove_head(lease.request, members[1])
            self._add_head(lease.request, members)
        self.work += lease.work
        self._change_user(lease, waits=True)

    def remove(self, lease: Lease, members: list[AgeKey]) -> None:
        """Note a request that was taken out of its group."""
        if lease.id in self.members:
            self._remove_head(lease.request, lease.age_key)
            if members:
                self._add_head(lease.request, members)
        self.work -= lease.work
        self._change_user(lease, waits=False)

    def oldest_of(self, user: str) -> AgeKey | None:
        """The oldest waiting request of a user, whatever its priority."""
        keys = self.by_user.get(user)
        if not keys:
            return None
        firsts, at = [], 0  # the first key of each priority
        while at < len(keys):
            firsts.append(keys[at][1:])
            at = bisect_left(keys, (keys[at][0] + 1,), lo=at)
        return min(firsts)

    def _add_head(self, request: Request, members: list[AgeKey]) -> None:
        rank, age, weight = -int(request.priority), members[0], scan_weight(request)
        insort(self.heads, (rank, *age))
        insort(self.heads_by_user.setdefault(request.user, []), (rank, *age))
        if request.deadline_ms:
            insort(self.deadlines, (rank, request.latest_start_ms, age[1]))
        self.members[age[1]] = members
        self.weights[age[1]] = weight
        self.weight += weight

    def _remove_head(self, request: Request, age: AgeKey) -> None:
        rank = -int(request.priority)
        remove_sorted(self.heads, (rank, *age))
        heads = self.heads_by_user[request.user]
        remove_sorted(heads, (rank, *age))
        if not heads:
            del self.heads_by_user[request.user]
        if request.deadline_ms:
            remove_sorted(self.deadlines, (rank, request.latest_start_ms, age[1]))
        del self.members[age[1]]
        self.weight -= self.weights.pop(age[1])

    def _change_user(self, lease: Lease, *, waits: bool) -> None:
        """Add or remove a request of a user, and update the oldest one of the user."""
        user = lease.request.user
        before = self.oldest_of(user)
        if waits:
            insort(self.by_user.setdefault(user, []), lease.queue_key)
        else:
            remove_sorted(self.by_user[user], lease.queue_key)
            if not self.by_user[user]:
                del self.by_user[user]
        after = self.oldest_of(user)
        if before == after:
            return
        if before is not None:
            remove_sorted(self.oldest_of_users, before)
        if after is not None:
            insort(self.oldest_of_users, after)


def remove_sorted(ordered: list[K], item: K) -> None:
    """Remove an item from a sorted list."""
    place = bisect_left(ordered, item)
    if place < len(ordered) and ordered[place] == item:
        del ordered[place]
