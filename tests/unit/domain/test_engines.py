"""Engines: names of placement groups, and when a row of an engine is over."""

# mypy: disable-error-code="arg-type,comparison-overlap,union-attr"

from __future__ import annotations

from distributed_grid.domain.engines import parse_group_name


def test_only_our_own_names_are_understood():
    assert parse_group_name("grid-boost-a-b-7") == ("a-b", 7)
    assert [parse_group_name(name) for name in ("grid-boost-a", "boost-a-7", "grid-boost--7", "grid-boost-a-x")] == [
        None
    ] * 4
