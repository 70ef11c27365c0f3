"""Jobs: their whole lives, with every way to end."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest

from distributed_grid.domain.effects import StartAttempt, StopAttempt
from distributed_grid.domain.events import AttemptEnded, AttemptsListed, AttemptStarted, ControlPlaneStarted
from distributed_grid.domain.jobs import Command, Ending, Job, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor import JobAnswer, pending, pending_for
from distributed_grid.reactor.dispatch import StepResult
from tests.support.builders import NOW, Scenario, a_command, a_node, a_request, a_submission, an_exit


def over(stepped: StepResult) -> Job:
    """The one job that ended."""
    (job,) = (row for row in stepped.changes if isinstance(row, Job) and row.is_over)
    return job


def lease_end(stepped: StepResult) -> LeaseEnd | None:
    (lease,) = (row for row in stepped.changes if isinstance(row, Lease) and row.is_over)
    return lease.end


def effects(tale: Scenario) -> list[tuple[str, str]]:
    return [(type(effect).__name__, effect.job.uid) for effect in pending(tale.ledger)]


def full(tale: Scenario) -> Scenario:
    """Nothing is free any more."""
    tale.ask(a_request("full", cores=4))
    return tale


def preempted(tale: Scenario) -> Scenario:
    """Job `j1` is stopping, to make room for the urgent `vip`."""
    tale.submit(a_request("j1", cores=4, priority="low"), retries=1, starts=True)
    tale.later(2)
    tale.submit(a_request("vip", cores=4, priority="urgent"))
    return tale


def test_a_job_runs_from_queue_to_exit(story):
    tale = story()
    told = tale.tell(a_submission(a_request("j1", cores=2)))
    job, lease = tale.job("j1"), tale.lease_of("j1")
    assert isinstance(told.answer, JobAnswer)
    assert (told.answer.job, told.answer.lease, told.answer.reasons) == (job, lease, ())
    assert (job.state, lease.state) == (JobState.ASSIGNED, LeaseState.RESERVING)
    assert pending(tale.ledger) == pending_for(tale.ledger, told.changes) == [StartAttempt("gpu1", job, lease)]
    tale.now += 500
    running = tale.start("j1", pid=77)
    assert (running.state, tale.lease_of("j1").state) == (JobState.RUNNING, LeaseState.ACTIVE)
    assert (running.attempt.pid, running.attempt.started_at_ms) == (77, NOW + 500)
    assert pending(tale.ledger) == []
    ended = tale.end("j1", an_exit(0))
    job = over(ended)
    assert (job.outcome, job.ended_at_ms, lease_end(ended)) == (an_exit(0), NOW + 500, LeaseEnd.RELEASED)
    assert ended.records[-1].type == "stopped"
    assert ended.records[-1].data["exit_code"] == 0
    assert tale.ledger.is_empty


def test_a_job_that_does_not_fit_waits_and_then_gets_its_attempt(story):
    tale = full(story())
    told = tale.tell(a_submission(a_request("j1")))
    assert told.answer.reasons == ("gpu1: 0 cores free, 1 core asked",)
    assert tale.job("j1").state is JobState.QUEUED
    assert pending(tale.ledger) == []
    tale.release("full")
    assert effects(tale) == [("StartAttempt", "j1")]


def test_a_job_that_will_not_wait_is_refused(story):
    tale = full(story())
    with pytest.raises(Refused, match=r"^No resource offers available"):
        tale.submit(a_request("j1", wait_s=0))
    assert tale.ledger.jobs == {}


def test_a_job_without_a_command_or_with_negative_retries_is_refused(story):
    tale = story()
    with pytest.raises(BadInput, match="no command"):
        tale.tell(a_submission(a_request("j1"), command=Command(())))
    with pytest.raises(BadInput, match="retries"):
        tale.tell(a_submission(a_request("j1"), retries=-1))


def test_the_same_submission_twice_is_one_job(story):
    tale = story()
    tale.tell(a_submission(a_request("j1")))
    again = tale.tell(a_submission(a_request("j1")))
    assert again.changes == []
    assert again.answer == JobAnswer(tale.job("j1"), tale.lease_of("j1"))


def test_the_same_submission_is_known_through_every_attempt(story):
    tale = story()
    tale.submit(a_request("j1"), retries=1, starts=True)
    tale.end("j1", an_exit(1))
    again = tale.tell(a_submission(a_request("j1"), retries=1))
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
def test_the_same_request_id_with_other_content_is_refused(story, other):
    tale = story()
    tale.submit(a_request("j1"))
    with pytest.raises(Conflict, match=r"^request j1 was used before for something else$"):
        tale.tell(other)


def test_the_request_id_of_a_plain_lease_is_refused(story):
    tale = story()
    tale.ask(a_request("r1"))
    with pytest.raises(Conflict):
        tale.submit(a_request("r1"))


def test_two_jobs_cannot_have_one_name(story):
    tale = story()
    tale.tell(a_submission(a_request("j1"), name="train"))
    with pytest.raises(Conflict, match="a job called train is already there"):
        tale.tell(a_submission(a_request("j2"), name="train"))
    tale.cancel("j1")
    tale.end("j1")
    tale.tell(a_submission(a_request("j2"), name="train"))


@pytest.mark.parametrize("off", [-1, 1, 1 << 32])
def test_a_report_with_another_fence_changes_nothing(story, off):
    tale = story()
    attempt = tale.submit(a_request("j1")).attempt
    before = tale.ledger.rows()
    tale.tell(AttemptStarted("j1", 1, attempt.fence + off, 7))
    tale.tell(AttemptEnded("j1", 1, attempt.fence + off, an_exit()))
    tale.tell(AttemptEnded("j1", 2, attempt.fence, an_exit()))
    tale.tell(AttemptEnded("stranger", 1, attempt.fence, an_exit()))
    assert tale.ledger.rows() == before


def test_a_start_that_is_reported_twice_counts_once(story):
    tale = story()
    tale.submit(a_request("j1"), starts=True)
    attempt = tale.job("j1").attempt
    assert tale.tell(AttemptStarted("j1", 1, attempt.fence, 99)).changes == []
    assert tale.job("j1").attempt.pid == 4242


def test_the_record_of_a_start_names_the_cores(story):
    tale = story()
    attempt = tale.submit(a_request("j1", cores=2)).attempt
    told = tale.tell(AttemptStarted("j1", 1, attempt.fence, 7, (2, 3)))
    assert told.records[0].data == {"job_id": "job-j1", "attempt": 1, "pid": 7, "cores": ["2", "3"]}
    assert tale.job("j1").attempt.cores == (2, 3)


def test_an_end_without_a_start_is_an_end(story):
    tale = story()
    tale.submit(a_request("j1"))
    told = tale.end("j1", Outcome(Ending.NEVER_STARTED, detail="no such program"))
    assert over(told).outcome.ending is Ending.NEVER_STARTED
    assert lease_end(told) is LeaseEnd.FAILED


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
def test_a_job_ends_exactly_as_its_attempt_did(story, outcome, end):
    tale = story()
    tale.submit(a_request("j1"), starts=True)
    told = tale.end("j1", outcome)
    assert over(told).outcome == over(told).attempts[-1].outcome == outcome
    assert lease_end(told) is end
    assert told.records[-1].reason == (outcome.detail or str(outcome.ending))


def test_retries_run_a_failed_job_again_until_they_are_used_up(story):
    tale = story()
    tale.submit(a_request("j1"), retries=2, starts=True)
    for left in (1, 0):
        told = tale.end("j1", an_exit(1))
        assert [record.type for record in told.records if record.type == "requeued"] == ["requeued"]
        assert tale.job("j1").retries_left == left
        tale.start("j1")
    job = over(tale.end("j1", an_exit(1)))
    assert [attempt.lease_id for attempt in job.attempts] == ["j1.1", "j1.2", "j1.3"]
    assert job.outcome == an_exit(1)


def test_a_retry_that_succeeds_is_the_end(story):
    tale = story()
    tale.submit(a_request("j1"), retries=5, starts=True)
    tale.end("j1", an_exit(1))
    tale.start("j1")
    assert over(tale.end("j1", an_exit(0))).outcome.succeeded


@pytest.mark.parametrize("ending", [Ending.OVER_LIMIT, Ending.NEVER_STARTED])
def test_what_would_fail_again_is_not_retried(story, ending):
    tale = story()
    tale.submit(a_request("j1"), retries=3, starts=True)
    assert over(tale.end("j1", Outcome(ending))).retries_left == 3


def test_a_retry_keeps_its_age_and_does_not_give_up_waiting(story):
    tale = story()
    tale.submit(a_request("j1", cores=4, wait_s=1), retries=1, starts=True)
    tale.ask(a_request("next", cores=4, wait_s=10**6))
    tale.later(100)
    tale.end("j1", an_exit(1))
    assert tale.lease_of("j1").asked_at_ms == NOW
    assert effects(tale) == [("StartAttempt", "j1")]
    tale.start("j1")
    tale.later(10**6)
    assert tale.job("j1").state is JobState.RUNNING


def test_a_queued_job_that_is_cancelled_is_over_at_once(story):
    tale = full(story())
    tale.submit(a_request("j1"))
    told = tale.cancel("j1")
    assert over(told).outcome == Outcome(Ending.CANCELLED, detail="cancelled by ada")
    assert lease_end(told) is LeaseEnd.WITHDRAWN
    assert told.answer.job.is_over


@pytest.mark.parametrize("starts", [False, True])
def test_a_job_that_has_its_attempt_is_stopped_and_over_when_that_is_proven(story, starts):
    tale = story()
    tale.submit(a_request("j1"), retries=3, starts=starts)
    told = tale.cancel("j1")
    assert (tale.job("j1").state, tale.lease_of("j1").state) == (JobState.STOPPING, LeaseState.RELEASING)
    assert pending(tale.ledger) == pending_for(tale.ledger, told.changes) == [StopAttempt("gpu1", tale.job("j1"))]
    job = over(tale.end("j1", Outcome(Ending.SIGNALLED, signal=15)))
    assert (job.outcome.ending, job.outcome.signal) == (Ending.CANCELLED, 15)
    assert tale.ledger.is_empty


def test_cancelling_twice_is_harmless(story):
    tale = story()
    tale.submit(a_request("j1"), starts=True)
    tale.cancel("j1")
    again = tale.cancel("j1")
    assert again.changes == []
    assert again.answer == JobAnswer(tale.job("j1"))


def test_cancelling_what_is_over_is_told_so(story):
    with pytest.raises(NotFound, match=r"^no job j9 is going on$"):
        story().cancel("j9")


def test_a_start_that_is_reported_while_stopping_is_noted(story):
    tale = story()
    tale.submit(a_request("j1"))
    tale.cancel("j1")
    job = tale.start("j1", pid=5)
    assert (job.state, job.attempt.pid) == (JobState.STOPPING, 5)


def test_a_job_whose_term_is_over_is_stopped_and_ends_expired(story):
    tale = story()
    tale.submit(a_request("j1", duration_s=10), starts=True)
    tale.later(10)
    assert effects(tale) == [("StopAttempt", "j1")]
    told = tale.end("j1", Outcome(Ending.SIGNALLED, signal=15))
    assert (over(told).outcome.ending, lease_end(told)) == (Ending.EXPIRED, LeaseEnd.EXPIRED)


def test_a_job_that_waits_too_long_ends_with_the_reasons(story):
    tale = full(story())
    tale.submit(a_request("j1", wait_s=5))
    told = tale.later(5)
    job = over(told)
    assert job.outcome == Outcome(Ending.WAITED_TOO_LONG, detail="waited 5 s: gpu1: 0 cores free, 1 core asked")
    assert job.attempts == ()


def test_a_preempted_job_is_stopped_first_and_the_preemptor_waits_for_it(story):
    tale = preempted(story())
    assert tale.lease_of("vip").awaits == ("j1.1",)
    assert tale.lease_of("j1").preempted_by == "vip.1"
    assert effects(tale) == [("StopAttempt", "j1")]


def test_a_preempted_job_is_queued_again_with_its_age_and_all_its_retries(story):
    tale = preempted(story())
    told = tale.end("j1", Outcome(Ending.SIGNALLED, signal=15))
    job = tale.job("j1")
    assert (job.state, job.retries_left, job.stop) == (JobState.QUEUED, 1, None)
    assert job.attempts[0].outcome.ending is Ending.PREEMPTED
    assert tale.lease_of("j1").asked_at_ms == job.submitted_at_ms == NOW
    assert lease_end(told) is LeaseEnd.PREEMPTED
    assert effects(tale) == [("StartAttempt", "vip")]
    tale.later(10**6)
    assert tale.job("j1").state is JobState.QUEUED
    tale.start("vip")
    tale.end("vip")
    assert tale.job("j1").attempt.number == 2


def test_a_preempted_job_that_is_cancelled_does_not_come_back(story):
    tale = preempted(story())
    tale.cancel("j1")
    assert tale.job("j1").stop.ending is Ending.CANCELLED
    told = tale.end("j1", Outcome(Ending.SIGNALLED, signal=15))
    assert over(told).outcome.ending is Ending.CANCELLED
    assert effects(tale) == [("StartAttempt", "vip")]


def test_a_job_that_waits_for_its_victims_is_cancelled_at_once(story):
    tale = preempted(story())
    job = over(tale.cancel("vip"))
    assert job.outcome.ending is Ending.CANCELLED
    assert job.attempts[0].outcome == job.outcome
    assert effects(tale) == [("StopAttempt", "j1")]
    tale.end("j1")
    assert tale.job("j1").attempt.number == 2


def test_a_start_nobody_ordered_is_not_believed(story):
    tale = preempted(story())
    assert tale.start("vip").state is JobState.ASSIGNED
    assert tale.lease_of("vip").state is LeaseState.RESERVING


def test_an_agent_that_evicts_for_its_owner_requeues_without_using_a_retry(story):
    tale = story()
    tale.submit(a_request("j1"), starts=True)
    tale.end("j1", Outcome(Ending.PREEMPTED, detail="the owner is back"))
    assert (tale.job("j1").state, tale.job("j1").attempt.number) == (JobState.ASSIGNED, 2)


def test_an_attempt_its_agent_has_no_trace_of_is_lost(story):
    tale = story()
    tale.submit(a_request("j1"), starts=True)
    told = tale.tell(AttemptsListed("gpu1", ()))
    assert over(told).outcome == Outcome(Ending.LOST, detail="gpu1 has no trace of it")
    assert lease_end(told) is LeaseEnd.LOST


def test_a_lost_attempt_is_run_again_only_with_retries(story):
    tale = story()
    tale.submit(a_request("j1"), retries=1, starts=True)
    tale.tell(AttemptsListed("gpu1", ()))
    assert (tale.job("j1").attempt.number, tale.job("j1").retries_left) == (2, 0)


def test_what_an_agent_knows_of_or_was_never_told_to_start_is_not_lost(story):
    tale = story(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    tale.submit(a_request("known", require=["gpu1"]), starts=True)
    tale.submit(a_request("assigned", require=["gpu1"]))
    tale.submit(a_request("elsewhere", require=["gpu2"]), starts=True)
    assert tale.tell(AttemptsListed("gpu1", ("known.1",))).changes == []


def test_a_stopping_attempt_its_agent_has_no_trace_of_ends_as_it_was_meant_to(story):
    tale = story()
    tale.submit(a_request("j1"), retries=3)
    tale.cancel("j1")
    assert over(tale.tell(AttemptsListed("gpu1", ()))).outcome.ending is Ending.CANCELLED


def test_several_lost_attempts_are_settled_together(story):
    tale = story()
    for uid in ("j1", "j2", "j3"):
        tale.submit(a_request(uid), starts=True)
    tale.tell(AttemptsListed("gpu1", ("j2.1",)))
    assert set(tale.ledger.jobs) == {"j2"}


def test_a_restart_finds_running_jobs_running_and_the_rest_to_do(story):
    tale = story()
    tale.submit(a_request("running"), starts=True)
    tale.submit(a_request("assigned"))
    tale.submit(a_request("stopping"), starts=True)
    tale.cancel("stopping")
    again = story(ledger=Ledger(tale.ledger.rows(durable_only=True)))
    again.tell(ControlPlaneStarted(2))
    assert pending(again.ledger) == pending(tale.ledger)
    assert effects(again) == [("StartAttempt", "assigned"), ("StopAttempt", "stopping")]
    assert over(again.end("running")).outcome.succeeded
