"""The index of waiting requests: heads of groups, users and deadlines, in order whatever comes and goes."""

from __future__ import annotations

from bisect import insort
from random import Random

from msgspec.structs import replace

from distributed_grid.domain.indexes.waiting_index import NAMES_PER_GROUP, AgeKey, WaitingIndex, scan_weight
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.resources import Priority
from tests.support.builders import a_request


def a_waiting_lease(dice: Random, number: int) -> Lease:
    """One of few different requests, so that some of them are equal."""
    request = replace(
        a_request(f"r{number}", cores=1, user=dice.choice(("ada", "bob"))),
        priority=dice.choice(list(Priority)),
        deadline_ms=dice.choice((0, 5_000, 9_000)),
    )
    return Lease(id=request.id, request=request, asked_at_ms=dice.randrange(1_000))


def test_the_index_is_the_same_whatever_has_come_and_gone():
    dice, index, fresh = Random(7), WaitingIndex(), WaitingIndex()
    groups: dict[object, list[AgeKey]] = {}
    leases = [a_waiting_lease(dice, number) for number in range(200)]
    for lease in leases:
        members = groups.setdefault(lease.queue_group, [])
        insort(members, lease.age_key)
        index.add(lease, members)
    dice.shuffle(leases)
    for lease in leases[:100]:
        members = groups[lease.queue_group]
        members.remove(lease.age_key)
        index.remove(lease, members)
    left: dict[object, list[AgeKey]] = {}
    for lease in leases[100:]:
        members = left.setdefault(lease.queue_group, [])
        insort(members, lease.age_key)
        fresh.add(lease, members)
    assert index == fresh
    assert len(index.heads) == len(left) == index.weight
    for user in ("ada", "bob"):
        assert index.oldest_of(user) == min(lease.age_key for lease in leases[100:] if lease.request.user == user)
    for lease in leases[100:]:
        members = groups[lease.queue_group]
        members.remove(lease.age_key)
        index.remove(lease, members)
    assert index == WaitingIndex()


def test_names_add_to_the_weight_of_a_request():
    request = a_request("r1", cores=1)
    named = replace(request, anti_affinity=tuple(f"job{number}" for number in range(2 * NAMES_PER_GROUP)))
    assert (scan_weight(request), scan_weight(named)) == (1, 3)
