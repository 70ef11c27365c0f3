"""The file of boosts: whole or not there, nobody else's business, and never lost silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid.control.boost_file import (
    Corrupted,
    ResourceBoostPersistence,
    StoredBoost,
    StoredClaim,
    StoredShare,
)

BOOST = StoredBoost(
    boost_id="b1",
    source_node="gpu2",
    target_node="gpu-master",
    resource_type="gpu",
    amount=1.0,
    allocated_at="2026-05-01T10:00:00.000Z",
    expires_at="2026-05-01T11:00:00.000Z",
    is_active=True,
    user="ada",
    priority="high",
    fence=(1 << 32) + 1,
    claim=StoredClaim(500, 0, (StoredShare(0, 1000, 8),), (("fpga", 1),)),
    machine_id="here",
)


@pytest.fixture
def kept(tmp_path: Path) -> ResourceBoostPersistence:
    return ResourceBoostPersistence(state_dir=tmp_path)


def test_what_was_saved_is_loaded(kept: ResourceBoostPersistence) -> None:
    assert kept.load() == []
    assert kept.save([BOOST], "here") is None
    assert kept.load() == [BOOST]
    kept.save([], "here")
    assert kept.load() == []


def test_only_its_owner_can_read_it_and_nothing_else_is_left(kept: ResourceBoostPersistence, tmp_path: Path) -> None:
    kept.save([BOOST], "here")
    kept.path.chmod(0o644)
    kept.save([BOOST], "here")
    assert kept.path.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"resource_boosts.json", ".resource_boosts.json.lock"}


def test_it_has_the_fields_that_the_guide_lists(kept: ResourceBoostPersistence) -> None:
    kept.save([BOOST], "here")
    (row,) = json.loads(kept.path.read_text())["boosts"]
    listed = {"boost_id", "source_node", "target_node", "resource_type", "amount", "allocated_at", "expires_at"}
    assert listed | {"is_active", "machine_id", "fence", "user", "priority", "claim"} <= set(row)


def test_machines_that_share_a_home_leave_each_others_boosts_alone(kept: ResourceBoostPersistence) -> None:
    other = replace(BOOST, boost_id="b2", machine_id="there")
    kept.save([BOOST], "here")
    kept.save([other], "there")
    assert kept.load() == [BOOST, other]
    kept.save([], "here")
    assert kept.load() == [other]


@pytest.mark.parametrize("junk", ["", "{", "[]", "null", '{"version": 9, "boosts": []}', "\x00\xff", '{"boosts": 3}'])
def test_a_file_that_makes_no_sense_is_set_aside_and_kept(kept: ResourceBoostPersistence, junk: str) -> None:
    kept.path.write_text(junk)
    with pytest.raises(Corrupted, match=r"^Persistence file corrupted: "):
        kept.load()
    aside = kept.save([BOOST], "here")
    assert aside is not None
    assert (aside.name, aside.read_text()) == ("resource_boosts.json.corrupt-1", junk)
    assert kept.load() == [BOOST]
    kept.path.write_text("again")
    again = kept.save([BOOST], "here")
    assert again is not None
    assert again.name == "resource_boosts.json.corrupt-2"


@pytest.mark.parametrize(
    "wrong",
    [
        {"boost_id": "../../etc"},
        {"expires_at": "tomorrow"},
        {"expires_at": "2026-13-41T10:00:00Z"},
        {"priority": "soon"},
        {"claim": {"cpu_milli": -1}},
        {"claim": {}},
        {"claim": {"gpus": [{"index": 0, "milli": 1001}]}},
        {"fence": -1},
        {"fence": 2**61},
        {"fence": 2**70},
        {"claim": {"cpu_milli": 2**51}},
        {"claim": {"cpu_milli": 2**70}},
        {"claim": {"memory_bytes": 2**63}},
        {"claim": {"gpus": [{"index": 2**16, "milli": 1000}]}},
        {"claim": {"gpus": [{"index": 0, "milli": 1}] * 1025}},
        {"claim": {"custom": [["x" * 257, 1]]}},
        {"amount": 1e300},
        {"user": "x" * 257},
        {"source_node": "x" * 257},
        {"allocated_at": "2026-01-01T00:00:00." + "0" * 1000 + "Z"},
        {"source_node": "gpu-master"},
        {"amount": "much"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_one_row_that_makes_no_sense_does_not_cost_the_others(
    kept: ResourceBoostPersistence, wrong: dict[str, object]
) -> None:
    kept.save([BOOST, replace(BOOST, boost_id="b2")], "here")
    document = json.loads(kept.path.read_text())
    document["boosts"][0] |= wrong
    kept.path.write_text(json.dumps(document))
    contents = kept.read()
    assert contents.problem
    assert [boost.boost_id for boost in contents.boosts] == ["b2"]


def test_a_write_that_fails_leaves_the_old_file(kept: ResourceBoostPersistence) -> None:
    kept.path.mkdir()
    with pytest.raises(OSError, match="directory"):
        kept.save([BOOST], "here")
    assert {path.name for path in kept.path.parent.iterdir()} <= {"resource_boosts.json", ".resource_boosts.json.lock"}


def test_without_a_name_it_is_the_file_of_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRID_STATE_DIR", str(tmp_path))
    assert ResourceBoostPersistence().path == tmp_path / "resource_boosts.json"
    assert ResourceBoostPersistence(tmp_path / "other.json").path.name == "other.json"
