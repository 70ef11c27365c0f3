"""Requests and leases: what nobody can ask for, what time alone ends, the line; and fences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.leases import (
    FOREVER_MS,
    MAX_DURATION_MS,
    MAX_EPOCH,
    MAX_EPOCH_LEAD,
    MAX_FENCE,
    MAX_GANG_SIZE,
    epoch_of,
    fence_on,
    first_fence,
    is_plausible_epoch,
    node_above_fence,
)
from distributed_grid.domain.resources import Amounts, Priority
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.states import LeaseState
from tests.support.builders import NOW, a_node, a_request
from tests.unit.domain.sample_rows import LEASE


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


@pytest.mark.parametrize(
    ("nonsense", "problem"),
    [
        ({"id": ""}, "must not be empty or have a dot"),
        ({"id": "r1.1"}, "must not be empty or have a dot"),
        ({"wait_ms": -1}, "a wait or a duration"),
        ({"duration_ms": MAX_DURATION_MS + 1}, "a wait or a duration"),
        ({"expects_ms": -1}, "an expected time or a deadline"),
        ({"deadline_ms": -1}, "an expected time or a deadline"),
        ({"gang": 0}, "a gang must have"),
        ({"gang": MAX_GANG_SIZE + 1}, "a gang must have"),
        ({"strategy": Strategy.NODE_SPECIFIC}, "needs a node"),
        ({"use_lease": "b1"}, "must not name resources"),
        ({"ask": Amounts()}, "nothing is asked for"),
    ],
)
def test_a_request_that_makes_no_sense_says_why(nonsense, problem):
    assert problem in (replace(a_request(), **nonsense).problem() or "")


@pytest.mark.parametrize(
    "sound",
    [
        {},
        {"wait_ms": 0, "duration_ms": MAX_DURATION_MS},
        {"gang": MAX_GANG_SIZE},
        {"strategy": Strategy.NODE_SPECIFIC, "require": ("gpu1",)},
        {"use_lease": "b1", "ask": Amounts()},
    ],
)
def test_a_request_that_makes_sense_has_no_problem(sound):
    assert replace(a_request(), **sound).problem() is None


@given(st.integers(1, 2**50), st.integers(0, 2**50))
def test_who_starts_at_the_latest_moment_is_over_by_its_deadline(deadline, expects):
    latest = replace(a_request(), deadline_ms=deadline, expects_ms=expects).latest_start_ms
    assert latest > 0
    assert latest + expects <= max(deadline, expects + 1)
    assert replace(a_request(), expects_ms=expects).latest_start_ms == 0


def test_a_wait_ends_when_the_deadline_cannot_be_met_any_more():
    request = replace(LEASE.request, deadline_ms=NOW + 4_000, expects_ms=1_000)
    assert LEASE.wait_until_ms == NOW + 5_000
    assert replace(LEASE, request=request).wait_until_ms == NOW + 3_000


@pytest.mark.parametrize("wait_ms", [FOREVER_MS, MAX_DURATION_MS])
def test_only_its_deadline_ends_a_wait_without_a_limit(wait_ms):
    patient = replace(LEASE, request=replace(LEASE.request, wait_ms=wait_ms))
    assert (patient.request.waits_forever, LEASE.request.waits_forever) == (True, False)
    assert (patient.wait_until_ms, patient.deadline_ms) == (0, 0)
    due = replace(patient.request, deadline_ms=NOW + 4_000, expects_ms=1_000)
    assert replace(patient, request=due).wait_until_ms == NOW + 3_000


@pytest.mark.parametrize(
    ("expects", "ends_at", "over"), [(0, 0, 0), (50, 0, 60), (0, 40, 40), (50, 40, 40), (5, 40, 15)]
)
def test_a_lease_is_expected_to_end_by_its_term_or_by_what_was_said_whichever_is_first(expects, ends_at, over):
    request = replace(LEASE.request, expects_ms=expects)
    assert replace(LEASE, request=request, granted_at_ms=10, ends_at_ms=ends_at).expected_end_ms == over


def test_only_age_and_wait_are_left_out_of_a_queue_group():
    same = replace(LEASE, id="r2", asked_at_ms=NOW + 9, request=replace(LEASE.request, id="r2", wait_ms=7))
    assert same.queue_group == LEASE.queue_group
    other = replace(LEASE, request=replace(LEASE.request, priority=Priority.LOW))
    assert len({LEASE.queue_group, other.queue_group, replace(LEASE, job="r1").queue_group}) == 3


@given(st.integers(0, MAX_EPOCH), st.integers(1, 2**32 - 1))
def test_every_fence_of_an_epoch_is_above_all_of_the_epochs_before(epoch, number):
    fence = first_fence(epoch) + number
    assert epoch_of(fence) == epoch
    assert first_fence(epoch) < fence < first_fence(epoch + 1)
    assert fence <= MAX_FENCE < 2**61


@given(st.integers(0, MAX_EPOCH))
def test_no_epoch_is_plausible_that_this_grid_cannot_have_come_to(own):
    assert is_plausible_epoch(own, own) == (own < MAX_EPOCH)
    assert not is_plausible_epoch(-1, own)
    assert not is_plausible_epoch(own + MAX_EPOCH_LEAD + 1, own)
    assert not is_plausible_epoch(MAX_EPOCH, own)


@given(epoch=st.integers(0, 1000), found=st.integers(0, first_fence(1001)), number=st.integers(1, first_fence(1001)))
def test_a_fence_that_was_found_on_a_node_is_below_the_next_one_given_there(epoch, found, number):
    node = node_above_fence(replace(a_node(), epoch=epoch), found, number)
    assert fence_on(node, number) > found
    assert node.epoch >= epoch
    assert fence_on(node, number) >= number


def test_a_node_whose_fences_are_low_enough_is_left_as_it_is():
    node = a_node()
    assert node_above_fence(node, 6, 7) is node
    assert node_above_fence(node, 7, 7).epoch == 1
