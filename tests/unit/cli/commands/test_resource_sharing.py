"""The common issues of sharing, told in the guide's words when they are there, and only then."""

from __future__ import annotations

from typing import Any

from distributed_grid.cli.commands.resource_sharing import sharing_notes

MARKS = {"cpu_pressure_high": 0.8, "memory_pressure_high": 0.7, "gpu_pressure_high": 0.9}
ON = {"enabled": True, "thresholds": MARKS}


def a_row(name: str, *, keeps: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"node_id": name, "keeps": list(keeps)}


def a_status(*nodes: dict[str, Any], offers: int = 1, waiting: int = 0) -> dict[str, Any]:
    return {"nodes": list(nodes), "offers": [{}] * offers, "waiting": waiting}


def test_a_grid_that_shares_well_has_nothing_to_tell() -> None:
    levels = {"gpu1": {"cpu": 0.05, "memory": 0.1, "gpu": 0.9}, "gpu2": {}}
    assert sharing_notes(a_status(a_row("gpu1"), a_row("gpu2")), ON, levels) == []


def test_where_nothing_is_offered_each_node_says_why() -> None:
    status = a_status(a_row("gpu1", keeps=("its owner uses 41 % of the CPU (limit 30 %)",)), a_row("gpu2"), offers=0)
    (note,) = sharing_notes(status, ON, {})
    owner = "its owner uses 41 % of the CPU (limit 30 %)"
    assert note.startswith(f"Resources not being shared: gpu1: {owner}; gpu2: nothing left; check ")
    (off,) = sharing_notes(a_status(a_row("gpu1")), ON | {"enabled": False}, {})
    assert off == "Resources not being shared: set resource_sharing.enabled to true in the config"


def test_nodes_above_their_marks_are_named_with_their_numbers() -> None:
    levels = {"gpu1": {"cpu": 0.932}, "gpu2": {"memory": 0.76, "gpu": 0.95}, "gpu3": {"cpu": 0.8, "memory": 0.7}}
    (note,) = sharing_notes(a_status(*map(a_row, levels)), ON, levels)
    assert note.startswith("High resource pressure: gpu1: CPU at 93 %; gpu2: memory at 76 %, GPUs at 95 %; add nodes")


def test_requests_that_wait_are_counted() -> None:
    assert sharing_notes(a_status(waiting=1), ON, {})[0].startswith("Tasks not scheduling: 1 request waits; ")
    assert sharing_notes(a_status(waiting=3), ON, {})[0].startswith("Tasks not scheduling: 3 requests wait; ")
