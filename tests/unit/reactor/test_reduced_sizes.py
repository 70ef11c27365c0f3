"""Reduction of learned sizes: who waits only for a guess gets what is free after a minute."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

from distributed_grid.domain.events import AttemptOutgrown, JobSubmitted, PolicySet
from distributed_grid.domain.jobs import Ending, JobEstimate, Outcome
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.states import JobState
from distributed_grid.reactor.dispatch import StepResult
from tests.support.builders import GB, Scenario, a_command, a_node, a_request


def a_full_scenario(free_gb: float = 4) -> Scenario:
    scenario = Scenario(a_node("n1", cores=4, memory_gb=16))
    scenario.ask(a_request("full", memory_gb=16 - free_gb))
    return scenario


def submit(scenario: Scenario, uid: str = "j1", *, cores: int = 1, restartable: bool = False) -> StepResult:
    """A job that was sized with 8 GB."""
    estimate = JobEstimate(memory_limits=(8 * GB, 12 * GB), tier="statistics", confidence_milli=830, samples=7)
    request = a_request(uid, cores=cores, wait_s=3600)
    return scenario.handle(
        JobSubmitted(
            id=f"{uid}-name",
            command=a_command(),
            request=request,
            retries=0,
            estimate=estimate,
            restartable=restartable,
        )
    )


def test_a_job_that_waits_only_for_its_learned_size_gets_what_is_free_after_a_minute():
    scenario = a_full_scenario()
    submit(scenario)
    scenario.advance(59)
    assert scenario.job("j1").state is JobState.QUEUED
    stepped = scenario.advance(1, heard=False)
    job = scenario.job("j1")
    assert (job.state, job.attempt.memory_limit_bytes) == (JobState.ASSIGNED, 4 * GB)
    assert (job.estimate.reduced_from_bytes, job.may_outgrow) == (8 * GB, True)
    (record,) = (record for record in stepped.records if record.type == "reduced")
    assert record.reason == "waited 60 s for 8.00 GB of memory, a learned size: 4.00 GB is free"


def test_who_waits_for_cores_keeps_its_size():
    scenario = Scenario(a_node("n1", cores=4, memory_gb=16))
    scenario.submit(a_request("busy", cores=4), starts=True)
    submit(scenario)
    scenario.advance(300)
    assert scenario.lease_of("j1").request.ask.memory_bytes == 8 * GB


def test_a_size_that_a_user_stated_stays():
    scenario = a_full_scenario()
    scenario.submit(a_request("j1", cores=1, memory_gb=8, wait_s=3600))
    scenario.advance(300)
    assert scenario.job("j1").state is JobState.QUEUED


def test_too_little_is_not_given():
    scenario = a_full_scenario(1 / 32)
    submit(scenario)
    scenario.advance(300)
    assert scenario.lease_of("j1").request.ask.memory_bytes == 8 * GB


def test_of_two_that_wait_each_gets_its_own_part():
    scenario = a_full_scenario()
    submit(scenario, "j1")
    submit(scenario, "j2")
    scenario.advance(60)
    states = [scenario.job(uid).state for uid in ("j1", "j2")]
    assert states == [JobState.ASSIGNED, JobState.QUEUED]
    scenario.ledger.check()


def test_what_the_quota_leaves_is_given():
    scenario = Scenario(a_node("n1", cores=4, memory_gb=16))
    scenario.handle(PolicySet(SchedulingPolicy(quotas=(Quota(name="ada", memory_bytes=9 * GB),))))
    scenario.ask(a_request("full", memory_gb=6))
    submit(scenario)
    scenario.advance(60)
    assert scenario.job("j1").attempt.memory_limit_bytes == 3 * GB


def test_a_restartable_job_with_a_reduced_size_is_not_ended_for_it():
    scenario = a_full_scenario()
    submit(scenario, restartable=True)
    scenario.advance(60)
    scenario.start("j1")
    scenario.release("full")
    attempt = scenario.job("j1").attempt
    scenario.handle(AttemptOutgrown("j1", 1, attempt.fence, 6 * GB, ("n1",)))
    assert scenario.lease_of("j1").claim.memory_bytes == 7.5 * GB


def test_who_ran_over_a_limit_is_not_given_less_than_that():
    scenario = a_full_scenario(8)
    submit(scenario, restartable=True)
    scenario.start("j1")
    scenario.ask(a_request("other", cores=1))
    scenario.end("j1", Outcome(Ending.OVER_LIMIT, detail="over limit"))
    scenario.advance(300)
    assert scenario.job("j1").state is JobState.QUEUED
    assert scenario.lease_of("j1").request.ask.memory_bytes == 12 * GB
