"""Contenders: of a queue of very different requests a limited number competes, and nobody is left out for good."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from bench.queue_mix import MIXES, MixedQueue
from distributed_grid.domain.indexes.waiting_index import scan_weight
from distributed_grid.domain.leases import MAX_NAMES, Request
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.scheduling.queue.contenders import MAX_CONTENDERS, contending_groups
from distributed_grid.scheduling.queue.queue import queue_order
from distributed_grid.scheduling.queue.start_estimate import estimate_start
from tests.support.builders import Scenario, a_node, a_request

CROWD = 3 * MAX_CONTENDERS
MARGIN = MAX_CONTENDERS // 4


def a_crowd(vary: Callable[[Request, int], Request], user: str = "flood") -> Scenario:
    """A full node, and a user with many requests that are all different."""
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16), a_node("gpu2", cores=1, memory_gb=1))
    scenario.ask(a_request("full", cores=4, user=user))
    for number in range(CROWD):
        scenario.now += 1
        scenario.ask(vary(a_request(f"r{number:04}", cores=2, user=user, wait_s=100_000), number))
    return scenario


def different_lengths(request: Request, number: int) -> Request:
    return replace(request, expects_ms=60_000 + number)


def contenders(scenario: Scenario) -> list[str]:
    return [members[0][1] for members in contending_groups(scenario.ledger, scenario.now)]


def calls_in(action: Callable[[], object]) -> int:
    """The number of function calls that an action makes."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("mix", MIXES)
def test_the_cost_of_a_submission_and_of_an_end_does_not_grow_with_a_queue_of_different_requests(mix):
    short, long = (MixedQueue(MIXES[mix], size) for size in (2 * MAX_CONTENDERS, 6 * MAX_CONTENDERS))
    for queue in (short, long):
        queue.end_one()  # the first one also makes what is kept between two scans
    assert calls_in(long.submit_next) < 1.3 * calls_in(short.submit_next) + 100
    assert calls_in(long.end_one) < 1.3 * calls_in(short.end_one) + 300
    long.ledger.check()


def test_different_deadlines_cost_a_submission_what_equal_ones_do():
    equal, different = (MixedQueue(MIXES[mix], 2 * MAX_CONTENDERS) for mix in ("nothing", "deadline"))
    assert calls_in(different.submit_next) < 1.5 * calls_in(equal.submit_next)


def test_so_many_groups_compete_and_fewer_where_they_name_much():
    plain = a_crowd(different_lengths)
    assert MARGIN < len(contenders(plain)) <= MAX_CONTENDERS
    named = a_crowd(lambda one, at: replace(one, anti_affinity=tuple(f"{at}-{name}" for name in range(MAX_NAMES))))
    weight = scan_weight(named.ledger.leases["r0000"].request)
    assert 0 < len(contenders(named)) * weight <= MAX_CONTENDERS


def test_all_groups_compete_in_an_ordinary_queue():
    scenario = Scenario(a_node("gpu1", cores=4))
    scenario.ask(a_request("full", cores=4))
    for number in range(MAX_CONTENDERS):
        scenario.ask(different_lengths(a_request(f"r{number}", cores=1), number))
    assert len(contenders(scenario)) == MAX_CONTENDERS == len(scenario.ledger.queue_groups)


def test_a_user_with_one_request_always_competes_with_a_flood():
    scenario = a_crowd(different_lengths)
    scenario.ask(a_request("mine", cores=2, user="bob"))
    for _ in range(50):
        scenario.now += 1
        assert "mine" in contenders(scenario)
    scenario.release("full")
    assert scenario.ledger.leases["mine"].holds


def test_an_urgent_request_and_the_next_deadline_of_a_flooding_user_always_compete():
    scenario = a_crowd(different_lengths)
    scenario.ask(replace(a_request("urgent", cores=2, user="flood"), priority=Priority.HIGH))
    scenario.ask(replace(a_request("tight", cores=2, user="flood"), deadline_ms=scenario.now + 30_000))
    for _ in range(50):
        scenario.now += 1
        assert {"urgent", "tight", "r0000"} <= set(contenders(scenario))


def test_the_starved_request_of_each_user_is_promoted_in_a_flood():
    scenario = a_crowd(lambda one, at: replace(different_lengths(one, at), priority=Priority.HIGH))
    scenario.ask(replace(a_request("low", cores=2, user="bob", wait_s=1_000_000), priority=Priority.LOW))
    scenario.now += SchedulingPolicy().starvation_ms + 1
    order = queue_order(scenario.ledger, scenario.now)
    promoted = {lease.id for lease in scenario.ledger.leases.values() if order.is_promoted(lease)}
    assert promoted == {"r0000", "low"}


def test_every_request_competes_from_time_to_time():
    scenario = a_crowd(different_lengths)
    seen: set[str] = set()
    for _ in range(200):
        scenario.now += 1_000
        seen.update(contenders(scenario))
    assert len(seen) == CROWD


def test_a_request_that_fits_behind_a_flood_that_does_not_is_started_by_a_later_tick():
    scenario = a_crowd(different_lengths)
    scenario.ask(a_request("big", cores=1, memory_gb=1, user="flood"))  # the only other room is taken
    small = replace(a_request("small", cores=1, user="flood", wait_s=100_000), expects_ms=1)
    scenario.ask(small)
    scenario.release("big")
    for _ in range(200):
        if scenario.ledger.leases["small"].holds:
            break
        scenario.advance(1)
    assert scenario.ledger.leases["small"].holds


def test_positions_in_a_flood_are_by_priority_and_age():
    scenario = a_crowd(different_lengths)
    order = queue_order(scenario.ledger, scenario.now)
    last = scenario.ledger.leases[f"r{CROWD - 1:04}"]
    assert (order.position(last), len(order)) == (CROWD - 1, CROWD)
    estimate = estimate_start(scenario.ledger, last, scenario.now)
    assert (estimate.position, estimate.starts_at_ms) == (CROWD, None)
    assert estimate.reason == f"{CROWD - 1} requests are before it"
