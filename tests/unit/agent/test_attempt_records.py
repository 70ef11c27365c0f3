"""Recorded ends of attempts are decoded into outcomes; so are those of earlier versions, whose ends had a kind."""

from __future__ import annotations

import pytest

from distributed_grid.agent.execution.attempt import outcome_of
from distributed_grid.domain.jobs import MAX_DETAIL_CHARS, Ending, Outcome


def test_a_record_has_the_words_of_an_outcome() -> None:
    record = {"ending": "over_limit", "signal": 9, "detail": "its disk is full", "cpu_ms": 7, "is_disk_overrun": True}
    expected = Outcome(Ending.OVER_LIMIT, signal=9, detail="its disk is full", cpu_ms=7, is_disk_overrun=True)
    assert outcome_of(record) == expected


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("exited", Outcome(Ending.EXITED)),
        ("hold_expired", Outcome(Ending.LOST)),
        ("over_disk_limit", Outcome(Ending.OVER_LIMIT, is_disk_overrun=True)),
        ("start_expired", Outcome(Ending.NEVER_STARTED, node_fault=True)),
        ("no_room", Outcome(Ending.NEVER_STARTED, node_fault=True)),
    ],
)
def test_a_record_of_an_earlier_version_is_understood(kind: str, outcome: Outcome) -> None:
    assert outcome_of({"kind": kind, "exit_code": None}) == outcome


@pytest.mark.parametrize(
    "record", [None, [], 7, {}, {"ending": "melted"}, {"kind": 3}, {"ending": "exited", "signal": "x"}]
)
def test_a_damaged_record_is_no_outcome(record: object) -> None:
    assert outcome_of(record) is None


def test_a_detail_that_no_message_can_carry_is_cut() -> None:
    outcome = outcome_of({"ending": "lost", "detail": "\udcff" + "x" * 2 * MAX_DETAIL_CHARS})
    assert outcome is not None
    assert outcome.detail.startswith("?x")
    assert len(outcome.detail) == MAX_DETAIL_CHARS
