"""The common issues of sharing, told in the guide's words when they are there, and only then."""

from __future__ import annotations

from typing import Any

from distributed_grid.cli.commands.resource_sharing import sharing_notes
from tests.support.records import records

MARKS = {"cpu_pressure_high": 0.8, "memory_pressure_high": 0.7, "gpu_pressure_high": 0.9}
ON = {"enabled": True, "thresholds": MARKS}


def a_row(name: str, *, keeps: tuple[str, ...] = ()) -> dict[str, Any]:
    has = {"cpu_cores": 16.0, "memory_gb": 64.0, "gpus": 2}
    return {"node_id": name, "keeps": list(keeps), "unused_borrowing": [], **has}


def an_offer(node: str, kind: str = "cpu", amount: float = 4.0, state: str = "open") -> dict[str, Any]:
    return {"node_id": node, "resource_type": kind, "amount": amount, "state": state}


def a_status(*nodes: dict[str, Any], offers: int = 1, waiting: int = 0) -> dict[str, Any]:
    return {"nodes": list(nodes), "offers": [an_offer("other", "tpu")] * offers, "waiting": waiting}


def test_a_grid_that_shares_well_has_nothing_to_tell() -> None:
    levels = {"gpu1": {"cpu": 0.05, "memory": 0.1, "gpu": 0.9}, "gpu2": {}}
    assert sharing_notes(records(a_status(a_row("gpu1"), a_row("gpu2"))), ON, levels) == []


def test_where_nothing_is_offered_each_node_says_why() -> None:
    status = a_status(a_row("gpu1", keeps=("its owner uses 41 % of the CPU (limit 30 %)",)), a_row("gpu2"), offers=0)
    (note,) = sharing_notes(records(status), ON, {})
    owner = "its owner uses 41 % of the CPU (limit 30 %)"
    assert note.startswith(f"Resources not being shared: gpu1: {owner}; gpu2: nothing left; check ")
    (off,) = sharing_notes(records(a_status(a_row("gpu1"))), ON | {"enabled": False}, {})
    assert off == "Resources not being shared: set resource_sharing.enabled to true in the config"


def test_nodes_above_their_marks_are_named_with_their_numbers() -> None:
    levels = {"gpu1": {"cpu": 0.932}, "gpu2": {"memory": 0.76, "gpu": 0.95}, "gpu3": {"cpu": 0.8, "memory": 0.7}}
    (note,) = sharing_notes(records(a_status(*map(a_row, levels))), ON, levels)
    assert note.startswith("High resource pressure: gpu1: CPU at 93 %; gpu2: memory at 76 %, GPUs at 95 %; add nodes")


def test_pressure_with_room_elsewhere_names_the_boosts_to_ask_for() -> None:
    status = a_status(a_row("gpu1"), a_row("gpu2"))
    status["offers"] = [
        an_offer("gpu1", "cpu", 12.0),
        an_offer("gpu2", "cpu", 3.5),
        an_offer("gpu2", "memory", 12.25),
        an_offer("gpu2", "gpu", 2.0, "paused"),
    ]
    (note,) = sharing_notes(records(status), ON, {"gpu1": {"cpu": 0.9}})
    boost = "grid boost request gpu1 cpu 2"
    assert note == f"High resource pressure: gpu1: CPU at 90 %; others have room: {boost}"
    (note,) = sharing_notes(records(status), ON, {"gpu1": {"cpu": 1.0, "memory": 0.95, "gpu": 0.95}})
    boosts = "grid boost request gpu1 cpu 3, grid boost request gpu1 memory 12"
    assert f"; others have room: {boosts}; add nodes, raise " in note, "no GPU has room"


def test_borrowing_that_went_back_unused_is_told_instead_of_another_boost() -> None:
    unused = {"resource_type": "memory", "amount": 4.0, "unused_seconds": 600.0}
    status = a_status(a_row("gpu1") | {"unused_borrowing": [unused]}, a_row("gpu2"))
    status["offers"] = [an_offer("gpu2", "memory", 12.0)]
    (note,) = sharing_notes(records(status), ON, {"gpu1": {"memory": 0.91}})
    told = "borrowed 4.0 GB, unused for 10 min, given back; asked again when work waits"
    assert note == f"High resource pressure: gpu1: memory at 91 % ({told})"


def test_requests_that_wait_are_counted() -> None:
    assert sharing_notes(records(a_status(waiting=1)), ON, {})[0].startswith("Tasks not scheduling: 1 request waits; ")
    assert sharing_notes(records(a_status(waiting=3)), ON, {})[0].startswith("Tasks not scheduling: 3 requests wait; ")
