"""Reruns: a bigger memory limit, within what a node could ever lend; and what the last attempt left as checkpoint."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptsListed,
    CheckpointShipped,
    JobSubmitted,
    LeaseLost,
    LeaseReclaimed,
    PolicySet,
)
from distributed_grid.domain.jobs import Ending, Job, JobEstimate, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.states import JobState
from distributed_grid.errors import Conflict, Refused
from distributed_grid.reactor import JobAnswer
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import StartAttempt, attempt_effects, checkpoint_effects
from tests.support.builders import GB, Scenario, a_command, a_node, a_request, an_exit, caps

OVER = Outcome(Ending.OVER_LIMIT, detail="over limit: used 1.0 GB of 1.0 GB")


def a_scenario() -> Scenario:
    return Scenario(a_node("n1", cores=4, memory_gb=16))


def an_estimate(*limits_gb: int) -> JobEstimate:
    return JobEstimate(
        memory_limits=tuple(limit * GB for limit in limits_gb), tier="statistics", confidence_milli=830, samples=14
    )


def submit(scenario: Scenario, *limits_gb: int, retries: int = 0, request: Request | None = None) -> StepResult:
    """A job that its user has declared restartable."""
    request = request or a_request("j1", cores=1)
    return scenario.handle(
        JobSubmitted(
            id="job",
            command=a_command(),
            request=request,
            retries=retries,
            estimate=an_estimate(*limits_gb),
            restartable=True,
        )
    )


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


def test_who_exceeds_a_limit_of_the_disk_is_not_run_again_bigger():
    scenario = a_scenario()
    submit(scenario, 2, 4, 8, 16, retries=1)
    scenario.start("j1")
    full = Outcome(Ending.OVER_LIMIT, detail="its files on the node take 200 GB", is_disk_overrun=True)
    assert over(scenario.end("j1", full)).outcome == full


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
    scenario.handle(PolicySet(SchedulingPolicy(quotas=(Quota(name="ada", memory_bytes=3 * GB),))))
    submit(scenario, 2, 4)
    job = over(run_over(scenario))
    assert "it cannot be run again with more: quota of ada: at most 3.0 GB, 4.0 asked" in job.outcome.detail


def test_an_estimate_beyond_every_node_gets_the_most_that_there_is():
    scenario = a_scenario()
    submit(scenario, 100, 200)
    assert scenario.job("j1").attempt.memory_limit_bytes == 16 * GB


def test_an_estimate_beyond_the_quota_gives_no_limit():
    scenario = a_scenario()
    scenario.handle(PolicySet(SchedulingPolicy(quotas=(Quota(name="ada", memory_bytes=3 * GB),))))
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
    job = Job(uid="j1", id="job", command=a_command(), request=a_request("j1", cores=1), submitted_at_ms=1)
    assert (job.given_limit_bytes, job.sized_request) == (0, job.request)
    sized = replace(job, estimate=an_estimate(1))
    assert sized.sized_request.ask.memory_bytes == GB


def reported(scenario: Scenario, outcome: Outcome, *, left: bool = True, number: int = 0) -> list[Job]:
    """The agent reports the end of an attempt of j1; the job as that has changed it."""
    attempt = scenario.job("j1").attempts[-1] if not number else scenario.job("j1").attempts[number - 1]
    event = AttemptEnded(
        uid="j1",
        number=attempt.number,
        fence=attempt.fence,
        outcome=outcome,
        nodes=(attempt.node,),
        pid=4242,
        has_checkpoint=left,
    )
    return [row for row in scenario.handle(event).changes if isinstance(row, Job)]


def a_displaced_job(scenario: Scenario, *, left: bool = True, retries: int = 3) -> Scenario:
    """A job whose first attempt was reclaimed, with its second one placed."""
    scenario.submit(a_request("j1", cores=1), retries=retries, starts=True)
    reported(scenario, Outcome(Ending.PREEMPTED), left=left)
    scenario.advance(30)
    assert scenario.job("j1").state is JobState.ASSIGNED
    return scenario


def shipped(scenario: Scenario, manifest: str = "m1", number: int = 1, problem: str = "") -> bool:
    """Whether the news changed anything."""
    return bool(
        scenario.handle(
            CheckpointShipped(uid="j1", number=number, manifest=manifest, problem=problem, files=3, bytes=42)
        ).changes
    )


def starts(scenario: Scenario) -> list[str]:
    """The checkpoints with which attempts are to be started."""
    return [effect.job.checkpoint for effect in attempt_effects(scenario.ledger) if isinstance(effect, StartAttempt)]


def test_the_next_attempt_waits_until_what_the_last_one_left_is_here(new_scenario):
    scenario = a_displaced_job(new_scenario())
    assert starts(scenario) == []
    (effect,) = checkpoint_effects(scenario.ledger)
    assert (effect.job.uid, effect.attempt.number) == ("j1", 1)
    done = scenario.handle(CheckpointShipped(uid="j1", number=1, manifest="m1", problem="", files=3, bytes=42))
    assert [effect.job.checkpoint for effect in attempt_effects(scenario.ledger, done.changes)] == ["m1"]
    job = scenario.job("j1")
    assert (job.checkpoint_attempt, job.checkpoint_files, job.checkpoint_bytes) == (1, 3, 42)
    assert checkpoint_effects(scenario.ledger) == []
    assert [(one.type, one.data["bytes"]) for one in done.records] == [("checkpoint-shipped", 42)]
    assert decode_row("job", encode_row(job)) == job


@pytest.mark.parametrize("outcome", [an_exit(1), Outcome(Ending.TIMED_OUT), Outcome(Ending.SIGNALLED, signal=9)])
def test_a_retry_gets_it_too(new_scenario, outcome):
    scenario = new_scenario()
    scenario.submit(a_request("j1", cores=1), retries=1, starts=True)
    reported(scenario, outcome)
    assert starts(scenario) == []
    assert shipped(scenario)
    assert starts(scenario) == ["m1"]


def test_news_of_another_attempt_or_of_no_job_or_said_twice_changes_nothing(new_scenario):
    scenario = a_displaced_job(new_scenario())
    assert not shipped(scenario, number=2)
    assert not shipped(scenario, number=0)
    assert shipped(scenario)
    assert not shipped(scenario, "m2")
    assert starts(scenario) == ["m1"]
    assert not scenario.handle(CheckpointShipped(uid="nobody", number=1, manifest="m1")).changes


def test_an_attempt_that_left_nothing_is_not_waited_for_and_nothing_older_comes_back(new_scenario):
    scenario = a_displaced_job(new_scenario(), left=False)
    assert starts(scenario) == [""]
    scenario.start("j1")
    reported(scenario, Outcome(Ending.PREEMPTED))
    scenario.advance(30)
    assert shipped(scenario, "m2", 2)
    scenario.start("j1")
    reported(scenario, an_exit(1), left=False)
    scenario.advance(30)
    assert starts(scenario) == [""]


def test_what_cannot_be_had_is_recorded_and_the_one_before_counts(new_scenario):
    scenario = a_displaced_job(new_scenario())
    assert shipped(scenario)
    scenario.start("j1")
    reported(scenario, Outcome(Ending.PREEMPTED))
    scenario.advance(60)
    assert shipped(scenario, "", 2, "it holds too much")
    assert starts(scenario) == ["m1"]
    job = scenario.job("j1")
    assert (job.checkpoint_attempt, job.checkpoint_problem) == (1, "attempt 2: it holds too much")


def test_an_attempt_that_never_ran_changes_nothing(new_scenario):
    scenario = a_displaced_job(new_scenario())
    assert shipped(scenario)
    attempt = scenario.job("j1").attempt
    refused = AttemptEnded(
        uid="j1", number=attempt.number, fence=attempt.fence, outcome=Outcome(Ending.PREEMPTED), nodes=(attempt.node,)
    )
    scenario.handle(refused)
    scenario.advance(60)
    assert starts(scenario) == ["m1"]


def test_a_job_that_ends_needs_nothing(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1", cores=1), starts=True)
    (job,) = reported(scenario, an_exit(0))
    assert job.is_over
    assert job.checkpoint_from == 0
    assert checkpoint_effects(scenario.ledger) == []


def test_a_job_that_is_cancelled_while_it_waits_needs_nothing(new_scenario):
    scenario = a_displaced_job(new_scenario())
    scenario.cancel("j1")
    attempt = scenario.job("j1").attempt
    never = Outcome(Ending.NEVER_STARTED, detail="not known here")
    scenario.handle(
        AttemptEnded(uid="j1", number=attempt.number, fence=attempt.fence, outcome=never, nodes=(attempt.node,))
    )
    assert "j1" not in scenario.ledger.jobs
    assert checkpoint_effects(scenario.ledger) == []


def test_a_new_place_that_is_lost_before_it_started_costs_no_retry(new_scenario):
    scenario = a_displaced_job(new_scenario(), retries=0)
    scenario.handle(LeaseLost(scenario.job("j1").lease_id, "gone"))
    scenario.advance(60)
    job = scenario.job("j1")
    assert (job.state, job.checkpoint_from) == (JobState.ASSIGNED, 1)
    assert shipped(scenario)
    assert starts(scenario) == ["m1"]


def test_a_new_place_that_is_taken_back_before_it_started_keeps_it(new_scenario):
    scenario = a_displaced_job(new_scenario())
    scenario.handle(LeaseReclaimed(scenario.job("j1").lease_id, "the owner"))
    attempt = scenario.job("j1").attempt
    never = Outcome(Ending.NEVER_STARTED, detail="not known here")
    scenario.handle(
        AttemptEnded(uid="j1", number=attempt.number, fence=attempt.fence, outcome=never, nodes=(attempt.node,))
    )
    scenario.advance(60)
    assert scenario.job("j1").checkpoint_from == 1


def test_an_agent_that_comes_anew_may_start_what_waited_for_its_checkpoint(new_scenario):
    scenario = a_displaced_job(new_scenario(a_node("gpu1", cores=4, hold_s=60)))
    scenario.handle(
        AttemptsListed(node="gpu1", attempts=(), boot="another", machine="another", ordered_since_ms=scenario.now)
    )
    assert shipped(scenario)
    assert starts(scenario) == ["m1"]


def lost_and_waiting(scenario: Scenario) -> Scenario:
    """A job whose only node was lost, and which waits."""
    scenario.submit(a_request("j1", cores=1), retries=2, starts=True)
    for seconds in (10, 60):  # it is doubted, then given up
        scenario.advance(seconds, heard=False)
    assert scenario.job("j1").state is JobState.QUEUED
    return scenario


def test_the_late_end_of_a_lost_attempt_brings_its_checkpoint_while_the_job_waits(new_scenario):
    scenario = lost_and_waiting(new_scenario(a_node("gpu1", cores=1, hold_s=60)))
    assert reported(scenario, Outcome(Ending.LOST))[0].checkpoint_from == 1
    scenario.handle(AttemptsListed(node="gpu1", attempts=(), boot="boot", machine="dir"))
    scenario.heartbeat("gpu1")
    scenario.advance(2)
    assert scenario.job("j1").state is JobState.ASSIGNED
    assert starts(scenario) == []
    assert shipped(scenario)
    assert starts(scenario) == ["m1"]


def test_the_late_end_of_a_lost_attempt_counts_no_more_when_the_next_one_has_its_place(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    scenario.submit(a_request("j1", cores=1), retries=2, starts=True)
    scenario.handle(LeaseLost(scenario.job("j1").lease_id, "not heard from"))
    assert scenario.job("j1").state is JobState.ASSIGNED
    assert reported(scenario, Outcome(Ending.LOST), number=1) == []
    assert starts(scenario) == [""]


def test_nobody_brings_the_checkpoint_of_another_nodes_attempt(new_scenario):
    scenario = lost_and_waiting(new_scenario(a_node("gpu1", cores=1, hold_s=60)))
    attempt = scenario.job("j1").attempts[-1]
    lie = AttemptEnded(
        uid="j1", number=1, fence=attempt.fence, outcome=Outcome(Ending.LOST), nodes=("gpu2",), has_checkpoint=True
    )
    scenario.handle(lie)
    assert checkpoint_effects(scenario.ledger) == []
