"""Checkpoint marks: in the control plane's own time, the newest one, and nobody else's."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import msgspec
import pytest

from distributed_grid.domain.events import AttemptEnded, AttemptMarked
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import JobState
from tests.support.builders import Scenario, a_request, an_exit


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
    scenario.handle(AttemptEnded("j1", 1, attempt.fence, preempted, mark_age_ms=2_000))
    assert scenario.now - scenario.job("j1").attempts[0].marked_at_ms == 2_000


def test_an_end_without_a_mark_keeps_the_one_that_is_known(new_scenario):
    scenario = a_run(new_scenario())
    mark(scenario, age_s=30)
    known = scenario.job("j1").attempt.marked_at_ms
    result = scenario.end("j1", an_exit(1))
    assert [row.attempts[0].marked_at_ms for row in result.changes if row.kind == "job"] == [known]


def test_a_job_stored_before_there_were_marks_is_read(new_scenario):
    scenario = a_run(new_scenario())
    old = msgspec.msgpack.decode(encode_row(scenario.job("j1")))
    for attempt in old["attempts"]:
        attempt.pop("marked_at_ms", None)  # which is not stored where it is the default
    assert decode_row("job", msgspec.msgpack.encode(old)) == scenario.job("j1")
