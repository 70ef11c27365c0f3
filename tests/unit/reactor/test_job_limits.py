"""Jobs that the grid gave a memory limit: run again bigger, within what a node could ever lend, and not for ever."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import JobSubmitted, PolicySet
from distributed_grid.domain.jobs import Ending, Job, JobEstimate, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.states import JobState
from distributed_grid.errors import Conflict, Refused
from distributed_grid.reactor import JobAnswer
from distributed_grid.reactor.dispatch import StepResult
from tests.support.builders import GB, Scenario, a_command, a_node, a_request, an_exit, caps

OVER = Outcome(Ending.OVER_LIMIT, detail="over limit: used 1.0 GB of 1.0 GB")


def a_scenario() -> Scenario:
    return Scenario(a_node("n1", cores=4, memory_gb=16))


def an_estimate(*limits_gb: int) -> JobEstimate:
    return JobEstimate(tuple(limit * GB for limit in limits_gb), tier="statistics", confidence_milli=830, samples=14)


def submit(scenario: Scenario, *limits_gb: int, retries: int = 0, request: Request | None = None) -> StepResult:
    request = request or a_request("j1", cores=1)
    return scenario.handle(JobSubmitted("job", a_command(), request, retries, an_estimate(*limits_gb)))


def run_over(scenario: Scenario) -> StepResult:
    scenario.start("j1")
    return scenario.end("j1", OVER)


def over(stepped: StepResult) -> Job:
    (job,) = (row for row in stepped.changes if isinstance(row, Job) and row.is_over)
    return job


def test_the_limit_is_asked_for_with_what_the_user_asked_for():
    scenario = a_scenario()
    submit(scenario, 2, 4, 8, 16)
    job, lease = scenario.job("j1"), scenario.lease_of("j1")
    assert (lease.claim.cpu_milli, lease.claim.memory_bytes) == (1000, 2 * GB)
    assert job.attempt.memory_limit_bytes == 2 * GB
    assert job.request.ask.memory_bytes == 0


def test_who_runs_over_is_run_again_bigger_without_using_up_retries():
    scenario = a_scenario()
    submit(scenario, 2, 4, 8, 16, retries=1)
    stepped = run_over(scenario)
    job = scenario.job("j1")
    assert (job.state, job.overruns, job.retries_left) == (JobState.ASSIGNED, 1, 1)
    assert [one.memory_limit_bytes for one in job.attempts] == [2 * GB, 4 * GB]
    assert scenario.lease_of("j1").claim.memory_bytes == 4 * GB
    (said,) = (record for record in stepped.records if record.type == "requeued")
    assert said.reason == f"{OVER.detail}; run again with 4.00 GB, time 1 of at most 3"
    assert said.data["memory_limit_bytes"] == 4 * GB
    scenario.start("j1")
    assert over(scenario.end("j1", an_exit())).outcome == an_exit()


def test_after_three_bigger_runs_it_is_over():
    scenario = a_scenario()
    submit(scenario, 2, 4, 8, 16, retries=5)
    for _ in range(3):
        run_over(scenario)
    job = over(run_over(scenario))
    assert len(job.attempts) == 4
    assert job.outcome.ending is Ending.OVER_LIMIT
    assert "the grid gave it 2.00 GB, 4.00 GB, 8.00 GB, 16.00 GB, and does not run it again" in job.outcome.detail


def test_a_limit_that_the_user_gave_stays():
    scenario = a_scenario()
    scenario.submit(a_request("j1", cores=1, memory_gb=2), retries=3)
    assert over(run_over(scenario)).outcome == OVER


def test_a_failure_within_the_limit_is_retried_with_the_same_limit():
    scenario = a_scenario()
    submit(scenario, 2, 4, retries=1)
    scenario.start("j1")
    scenario.end("j1", an_exit(1))
    job = scenario.job("j1")
    assert [one.memory_limit_bytes for one in job.attempts] == [2 * GB, 2 * GB]
    assert (job.retries_left, job.overruns) == (0, 0)


def test_the_next_limit_is_no_more_than_a_node_could_ever_lend():
    scenario = a_scenario()
    submit(scenario, 10, 20, 40, 80)
    run_over(scenario)
    assert scenario.job("j1").attempt.memory_limit_bytes == 16 * GB
    job = over(run_over(scenario))
    assert [one.memory_limit_bytes for one in job.attempts] == [10 * GB, 16 * GB]
    assert job.outcome.ending is Ending.OVER_LIMIT


def test_a_bigger_limit_that_nobody_can_ever_lend_ends_the_job_with_the_reason():
    scenario = a_scenario()
    submit(scenario, 16, 32)
    job = over(run_over(scenario))
    assert job.outcome.ending is Ending.OVER_LIMIT
    assert "it cannot be run again with more: no node can ever lend 1 core, 32.0 GB: n1: " in job.outcome.detail


def test_a_quota_ends_it_with_the_reason_too():
    scenario = a_scenario()
    scenario.handle(PolicySet(SchedulingPolicy(quotas=(Quota("ada", memory_bytes=3 * GB),))))
    submit(scenario, 2, 4)
    job = over(run_over(scenario))
    assert "it cannot be run again with more: quota of ada: at most 3.0 GB, 4.0 asked" in job.outcome.detail


def test_an_estimate_beyond_every_node_gets_the_most_that_there_is():
    scenario = a_scenario()
    submit(scenario, 100, 200)
    assert scenario.job("j1").attempt.memory_limit_bytes == 16 * GB


def test_an_estimate_beyond_the_quota_gives_no_limit():
    scenario = a_scenario()
    scenario.handle(PolicySet(SchedulingPolicy(quotas=(Quota("ada", memory_bytes=3 * GB),))))
    submit(scenario, 8, 16)
    assert scenario.job("j1").attempt.memory_limit_bytes == 0
    assert over(run_over(scenario)).outcome == OVER


def test_what_is_refused_for_another_reason_stays_refused():
    scenario = a_scenario()
    with pytest.raises(Refused, match="can ever lend"):
        submit(scenario, 2, 4, request=a_request("j1", cores=5))


def test_a_job_that_does_not_fit_now_waits_for_its_memory():
    scenario = a_scenario()
    scenario.ask(a_request("full", memory_gb=15))
    result = submit(scenario, 2, 4)
    assert result.answer.reasons == ("n1: 1.0 GB free, 2.0 GB asked",)


def test_the_same_request_again_is_the_same_job_whatever_is_estimated_then():
    scenario = a_scenario()
    submit(scenario, 2, 4)
    again = submit(scenario, 8, 16)
    assert isinstance(again.answer, JobAnswer)
    assert again.answer.job == scenario.job("j1")
    with pytest.raises(Conflict):
        submit(scenario, 2, 4, request=a_request("j1", cores=2))


def test_who_is_preempted_keeps_its_limit():
    scenario = a_scenario()
    submit(scenario, 2, 4, request=a_request("j1", cores=1, priority="low"))
    scenario.start("j1")
    scenario.advance(2)
    scenario.submit(a_request("vip", cores=4, priority="urgent"))
    scenario.end("j1", Outcome(Ending.SIGNALLED, signal=15))
    lease = scenario.lease_of("j1")
    assert (lease.request.ask.memory_bytes, scenario.job("j1").overruns) == (2 * GB, 0)


def test_who_is_cancelled_while_it_runs_over_is_over():
    scenario = a_scenario()
    submit(scenario, 2, 4)
    scenario.start("j1")
    scenario.cancel("j1")
    assert over(scenario.end("j1", OVER)).outcome.ending is Ending.CANCELLED


def test_caps_and_required_nodes_count_for_the_most_that_there_is():
    scenario = Scenario(
        a_node("small", cores=4, memory_gb=64, caps=caps(memory_gb=6)), a_node("big", cores=4, memory_gb=64)
    )
    submit(scenario, 4, 32, request=a_request("j1", cores=1, require=("small",)))
    run_over(scenario)
    assert scenario.job("j1").attempt.memory_limit_bytes == 6 * GB


def test_rows_without_an_estimate_are_what_they_were():
    job = Job("j1", "job", a_command(), a_request("j1", cores=1), 1)
    assert (job.given_limit_bytes, job.sized_request) == (0, job.request)
    sized = replace(job, estimate=an_estimate(1))
    assert sized.sized_request.ask.memory_bytes == GB
