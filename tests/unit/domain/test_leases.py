"""Requests and leases: what nobody can ask for, what time alone ends, the line; and fences."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.resources import Priority
from distributed_grid.domain.states import LeaseState
from tests.support.builders import NOW
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
