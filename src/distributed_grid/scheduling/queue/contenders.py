"""Contenders: the groups of equal requests that compete in one scan of the queue, at most so many.

Where the groups together weigh at most `MAX_CONTENDERS`, all compete. Beyond that a quarter each are: the first by
priority and age; the first deadlines of each priority; the first of the users whose oldest request has waited longest,
each user as many as any other; and a part of the others, chosen by the clock. So the request that is promoted next, an
urgent one, a tight deadline and a user with few requests always compete, whatever others have put into the queue, and
everybody else does from time to time. A request that names many nodes, labels or jobs weighs more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger

MAX_CONTENDERS = 256
"""Weight of the groups that compete in one scan; a group that names less than 16 nodes, labels or jobs weighs 1."""
MAX_PREEMPTORS = 64
"""Groups of a long queue for which a preemption is looked for in one scan."""
_PART = MAX_CONTENDERS // 4
_MULTIPLIER = 2_654_435_761
"""Spreads moments that follow each other over the whole queue (Knuth's multiplicative hash)."""

Members = Sequence[tuple[int, str]]
"""Ages and ids of equal requests, the oldest first."""


def all_compete(ledger: Ledger) -> bool:
    """True if the queue has so few groups that each of them competes."""
    return ledger.waiting_index.weight <= MAX_CONTENDERS


def contending_groups(ledger: Ledger, now: int) -> list[Members]:
    """The groups that compete at a moment."""
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
        _choose(chosen, heads, index.weights)
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


def _choose(chosen: dict[str, None], heads: Iterable[str], weights: dict[str, int]) -> None:
    """Add heads of one order until they weigh their part; those that were chosen before count, too."""
    weight = 0
    for head in heads:
        weight += weights[head]
        if weight > _PART and weight > weights[head]:
            return
        chosen[head] = None


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
