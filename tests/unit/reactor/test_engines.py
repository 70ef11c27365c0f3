"""Engines: wanted until given up, over every restart."""

from __future__ import annotations

import pytest

from distributed_grid.domain.engines import ATTACHED, SSH, EngineRow
from distributed_grid.domain.events import EngineRegistered, EngineRemoved
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.errors import Refused

WANTED = EngineRegistered("ray", SSH, "10.0.0.1:6379", nodes=("gpu1", "gpu2"))


def test_a_wanted_engine_is_in_the_ledger_and_in_whatever_is_stored_of_it(new_scenario):
    scenario = new_scenario()
    scenario.handle(WANTED)
    row = scenario.ledger.engines["ray"]
    assert row == EngineRow("ray", SSH, "10.0.0.1:6379", nodes=("gpu1", "gpu2"))
    stored = [(kept.kind, encode_row(kept)) for kept in scenario.ledger.rows(durable_only=True)]
    assert Ledger(decode_row(kind, blob) for kind, blob in stored).engines == {"ray": row}


def test_wanting_what_is_wanted_changes_nothing_and_another_session_does(new_scenario):
    scenario = new_scenario()
    scenario.handle(WANTED)
    assert scenario.handle(WANTED).changes == []
    again = EngineRegistered("ray", SSH, "10.0.0.1:6379", session="s2", nodes=("gpu1", "gpu2"))
    assert [row.session for row in scenario.handle(again).changes] == ["s2"]


def test_an_engine_that_was_come_by_in_another_way_has_to_be_given_up_first(new_scenario):
    scenario = new_scenario()
    scenario.handle(WANTED)
    with pytest.raises(Refused, match=r"ray is ssh at 10\.0\.0\.1:6379 already"):
        scenario.handle(EngineRegistered("ray", ATTACHED, "10.0.0.9:6379"))
    scenario.handle(EngineRemoved("ray", "asked to"))
    scenario.handle(EngineRegistered("ray", ATTACHED, "10.0.0.9:6379"))
    assert scenario.ledger.engines["ray"].mode == ATTACHED


def test_giving_up_twice_is_harmless(new_scenario):
    scenario = new_scenario()
    scenario.handle(WANTED)
    result = scenario.handle(EngineRemoved("ray", "asked to"))
    assert [record.type for record in result.records] == ["engine-removed"]
    assert scenario.ledger.engines == {}
    assert scenario.handle(EngineRemoved("ray")).changes == []
