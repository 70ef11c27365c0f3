"""When somebody who waits will start, and why nobody knows where nobody knows."""

from __future__ import annotations

import pytest

from distributed_grid.domain.events import JobSubmitted, PolicySet
from distributed_grid.domain.jobs import JobEstimate
from distributed_grid.domain.scheduling_policy import HOUR_MS, Quota, SchedulingPolicy
from distributed_grid.scheduling.queue.backfill import expected_ms, projected_end_ms
from distributed_grid.scheduling.queue.start_estimate import (
    MAX_PLANNED,
    MAX_PLANNED_FOR_NEWCOMER,
    StartEstimate,
    estimate_newcomer_start,
    estimate_start,
)
from tests.support.builders import Scenario, a_command, a_node, a_request
from tests.support.workload import Workload, WorkloadJob

FOREVER_S = 10**7


def a_scenario() -> Scenario:
    return Scenario(a_node("n1", cores=4))


def outlook_of(scenario: Scenario, request_id: str) -> StartEstimate:
    return estimate_start(scenario.ledger, scenario.ledger.leases[request_id], scenario.now)


def wait(scenario: Scenario, request_id: str, cores: int, **what: object) -> None:
    scenario.ask(a_request(request_id, cores=cores, wait_s=FOREVER_S, **what))  # type: ignore[arg-type]
    scenario.advance(0.001)


def test_the_first_starts_when_enough_is_over():
    scenario = a_scenario()
    scenario.ask(a_request("a", cores=2, duration_s=100))
    scenario.ask(a_request("b", cores=2, duration_s=300))
    ends_at = scenario.ledger.leases["a"].ends_at_ms
    wait(scenario, "x", 1)
    assert outlook_of(scenario, "x") == StartEstimate(1, ends_at, "when a is over on n1")


def test_those_before_it_are_planned_first():
    scenario = a_scenario()
    scenario.ask(a_request("full", cores=4, duration_s=100))
    ends_at = scenario.ledger.leases["full"].ends_at_ms
    wait(scenario, "x1", 4, duration_s=50)
    wait(scenario, "x2", 4, duration_s=50)
    assert outlook_of(scenario, "x2") == StartEstimate(2, ends_at + 50_000, "when x1 has had its turn on n1")


def test_nobody_knows_after_somebody_who_does_not_say():
    scenario = a_scenario()
    scenario.ask(a_request("full", cores=4))
    wait(scenario, "x", 4)
    assert outlook_of(scenario, "x") == StartEstimate(1, None, "nobody knows how long full takes, which holds n1")


def test_beyond_a_quota_it_starts_when_its_own_side_holds_less():
    scenario = a_scenario()
    scenario.handle(PolicySet(SchedulingPolicy(quotas=(Quota(name="ada", cpu_milli=2000),))))
    scenario.ask(a_request("a", cores=2))
    wait(scenario, "x", 1)
    assert outlook_of(scenario, "x").reason == "when less is held under the quota of ada: 2 of 2 cores held, 1 asked"


def test_where_no_open_node_could_serve_it_that_is_said():
    scenario = a_scenario()
    wait(scenario, "x", 4)
    scenario.advance(3600, heard=False)
    wait(scenario, "y", 4)
    assert outlook_of(scenario, "y").reason == "no open node could serve it"


def test_far_back_in_the_line_nobody_plans():
    scenario = a_scenario()
    scenario.ask(a_request("full", cores=4, duration_s=100))
    for number in range(MAX_PLANNED + 1):
        wait(scenario, f"x{number:03}", 4, duration_s=10)
    assert outlook_of(scenario, f"x{MAX_PLANNED:03}") == StartEstimate(
        MAX_PLANNED + 1, None, f"{MAX_PLANNED} requests are before it"
    )


def test_the_answer_to_a_request_has_its_start_where_few_are_before_it():
    scenario = a_scenario()
    scenario.ask(a_request("full", cores=4, duration_s=100))
    for number in range(MAX_PLANNED_FOR_NEWCOMER + 1):
        wait(scenario, f"x{number:03}", 4, duration_s=10)
    ledger, now = scenario.ledger, scenario.now
    leases = [ledger.leases[f"x{number:03}"] for number in range(MAX_PLANNED_FOR_NEWCOMER + 1)]
    assert [estimate_newcomer_start(ledger, one, now) for one in leases[:-1]] == [
        estimate_start(ledger, one, now).starts_at_ms for one in leases[:-1]
    ]
    assert estimate_newcomer_start(ledger, leases[-1], now) is None
    assert estimate_start(ledger, leases[-1], now).starts_at_ms is not None


@pytest.mark.parametrize("sizes", [(4, 4, 4), (1, 2, 3, 4), (3, 3, 3)])
def test_if_nobody_else_comes_and_all_words_are_true_the_estimate_is_right(sizes):
    """For the last of the line, whom nobody passes: those before it are as long as it is."""
    traffic = Workload([a_node("n1", cores=4)], tick_ms=HOUR_MS)

    def work(name: str, cores: int, at_ms: int) -> WorkloadJob:
        request = a_request(name, cores=cores, wait_s=FOREVER_S, expects_ms=600_000)
        return WorkloadJob(at_ms, request, 600_000)

    traffic.submit(work("full", 4, 0), *(work(f"x{at}", cores, at + 1) for at, cores in enumerate(sizes)))
    traffic.run(60_000)
    waiting = [traffic.ledger.leases[lease_id] for _, _, lease_id in traffic.ledger.waiting]
    expected = {lease.request.id: estimate_start(traffic.ledger, lease, traffic.now).starts_at_ms for lease in waiting}
    traffic.run(10 * HOUR_MS)
    final = f"x{len(sizes) - 1}"
    assert expected[final] == traffic.starts[final][0]


def run_job(scenario: Scenario, name: str, *, cores: int = 4, run_ms: int = 0) -> None:
    """A job that holds its cores, of whose command earlier runs took that long."""
    request = a_request(name, cores=cores, wait_s=FOREVER_S)
    scenario.handle(
        JobSubmitted(
            id=f"job-{name}",
            command=a_command("sleep", "400"),
            request=request,
            retries=0,
            estimate=JobEstimate(run_ms=run_ms),
        )
    )


def test_other_commands_of_a_user_give_no_estimate():
    scenario = a_scenario()
    for name in ("short1", "short2"):
        run_job(scenario, name)
        scenario.advance(1)
        scenario.start(name)
        scenario.end(name)
    assert len(scenario.ledger.accounts["ada"].runs) == 2
    run_job(scenario, "long")
    wait(scenario, "x", 4)
    assert outlook_of(scenario, "x") == StartEstimate(1, None, "nobody knows how long job-long takes, which holds n1")


def test_earlier_runs_of_a_command_say_when_it_is_over():
    scenario = a_scenario()
    run_job(scenario, "long", run_ms=400_000)
    wait(scenario, "x", 4)
    began = scenario.ledger.leases["long.1"].granted_at_ms
    assert outlook_of(scenario, "x") == StartEstimate(1, began + 400_000, "when job-long is over on n1")


def test_those_who_wait_count_by_earlier_runs_of_their_command():
    scenario = a_scenario()
    run_job(scenario, "first", run_ms=100_000)
    run_job(scenario, "second", run_ms=50_000)
    wait(scenario, "x", 4)
    began = scenario.ledger.leases["first.1"].granted_at_ms
    assert outlook_of(scenario, "x").starts_at_ms == began + 150_000


def test_estimate_of_earlier_runs_ends_after_twice_its_length():
    scenario = a_scenario()
    run_job(scenario, "long", run_ms=60_000)
    began = scenario.ledger.leases["long.1"].granted_at_ms
    wait(scenario, "x", 4)
    scenario.advance(90)
    assert outlook_of(scenario, "x").starts_at_ms == began + 120_000
    scenario.advance(60)
    assert outlook_of(scenario, "x").starts_at_ms is None


def test_stated_length_counts_before_earlier_runs():
    scenario = a_scenario()
    request = a_request("said", cores=4, wait_s=FOREVER_S, expects_ms=30_000)
    scenario.handle(
        JobSubmitted(id="said", command=a_command(), request=request, retries=0, estimate=JobEstimate(run_ms=500_000))
    )
    wait(scenario, "x", 4)
    assert outlook_of(scenario, "x").starts_at_ms == scenario.ledger.leases["said.1"].granted_at_ms + 30_000


def test_backfill_decides_without_earlier_runs_of_a_command():
    scenario = a_scenario()
    run_job(scenario, "long", run_ms=400_000)
    lease = scenario.ledger.leases["long.1"]
    assert expected_ms(scenario.ledger, lease) == 0
    assert projected_end_ms(scenario.ledger, lease, scenario.now) == 0
