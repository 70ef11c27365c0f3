"""Leases, jobs and the form in which rows are stored."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.engines import EngineCapacity
from distributed_grid.domain.jobs import Attempt, Ending, Job, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.moves import OffloadWatch
from distributed_grid.domain.nodes import NodeObservation, Offer
from distributed_grid.domain.rebalancing import RebalanceState
from distributed_grid.domain.resources import Claim, GpuShare, Priority
from distributed_grid.domain.rows import VOLATILE, Counter, decode_row, encode_row
from distributed_grid.domain.states import JobState, LeaseState
from distributed_grid.domain.workers import UtilizationWindow
from tests.support.builders import GB, NOW, a_capacity, a_command, a_node, a_request, an_exit, caps, thresholds

LEASE = Lease("r1", a_request(wait_s=5, priority="high"), NOW)
ATTEMPT = Attempt(1, "r1.1", "gpu1", 7, NOW, cores=(0, 1), pid=4242)
JOB = Job("r1", "train", a_command("python", "train.py"), a_request(), NOW, attempts=(ATTEMPT,), lease_id="r1.1")
CLAIM = Claim(1000, GB, (GpuShare(0, 500, GB),), (("fpga", 1),))


@pytest.mark.parametrize(
    "row",
    [
        Counter("fence", 2**62),
        a_node(gpus=2, custom={"fpga": 1}, caps=caps(cores=1, custom={"fpga": 1}), thresholds=thresholds()),
        replace(LEASE, state=LeaseState.RESERVING, claim=CLAIM, node="gpu1", awaits=("r0",)),
        replace(JOB, attempts=(replace(ATTEMPT, outcome=Outcome(Ending.SIGNALLED, signal=9)),)),
    ],
    ids=lambda row: row.kind,
)
def test_a_durable_row_comes_back_as_it_was_stored(row):
    assert decode_row(row.kind, encode_row(row)) == row
    assert row.kind not in VOLATILE


def test_a_row_of_a_newer_build_is_read_without_what_it_adds():
    stored = {**msgspec.to_builtins(a_node("gpu1")), "mood": "cheerful"}
    assert decode_row("node", msgspec.msgpack.encode(stored)) == a_node("gpu1")


def test_a_row_of_an_older_build_gets_the_defaults_of_what_it_lacks():
    assert decode_row("node", msgspec.msgpack.encode({"name": "gpu1"})).name == "gpu1"


def test_what_is_measured_or_derived_anew_is_never_stored():
    assert {
        NodeObservation.kind,
        Offer.kind,
        RebalanceState.kind,
        EngineCapacity.kind,
        MemoryServerRow.kind,
        UtilizationWindow.kind,
        OffloadWatch.kind,
    } == VOLATILE
    with pytest.raises(KeyError):
        decode_row(Offer.kind, b"")


def test_every_row_has_a_key_and_says_whether_it_is_over():
    offer = Offer("gpu1", 1, a_capacity(), NOW, NOW + 1)
    assert [
        row.key for row in (LEASE, JOB, offer, NodeObservation("gpu2", NOW), Counter("fence", 1), a_node("gpu3"))
    ] == [
        "r1",
        "r1",
        "gpu1",
        "gpu2",
        "fence",
        "gpu3",
    ]
    assert not any(row.is_over for row in (LEASE, JOB, offer, NodeObservation("gpu2", NOW), Counter("fence", 1)))
    assert replace(LEASE, state=LeaseState.ENDED).is_over
    assert replace(JOB, state=JobState.ENDED).is_over
    assert replace(offer, withdrawn=True).is_over


def test_a_lease_holds_from_its_grant_to_its_end():
    assert [state for state in LeaseState if replace(LEASE, state=state).holds] == [
        LeaseState.RESERVING,
        LeaseState.ACTIVE,
        LeaseState.RELEASING,
    ]


@pytest.mark.parametrize(
    ("state", "deadline"),
    [
        (LeaseState.ASKED, NOW + 5_000),
        (LeaseState.RESERVING, NOW + 99),
        (LeaseState.ACTIVE, NOW + 99),
        (LeaseState.RELEASING, 0),
        (LeaseState.ENDED, 0),
    ],
)
def test_time_alone_ends_a_wait_or_a_term_and_nothing_else(state, deadline):
    assert replace(LEASE, state=state, ends_at_ms=NOW + 99).deadline_ms == deadline


def test_the_place_in_line_is_priority_then_age():
    older = replace(LEASE, id="r2", asked_at_ms=NOW - 1)
    urgent = replace(LEASE, id="r3", request=replace(LEASE.request, priority=Priority.URGENT))
    line = sorted([LEASE, older, urgent], key=lambda lease: lease.queue_key)
    assert [lease.id for lease in line] == ["r3", "r2", "r1"]


def test_the_attempt_of_a_job_is_the_one_that_has_not_ended():
    assert JOB.attempt is ATTEMPT
    assert replace(JOB, attempts=()).attempt is None
    assert replace(JOB, attempts=(replace(ATTEMPT, outcome=an_exit()),)).attempt is None


@pytest.mark.parametrize(
    ("outcome", "succeeded", "retried"),
    [
        (an_exit(0), True, False),
        (an_exit(1), False, True),
        (Outcome(Ending.SIGNALLED, signal=9), False, True),
        (Outcome(Ending.LOST), False, True),
        (Outcome(Ending.TIMED_OUT), False, True),
        (Outcome(Ending.CANCELLED), False, False),
        (Outcome(Ending.CANCELLED, exit_code=0), False, False),
        (Outcome(Ending.PREEMPTED), False, False),
        (Outcome(Ending.OVER_LIMIT), False, False),
        (Outcome(Ending.EXPIRED), False, False),
        (Outcome(Ending.NEVER_STARTED), False, False),
        (Outcome(Ending.WAITED_TOO_LONG), False, False),
    ],
)
def test_only_what_failed_by_itself_may_be_retried(outcome, succeeded, retried):
    assert (outcome.succeeded, outcome.may_be_retried) == (succeeded, retried)
