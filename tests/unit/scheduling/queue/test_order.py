"""Work that overtakes a waiting request, and the requests that come first because of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.queue_mix import MIXES, MixedQueue
from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.indexes.waiting_index import scan_weight
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import MAX_NAMES, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.scheduling_policy import HOUR_MS, SchedulingPolicy
from distributed_grid.domain.statistics import QueueProgress
from distributed_grid.scheduling.queue.order import (
    HALF_LIFE_MS,
    LIMIT,
    MAX_CONTENDERS,
    SHORT_PART,
    contending_groups,
    queue_order,
    recent_peak,
)
from distributed_grid.scheduling.queue.start_estimate import estimate_start
from tests.support.builders import Scenario, a_node, a_request
from tests.support.workload import Workload, WorkloadJob

FOREVER_S = 10**7
STOPPED = Outcome(Ending.SIGNALLED, signal=15)
MINUTE_MS = 60_000
NO_STARVATION = SchedulingPolicy(starvation_ms=10**6 * HOUR_MS)
HOUR_OF_GRID = 1000 * HOUR_MS
"""The work of a request that takes the whole grid for an hour."""


def a_busy_scenario() -> Scenario:
    """Four cores, all held, and five users who wait or hold something, so that shares are not exact."""
    scenario = Scenario(a_node("n1", cores=4))
    scenario.handle(PolicySet(NO_STARVATION))
    for user in ("bob", "dan", "eve", "joe"):
        scenario.ask(a_request(f"full-{user}", cores=1, user=user))
    return scenario


def wait(scenario: Scenario, request_id: str, cores: int = 4, **what: object) -> None:
    scenario.ask(a_request(request_id, cores=cores, wait_s=FOREVER_S, **what))  # type: ignore[arg-type]
    scenario.advance(1)


def overtake(scenario: Scenario, hours: float, *, peak_hours: float = 8) -> None:
    """So much work has started after the turn of the oldest request."""
    oldest = scenario.ledger.leases[scenario.ledger.waiting_index.oldest_of_users[0][1]]
    peak, started = round(peak_hours * HOUR_OF_GRID), oldest.turn + round(hours * HOUR_OF_GRID)
    progress = replace(scenario.ledger.queue_progress, started=started, peak=peak, peak_at_ms=scenario.now)
    scenario.ledger.apply([progress])


def order(scenario: Scenario) -> list[str]:
    return [lease.id for lease in queue_order(scenario.ledger, scenario.now).in_order()]


def test_an_overtaken_request_comes_before_those_with_a_greater_need():
    scenario = a_busy_scenario()
    wait(scenario, "long", user="ann", expects_ms=10 * HOUR_MS)
    overtake(scenario, 8 * LIMIT - 0.01)
    wait(scenario, "short", user="eve", expects_ms=HOUR_MS)
    scenario.advance(3600)
    assert order(scenario) == ["short", "long"]
    overtake(scenario, 8 * LIMIT + 0.01)
    assert order(scenario) == ["long", "short"]


def test_overtaken_requests_come_by_age():
    scenario = a_busy_scenario()
    wait(scenario, "first", user="ann", expects_ms=10 * HOUR_MS)
    wait(scenario, "second", user="eve", expects_ms=HOUR_MS)
    overtake(scenario, 100)
    assert order(scenario) == ["first", "second"]


def test_the_share_of_its_user_does_not_put_an_overtaken_request_back():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.handle(PolicySet(NO_STARVATION))
    for number, user in enumerate(("ann", "ann", "bob", "dan")):
        scenario.ask(a_request(f"full{number}", cores=1, user=user))
    wait(scenario, "above", user="ann", expects_ms=HOUR_MS)
    wait(scenario, "below", user="eve", expects_ms=HOUR_MS)
    assert order(scenario) == ["below", "above"]
    overtake(scenario, 8 * LIMIT - 0.01)
    assert order(scenario) == ["below", "above"]
    overtake(scenario, 8 * LIMIT + 0.01)
    assert order(scenario) == ["above", "below"]


def test_an_overtaken_request_comes_after_higher_priorities_and_tight_deadlines():
    scenario = a_busy_scenario()
    wait(scenario, "long", user="ann", expects_ms=10 * HOUR_MS)
    overtake(scenario, 100)
    wait(scenario, "high", user="bob", priority="high")
    wait(scenario, "tight", user="dan", expects_ms=HOUR_MS, deadline_ms=scenario.now + HOUR_MS + MINUTE_MS)
    assert order(scenario) == ["high", "tight", "long"]


def test_a_short_request_of_a_user_below_its_share_passes_an_overtaken_one():
    scenario = a_busy_scenario()
    wait(scenario, "long", user="ann", expects_ms=10 * HOUR_MS)
    overtake(scenario, 7)
    short_ms = round(8 * SHORT_PART * HOUR_MS)
    wait(scenario, "short", user="eve", duration_s=short_ms // 1000)
    wait(scenario, "longer", user="eve", duration_s=2 * short_ms // 1000)
    assert order(scenario) == ["short", "long", "longer"]


def test_no_short_request_passes_once_the_largest_backlog_has_overtaken_the_oldest_request():
    """So a stream of short requests cannot delay it without bound."""
    scenario = a_busy_scenario()
    wait(scenario, "long", user="ann", expects_ms=10 * HOUR_MS)
    overtake(scenario, 7.9)
    wait(scenario, "short", user="eve", duration_s=60)
    assert order(scenario) == ["short", "long"]
    overtake(scenario, 8.1)
    assert order(scenario) == ["long", "short"]


def test_a_stated_length_without_a_term_does_not_pass_an_overtaken_request():
    scenario = a_busy_scenario()
    wait(scenario, "long", user="ann", expects_ms=10 * HOUR_MS)
    overtake(scenario, 7)
    wait(scenario, "stated", user="eve", expects_ms=MINUTE_MS)
    assert order(scenario) == ["long", "stated"]


def test_an_overtaken_request_is_promoted_after_the_starvation_time_unless_a_higher_priority_waits():
    scenario = a_busy_scenario()
    scenario.handle(PolicySet(SchedulingPolicy(starvation_ms=HOUR_MS)))
    for request_id in ("first", "second"):
        wait(scenario, request_id, user="ann", expects_ms=10 * HOUR_MS)
    overtake(scenario, 100)
    scenario.advance(2 * 3600)
    wait(scenario, "tight", user="dan", expects_ms=HOUR_MS, deadline_ms=scenario.now + HOUR_MS + MINUTE_MS)
    assert order(scenario) == ["first", "second", "tight"]
    wait(scenario, "high", user="bob", priority="high")
    assert order(scenario) == ["first", "high", "tight", "second"]


def test_equal_short_requests_come_by_age_although_only_the_older_is_overtaken():
    scenario = a_busy_scenario()
    wait(scenario, "long", user="ann", expects_ms=HOUR_MS)
    wait(scenario, "older", user="eve", duration_s=60)
    overtake(scenario, 7)
    wait(scenario, "younger", user="eve", duration_s=60)
    assert order(scenario) == ["long", "older", "younger"]


def test_nothing_is_reserved_for_a_short_request_that_passes_an_overtaken_one():
    """Else a stream of wide short requests would keep free nodes from the overtaken one."""
    scenario = a_busy_scenario()
    wait(scenario, "long", cores=1, user="ann", expects_ms=10 * HOUR_MS)
    overtake(scenario, 7)
    wait(scenario, "wide", cores=4, user="eve", duration_s=60)
    assert order(scenario) == ["wide", "long"]
    scenario.release("full-bob")
    assert scenario.ledger.leases["long"].holds


def test_a_short_request_of_a_user_above_its_share_does_not_pass():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.handle(PolicySet(NO_STARVATION))
    for number, user in enumerate(("eve", "eve", "bob", "dan")):
        scenario.ask(a_request(f"full{number}", cores=1, user=user))
    wait(scenario, "long", user="ann", expects_ms=10 * HOUR_MS)
    overtake(scenario, 7)
    wait(scenario, "short", user="eve", duration_s=60)
    assert order(scenario) == ["long", "short"]


def test_no_estimate_passes_an_overtaken_request():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.handle(PolicySet(NO_STARVATION))
    for number in range(2):
        scenario.submit(a_request(f"j{number}", user="bob"), starts=True)
        scenario.advance(30)
        scenario.end(f"j{number}")
    for user in ("dan", "eve"):
        scenario.ask(a_request(f"full-{user}", cores=1, user=user, duration_s=7200))
    wait(scenario, "big", user="ann")
    wait(scenario, "other", user="joe")
    overtake(scenario, 100)
    assert scenario.submit(a_request("j2", cores=2, user="bob")).state == "queued"
    scenario.ask(a_request("term", cores=2, user="bob", duration_s=60))
    assert scenario.ledger.leases["term"].holds


def test_three_users_share_exactly_whatever_has_overtaken_one():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.handle(PolicySet(NO_STARVATION))
    for number, user in enumerate(("ann", "ann", "bob", "bob")):
        scenario.ask(a_request(f"full{number}", cores=1, user=user))
    wait(scenario, "above", user="ann")
    wait(scenario, "below", user="eve")
    overtake(scenario, 100)
    assert order(scenario) == ["below", "above"]


def test_work_that_starts_at_once_counts_as_overtaking():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("full", cores=2, user="bob", duration_s=7200))
    wait(scenario, "big", cores=4, user="ann", duration_s=3600)
    before = scenario.ledger.queue_progress.started
    scenario.ask(a_request("beside", cores=2, user="eve", duration_s=3600))
    assert scenario.ledger.leases["beside"].holds
    assert scenario.ledger.queue_progress.started - before == HOUR_OF_GRID // 2


def test_without_a_queue_nothing_is_counted():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("alone", cores=4, duration_s=3600))
    assert scenario.ledger.queue_progress == QueueProgress()


def test_a_withdrawn_request_overtakes_nobody_and_later_ones_keep_their_order():
    scenario = a_busy_scenario()
    wait(scenario, "first", user="ann")
    wait(scenario, "flood", user="bob")
    wait(scenario, "second", user="eve")
    scenario.release("flood")
    wait(scenario, "third", user="dan")
    leases = scenario.ledger.leases
    assert scenario.ledger.queue_progress.started == 0
    assert leases["first"].turn <= leases["second"].turn <= leases["third"].turn


def test_a_requeued_job_keeps_its_turn():
    scenario = Scenario(a_node("n1", cores=1))
    for request_id, user in (("j1", "ann"), ("j2", "bob")):
        scenario.submit(a_request(request_id, user=user, priority="low", wait_s=FOREVER_S), starts=request_id == "j1")
    turn = scenario.lease_of("j1").turn
    scenario.advance(60)
    scenario.ask(a_request("now", priority="urgent", user="eve"))
    scenario.end("j1", STOPPED)
    again = scenario.lease_of("j1")
    assert (again.id, again.turn, again.work) == ("j1.2", turn, HOUR_OF_GRID)


def test_progress_and_turns_are_the_same_after_a_restart():
    scenario = a_busy_scenario()
    wait(scenario, "first", user="ann", cores=1)
    wait(scenario, "second", user="eve", cores=1)
    scenario.release("full-bob")
    again = Ledger(scenario.ledger.rows(durable_only=True))
    assert again.queue_progress == scenario.ledger.queue_progress != QueueProgress()
    assert again.waiting_index == scenario.ledger.waiting_index
    assert again.waiting_index.work == again.leases["second"].work > 0


def test_a_backlog_counts_half_after_a_half_life():
    assert recent_peak(QueueProgress(peak=100, peak_at_ms=5), 5 + HALF_LIFE_MS) == pytest.approx(50)


def test_a_flood_that_others_do_not_overtake_gains_nothing_by_its_age():
    """One asks for four days of work at once; four others, who come days later with little, do not wait for that."""
    traffic = Workload([a_node("n1", cores=8)], NO_STARVATION, tick_ms=HOUR_MS)
    for number in range(8 * 24 * 4):
        traffic.submit(WorkloadJob(0, a_request(f"flood{number}", user="flood", wait_s=FOREVER_S), HOUR_MS))
    late = [(day, user) for day in range(1, 4) for user in ("ann", "bob", "dan", "eve")]
    for day, user in late:
        at_ms = day * 24 * HOUR_MS + 1
        traffic.submit(WorkloadJob(at_ms, a_request(f"{user}{day}", user=user, wait_s=FOREVER_S), HOUR_MS))
    traffic.run(4 * 24 * HOUR_MS)
    assert max(traffic.starts[f"{user}{day}"][0] - day * 24 * HOUR_MS for day, user in late) <= HOUR_MS


USERS = ("ann", "bob", "dan", "eve", "joe")


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_request_waits_much_longer_than_the_whole_backlog_takes(seed):
    """Five users ask for as much as there is; one of them for long, wide things that all others would pass."""
    dice, wide_ms = random.Random(seed), 6 * HOUR_MS
    traffic = Workload([a_node("n1", cores=8)], NO_STARVATION, tick_ms=HOUR_MS)
    peak_ms, asked = 0.0, 0
    waits: dict[str, int] = {}
    for hour in range(72):
        for _ in range(3 if hour else 12):
            asked += 1
            user = dice.choice(USERS)
            run_ms, cores = (wide_ms, 6) if user == "ann" and dice.random() < 0.3 else (HOUR_MS, dice.choice((1, 2, 4)))
            request = a_request(f"r{asked}", user=user, cores=cores, duration_s=run_ms // 1000, wait_s=FOREVER_S)
            at_ms = hour * HOUR_MS + dice.randrange(HOUR_MS)
            traffic.submit(WorkloadJob(at_ms, request, run_ms))
            waits[request.id] = at_ms
        traffic.run((hour + 1) * HOUR_MS)
        peak_ms = max(peak_ms, traffic.ledger.waiting_index.work / 1000)
    traffic.run(300 * HOUR_MS)
    longest = max(traffic.starts[request_id][0] - at_ms for request_id, at_ms in waits.items())
    assert longest <= 2 * peak_ms + 3 * wide_ms


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
