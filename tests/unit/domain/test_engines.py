"""Engines: names of placement groups, and when a row of an engine is over."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.engines import (
    ATTACHED,
    Binding,
    EngineCapacity,
    EngineResources,
    EngineRow,
    parse_group_name,
)


def test_only_our_own_names_are_understood():
    assert parse_group_name("grid-boost-a-b-7") == ("a-b", 7)
    assert [parse_group_name(name) for name in ("grid-boost-a", "boost-a-7", "grid-boost--7", "grid-boost-a-x")] == [
        None
    ] * 4


@given(st.text(string.ascii_letters + string.digits + "-_:.", min_size=1, max_size=200), st.integers(0, 2**62))
def test_the_name_of_a_group_tells_its_lease_and_fence(lease_id, fence):
    binding = Binding(lease_id=lease_id, fence=fence, node="gpu1", place="n1")
    assert parse_group_name(binding.group) == (lease_id, fence)


@given(st.text(max_size=300))
def test_whatever_else_runs_in_an_engine_no_name_breaks_it(name):
    found = parse_group_name(name)
    assert found is None or Binding(lease_id=found[0], fence=found[1], node="gpu1", place="n1").group.startswith(
        "grid-boost-"
    )


def test_rows_of_an_engine_are_over_when_they_are_gone():
    rows = (
        EngineRow(name="ray", mode=ATTACHED, address="head:6379"),
        EngineCapacity("gpu1", EngineResources()),
        Binding(lease_id="b1", fence=7, node="gpu1", place="n1"),
    )
    assert [row.key for row in rows] == ["ray", "gpu1", "b1-7"]
    assert not any(row.is_over for row in rows)
    assert all(replace(row, gone=True).is_over for row in rows)
