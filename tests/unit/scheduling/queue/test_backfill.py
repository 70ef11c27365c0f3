"""Gaps before a big request are used, and it starts no later for that.

How long things are expected to take.

`low` takes what nobody else who waits could use.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.scheduling_policy import HOUR_MS, SchedulingPolicy
from distributed_grid.scheduling.queue.backfill import NEVER, RELEASE_MS, StartForecast, expected_ms, projected_end_ms
from tests.support.builders import Scenario, a_node, a_request
from tests.support.workload import Workload, WorkloadJob

MINUTE_MS = 60_000
FOREVER_S = 10**7


def a_big_one_waits(**half: float) -> Scenario:
    """Half of four cores is lent, for two minutes unless said otherwise; somebody waits for all four."""
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("half", cores=2, **(half or {"duration_s": 120})))  # type: ignore[arg-type]
    scenario.ask(a_request("big", cores=4, wait_s=FOREVER_S))
    scenario.advance(1)
    return scenario


def comes(scenario: Scenario, request: Request) -> str:
    """The state of somebody who comes now."""
    lease = scenario.ask(request)
    assert lease is not None
    return str(lease.state)


def test_request_that_ends_in_time_is_backfilled():
    scenario = a_big_one_waits()
    assert comes(scenario, a_request("short", cores=2, duration_s=100)) == "active"


def test_request_that_ends_too_late_is_not_backfilled():
    scenario = a_big_one_waits()
    assert comes(scenario, a_request("long", cores=1, duration_s=200)) == "asked"


def test_request_of_unknown_length_is_not_backfilled():
    scenario = a_big_one_waits()
    assert comes(scenario, a_request("who knows", cores=1)) == "asked"


def test_request_that_fits_beside_the_reservation_is_backfilled():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("half", cores=2, duration_s=120))
    scenario.ask(a_request("big", cores=3, wait_s=FOREVER_S))
    scenario.advance(1)
    assert comes(scenario, a_request("long", cores=1, duration_s=9999)) == "active"
    assert comes(scenario, a_request("longer", cores=1, duration_s=9999)) == "asked"


def test_stated_length_counts_like_a_term():
    scenario = a_big_one_waits(expects_ms=120_000)
    assert comes(scenario, a_request("short", cores=2, expects_ms=100_000)) == "active"


def test_a_guess_from_the_last_two_jobs_counts_too():
    scenario = Scenario(a_node("n1", cores=4))
    for number in range(2):
        scenario.submit(a_request(f"j{number}", user="bob"), starts=True)
        scenario.advance(30)
        scenario.end(f"j{number}")
    scenario.ask(a_request("half", cores=2, duration_s=120))
    scenario.ask(a_request("big", cores=4, wait_s=FOREVER_S))
    scenario.advance(1)
    assert scenario.submit(a_request("j2", cores=2, user="bob")).state == "assigned"


def test_starved_request_is_not_passed_on_an_estimate():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.handle(PolicySet(SchedulingPolicy(starvation_ms=HOUR_MS)))
    for number in range(2):
        scenario.submit(a_request(f"j{number}", user="bob"), starts=True)
        scenario.advance(30)
        scenario.end(f"j{number}")
    scenario.ask(a_request("half", cores=2, duration_s=2 * 3600))
    scenario.ask(a_request("big", cores=4, wait_s=FOREVER_S))
    scenario.advance(3601)
    assert scenario.submit(a_request("j2", cores=2, user="bob")).state == "queued"
    assert comes(scenario, a_request("term", cores=2, user="eve", duration_s=60)) == "active"


def test_overrun_user_does_not_pass_a_starved_request_by_its_statement():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.handle(PolicySet(SchedulingPolicy(starvation_ms=HOUR_MS)))
    scenario.ask(a_request("half", cores=2, duration_s=4 * 3600))
    scenario.ask(a_request("big", cores=4, wait_s=FOREVER_S))
    scenario.advance(3601)
    assert comes(scenario, a_request("word", cores=2, user="bob", expects_ms=60_000)) == "active"
    scenario.advance(120)
    scenario.release("word")
    assert comes(scenario, a_request("word2", cores=2, user="bob", expects_ms=60_000)) == "asked"
    assert comes(scenario, a_request("other", cores=2, user="eve", expects_ms=60_000)) == "active"


def test_the_earliest_moment_is_when_enough_has_come_free():
    scenario = Scenario(a_node("n1", cores=4))
    for request_id, seconds in (("a", 100), ("b", 200), ("c", 300)):
        scenario.ask(a_request(request_id, duration_s=seconds))
    forecast = StartForecast(scenario.ledger, scenario.now)
    asks = [a_request("x", cores=cores).ask for cores in (1, 2, 3, 4)]
    found = [forecast.earliest_ms(ask, "n1") - scenario.now for ask in asks]
    assert found == [0, 100_000, 200_000, 300_000]


def test_nobody_knows_when_where_somebody_does_not_say():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("a"))
    assert StartForecast(scenario.ledger, scenario.now).earliest_ms(a_request("x", cores=4).ask, "n1") == NEVER


def test_a_gang_is_kept_as_many_nodes_as_it_has_members():
    scenario = Scenario(*(a_node(f"n{number}", cores=4) for number in range(3)))
    for number in range(3):
        scenario.ask(a_request(f"r{number}", cores=4, require=[f"n{number}"], duration_s=100 * (number + 1)))
    gang = a_request("gang", cores=4, gang=2, wait_s=FOREVER_S)
    kept = StartForecast(scenario.ledger, scenario.now).reserve(
        Lease(id="gang", request=gang, asked_at_ms=scenario.now), exclude=set()
    )
    assert set(kept.held_then) == {"n0", "n1"}
    assert kept.at_ms == scenario.now + 200_000


RUNNING = st.lists(st.tuples(st.integers(1, 3), st.integers(2, 30)), max_size=3)  # cores, minutes
LATER = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(11, 40)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(running=RUNNING, later=LATER, big=st.integers(2, 8))
def test_backfill_never_delays_the_first_request(running, later, big):
    """All words true, and those who come later all longer, so that they never come before it: the big one starts as
    soon as it would without them."""

    def start_of_big(others: list[tuple[int, int, int]]) -> int:
        traffic = Workload([a_node("n1", cores=12)], tick_ms=HOUR_MS)
        for number, (cores, minutes) in enumerate(running):
            traffic.submit(_work(f"r{number}", 0, cores, minutes))
        traffic.submit(_work("full", 0, 12 - sum(cores for cores, _ in running), 20), _work("big", 1, big, 10))
        for number, (at, cores, minutes) in enumerate(others):
            traffic.submit(_work(f"l{number}", 2 + at * MINUTE_MS, cores, minutes))
        traffic.run(12 * HOUR_MS)
        assert not traffic.ledger.waiting
        return traffic.starts["big"][0]

    assert start_of_big(later) == start_of_big([])


def _work(name: str, at_ms: int, cores: int, minutes: int) -> WorkloadJob:
    run_ms = minutes * MINUTE_MS
    request = a_request(name, cores=cores, wait_s=FOREVER_S, expects_ms=run_ms)
    return WorkloadJob(at_ms, request, run_ms)


def a_story_with_runs(*seconds: float) -> Scenario:
    """Ada's jobs took so long."""
    scenario = Scenario(a_node("n1", cores=8))
    for number, length in enumerate(seconds):
        scenario.submit(a_request(f"j{number}"), starts=True)
        scenario.advance(length)
        scenario.end(f"j{number}")
    return scenario


def expected_s(scenario: Scenario, request: Request, *, job: str = "job-x") -> float:
    return expected_ms(scenario.ledger, Lease(id=request.id, request=request, asked_at_ms=scenario.now, job=job)) / 1000


def test_a_guess_is_the_mean_of_the_last_two_runs():
    assert expected_s(a_story_with_runs(1000, 10, 30), a_request("x")) == 20


def test_one_run_is_no_guess():
    assert expected_s(a_story_with_runs(10), a_request("x")) == 0


def test_only_jobs_are_guessed():
    assert expected_s(a_story_with_runs(10, 30), a_request("x"), job="") == 0


def test_a_guess_shortens_a_term_and_never_lengthens_it():
    scenario = a_story_with_runs(10, 30)
    assert expected_s(scenario, a_request("x", duration_s=100)) == 20
    assert expected_s(scenario, a_request("x", duration_s=5)) == 5


def test_stated_length_counts_before_an_estimate():
    scenario = a_story_with_runs(10, 30)
    assert expected_s(scenario, a_request("x", expects_ms=70_000)) == 70
    assert expected_s(scenario, a_request("x", expects_ms=70_000, duration_s=40)) == 40


def test_overrun_length_is_doubled_again_and_again():
    scenario = Scenario(a_node("n1", cores=8))
    start = scenario.now
    scenario.ask(a_request("r1", expects_ms=60_000))
    ends = []
    for _ in range(4):
        scenario.advance(50)
        ends.append((projected_end_ms(scenario.ledger, scenario.ledger.leases["r1"], scenario.now) - start) // 1000)
    assert ends == [60, 120, 240, 240]


def test_due_lease_is_expected_to_end_at_any_moment():
    scenario = Scenario(a_node("n1", cores=8))
    scenario.ask(a_request("r1", expects_ms=60_000))
    scenario.advance(60)
    assert projected_end_ms(scenario.ledger, scenario.ledger.leases["r1"], scenario.now) == scenario.now + 1


def test_overrun_lease_ends_by_its_term():
    scenario = Scenario(a_node("n1", cores=8))
    scenario.ask(a_request("r1", expects_ms=60_000, duration_s=100))
    ends_at = scenario.ledger.leases["r1"].ends_at_ms
    scenario.advance(80)
    assert projected_end_ms(scenario.ledger, scenario.ledger.leases["r1"], scenario.now) == ends_at


def test_without_guesses_a_broken_word_says_nothing():
    scenario = Scenario(a_node("n1", cores=8))
    scenario.ask(a_request("r1", expects_ms=60_000))
    scenario.advance(50)
    assert (
        projected_end_ms(scenario.ledger, scenario.ledger.leases["r1"], scenario.now, estimates=False)
        == scenario.now + 10_000
    )
    scenario.advance(30)
    assert projected_end_ms(scenario.ledger, scenario.ledger.leases["r1"], scenario.now, estimates=False) == 0


def test_lease_being_released_ends_soon():
    scenario = Scenario(a_node("n1", cores=8))
    scenario.submit(a_request("r1"), starts=True)
    scenario.cancel("r1")
    assert projected_end_ms(scenario.ledger, scenario.lease_of("r1"), scenario.now) == scenario.now + RELEASE_MS


def state_of(scenario: Scenario, request_id: str) -> str:
    return str(scenario.ledger.leases[request_id].state)


def test_low_does_not_take_what_a_waiting_one_could_use():
    """Without patience nothing would be kept yet: anybody else could take the two cores."""
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("half", cores=2))
    scenario.ask(a_request("waits", cores=3, wait_s=FOREVER_S))
    scenario.ask(a_request("low", cores=1, priority="low", wait_s=FOREVER_S))
    assert state_of(scenario, "low") == "asked"
    scenario.ask(a_request("medium", cores=1))
    assert state_of(scenario, "medium") == "active"


def test_low_takes_what_is_over_before_the_other_could_start():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("half", cores=2, duration_s=100))
    scenario.ask(a_request("waits", cores=3, wait_s=FOREVER_S))
    scenario.ask(a_request("low", cores=2, priority="low", duration_s=90))
    assert state_of(scenario, "low") == "active"


def test_low_takes_what_is_left_even_when_the_other_has_started():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("half", cores=2, duration_s=100))
    scenario.ask(a_request("waits", cores=3, wait_s=FOREVER_S))
    scenario.ask(a_request("low", cores=1, priority="low"))
    assert state_of(scenario, "low") == "active"


def test_low_takes_a_node_that_the_other_cannot_use():
    scenario = Scenario(a_node("n1", cores=4), a_node("n2", cores=2))
    scenario.ask(a_request("full", cores=4, require=["n1"]))
    scenario.ask(a_request("waits", cores=4, wait_s=FOREVER_S))
    scenario.ask(a_request("low", cores=2, priority="low"))
    assert scenario.ledger.leases["low"].node == "n2"


def test_low_takes_other_kinds_than_those_waited_for():
    scenario = Scenario(a_node("n1", cores=4, memory_gb=16))
    scenario.ask(a_request("full", cores=4))
    scenario.ask(a_request("waits", cores=1, wait_s=FOREVER_S))
    scenario.ask(a_request("low", memory_gb=4, priority="low"))
    assert state_of(scenario, "low") == "active"


def test_low_is_served_when_nobody_else_waits():
    scenario = Scenario(a_node("n1", cores=4))
    scenario.ask(a_request("low", cores=4, priority="low"))
    assert state_of(scenario, "low") == "active"
