"""Deadlines: what could not be over in time is given up instead of started; what runs is left alone."""

from __future__ import annotations

import pytest

from distributed_grid.domain.events import LeaseAsked, LeaseReclaimed
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.errors import Refused
from tests.support.builders import NOW, Scenario, a_node, a_request


@pytest.fixture
def full() -> Scenario:
    story = Scenario(a_node("n1", cores=1))
    story.ask(a_request("first"))
    return story


def test_what_cannot_be_over_in_time_is_refused_at_once():
    story = Scenario(a_node("n1"))
    with pytest.raises(Refused, match="it takes 60 s, but its deadline is in 30 s"):
        story.tell(LeaseAsked(a_request(expects_ms=60_000, deadline_ms=NOW + 30_000)))


def test_a_wait_ends_when_the_deadline_cannot_be_met_any_more(full):
    full.ask(a_request("r1", expects_ms=20_000, deadline_ms=NOW + 60_000, wait_s=300))
    full.later(39)
    assert full.ledger.leases["r1"].state is LeaseState.ASKED
    stepped = full.later(2)
    (over,) = [row for row in stepped.changes if row.kind == "lease"]
    assert over.end is LeaseEnd.WITHDRAWN
    assert over.detail.startswith("its deadline cannot be met any more, after a wait of 41 s: n1: 0 cores free")


def test_a_job_in_line_ends_with_its_deadline_too(full):
    full.submit(a_request("j1", deadline_ms=NOW + 5_000))
    stepped = full.later(6)
    (job,) = [row for row in stepped.changes if row.kind == "job"]
    assert job.state is JobState.ENDED
    assert "its deadline cannot be met any more" in job.outcome.detail


def test_what_runs_is_not_stopped_by_its_deadline_and_what_was_displaced_runs_again():
    story = Scenario(a_node("n1", cores=1))
    story.submit(a_request("j1", deadline_ms=NOW + 5_000), starts=True)
    story.later(10)
    assert story.job("j1").state is JobState.RUNNING
    story.tell(LeaseReclaimed(story.job("j1").lease_id, "the owner is back"))
    story.end("j1")
    story.later(1)
    assert story.job("j1").state is JobState.ASSIGNED
