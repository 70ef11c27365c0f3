"""The laws of the grid, each as a function that holds one moment against it."""

from __future__ import annotations

import pytest

from distributed_grid.domain.changes import Counter
from distributed_grid.domain.events import JobSubmitted, LeaseAsked, LeaseReleased, TimePassed
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.lives import LeaseEnd
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.errors import NotFound
from distributed_grid.reactor import JobAnswer, LeaseAnswer, decide, pending, pending_for
from distributed_grid.scheduling.line import next_turn
from tests.unit.reactor.world import Moment, World, by_job, in_order


def _started(ledger: Ledger, name: str) -> list[Lease]:
    """The leases that use a node now: a preemptor whose victims are still there does not."""
    return [lease for lease in ledger.leases.values() if lease.node == name and lease.holds and not lease.awaits]


def a_node_is_never_lent_more_than_capacity_and_caps_allow(world: World, moment: Moment) -> None:
    for name, node in world.ledger.nodes.items():
        claims = [lease.claim for lease in _started(world.ledger, name) if lease.claim is not None]
        most = [node.capacity.cpu_milli, node.capacity.memory_bytes]
        if node.caps.cpu_milli is not None:
            most[0] = min(most[0], node.caps.cpu_milli)
        if node.caps.memory_bytes is not None:
            most[1] = min(most[1], node.caps.memory_bytes)
        if not node.caps.can_share:
            most = [0, 0]
        assert sum(claim.cpu_milli for claim in claims) <= most[0]
        assert sum(claim.memory_bytes for claim in claims) <= most[1]
        has = dict(node.capacity.custom)
        limit = dict(node.caps.custom or ())
        for kind in {kind for claim in claims for kind, _ in claim.custom}:
            lent = sum(dict(claim.custom).get(kind, 0) for claim in claims)
            assert lent <= min(has.get(kind, 0), limit.get(kind, lent))
        devices = {share.index for claim in claims for share in claim.gpus}
        if node.caps.gpu_count is not None:
            assert len(devices) <= node.caps.gpu_count
        assert devices <= {device.index for device in node.capacity.gpus}
    assert {lease.node for lease in world.ledger.leases.values() if lease.holds} <= set(world.ledger.nodes)


def a_gpu_is_never_lent_twice(world: World, moment: Moment) -> None:
    for name, node in world.ledger.nodes.items():
        for device in node.capacity.gpus:
            shares = [
                share
                for lease in _started(world.ledger, name)
                if lease.claim is not None
                for share in lease.claim.gpus
                if share.index == device.index
            ]
            assert sum(share.milli for share in shares) <= WHOLE_GPU
            assert sum(share.memory_bytes for share in shares) <= device.memory_bytes
            if device.exclusive or any(share.milli == WHOLE_GPU for share in shares):
                assert [share.milli for share in shares] in ([], [WHOLE_GPU])


def every_lease_ends_exactly_once(world: World, moment: Moment) -> None:
    assert all(times <= 1 for times in world.ends.values())
    over = {lease_id for lease_id, times in world.ends.items() if times}
    assert world.seen - over == set(world.ledger.leases)
    for row in moment.changes:
        if isinstance(row, Lease) and row.is_over:
            assert row.end is not None
            assert row.claim is None
            assert row.ended_at_ms == world.now


def fences_only_grow(world: World, moment: Moment) -> None:
    for row in moment.changes:
        if isinstance(row, Counter) and row.name == "fence":
            assert row.value >= world.fences[-1]
            world.fences.append(row.value)
    fences = {lease.id: lease.fence for lease in world.ledger.leases.values() if lease.fence}
    assert len(set(fences.values())) == len(fences)
    before = {row.id: row.fence for row in moment.rows_before if isinstance(row, Lease) and row.fence}
    granted = [fence for lease_id, fence in fences.items() if lease_id not in before]
    assert all(fence > max(before.values(), default=0) for fence in granted)
    assert all(fences.get(lease_id, fence) == fence for lease_id, fence in before.items())
    for job in world.ledger.jobs.values():
        numbers = [attempt.fence for attempt in job.attempts]
        assert numbers == sorted(set(numbers))


def a_refused_event_changes_nothing(world: World, moment: Moment) -> None:
    if moment.refusal is not None:
        assert world.ledger.rows() == moment.rows_before


def deciding_changes_nothing(world: World, moment: Moment) -> None:
    assert moment.rows_decided == moment.rows_before


def what_is_stored_is_the_ledger(world: World, moment: Moment) -> None:
    found = world.rebuilt()
    assert in_order(found.rows()) == in_order(world.ledger.rows(durable_only=True))
    found.check()


def the_same_request_twice_is_one_grant(world: World, moment: Moment) -> None:
    """Whatever was asked for and accepted: asking again, at once, gets the same answer and nothing else."""
    if moment.refusal is not None or not isinstance(moment.event, LeaseAsked | JobSubmitted):
        return
    again = decide(world.ledger, moment.event, world.now)
    assert again.changes == []
    assert again.follow == []
    first = moment.answer
    if isinstance(first, LeaseAnswer):
        assert isinstance(again.answer, LeaseAnswer)
        assert again.answer.lease.id == first.lease.id
    else:
        assert isinstance(first, JobAnswer)
        assert isinstance(again.answer, JobAnswer)
        assert again.answer.job.uid == first.job.uid


def a_restart_finds_the_same_things_to_do(world: World, moment: Moment) -> None:
    assert by_job(pending(world.rebuilt())) == by_job(pending(world.ledger))


def what_is_new_to_do_follows_from_what_changed(world: World, moment: Moment) -> None:
    every, some = pending(world.ledger), pending_for(world.ledger, moment.changes)
    assert all(effect in every for effect in some)
    assert all(effect in some for effect in every if effect not in moment.pending_before)


def releasing_twice_is_harmless(world: World, moment: Moment) -> None:
    """The second release changes nothing: the lease is gone (the runtime makes a success of that) or going."""
    if moment.refusal is not None or not isinstance(moment.event, LeaseReleased):
        return
    rows = world.ledger.rows()
    if moment.event.lease_id in world.ledger.leases:
        again = decide(world.ledger, moment.event, world.now)
        assert (again.changes, again.follow) == ([], [])
    else:
        with pytest.raises(NotFound):
            decide(world.ledger, moment.event, world.now)
    assert world.ledger.rows() == rows


def nobody_waits_who_could_be_served(world: World, moment: Moment) -> None:
    """Whoever fits has been served, unless room came by the clock alone and nobody looked yet."""
    assert next_turn(world.ledger, world.now) is None or moment.refusal is not None or not moment.changes


def an_offer_is_within_what_its_node_may_lend(world: World, moment: Moment) -> None:
    for name, offer in world.ledger.offers.items():
        most = world.ledger.nodes[name].lendable
        assert offer.lends.cpu_milli <= most.cpu_milli
        assert offer.lends.memory_bytes <= most.memory_bytes
        assert set(offer.lends.gpus) <= set(most.gpus)
        assert all(count <= dict(most.custom).get(kind, 0) for kind, count in offer.lends.custom)


def nothing_is_given_up_before_its_hold_is_over(world: World, moment: Moment) -> None:
    """What silence alone ends was silent for longer than its node's hold, counted from the last sign of life, or from
    the start of a control plane that has heard none."""
    if not isinstance(moment.event, TimePassed):
        return
    held = {row.id: row.node for row in moment.rows_before if isinstance(row, Lease) and row.holds}
    for row in moment.changes:
        if not isinstance(row, Lease) or row.end is not LeaseEnd.LOST or row.id not in held:
            continue
        node = next(node for node in moment.rows_before if isinstance(node, Node) and node.name == held[row.id])
        assert node.hold_ms
        assert world.now - world.heard_at.get(node.name, world.began_at) >= node.hold_ms


def a_node_that_gives_way_or_is_silent_gets_nothing_new(world: World, moment: Moment) -> None:
    before = {row.id for row in moment.rows_before if isinstance(row, Lease) and row.holds}
    for row in moment.changes:
        if isinstance(row, Lease) and row.holds and row.id not in before:
            seen = world.ledger.sightings[row.node]
            assert not seen.yields
            assert seen.at_ms


def the_indexes_say_what_the_rows_say(world: World, moment: Moment) -> None:
    world.ledger.check()


LAWS = (
    the_indexes_say_what_the_rows_say,
    a_node_is_never_lent_more_than_capacity_and_caps_allow,
    a_gpu_is_never_lent_twice,
    every_lease_ends_exactly_once,
    fences_only_grow,
    a_refused_event_changes_nothing,
    deciding_changes_nothing,
    what_is_stored_is_the_ledger,
    the_same_request_twice_is_one_grant,
    a_restart_finds_the_same_things_to_do,
    what_is_new_to_do_follows_from_what_changed,
    releasing_twice_is_harmless,
    nobody_waits_who_could_be_served,
    an_offer_is_within_what_its_node_may_lend,
    nothing_is_given_up_before_its_hold_is_over,
    a_node_that_gives_way_or_is_silent_gets_nothing_new,
)
