"""Engines: wanted until given up, over every restart."""

from __future__ import annotations

import pytest

from distributed_grid.domain.engines import ATTACHED, SSH, EngineRow
from distributed_grid.domain.events import EngineGivenUp, EngineWanted
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.errors import Refused

WANTED = EngineWanted("ray", SSH, "10.0.0.1:6379", nodes=("gpu1", "gpu2"))


def test_a_wanted_engine_is_in_the_ledger_and_in_whatever_is_stored_of_it(story):
    tale = story()
    tale.tell(WANTED)
    row = tale.ledger.engines["ray"]
    assert row == EngineRow("ray", SSH, "10.0.0.1:6379", nodes=("gpu1", "gpu2"))
    stored = [(kept.kind, encode_row(kept)) for kept in tale.ledger.rows(durable_only=True)]
    assert Ledger(decode_row(kind, blob) for kind, blob in stored).engines == {"ray": row}


def test_wanting_what_is_wanted_changes_nothing_and_another_session_does(story):
    tale = story()
    tale.tell(WANTED)
    assert tale.tell(WANTED).changes == []
    again = EngineWanted("ray", SSH, "10.0.0.1:6379", session="s2", nodes=("gpu1", "gpu2"))
    assert [row.session for row in tale.tell(again).changes] == ["s2"]


def test_an_engine_that_was_come_by_in_another_way_has_to_be_given_up_first(story):
    tale = story()
    tale.tell(WANTED)
    with pytest.raises(Refused, match=r"ray is ssh at 10\.0\.0\.1:6379 already"):
        tale.tell(EngineWanted("ray", ATTACHED, "10.0.0.9:6379"))
    tale.tell(EngineGivenUp("ray", "asked to"))
    tale.tell(EngineWanted("ray", ATTACHED, "10.0.0.9:6379"))
    assert tale.ledger.engines["ray"].mode == ATTACHED


def test_giving_up_twice_is_harmless(story):
    tale = story()
    tale.tell(WANTED)
    told = tale.tell(EngineGivenUp("ray", "asked to"))
    assert [record.type for record in told.records] == ["engine-given-up"]
    assert tale.ledger.engines == {}
    assert tale.tell(EngineGivenUp("ray")).changes == []
