"""Jobs: their whole lives with every way to end, checkpoint marks, commands in leases, and attempts without a trace."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from distributed_grid.control.agent_messages import order_of
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptMarked,
    AttemptsGone,
    AttemptsListed,
    AttemptStarted,
    ControlPlaneStarted,
    EngineNode,
    EngineObserved,
    EngineRegistered,
    GroupBound,
    JobDetached,
    NodeStopped,
    TimePassed,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.jobs import Command, Ending, Job, Outcome
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor import JobAnswer, step
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import StartAttempt, StopAttempt, attempt_effects
from distributed_grid.reactor.nodes import HOLD_GRACE_MS
from tests.support.builders import GB, NOW, Scenario, a_command, a_node, a_request, a_submission, an_exit


def over(stepped: StepResult) -> Job:
    """The one job that ended."""
    (job,) = (row for row in stepped.changes if isinstance(row, Job) and row.is_over)
    return job


def lease_end(stepped: StepResult) -> LeaseEnd | None:
    (lease,) = (row for row in stepped.changes if isinstance(row, Lease) and row.is_over)
    return lease.end


def effects(scenario: Scenario) -> list[tuple[str, str]]:
    return [(type(effect).__name__, effect.job.uid) for effect in attempt_effects(scenario.ledger)]


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
        attempt_effects(scenario.ledger)
        == attempt_effects(scenario.ledger, result.changes)
        == [StartAttempt("gpu1", job, lease)]
    )
    scenario.now += 500
    running = scenario.start("j1", pid=77)
    assert (running.state, scenario.lease_of("j1").state) == (JobState.RUNNING, LeaseState.ACTIVE)
    assert (running.attempt.pid, running.attempt.started_at_ms) == (77, NOW + 500)
    assert attempt_effects(scenario.ledger) == []
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
    assert attempt_effects(scenario.ledger) == []
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
    scenario.handle(AttemptStarted(uid="j1", number=1, fence=attempt.fence + off, pid=7))
    scenario.handle(AttemptEnded(uid="j1", number=1, fence=attempt.fence + off, outcome=an_exit()))
    scenario.handle(AttemptEnded(uid="j1", number=2, fence=attempt.fence, outcome=an_exit()))
    scenario.handle(AttemptEnded(uid="stranger", number=1, fence=attempt.fence, outcome=an_exit()))
    assert scenario.ledger.rows() == before


def test_a_start_that_is_reported_twice_counts_once(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), starts=True)
    attempt = scenario.job("j1").attempt
    assert scenario.handle(AttemptStarted(uid="j1", number=1, fence=attempt.fence, pid=99)).changes == []
    assert scenario.job("j1").attempt.pid == 4242


def test_the_record_of_a_start_names_the_cores(new_scenario):
    scenario = new_scenario()
    attempt = scenario.submit(a_request("j1", cores=2)).attempt
    result = scenario.handle(AttemptStarted(uid="j1", number=1, fence=attempt.fence, pid=7, cores=(2, 3)))
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
        attempt_effects(scenario.ledger)
        == attempt_effects(scenario.ledger, result.changes)
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


@pytest.mark.parametrize("starts", [False, True])
def test_a_detached_job_goes_on_and_says_since_when_and_why(new_scenario, starts):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), starts=starts)
    before = scenario.job("j1")
    result = scenario.handle(JobDetached("j1", "ada", "the terminal closed"))
    job = scenario.job("j1")
    assert (job.detached_at_ms, job.detached_reason) == (scenario.now, "the terminal closed")
    assert replace(job, detached_at_ms=0, detached_reason="") == before
    assert [(one.type, one.subject, one.reason) for one in result.records] == [
        ("detached", "j1", "the terminal closed")
    ]
    assert result.answer == JobAnswer(job)


def test_a_job_that_is_over_is_not_detached(new_scenario):
    with pytest.raises(NotFound, match=r"^no job j9 is going on$"):
        new_scenario().handle(JobDetached("j9", "ada", "the terminal closed"))


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
    result = scenario.handle(AttemptsListed(node="gpu1", attempts=()))
    assert over(result).outcome == Outcome(Ending.LOST, detail="gpu1 has no trace of it")
    assert lease_end(result) is LeaseEnd.LOST


def test_a_lost_attempt_is_run_again_only_with_retries(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=1, starts=True)
    scenario.handle(AttemptsListed(node="gpu1", attempts=()))
    assert (scenario.job("j1").attempt.number, scenario.job("j1").retries_left) == (2, 0)


def test_what_an_agent_knows_of_or_was_never_told_to_start_is_not_lost(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    scenario.submit(a_request("known", require=["gpu1"]), starts=True)
    scenario.submit(a_request("assigned", require=["gpu1"]))
    scenario.submit(a_request("elsewhere", require=["gpu2"]), starts=True)
    assert scenario.handle(AttemptsListed(node="gpu1", attempts=("known.1",))).changes == []


def test_a_stopping_attempt_its_agent_has_no_trace_of_ends_as_it_was_meant_to(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), retries=3)
    scenario.cancel("j1")
    assert over(scenario.handle(AttemptsListed(node="gpu1", attempts=()))).outcome.ending is Ending.CANCELLED


def test_several_lost_attempts_are_settled_together(new_scenario):
    scenario = new_scenario()
    for uid in ("j1", "j2", "j3"):
        scenario.submit(a_request(uid), starts=True)
    scenario.handle(AttemptsListed(node="gpu1", attempts=("j2.1",)))
    assert set(scenario.ledger.jobs) == {"j2"}


def test_a_restart_finds_running_jobs_running_and_the_rest_to_do(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("running"), starts=True)
    scenario.submit(a_request("assigned"))
    scenario.submit(a_request("stopping"), starts=True)
    scenario.cancel("stopping")
    again = new_scenario(ledger=Ledger(scenario.ledger.rows(durable_only=True)))
    again.handle(ControlPlaneStarted(2))
    assert attempt_effects(again.ledger) == attempt_effects(scenario.ledger)
    assert effects(again) == [("StartAttempt", "assigned"), ("StopAttempt", "stopping")]
    assert over(again.end("running")).outcome.succeeded


def a_run(scenario: Scenario, *, seconds: float = 60) -> Scenario:
    """One job that has run for a while."""
    scenario.submit(a_request("j1", cores=1), starts=True)
    scenario.advance(seconds)
    return scenario


def mark(scenario: Scenario, *, age_s: float = 0, number: int = 0, off: int = 0, nodes: tuple[str, ...] = ()) -> bool:
    """The agent reports a mark; whether that changed anything."""
    attempt = scenario.job("j1").attempts[-1]
    event = AttemptMarked("j1", number or attempt.number, attempt.fence + off, round(1000 * age_s), nodes)
    return bool(scenario.handle(event).changes)


def marked_ago_s(scenario: Scenario) -> float:
    return (scenario.now - scenario.job("j1").attempts[-1].marked_at_ms) / 1000


def test_a_mark_is_noted_in_our_own_time(new_scenario):
    scenario = a_run(new_scenario())
    assert mark(scenario, age_s=7)
    assert marked_ago_s(scenario) == 7
    scenario.advance(3)
    assert marked_ago_s(scenario) == 10


def test_an_older_mark_never_replaces_a_newer_one(new_scenario):
    scenario = a_run(new_scenario())
    assert mark(scenario, age_s=7)
    scenario.advance(3)
    assert not mark(scenario, age_s=11)
    assert not mark(scenario, age_s=10)
    assert marked_ago_s(scenario) == 10
    assert mark(scenario, age_s=9)
    assert marked_ago_s(scenario) == 9


def test_a_mark_is_neither_of_the_future_nor_older_than_the_attempt(new_scenario):
    scenario = a_run(new_scenario())
    assert mark(scenario, age_s=1e9)
    assert marked_ago_s(scenario) == 60
    assert mark(scenario, age_s=-1e9)
    assert marked_ago_s(scenario) == 0


@pytest.mark.parametrize("odd", [{"off": -1}, {"off": 1}, {"number": 2}, {"nodes": ("gpu2",)}])
def test_a_report_of_another_attempt_or_from_another_node_changes_nothing(new_scenario, odd):
    scenario = a_run(new_scenario())
    assert not mark(scenario, **odd)
    assert scenario.job("j1").attempt.marked_at_ms == 0
    assert mark(scenario, nodes=("gpu1", "gpu2"))


def test_a_mark_of_a_job_that_is_over_changes_nothing(new_scenario):
    scenario = a_run(new_scenario())
    attempt = scenario.job("j1").attempt
    scenario.end("j1")
    assert not scenario.handle(AttemptMarked("j1", 1, attempt.fence, 0)).changes


def test_a_mark_of_an_attempt_that_was_displaced_says_nothing_of_the_next(new_scenario):
    scenario = a_run(new_scenario())
    first = scenario.job("j1").attempt
    mark(scenario)
    scenario.end("j1", Outcome(Ending.PREEMPTED))
    scenario.start("j1")
    assert not scenario.handle(AttemptMarked("j1", 1, first.fence, 0)).changes
    assert scenario.job("j1").attempt.marked_at_ms == 0


def test_an_attempt_that_has_not_started_cannot_mark(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1", cores=1))
    assert not mark(scenario)


def test_a_job_that_is_being_stopped_may_still_mark(new_scenario):
    scenario = a_run(new_scenario())
    scenario.cancel("j1")
    assert scenario.job("j1").state is JobState.STOPPING
    assert mark(scenario, age_s=1)


def test_the_last_mark_comes_with_the_end(new_scenario):
    scenario = a_run(new_scenario())
    mark(scenario, age_s=30)
    attempt = scenario.job("j1").attempt
    preempted = Outcome(Ending.PREEMPTED)
    scenario.handle(AttemptEnded(uid="j1", number=1, fence=attempt.fence, outcome=preempted, mark_age_ms=2_000))
    assert scenario.now - scenario.job("j1").attempts[0].marked_at_ms == 2_000


def test_an_end_without_a_mark_keeps_the_one_that_is_known(new_scenario):
    scenario = a_run(new_scenario())
    mark(scenario, age_s=30)
    known = scenario.job("j1").attempt.marked_at_ms
    result = scenario.end("j1", an_exit(1))
    assert [row.attempts[0].marked_at_ms for row in result.changes if isinstance(row, Job)] == [known]


def test_a_job_stored_before_there_were_marks_is_read(new_scenario):
    scenario = a_run(new_scenario())
    old = msgspec.msgpack.decode(encode_row(scenario.job("j1")))
    for attempt in old["attempts"]:
        attempt.pop("marked_at_ms", None)  # which is not stored where it is the default
    assert decode_row("job", msgspec.msgpack.encode(old)) == scenario.job("j1")


def using(lease_id: str, request_id: str = "j1", user: str = "ada") -> Request:
    return replace(a_request(request_id, user=user), ask=Amounts(), use_lease=lease_id)


def test_a_command_runs_with_what_the_lease_has_and_takes_nothing_besides(new_scenario):
    scenario = new_scenario(a_node(cores=4))
    lease = scenario.ask(a_request("b1", cores=3, duration_s=60))
    scenario.submit(using("b1"))
    assert scenario.ledger.claims_on("gpu1").cpu_milli == 3000
    (start,) = attempt_effects(scenario.ledger)
    assert order_of(scenario.ledger, start).claim == lease.claim


@pytest.mark.parametrize("ends", ["released", "expired"])
def test_it_is_stopped_when_the_lease_is_over(new_scenario, ends):
    scenario = new_scenario()
    scenario.ask(a_request("b1", duration_s=60))
    scenario.submit(using("b1"), starts=True)
    if ends == "released":
        scenario.release("b1")
    else:
        scenario.advance(61)
    job = scenario.job("j1")
    assert (job.state, job.stop.ending, job.stop.requeue) == (JobState.STOPPING, Ending.CANCELLED, False)
    assert "b1" in job.stop.detail


def test_an_engine_has_nothing_to_reserve_for_it(new_scenario):
    scenario = new_scenario()
    scenario.handle(EngineRegistered(name="ray", mode="attached", address="head:6379"))
    place = EngineNode(id="n1", name="gpu1", room=EngineResources(4000, 16 * GB, 0))
    scenario.handle(EngineObserved(name="ray", session="s1", asked_at_ms=scenario.now, nodes=(place,), groups=()))
    scenario.ask(a_request("b1"))
    (binding,) = scenario.ledger.bindings.values()
    scenario.handle(GroupBound(binding.key))
    scenario.submit(using("b1"), starts=True)
    scenario.advance(1)
    scenario.handle(
        EngineObserved(
            name="ray", session="s1", asked_at_ms=scenario.now, nodes=(place,), groups=((binding.group, "n1"),)
        )
    )
    assert list(scenario.ledger.bindings) == [binding.key]


def test_one_command_at_a_time(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("b1"))
    scenario.submit(using("b1"), starts=True)
    with pytest.raises(Refused, match="in use by job-j1"):
        scenario.handle(a_submission(using("b1", "j2")))
    scenario.end("j1")
    scenario.submit(using("b1", "j2"))


def test_only_its_own_user_and_only_while_it_is_active(new_scenario):
    scenario = new_scenario(a_node(cores=1))
    scenario.ask(a_request("b1"))
    scenario.ask(a_request("b2"))
    for request, said in ((using("b1", user="eve"), "belongs to ada"), (using("b2"), "is asked"), (using("b3"), "b3")):
        with pytest.raises((Refused, NotFound), match=said):
            scenario.handle(a_submission(request))


def test_a_command_that_its_node_took_back_does_not_wait_for_another_place(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("b1"))
    scenario.submit(using("b1"), starts=True)
    scenario.end("j1", Outcome(Ending.RECLAIMED, detail="the owner is back"))
    assert "j1" not in scenario.ledger.jobs


def test_it_goes_with_a_lease_that_made_room_for_an_urgent_one(new_scenario):
    scenario = new_scenario(a_node(cores=1))
    scenario.ask(a_request("b1", priority="low"))
    scenario.submit(using("b1"), starts=True)
    scenario.advance(3600)
    scenario.ask(a_request("hot", priority="urgent"))
    assert "b1" not in scenario.ledger.leases
    scenario.advance(1)
    assert scenario.job("j1").state is JobState.STOPPING


HOLD = 60


@pytest.fixture
def far():
    """A node of another machine whose agent runs one job that may be retried."""
    scenario = Scenario(a_node("gpu2", cores=4, hold_s=HOLD))
    scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-1"))
    scenario.submit(a_request("r1", cores=4), retries=1, starts=True)
    yield scenario
    scenario.ledger.check()


@pytest.fixture
def here():
    """The same on the control plane's own machine, which has no hold."""
    scenario = Scenario(a_node("gpu2", cores=4))
    scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-1"))
    scenario.submit(a_request("r1", cores=4), retries=1, starts=True)
    yield scenario
    scenario.ledger.check()


def attempts(scenario: Scenario) -> int:
    return len(scenario.job("r1").attempts)


def test_an_agent_with_another_directory_ends_nothing_until_the_hold_it_may_have_is_over(far: Scenario) -> None:
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
    for _ in range((HOLD * 1000 + HOLD_GRACE_MS) // 2000 - 1):
        far.advance(2)  # the new agent is heard all the time
        assert (far.job("r1").state, attempts(far)) == (JobState.RUNNING, 1)
    far.advance(4)
    assert (far.job("r1").state, attempts(far)) == (JobState.ASSIGNED, 2)
    attempt = far.job("r1").attempt
    assert attempt is not None
    assert attempt.machine == "dir-2"


def test_an_end_that_could_not_be_stored_is_decided_again(far: Scenario) -> None:
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
    for _ in range((HOLD * 1000 + HOLD_GRACE_MS) // 2000 - 1):
        far.advance(2)
    stored = [row for row in far.ledger.rows() if not row.is_volatile]
    far.advance(4)
    assert attempts(far) == 2
    observed = [row for row in far.ledger.rows() if row.is_volatile]
    far.ledger = Ledger(stored)
    far.ledger.apply(observed)
    assert attempts(far) == 1
    far.advance(2)
    assert attempts(far) == 2


def test_greeting_again_and_again_does_not_keep_it_for_ever(far: Scenario) -> None:
    for _ in range(HOLD // 2 + 2):
        far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
        far.advance(2)
    assert attempts(far) == 2


def test_another_boot_proves_it_only_for_the_same_machine_and_directory(far: Scenario) -> None:
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-2", machine="dir-2"))
    assert (far.job("r1").state, attempts(far)) == (JobState.RUNNING, 1)
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-2", machine="dir-1"))
    assert attempts(far) == 2


def test_an_agent_that_lost_its_record_is_not_believed_either(far: Scenario) -> None:
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-1"))
    assert (far.job("r1").state, attempts(far)) == (JobState.RUNNING, 1)


def test_the_agent_that_runs_it_comes_back_and_nothing_was(far: Scenario) -> None:
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
    far.advance(30)
    far.handle(AttemptsListed(node="gpu2", attempts=("r1.1",), boot="boot-1", machine="dir-1"))
    far.advance(HOLD + 10)
    assert (far.job("r1").state, attempts(far)) == (JobState.RUNNING, 1)


def test_a_control_plane_that_was_restarted_waits_a_whole_hold_again(far: Scenario) -> None:
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
    far.advance(HOLD - 5)
    far.handle(ControlPlaneStarted(9))
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
    far.heartbeat("gpu2")
    far.advance(HOLD - 5)
    assert attempts(far) == 1
    far.advance(10)
    assert attempts(far) == 2


def test_what_another_agent_was_ordered_and_has_not_reported_is_kept_as_long(far: Scenario) -> None:
    far.end("r1")
    far.submit(a_request("r2", cores=4))
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
    far.advance(HOLD - 5)
    assert far.job("r2").state is JobState.ASSIGNED
    far.advance(10)
    assert "r2" not in far.ledger.jobs


def test_stopping_the_new_agent_does_not_end_what_the_old_one_runs(far: Scenario) -> None:
    far.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
    far.handle(NodeStopped("gpu2"))
    assert far.job("r1").state is JobState.RUNNING
    far.advance(HOLD + 3, heard=False)
    assert far.job("r1").state is JobState.QUEUED


def test_on_this_machine_what_is_seen_to_run_is_kept_and_what_is_not_is_lost(here: Scenario) -> None:
    here.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2", running=("r1.1",)))
    here.advance(100_000)
    assert (here.job("r1").state, attempts(here)) == (JobState.RUNNING, 1)
    here.handle(AttemptsGone("gpu2", ("r1.1", "other.1")))
    assert attempts(here) == 2


def test_on_this_machine_what_nobody_sees_is_lost_at_once(here: Scenario) -> None:
    here.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-2"))
    assert attempts(here) == 2


def test_only_what_was_missing_can_be_gone(here: Scenario) -> None:
    here.handle(AttemptsGone("gpu2", ("r1.1",)))
    assert (here.job("r1").state, attempts(here)) == (JobState.RUNNING, 1)


def test_what_is_lost_at_once_is_given_up_so_much_in_one_step() -> None:
    jobs = 2 * MAX_LEASES_PER_STEP + 1
    scenario = Scenario(a_node("gpu2", cores=jobs, hold_s=HOLD))
    scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-1"))
    for number in range(jobs):
        scenario.submit(a_request(f"r{number}", cores=1), starts=True)
    listed = step(
        scenario.ledger, AttemptsListed(node="gpu2", attempts=(), boot="boot-2", machine="dir-1"), scenario.now
    )
    assert (len(scenario.ledger.jobs), listed.later) == (jobs - MAX_LEASES_PER_STEP, [])
    left: list[int] = []
    ahead: list[Cause] = [TimePassed()]
    while ahead:
        ahead = step(scenario.ledger, ahead[0], scenario.now).later
        left.append(len(scenario.ledger.jobs))
    assert left == [1, 0]
    scenario.ledger.check()


@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_assigned_and_never_ordered_is_the_new_agents_and_what_was_ordered_may_run(ordered: bool) -> None:
    scenario = Scenario(a_node("gpu2", cores=4, hold_s=HOLD))
    scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1", machine="dir-1"))
    since_ms = scenario.now
    scenario.advance(1)
    scenario.submit(a_request("r1", cores=4))
    attempt = scenario.job("r1").attempt
    assert attempt is not None
    sent = (attempt.lease_id,) if ordered else ()
    scenario.handle(
        AttemptsListed(
            node="gpu2", attempts=(), boot="boot-2", machine="dir-2", ordered=sent, ordered_since_ms=since_ms
        )
    )
    again = scenario.job("r1").attempt
    assert again is not None
    assert (again.number, again.machine) == (1, "dir-1" if ordered else "dir-2")
    for _ in range(HOLD):
        scenario.advance(2)
    assert ("r1" in scenario.ledger.jobs) is not ordered
    scenario.ledger.check()
