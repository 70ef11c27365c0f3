"""How the announced end of a machine is shown to who runs there."""

from __future__ import annotations

from distributed_grid.cli.commands.explain import machine_end_lines
from distributed_grid.cli.output import format_time


def test_an_announced_end_says_when_it_is_and_when_what_runs_is_stopped() -> None:
    at, stops_at = "2026-01-02T10:00:00Z", "2026-01-02T09:59:20Z"
    assert [*machine_end_lines({"at": at, "stops_at": stops_at, "reason": "EC2 spot notice (terminate)"})] == [
        f"ends at {format_time(at)}: EC2 spot notice (terminate)",
        f"it is stopped at {format_time(stops_at)}, unless it is over before",
    ]


def test_an_end_without_a_time_may_come_at_any() -> None:
    found = {"at": None, "stops_at": None, "reason": "EC2 rebalance recommendation"}
    assert [*machine_end_lines(found)] == ["may be taken away at any time: EC2 rebalance recommendation"]
