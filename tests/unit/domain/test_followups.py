"""Follow-ups: the order of a step."""

from __future__ import annotations

from distributed_grid.domain.followups import PLACES, CheckMove, ContinueScan, Followup, Place, ScanQueue


def test_moved_work_and_a_scan_in_progress_precede_everything_else() -> None:
    assert {kind for kind, place in PLACES.items() if place is Place.FIRST} == {CheckMove, ContinueScan}


def test_a_scan_is_put_in_once() -> None:
    assert PLACES[ScanQueue] is Place.LAST_ONCE


def test_facts_keep_the_order_in_which_they_were_decided() -> None:
    assert set(PLACES) <= {*Followup.__subclasses__()}
