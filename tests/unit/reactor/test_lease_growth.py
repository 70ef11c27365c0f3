"""Growth of leases whose size was learned: by what is free, once for each report, and never a rerun."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.events import AttemptOutgrown, JobSubmitted, LeaseReclaimed, NodeDrained, PolicySet
from distributed_grid.domain.jobs import Ending, Job, JobEstimate, Outcome
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.states import JobState
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import ResizeAttempt, attempt_effects, most_held_bytes, overdue
from tests.support.builders import GB, Scenario, a_command, a_node, a_request, an_exit

OVER = Outcome(Ending.OVER_LIMIT, detail="over limit: used 16.0 GB of 16.0 GB")


def a_scenario(*, restartable: bool = False, retries: int = 0) -> Scenario:
    """A job that was given 1 GB of 16, and runs."""
    scenario = Scenario(a_node("n1", cores=4, memory_gb=16))
    submit(scenario, "j1", restartable=restartable, retries=retries)
    scenario.start("j1")
    return scenario


def submit(scenario: Scenario, uid: str, *, restartable: bool = False, retries: int = 0) -> None:
    estimate = JobEstimate(
        memory_limits=(GB, 2 * GB, 4 * GB, 8 * GB), tier="statistics", confidence_milli=830, samples=7
    )
    request = a_request(uid, cores=1)
    scenario.handle(
        JobSubmitted(
            id=f"{uid}-name",
            command=a_command(),
            request=request,
            retries=retries,
            estimate=estimate,
            restartable=restartable,
        )
    )


def outgrow(scenario: Scenario, held_gb: float, *, uid: str = "j1", off: int = 0, node: str = "n1") -> StepResult:
    """The agent says that the attempt holds so much."""
    last = scenario.job(uid).attempts[-1]
    return scenario.handle(AttemptOutgrown(uid, last.number, last.fence + off, round(held_gb * GB), (node,)))


def leased_gb(scenario: Scenario, uid: str = "j1") -> float:
    return scenario.lease_of(uid).claim.memory_bytes / GB


def test_a_lease_grows_to_a_quarter_more_than_its_job_holds():
    scenario = a_scenario()
    stepped = outgrow(scenario, 4)
    job = scenario.job("j1")
    assert leased_gb(scenario) == 5
    assert (job.attempt.memory_limit_bytes, job.attempt.growths, job.state) == (5 * GB, 1, JobState.RUNNING)
    assert job.sized_request.ask.memory_bytes == 5 * GB
    assert scenario.ledger.claims_on("n1").memory_bytes == 5 * GB
    (record,) = (record for record in stepped.records if record.type == "grown")
    assert record.reason == "its lease has 5.00 GB of memory instead of 1.00 GB: it holds 4.00 GB"
    scenario.ledger.check()


def test_a_report_that_comes_twice_changes_nothing_the_second_time():
    scenario = a_scenario()
    outgrow(scenario, 4)
    again = outgrow(scenario, 4)
    assert (again.changes, again.records) == ([], [])


@pytest.mark.parametrize(("off", "node"), [(-1, "n1"), (1, "n1"), (0, "n2")])
def test_a_report_with_another_fence_or_of_another_node_changes_nothing(off: int, node: str):
    scenario = a_scenario()
    assert outgrow(scenario, 4, off=off, node=node).changes == []
    assert leased_gb(scenario) == 1


def test_two_jobs_never_get_the_same_byte():
    scenario = a_scenario()
    submit(scenario, "j2")
    scenario.start("j2")
    outgrow(scenario, 12)
    assert leased_gb(scenario) == 15
    stepped = outgrow(scenario, 10, uid="j2")
    assert leased_gb(scenario, "j2") == 1
    (record,) = stepped.records
    assert record.type == "not-grown"
    assert record.reason == "it holds 10.00 GB: n1 has no memory free beside its lease of 1.00 GB; it runs on"
    assert outgrow(scenario, 11, uid="j2").changes == []
    scenario.ledger.check()


def test_a_lease_gets_what_is_left_where_that_is_not_enough():
    scenario = a_scenario()
    scenario.ask(a_request("other", memory_gb=10))
    outgrow(scenario, 8)
    attempt = scenario.job("j1").attempt
    assert leased_gb(scenario) == 6
    assert attempt.growth_refused == "it holds 8.00 GB: n1 has 5.0 GB free beside its lease of 1.00 GB"
    scenario.release("other")
    outgrow(scenario, 8)
    assert (leased_gb(scenario), scenario.job("j1").attempt.growth_refused) == (10, "")


def test_the_next_job_waits_for_memory_that_a_lease_has_grown_to():
    scenario = a_scenario()
    outgrow(scenario, 12)
    scenario.handle(JobSubmitted(id="next", command=a_command(), request=a_request("j9", cores=1, memory_gb=2)))
    assert scenario.job("j9").state is JobState.QUEUED


def test_a_lease_grows_within_the_quota_of_its_user():
    scenario = a_scenario()
    scenario.handle(PolicySet(SchedulingPolicy(quotas=(Quota(name="ada", memory_bytes=3 * GB),))))
    outgrow(scenario, 8)
    assert leased_gb(scenario) == 3
    assert "quota of ada: 2.0 GB left beside its lease of 1.00 GB" in scenario.job("j1").attempt.growth_refused


@pytest.mark.parametrize(("restartable", "retries"), [(True, 0), (False, 1)])
def test_what_is_declared_restartable_keeps_its_limit(restartable: bool, retries: int):
    scenario = a_scenario(restartable=restartable, retries=retries)
    assert outgrow(scenario, 4).changes == []
    scenario.end("j1", OVER)
    job = scenario.job("j1")
    assert (job.overruns, job.attempt.memory_limit_bytes) == (1, 2 * GB)


def test_what_is_not_declared_restartable_is_never_run_again_for_its_size():
    scenario = a_scenario()
    scenario.ask(a_request("other", memory_gb=15))
    outgrow(scenario, 8)
    stepped = scenario.end("j1", OVER)
    (job,) = (row for row in stepped.changes if isinstance(row, Job) and row.is_over)
    assert (job.outcome.ending, len(job.attempts), job.overruns) == (Ending.OVER_LIMIT, 1, 0)
    assert "its lease could not grow: it holds 8.00 GB: n1 has no memory free" in job.outcome.detail
    assert "it is not run again, which only --restartable or --retries allow" in job.outcome.detail


def test_who_has_used_up_its_retries_is_not_run_again_for_its_size():
    scenario = a_scenario(retries=1)
    scenario.end("j1", an_exit(1))
    scenario.start("j1")
    outgrow(scenario, 4)
    assert leased_gb(scenario) == 5
    scenario.end("j1", OVER)
    assert "j1" not in scenario.ledger.jobs


def test_who_gave_way_to_an_owner_asks_for_as_much_as_it_had():
    scenario = a_scenario()
    outgrow(scenario, 4)
    lease = scenario.lease_of("j1")
    scenario.handle(LeaseReclaimed(lease.id, "its owner needs it"))
    scenario.end("j1", Outcome(Ending.SIGNALLED, signal=15))
    assert scenario.lease_of("j1").request.ask.memory_bytes == 5 * GB


def test_an_agent_is_told_the_size_of_a_lease_until_its_attempt_is_over():
    scenario = a_scenario()
    stepped = outgrow(scenario, 4)
    (resize,) = attempt_effects(scenario.ledger, stepped.changes)
    assert isinstance(resize, ResizeAttempt)
    assert resize.lease.claim.memory_bytes == 5 * GB
    assert most_held_bytes(scenario.ledger, resize.lease) == 16 * GB
    assert attempt_effects(scenario.ledger, node="n1") == overdue(scenario.ledger, "n1", 1) == [resize]
    scenario.end("j1")
    assert attempt_effects(scenario.ledger, node="n1") == []


def test_a_node_that_drains_lets_nothing_grow():
    scenario = a_scenario()
    scenario.handle(NodeDrained("n1", reclaims=False))
    outgrow(scenario, 4)
    assert leased_gb(scenario) == 1
    assert "n1 is draining" in scenario.job("j1").attempt.growth_refused


def test_a_grown_lease_is_stored():
    scenario = a_scenario()
    outgrow(scenario, 4)
    job, lease = scenario.job("j1"), scenario.lease_of("j1")
    assert decode_row("job", encode_row(job)) == job
    assert decode_row("lease", encode_row(lease)) == lease


@given(st.lists(st.tuples(st.sampled_from(["j1", "j2", "j3"]), st.floats(0, 40)), max_size=12))
def test_whatever_jobs_hold_no_more_is_lent_than_there_is(reports: list[tuple[str, float]]):
    scenario = a_scenario()
    for uid in ("j2", "j3"):
        submit(scenario, uid)
        scenario.start(uid)
    for uid, held_gb in reports:
        before = leased_gb(scenario, uid)
        outgrow(scenario, held_gb, uid=uid)
        assert leased_gb(scenario, uid) >= before
        assert sum(leased_gb(scenario, one) for one in ("j1", "j2", "j3")) <= 16
        scenario.ledger.check()
