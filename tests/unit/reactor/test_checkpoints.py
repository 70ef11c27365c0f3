"""Checkpoint directories: the next attempt starts with what the last one left, once that is here, and not before."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest

from distributed_grid.domain.events import AttemptEnded, AttemptsListed, CheckpointShipped, LeaseLost, LeaseReclaimed
from distributed_grid.domain.jobs import Ending, Job, Outcome
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import JobState
from distributed_grid.reactor.effects import StartAttempt, pending, pending_checkpoints, pending_for
from tests.support.builders import Scenario, a_node, a_request, an_exit


def reported(scenario: Scenario, outcome: Outcome, *, left: bool = True, number: int = 0) -> list[Job]:
    """The agent reports the end of an attempt of j1; the job as that has changed it."""
    attempt = scenario.job("j1").attempts[-1] if not number else scenario.job("j1").attempts[number - 1]
    event = AttemptEnded("j1", attempt.number, attempt.fence, outcome, (attempt.node,), pid=4242, has_checkpoint=left)
    return [row for row in scenario.handle(event).changes if isinstance(row, Job)]


def a_displaced_job(scenario: Scenario, *, left: bool = True, retries: int = 3) -> Scenario:
    """A job whose first attempt was reclaimed, with its second one placed."""
    scenario.submit(a_request("j1", cores=1), retries=retries, starts=True)
    reported(scenario, Outcome(Ending.RECLAIMED), left=left)
    scenario.advance(30)
    assert scenario.job("j1").state is JobState.ASSIGNED
    return scenario


def shipped(scenario: Scenario, manifest: str = "m1", number: int = 1, problem: str = "") -> bool:
    """Whether the news changed anything."""
    return bool(scenario.handle(CheckpointShipped("j1", number, manifest, problem, 3, 42)).changes)


def starts(scenario: Scenario) -> list[str]:
    """The checkpoints with which attempts are to be started."""
    return [effect.job.checkpoint for effect in pending(scenario.ledger) if isinstance(effect, StartAttempt)]


def test_the_next_attempt_waits_until_what_the_last_one_left_is_here(new_scenario):
    scenario = a_displaced_job(new_scenario())
    assert starts(scenario) == []
    (effect,) = pending_checkpoints(scenario.ledger)
    assert (effect.job.uid, effect.attempt.number) == ("j1", 1)
    done = scenario.handle(CheckpointShipped("j1", 1, "m1", "", 3, 42))
    assert [effect.job.checkpoint for effect in pending_for(scenario.ledger, done.changes)] == ["m1"]
    job = scenario.job("j1")
    assert (job.checkpoint_attempt, job.checkpoint_files, job.checkpoint_bytes) == (1, 3, 42)
    assert pending_checkpoints(scenario.ledger) == []
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
    assert not scenario.handle(CheckpointShipped("nobody", 1, "m1")).changes


def test_an_attempt_that_left_nothing_is_not_waited_for_and_nothing_older_comes_back(new_scenario):
    scenario = a_displaced_job(new_scenario(), left=False)
    assert starts(scenario) == [""]
    scenario.start("j1")
    reported(scenario, Outcome(Ending.RECLAIMED))
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
    reported(scenario, Outcome(Ending.RECLAIMED))
    scenario.advance(60)
    assert shipped(scenario, "", 2, "it holds too much")
    assert starts(scenario) == ["m1"]
    job = scenario.job("j1")
    assert (job.checkpoint_attempt, job.checkpoint_problem) == (1, "attempt 2: it holds too much")


def test_an_attempt_that_never_ran_changes_nothing(new_scenario):
    scenario = a_displaced_job(new_scenario())
    assert shipped(scenario)
    attempt = scenario.job("j1").attempt
    refused = AttemptEnded("j1", attempt.number, attempt.fence, Outcome(Ending.RECLAIMED), (attempt.node,))
    scenario.handle(refused)
    scenario.advance(60)
    assert starts(scenario) == ["m1"]


def test_a_job_that_ends_needs_nothing(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1", cores=1), starts=True)
    (job,) = reported(scenario, an_exit(0))
    assert job.is_over
    assert job.checkpoint_from == 0
    assert pending_checkpoints(scenario.ledger) == []


def test_a_job_that_is_cancelled_while_it_waits_needs_nothing(new_scenario):
    scenario = a_displaced_job(new_scenario())
    scenario.cancel("j1")
    attempt = scenario.job("j1").attempt
    never = Outcome(Ending.NEVER_STARTED, detail="not known here")
    scenario.handle(AttemptEnded("j1", attempt.number, attempt.fence, never, (attempt.node,)))
    assert "j1" not in scenario.ledger.jobs
    assert pending_checkpoints(scenario.ledger) == []


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
    scenario.handle(AttemptEnded("j1", attempt.number, attempt.fence, never, (attempt.node,)))
    scenario.advance(60)
    assert scenario.job("j1").checkpoint_from == 1


def test_an_agent_that_comes_anew_may_start_what_waited_for_its_checkpoint(new_scenario):
    scenario = a_displaced_job(new_scenario(a_node("gpu1", cores=4, hold_s=60)))
    scenario.handle(AttemptsListed("gpu1", (), boot="another", machine="another", ordered_since_ms=scenario.now))
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
    lie = AttemptEnded("j1", 1, attempt.fence, Outcome(Ending.LOST), ("gpu2",), has_checkpoint=True)
    scenario.handle(lie)
    assert pending_checkpoints(scenario.ledger) == []
