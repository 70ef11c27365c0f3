"""Fair shares: the smaller share goes first, old usage hardly counts, and the sums are exact. Quotas: limits of one
user, or of a team together; a request beyond them blocks no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fairness import indexes
from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import MAX_DURATION_MS
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import MAX_AMOUNT, Claim
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.scheduling_policy import HOUR_MS, Quota, SchedulingPolicy
from distributed_grid.domain.statistics import Account
from distributed_grid.errors import Refused
from distributed_grid.scheduling.queue.fairness import (
    MAX_USAGE,
    Quotas,
    Shares,
    decay_factors,
    exceeds_quota_alone,
    settle_account,
)
from distributed_grid.scheduling.queue.order import queue_order
from tests.support.builders import GB, Scenario, a_node, a_request
from tests.support.workload import Workload, WorkloadJob

HALF = SchedulingPolicy(half_life_ms=HOUR_MS)


def a_scenario(policy: SchedulingPolicy = HALF, *, cores: int = 8) -> Scenario:
    scenario = Scenario(a_node("n1", cores=cores, memory_gb=32))
    scenario.handle(PolicySet(policy))
    return scenario


def hold(scenario: Scenario, user: str, seconds: float, *, cores: float) -> None:
    """Somebody holds something for a while."""
    name = f"{user}-{scenario.now}"
    scenario.ask(a_request(name, user=user, cores=cores))
    scenario.advance(seconds)
    scenario.release(name)


def order(scenario: Scenario) -> list[str]:
    return [lease.id for lease in queue_order(scenario.ledger, scenario.now).in_order()]


def shares(scenario: Scenario) -> Shares:
    return Shares(scenario.ledger, scenario.now)


def test_user_above_its_share_comes_after_users_below():
    scenario = a_scenario()
    hold(scenario, "much", 4 * 3600, cores=8)
    scenario.ask(a_request("full", cores=8, user="else"))
    for user in ("much", "little", "never"):
        scenario.ask(a_request(f"of-{user}", cores=8, user=user))
        scenario.advance(1)
    assert order(scenario) == ["of-little", "of-never", "of-much"]


def test_larger_excess_comes_later():
    scenario = a_scenario()
    hold(scenario, "most", 3 * 3600, cores=8)
    hold(scenario, "more", 2500, cores=8)
    scenario.ask(a_request("full", cores=8, user="else"))
    for user in ("most", "more"):
        scenario.ask(a_request(f"of-{user}", cores=8, user=user))
        scenario.advance(1)
    assert order(scenario) == ["of-more", "of-most"]


def test_user_holding_its_share_comes_after_a_newcomer_at_once():
    """The newcomer need not wait until a history has grown."""
    scenario = a_scenario()
    scenario.ask(a_request("full", cores=8, user="ann"))
    scenario.ask(a_request("more", cores=8, user="ann"))
    scenario.advance(1)
    scenario.ask(a_request("new", cores=8, user="bob"))
    assert order(scenario) == ["new", "more"]


def test_a_newcomer_counts_among_those_who_share_at_once():
    """Ann holds more than half and waits for more than is free: she is not alone with that any more."""
    scenario = a_scenario()
    scenario.ask(a_request("most", cores=6, user="ann", duration_s=120))
    scenario.ask(a_request("more", cores=7, user="ann"))
    assert scenario.ask(a_request("new", cores=2, user="bob")).state == "active"


def test_within_their_parts_who_has_waited_longest_for_its_length_goes_first():
    scenario = a_scenario()
    scenario.ask(a_request("full", cores=8, user="else"))
    scenario.ask(a_request("long", cores=1, user="ann", expects_ms=10 * HOUR_MS))
    scenario.advance(60)
    scenario.ask(a_request("short", cores=1, user="bob", expects_ms=60_000))
    assert order(scenario) == ["long", "short"]
    scenario.advance(60)
    assert order(scenario) == ["short", "long"]


def test_priority_counts_more_than_shares():
    scenario = a_scenario()
    hold(scenario, "much", 600, cores=8)
    scenario.ask(a_request("full", cores=8))
    scenario.ask(a_request("poor", cores=8, user="never"))
    scenario.ask(a_request("rich", cores=8, user="much", priority="high"))
    assert order(scenario) == ["rich", "poor"]


def test_current_claims_count_at_once():
    """Two who come together share what is free, though neither has a history."""
    scenario = a_scenario()
    scenario.ask(a_request("full", cores=8, user="else"))
    for number in range(4):
        scenario.ask(a_request(f"a{number}", cores=2, user="ann"))
    for number in range(4):
        scenario.ask(a_request(f"b{number}", cores=2, user="bob"))
    scenario.release("full")
    holders = [lease.request.user for lease in scenario.ledger.leases.values() if lease.holds]
    assert sorted(holders) == ["ann", "ann", "bob", "bob"]


def test_past_use_counts_half_after_a_half_life():
    scenario = a_scenario()
    hold(scenario, "ann", 60, cores=4)
    before = shares(scenario).recent("ann")
    scenario.advance(3600)
    assert shares(scenario).recent("ann") == pytest.approx(before / 2, rel=1e-4)


def test_constant_holding_has_that_recent_share():
    scenario = a_scenario()
    scenario.ask(a_request("r1", cores=2, user="ann"))
    scenario.advance(50 * 3600)
    assert shares(scenario).recent("ann") == pytest.approx(0.25, rel=1e-6)


def test_without_a_half_life_only_what_is_held_counts():
    scenario = a_scenario(SchedulingPolicy(half_life_ms=0))
    hold(scenario, "ann", 600, cores=8)
    assert shares(scenario).recent("ann") == 0
    scenario.ask(a_request("r1", cores=2, user="ann"))
    assert (shares(scenario).recent("ann"), shares(scenario).held("ann")) == (0, 0.25)
    account = scenario.ledger.accounts["ann"]
    assert (account.cpu, account.memory, account.gpu) == (0, 0, 0)


def test_the_largest_part_of_any_resource_is_the_share():
    scenario = Scenario(a_node("n1", cores=8, memory_gb=32, gpus=4))
    scenario.ask(a_request("r1", cores=1, memory_gb=8, gpus=2, user="ann"))
    assert shares(scenario).held("ann") == 0.5


def test_parts_are_by_weight():
    scenario = a_scenario(SchedulingPolicy(weights=(("ann", 2000), ("night", 5000))))
    for user in ("ann", "bob"):
        scenario.ask(a_request(user, user=user))
    part = shares(scenario).part
    assert (part("ann"), part("bob")) == pytest.approx((2 / 3, 1 / 3))
    scenario.ask(a_request("eve", user="eve", team="night"))
    assert shares(scenario).part("eve", "night") == 5 / 8


def test_a_part_among_many_is_two_fifths_and_still_by_weight():
    scenario = a_scenario(SchedulingPolicy(weights=(("ann", 2000),)))
    for user in ("ann", "bob", "eve", "joe"):
        scenario.ask(a_request(user, user=user))
    part = shares(scenario).part
    assert (part("ann"), part("bob")) == pytest.approx((2 * 0.4 * 4 / 5, 0.4 * 4 / 5))


def test_inactive_user_does_not_count_in_the_shares():
    scenario = a_scenario()
    hold(scenario, "gone", 600, cores=8)
    scenario.ask(a_request("r1", user="ann"))
    assert shares(scenario).part("ann") == 1.0


def test_a_member_of_a_team_has_the_teams_weight():
    policy = SchedulingPolicy(
        weights=(("vision", 3000), ("ann", 500)), quotas=(Quota(name="vision", members=("ann", "bob")),)
    )
    assert [policy.weight_of(user) for user in ("ann", "bob", "eve")] == [500, 3000, 1000]


@given(
    steps=st.lists(st.tuples(st.integers(1, 400_000), st.integers(0, 64)), min_size=1, max_size=12),
    half_life_s=st.integers(60, 3_600),
)
def test_the_closed_form_is_what_small_steps_add_up_to(steps, half_life_s):
    """Rates change now and then; each ten milliseconds are faded on their own on the one side, each rate at once on
    the other."""
    small_s = 0.01
    left_small, _ = decay_factors(10, half_life_s * 1000)
    exact = summed = 0.0
    for steps_of_rate, rate in ((ms // 10_000 + 1, cores * 1000) for ms, cores in steps):
        for _ in range(steps_of_rate * 10):
            summed = summed * left_small + rate * small_s * left_small**0.5
        left, seconds = decay_factors(steps_of_rate * 100, half_life_s * 1000)
        exact = exact * left + rate * seconds
    assert summed == pytest.approx(exact, rel=1e-6, abs=1e-6)


@given(
    held=st.lists(st.tuples(st.integers(1, 600), st.integers(1, 4)), max_size=8),
    more=st.lists(st.integers(0, 600), max_size=4),
)
def test_settling_more_often_changes_nothing_but_roundings(held, more):
    once, often = a_scenario(cores=64), a_scenario(cores=64)
    for number, (seconds, cores) in enumerate(held):
        for scenario in (once, often):
            scenario.ask(a_request(f"r{number}", cores=cores, user="ann"))
        once.advance(seconds)
        for part in range(3):
            often.advance(seconds / 4)
            often.ask(a_request(f"x{number}-{part}", memory_gb=0.0001, user="ann"))
        often.advance(seconds / 4)
    for scenario in (once, often):
        scenario.advance(sum(more))
    assert shares(often).recent("ann") == pytest.approx(shares(once).recent("ann"), rel=1e-5, abs=1e-7)


def test_the_largest_use_there_can_be_is_stored_and_read_back():
    ledger = Ledger(
        [
            Account(user="ann", at_ms=0, cpu=MAX_USAGE, memory=MAX_USAGE, gpu=MAX_USAGE),
            SchedulingPolicy(half_life_ms=MAX_DURATION_MS),
        ]
    )
    ledger.held["ann"] = NodeClaims([Claim(MAX_AMOUNT, MAX_AMOUNT)])
    account = settle_account(ledger, "ann", MAX_DURATION_MS)
    assert (account.cpu, account.memory) == (MAX_USAGE, MAX_USAGE)
    assert decode_row("account", encode_row(account)) == account


def test_an_account_is_settled_with_every_grant_and_every_end():
    scenario = a_scenario()
    scenario.ask(a_request("r1", cores=2, user="ann"))
    assert scenario.ledger.accounts["ann"] == Account(user="ann", at_ms=scenario.now)
    scenario.advance(60)
    scenario.release("r1")
    account = scenario.ledger.accounts["ann"]
    assert account.at_ms == scenario.now
    assert account.cpu == pytest.approx(2000 * 60, rel=0.01)


def test_the_last_two_run_times_of_jobs_are_remembered():
    scenario = a_scenario()
    for number, seconds in enumerate((10, 20, 40)):
        scenario.submit(a_request(f"j{number}", user="ann"), starts=True)
        scenario.advance(seconds)
        scenario.end(f"j{number}")
    assert scenario.ledger.accounts["ann"].runs == (20_000, 40_000)


def test_a_lease_without_a_command_says_nothing_about_run_times():
    scenario = a_scenario()
    hold(scenario, "ann", 60, cores=1)
    assert scenario.ledger.accounts["ann"].runs == ()


def test_preempted_run_is_no_run_time():
    scenario = a_scenario(cores=1)
    scenario.submit(a_request("j1", user="ann", priority="low"), starts=True)
    scenario.advance(60)
    scenario.ask(a_request("now", priority="urgent", user="bob"))
    scenario.end("j1")
    assert scenario.ledger.accounts["ann"].runs == ()


def test_overrun_of_a_stated_length_is_recorded():
    scenario = a_scenario()
    scenario.ask(a_request("r1", user="ann", expects_ms=10_000))
    scenario.advance(20)
    scenario.release("r1")
    assert scenario.ledger.accounts["ann"].overran_at_ms == scenario.now


def test_three_who_ask_very_differently_get_equal_shares():
    assert min(indexes(seed=1, hours=48)[24:]) >= 0.95


def test_a_flood_does_not_become_a_right_by_growing_old():
    """One asks for four days of work at once; another, who comes days later with little, does not wait for that."""
    traffic = Workload([a_node("n1", cores=4)], tick_ms=HOUR_MS)
    for number in range(4 * 24 * 4):
        traffic.submit(WorkloadJob(0, a_request(f"flood{number}", user="flood", wait_s=10**7), HOUR_MS))
    for day in range(1, 4):
        traffic.submit(WorkloadJob(day * 24 * HOUR_MS + 1, a_request(f"late{day}", user="late", wait_s=10**7), HOUR_MS))
    traffic.run(4 * 24 * HOUR_MS)
    waits = [traffic.starts[f"late{day}"][0] - day * 24 * HOUR_MS for day in range(1, 4)]
    assert max(waits) <= HOUR_MS


FOREVER_S = 10**7


def a_grid_with_quotas(*quotas: Quota) -> Scenario:
    scenario = Scenario(a_node("n1", cores=16, memory_gb=64, gpus=4, custom={"fpga": 4}))
    scenario.handle(PolicySet(SchedulingPolicy(quotas=quotas)))
    return scenario


def state_of(scenario: Scenario, request_id: str) -> str:
    return str(scenario.ledger.leases[request_id].state)


def test_beyond_its_quota_a_request_waits_for_its_own_side():
    scenario = a_grid_with_quotas(Quota(name="ann", cpu_milli=4000))
    scenario.ask(a_request("a1", cores=3, user="ann"))
    scenario.ask(a_request("a2", cores=2, user="ann", wait_s=FOREVER_S))
    assert state_of(scenario, "a2") == "asked"
    assert Quotas(scenario.ledger).exceeded(a_request("x", cores=2, user="ann")) == (
        "quota of ann: 3 of 4 cores held, 2 asked"
    )
    scenario.release("a1")
    assert state_of(scenario, "a2") == "active"


def test_nobody_waits_for_who_is_beyond_its_quota():
    """It has waited for long, and everything it asks for is kept from nobody."""
    scenario = a_grid_with_quotas(Quota(name="ann", cpu_milli=16_000))
    scenario.ask(a_request("a1", cores=10, user="ann"))
    scenario.ask(a_request("a2", cores=10, user="ann", wait_s=FOREVER_S))
    scenario.advance(3600)
    scenario.ask(a_request("b1", cores=6, user="bob"))
    assert state_of(scenario, "b1") == "active"


def test_a_team_holds_its_quota_together():
    scenario = a_grid_with_quotas(Quota(name="vision", members=("ann", "bob"), cpu_milli=4000))
    scenario.ask(a_request("a1", cores=3, user="ann"))
    scenario.ask(a_request("b1", cores=2, user="bob", wait_s=FOREVER_S))
    scenario.ask(a_request("e1", cores=2, user="eve", team="vision", wait_s=FOREVER_S))
    scenario.ask(a_request("f1", cores=2, user="fay"))
    assert [state_of(scenario, one) for one in ("a1", "b1", "e1", "f1")] == ["active", "asked", "asked", "active"]


@pytest.mark.parametrize(
    ("quota", "ask", "words"),
    [
        (Quota(name="ann", memory_bytes=8 * GB), {"memory_gb": 9}, "quota of ann: at most 8.0 GB, 9.0 asked"),
        (Quota(name="ann", gpu_milli=1000), {"gpus": 2}, "quota of ann: at most 1 GPU, 2 asked"),
        (Quota(name="ann", custom=(("fpga", 1),)), {"custom": {"fpga": 2}}, "quota of ann: at most 1 fpga, 2 asked"),
        (Quota(name="ann", leases=1), {"cores": 1, "gang": 2}, "quota of ann: at most 1 leases, 2 asked"),
        (Quota(name="ann", cpu_milli=2500), {"cores": 1, "gang": 3}, "quota of ann: at most 2.5 cores, 3 asked"),
    ],
)
def test_more_than_a_quota_at_once_is_refused_with_numbers(quota, ask, words):
    scenario = a_grid_with_quotas(quota)
    assert exceeds_quota_alone(scenario.ledger, a_request("x", user="ann", **ask)) == words
    with pytest.raises(Refused, match="quota of ann"):
        scenario.ask(a_request("x", user="ann", **ask))
    assert "x" not in scenario.ledger.leases


def test_resource_outside_a_quota_is_not_limited():
    scenario = a_grid_with_quotas(Quota(name="ann", cpu_milli=1000))
    assert exceeds_quota_alone(scenario.ledger, a_request("x", user="ann", memory_gb=60, gpus=4)) is None


def test_the_number_of_leases_can_be_limited():
    scenario = a_grid_with_quotas(Quota(name="ann", leases=2))
    for number in range(3):
        scenario.ask(a_request(f"a{number}", user="ann", wait_s=FOREVER_S))
    assert [state_of(scenario, f"a{number}") for number in range(3)] == ["active", "active", "asked"]


def test_whatever_comes_and_goes_a_quota_is_never_exceeded():
    scenario = a_grid_with_quotas(
        Quota(name="ann", cpu_milli=5000), Quota(name="team", members=("ann", "bob"), cpu_milli=8000)
    )
    for number in range(60):
        user = ("ann", "bob")[number % 2]
        scenario.ask(a_request(f"r{number}", cores=1 + number % 3, user=user, wait_s=FOREVER_S))
        if number % 4 == 3:
            held = [lease.id for lease in scenario.ledger.leases.values() if lease.holds]
            scenario.release(held[number % len(held)])
        ann, bob = (scenario.ledger.held_by(user).cpu_milli for user in ("ann", "bob"))
        assert ann <= 5000
        assert ann + bob <= 8000
