"""Rows of moves: their values, and the sets that the ledger refuses."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import AutoOffloadState, Move, MoveConsent
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import MoveState
from tests.support.builders import Scenario, a_node
from tests.unit.reactor.offloading.move_builders import a_process_move


@pytest.fixture
def ledger() -> Ledger:
    scenario = Scenario(a_node("gpu1"), a_node("gpu2"))
    scenario.handle(events.MoveRequested(a_process_move()))
    scenario.ledger.check()
    return scenario.ledger


def _move(ledger: Ledger) -> Move:
    return ledger.moves["move-1"]


def test_a_move_is_found_by_its_nodes_and_by_its_job_until_it_is_over(ledger: Ledger) -> None:
    assert ledger.moves_at == {"gpu1": {"move-1": None}, "gpu2": {"move-1": None}}
    ledger.apply([replace(_move(ledger), job="moved-1")])
    assert ledger.moves_by_job == {"moved-1": "move-1"}
    ledger.apply([replace(_move(ledger), state=MoveState.ENDED)])
    assert not (ledger.moves)
    assert not (ledger.moves_by_job)
    assert not (ledger.moves_at)


def test_rows_of_offloading_survive_the_store(ledger: Ledger) -> None:
    consent = MoveConsent(user="ada", shape="python3 train.py", given_at_ms=1, variables=("HOME",))
    ledger.apply([consent, AutoOffloadState(enabled=True, set_by="ada", set_at_ms=1)])
    again = Ledger(decode_row(row.kind, encode_row(row)) for row in ledger.rows(durable_only=True))
    assert (again.moves, again.consents, again.auto_offload) == (ledger.moves, ledger.consents, ledger.auto_offload)
    ledger.apply([replace(consent, withdrawn=True)])
    assert not ledger.consents


@pytest.mark.parametrize(
    ("news", "wrong"),
    [
        ({"lease_id": "", "state": MoveState.SHIPPED}, "without room"),
        ({"lease_id": "lost"}, "is not there"),
        ({"state": MoveState.RUNNING, "job": "moved-1", "result": "exited 0"}, "its room is kept"),
        ({"state": MoveState.DEAD, "lease_id": ""}, "its job"),
        ({"id": "move-2", "lease_id": "move-1"}, "moved twice"),
    ],
)
def test_what_cannot_be_is_noticed(ledger: Ledger, news: dict[str, str], wrong: str) -> None:
    ledger.apply([replace(_move(ledger), **news)])
    with pytest.raises(AssertionError, match=wrong):
        ledger.check()


def test_room_that_is_kept_for_no_move_is_noticed(ledger: Ledger) -> None:
    ledger.apply([replace(_move(ledger), state=MoveState.ENDED)])
    with pytest.raises(AssertionError, match="kept for no move"):
        ledger.check()


def test_a_job_is_moved_once_at_a_time(ledger: Ledger) -> None:
    both = [replace(_move(ledger), id=name, job="r1", process=None, lease_id="") for name in ("move-2", "move-3")]
    ledger.apply(both)
    with pytest.raises(AssertionError, match="moved"):
        ledger.check()
