"""Jobs: their whole lives, with every way to end."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest

from distributed_grid.domain.events import AttemptEnded, AttemptsListed, AttemptStarted, ControlPlaneStarted
from distributed_grid.domain.jobs import Command, Ending, Job, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor import JobAnswer, pending, pending_for
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import StartAttempt, StopAttempt
from tests.support.builders import NOW, Scenario, a_command, a_node, a_request, a_submission, an_exit


def over(stepped: StepResult) -> Job:
    """The one job that ended."""
    (job,) = (row for row in stepped.changes if isinstance(row, Job) and row.is_over)
    return job


def lease_end(stepped: StepResult) -> LeaseEnd | None:
    (lease,) = (row for row in stepped.changes if isinstance(row, Lease) and row.is_over)
    return lease.end


def effects(scenario: Scenario) -> list[tuple[str, str]]:
    return [(type(effect).__name__, effect.job.uid) for effect in pending(scenario.ledger)]


def full(scenario: Scenario) -> Scenario:
    """Nothing is free any more."""
    scenario.ask(a_request("full", cores=4))
    return scenario


def preempted(scenario: Scenario) -> Scenario:
    """Job `j1` is stopping, to make room for the urgent `vip`."""
    scenario.submit(a_request("j1", cores=4, priority="low"), retries=1, starts=True)
    scenario.advance(2)
    scenario.submit(a_request("vip", cores=4, priority="urgent"))
    return scenario


def test_a_job_runs_from_queue_to_exit(new_scenario):
    scenario = new_scenario()
    result = scenario.handle(a_submission(a_request("j1", cores=2)))
    job, lease = scenario.job("j1"), scenario.lease_of("j1")
    assert isinstance(result.answer, JobAnswer)
    assert (result.answer.job, result.answer.lease, result.answer.reasons) == (job, lease, ())
    assert (job.state, lease.state) == (JobState.ASSIGNED, LeaseState.RESERVING)
    assert (
        pending(scenario.ledger) == pending_for(scenario.ledger, result.changes) == [StartAttempt("gpu1", job, lease)]
    )
    scenario.now += 500
    running = scenario.start("j1", pid=77)
    assert (running.state, scenario.lease_of("j1").state) == (JobState.RUNNING, LeaseState.ACTIVE)
    assert (running.attempt.pid, running.attempt.started_at_ms) == (77, NOW + 500)
    assert pending(scenario.ledger) == []
    ended = scenario.end("j1", an_exit(0))
    job = over(ended)
    assert (job.outcome, job.ended_at_ms, lease_end(ended)) == (an_exit(0), NOW + 500, LeaseEnd.RELEASED)
    assert ended.records[-1].type == "stopped"
    assert ended.records[-1].data["exit_code"] == 0
    assert scenario.ledger.is_empty


def test_a_job_that_does_not_fit_waits_and_then_gets_its_attempt(new_scenario):
    scenario = full(new_scenario())
    result = scenario.handle(a_submission(a_request("j1")))
    assert result.answer.reasons == ("gpu1: 0 cores free, 1 core asked",)
    assert scenario.job("j1").state is JobState.QUEUED
    assert pending(scenario.ledger) == []
    scenario.release("full")
    assert effects(scenario) == [("StartAttempt", "j1")]


def test_a_job_that_will_not_wait_is_refused(new_scenario):
    scenario = full(new_scenario())
    with pytest.raises(Refused, match=r"^No resource offers available"):
        scenario.submit(a_request("j1", wait_s=0))
    assert scenario.ledger.jobs == {}


def test_a_job_without_a_command_or_with_negative_retries_is_refused(new_scenario):
    scenario = new_scenario()
    with pytest.raises(BadInput, match="no command"):
        scenario.handle(a_submission(a_request("j1"), command=Command(())))
    with pytest.raises(BadInput, match="retries"):
        scenario.handle(a_submission(a_request("j1"), retries=-1))


def test_the_same_submission_twice_is_one_job(new_scenario):
    scenario = new_scenario()
    scenario.handle(a_submission(a_request("j1")))
    again = scenario.handle(a_submission(a_request("j1")))
    assert again.changes == []
    assert again.answer == JobAnswer(scenario.job("j1"), scenario.lease_of("j1"))


def test_the_same_submission_is_known_through_every_attempt(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=1, starts=True)
    scenario.end("j1", an_exit(1))
    again = scenario.handle(a_submission(a_request("j1"), retries=1))
    assert again.changes == []
    assert again.answer.lease.id == "j1.2"


@pytest.mark.parametrize(
    "other",
    [
        a_submission(a_request("j1", cores=2)),
        a_submission(a_request("j1"), name="another"),
        a_submission(a_request("j1"), command=a_command("false")),
    ],
)
def test_the_same_request_id_with_other_content_is_refused(new_scenario, other):
    scenario = new_scenario()
    scenario.submit(a_request("j1"))
    with pytest.raises(Conflict, match=r"^request j1 was used before for something else$"):
        scenario.handle(other)


def test_the_request_id_of_a_plain_lease_is_refused(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1"))
    with pytest.raises(Conflict):
        scenario.submit(a_request("r1"))


def test_two_jobs_cannot_have_one_name(new_scenario):
    scenario = new_scenario()
    scenario.handle(a_submission(a_request("j1"), name="train"))
    with pytest.raises(Conflict, match="a job called train is already there"):
        scenario.handle(a_submission(a_request("j2"), name="train"))
    scenario.cancel("j1")
    scenario.end("j1")
    scenario.handle(a_submission(a_request("j2"), name="train"))


@pytest.mark.parametrize("off", [-1, 1, 1 << 32])
def test_a_report_with_another_fence_changes_nothing(new_scenario, off):
    scenario = new_scenario()
    attempt = scenario.submit(a_request("j1")).attempt
    before = scenario.ledger.rows()
    scenario.handle(AttemptStarted("j1", 1, attempt.fence + off, 7))
    scenario.handle(AttemptEnded("j1", 1, attempt.fence + off, an_exit()))
    scenario.handle(AttemptEnded("j1", 2, attempt.fence, an_exit()))
    scenario.handle(AttemptEnded("stranger", 1, attempt.fence, an_exit()))
    assert scenario.ledger.rows() == before


def test_a_start_that_is_reported_twice_counts_once(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), starts=True)
    attempt = scenario.job("j1").attempt
    assert scenario.handle(AttemptStarted("j1", 1, attempt.fence, 99)).changes == []
    assert scenario.job("j1").attempt.pid == 4242


def test_the_record_of_a_start_names_the_cores(new_scenario):
    scenario = new_scenario()
    attempt = scenario.submit(a_request("j1", cores=2)).attempt
    result = scenario.handle(AttemptStarted("j1", 1, attempt.fence, 7, (2, 3)))
    assert result.records[0].data == {"job_id": "job-j1", "attempt": 1, "pid": 7, "cores": ["2", "3"]}
    assert scenario.job("j1").attempt.cores == (2, 3)


def test_an_end_without_a_start_is_an_end(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"))
    result = scenario.end("j1", Outcome(Ending.NEVER_STARTED, detail="no such program"))
    assert over(result).outcome.ending is Ending.NEVER_STARTED
    assert lease_end(result) is LeaseEnd.FAILED


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (an_exit(3), LeaseEnd.RELEASED),
        (Outcome(Ending.SIGNALLED, signal=9), LeaseEnd.RELEASED),
        (Outcome(Ending.OVER_LIMIT, detail="over limit: used 2.1 GB of 1.0 GB"), LeaseEnd.FAILED),
        (Outcome(Ending.TIMED_OUT), LeaseEnd.RELEASED),
        (Outcome(Ending.LOST), LeaseEnd.LOST),
    ],
)
def test_a_job_ends_exactly_as_its_attempt_did(new_scenario, outcome, end):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), starts=True)
    result = scenario.end("j1", outcome)
    assert over(result).outcome == over(result).attempts[-1].outcome == outcome
    assert lease_end(result) is end
    assert result.records[-1].reason == (outcome.detail or str(outcome.ending))


def test_retries_run_a_failed_job_again_until_they_are_used_up(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=2, starts=True)
    for left in (1, 0):
        result = scenario.end("j1", an_exit(1))
        assert [record.type for record in result.records if record.type == "requeued"] == ["requeued"]
        assert scenario.job("j1").retries_left == left
        scenario.start("j1")
    job = over(scenario.end("j1", an_exit(1)))
    assert [attempt.lease_id for attempt in job.attempts] == ["j1.1", "j1.2", "j1.3"]
    assert job.outcome == an_exit(1)


def test_a_retry_that_succeeds_is_the_end(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=5, starts=True)
    scenario.end("j1", an_exit(1))
    scenario.start("j1")
    assert over(scenario.end("j1", an_exit(0))).outcome.succeeded


@pytest.mark.parametrize("ending", [Ending.OVER_LIMIT, Ending.NEVER_STARTED])
def test_what_would_fail_again_is_not_retried(new_scenario, ending):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=3, starts=True)
    assert over(scenario.end("j1", Outcome(ending))).retries_left == 3


def test_a_retry_keeps_its_age_and_does_not_give_up_waiting(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1", cores=4, wait_s=1), retries=1, starts=True)
    scenario.ask(a_request("next", cores=4, wait_s=10**6))
    scenario.advance(100)
    scenario.end("j1", an_exit(1))
    assert scenario.lease_of("j1").asked_at_ms == NOW
    assert effects(scenario) == [("StartAttempt", "j1")]
    scenario.start("j1")
    scenario.advance(10**6)
    assert scenario.job("j1").state is JobState.RUNNING


def test_a_queued_job_that_is_cancelled_is_over_at_once(new_scenario):
    scenario = full(new_scenario())
    scenario.submit(a_request("j1"))
    result = scenario.cancel("j1")
    assert over(result).outcome == Outcome(Ending.CANCELLED, detail="cancelled by ada")
    assert lease_end(result) is LeaseEnd.WITHDRAWN
    assert result.answer.job.is_over


@pytest.mark.parametrize("starts", [False, True])
def test_a_job_that_has_its_attempt_is_stopped_and_over_when_that_is_proven(new_scenario, starts):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=3, starts=starts)
    result = scenario.cancel("j1")
    assert (scenario.job("j1").state, scenario.lease_of("j1").state) == (JobState.STOPPING, LeaseState.RELEASING)
    assert (
        pending(scenario.ledger)
        == pending_for(scenario.ledger, result.changes)
        == [StopAttempt("gpu1", scenario.job("j1"))]
    )
    job = over(scenario.end("j1", Outcome(Ending.SIGNALLED, signal=15)))
    assert (job.outcome.ending, job.outcome.signal) == (Ending.CANCELLED, 15)
    assert scenario.ledger.is_empty


def test_cancelling_twice_is_harmless(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), starts=True)
    scenario.cancel("j1")
    again = scenario.cancel("j1")
    assert again.changes == []
    assert again.answer == JobAnswer(scenario.job("j1"))


def test_cancelling_what_is_over_is_told_so(new_scenario):
    with pytest.raises(NotFound, match=r"^no job j9 is going on$"):
        new_scenario().cancel("j9")


def test_a_start_that_is_reported_while_stopping_is_noted(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"))
    scenario.cancel("j1")
    job = scenario.start("j1", pid=5)
    assert (job.state, job.attempt.pid) == (JobState.STOPPING, 5)


def test_a_job_whose_term_is_over_is_stopped_and_ends_expired(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1", duration_s=10), starts=True)
    scenario.advance(10)
    assert effects(scenario) == [("StopAttempt", "j1")]
    result = scenario.end("j1", Outcome(Ending.SIGNALLED, signal=15))
    assert (over(result).outcome.ending, lease_end(result)) == (Ending.EXPIRED, LeaseEnd.EXPIRED)


def test_a_job_that_waits_too_long_ends_with_the_reasons(new_scenario):
    scenario = full(new_scenario())
    scenario.submit(a_request("j1", wait_s=5))
    result = scenario.advance(5)
    job = over(result)
    assert job.outcome == Outcome(Ending.WAITED_TOO_LONG, detail="waited 5 s: gpu1: 0 cores free, 1 core asked")
    assert job.attempts == ()


def test_a_preempted_job_is_stopped_first_and_the_preemptor_waits_for_it(new_scenario):
    scenario = preempted(new_scenario())
    assert scenario.lease_of("vip").awaits == ("j1.1",)
    assert scenario.lease_of("j1").preempted_by == "vip.1"
    assert effects(scenario) == [("StopAttempt", "j1")]


def test_a_preempted_job_is_queued_again_with_its_age_and_all_its_retries(new_scenario):
    scenario = preempted(new_scenario())
    result = scenario.end("j1", Outcome(Ending.SIGNALLED, signal=15))
    job = scenario.job("j1")
    assert (job.state, job.retries_left, job.stop) == (JobState.QUEUED, 1, None)
    assert job.attempts[0].outcome.ending is Ending.PREEMPTED
    assert scenario.lease_of("j1").asked_at_ms == job.submitted_at_ms == NOW
    assert lease_end(result) is LeaseEnd.PREEMPTED
    assert effects(scenario) == [("StartAttempt", "vip")]
    scenario.advance(10**6)
    assert scenario.job("j1").state is JobState.QUEUED
    scenario.start("vip")
    scenario.end("vip")
    assert scenario.job("j1").attempt.number == 2


def test_a_preempted_job_that_is_cancelled_does_not_come_back(new_scenario):
    scenario = preempted(new_scenario())
    scenario.cancel("j1")
    assert scenario.job("j1").stop.ending is Ending.CANCELLED
    result = scenario.end("j1", Outcome(Ending.SIGNALLED, signal=15))
    assert over(result).outcome.ending is Ending.CANCELLED
    assert effects(scenario) == [("StartAttempt", "vip")]


def test_a_job_that_waits_for_its_victims_is_cancelled_at_once(new_scenario):
    scenario = preempted(new_scenario())
    job = over(scenario.cancel("vip"))
    assert job.outcome.ending is Ending.CANCELLED
    assert job.attempts[0].outcome == job.outcome
    assert effects(scenario) == [("StopAttempt", "j1")]
    scenario.end("j1")
    assert scenario.job("j1").attempt.number == 2


def test_a_start_nobody_ordered_is_not_believed(new_scenario):
    scenario = preempted(new_scenario())
    assert scenario.start("vip").state is JobState.ASSIGNED
    assert scenario.lease_of("vip").state is LeaseState.RESERVING


def test_an_agent_that_evicts_for_its_owner_requeues_without_using_a_retry(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), starts=True)
    scenario.end("j1", Outcome(Ending.PREEMPTED, detail="the owner is back"))
    assert (scenario.job("j1").state, scenario.job("j1").attempt.number) == (JobState.ASSIGNED, 2)


def test_an_attempt_its_agent_has_no_trace_of_is_lost(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), starts=True)
    result = scenario.handle(AttemptsListed("gpu1", ()))
    assert over(result).outcome == Outcome(Ending.LOST, detail="gpu1 has no trace of it")
    assert lease_end(result) is LeaseEnd.LOST


def test_a_lost_attempt_is_run_again_only_with_retries(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=1, starts=True)
    scenario.handle(AttemptsListed("gpu1", ()))
    assert (scenario.job("j1").attempt.number, scenario.job("j1").retries_left) == (2, 0)


def test_what_an_agent_knows_of_or_was_never_told_to_start_is_not_lost(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    scenario.submit(a_request("known", require=["gpu1"]), starts=True)
    scenario.submit(a_request("assigned", require=["gpu1"]))
    scenario.submit(a_request("elsewhere", require=["gpu2"]), starts=True)
    assert scenario.handle(AttemptsListed("gpu1", ("known.1",))).changes == []


def test_a_stopping_attempt_its_agent_has_no_trace_of_ends_as_it_was_meant_to(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=3)
    scenario.cancel("j1")
    assert over(scenario.handle(AttemptsListed("gpu1", ()))).outcome.ending is Ending.CANCELLED


def test_several_lost_attempts_are_settled_together(new_scenario):
    scenario = new_scenario()
    for uid in ("j1", "j2", "j3"):
        scenario.submit(a_request(uid), starts=True)
    scenario.handle(AttemptsListed("gpu1", ("j2.1",)))
    assert set(scenario.ledger.jobs) == {"j2"}


def test_a_restart_finds_running_jobs_running_and_the_rest_to_do(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("running"), starts=True)
    scenario.submit(a_request("assigned"))
    scenario.submit(a_request("stopping"), starts=True)
    scenario.cancel("stopping")
    again = new_scenario(ledger=Ledger(scenario.ledger.rows(durable_only=True)))
    again.handle(ControlPlaneStarted(2))
    assert pending(again.ledger) == pending(scenario.ledger)
    assert effects(again) == [("StartAttempt", "assigned"), ("StopAttempt", "stopping")]
    assert over(again.end("running")).outcome.succeeded
