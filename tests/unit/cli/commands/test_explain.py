"""How the announced end of a machine and the state of a node are shown."""

from __future__ import annotations

from distributed_grid.cli.commands.explain import explanation_lines, machine_end_lines
from distributed_grid.cli.output import format_time
from tests.support.records import records


def test_an_announced_end_says_when_it_is_and_when_what_runs_is_stopped() -> None:
    at, stops_at = "2026-01-02T10:00:00Z", "2026-01-02T09:59:20Z"
    assert [*machine_end_lines(records({"at": at, "stops_at": stops_at, "reason": "EC2 spot notice (terminate)"}))] == [
        f"ends at {format_time(at)}: EC2 spot notice (terminate)",
        f"it is stopped at {format_time(stops_at)}, unless it is over before",
    ]


def test_an_end_without_a_time_may_come_at_any() -> None:
    found = {"at": None, "stops_at": None, "reason": "EC2 rebalance recommendation"}
    assert [*machine_end_lines(records(found))] == ["may be taken away at any time: EC2 rebalance recommendation"]


def test_a_node_says_how_it_is_started_and_what_it_gave_back_unused() -> None:
    unused = {"resource_type": "memory", "amount": 4.0, "unused_seconds": 600.0}
    node = {"kind": "node", "id": "gpu1", "state": "stopped", "unused_borrowing": [unused]}
    lines = [*explanation_lines(records({**node, "offloading": {"look": None, "degraded": None}, "events": []}))]
    assert lines[0] == "gpu1 is stopped"
    assert lines[1].split(maxsplit=2)[2] == "grid cluster start gpu1"
    assert lines[2].strip() == (
        "borrowing     borrowed 4.0 GB, unused for 10 min, given back; asked again when work waits"
    )
