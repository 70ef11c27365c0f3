"""Tables of offers and allocations."""

from __future__ import annotations

import pytest

from distributed_grid.cli.commands.status import allocations_table, offers_table

OFFER = {"node_id": "gpu1", "resource_type": "memory", "expires_at": None, "state": "open"}


@pytest.mark.parametrize(
    ("amount", "shown"), [(12.3456, "12.3 GB"), (0.05, "0.1 GB"), (0.042, "0.04 GB"), (0.001, "0.001 GB")]
)
def test_a_little_is_not_shown_as_nothing(amount: float, shown: str) -> None:
    assert shown in offers_table([{**OFFER, "amount": amount}])


def test_a_paused_offer_is_listed_with_its_mark_its_measure_and_its_earliest_return() -> None:
    paused = {"state": "paused", "mark_percent": 50.0, "measured_percent": 63.4, "returns_at": "2026-05-01T13:00:00Z"}
    shown = offers_table([{**OFFER, "amount": 2.0}, {**OFFER, **paused, "amount": 3.0}]).splitlines()
    assert shown[0].split() == ["NODE", "OFFERS", "UNTIL", "PAUSED"]
    assert "63.4 % used in the last minute (limit 50 %); may return at " in shown[2]
    assert "PAUSED" not in offers_table([{**OFFER, "amount": 2.0}])


def test_two_allocations_never_look_alike() -> None:
    common = {"node_id": "gpu1", "resource_type": "cpu", "amount": 1, "user": "ana", "priority": "low"}
    common |= {"state": "active", "job_id": None, "expires_at": None, "target_node": None}
    ids = ["experiment-of-ana-1", "experiment-of-ana-2"]
    _, *rows = allocations_table([{**common, "allocation_id": id_} for id_ in ids]).splitlines()
    assert [row.split()[0] for row in rows] == ids


def test_allocations_for_a_node_say_so() -> None:
    row = {"allocation_id": "auto-gpu1-memory-1", "node_id": "gpu2", "resource_type": "memory", "amount": 4.0429}
    row |= {"user": "grid", "priority": "low", "state": "active", "job_id": None, "expires_at": None}
    head, line = allocations_table([{**row, "target_node": "gpu1"}]).splitlines()
    assert head.split()[:4] == ["ALLOCATION", "NODE", "AMOUNT", "FOR"]
    assert line.split()[:5] == ["auto-gpu1-memory-1", "gpu2", "4.04", "GB", "gpu1"]
