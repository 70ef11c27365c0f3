"""Boosts as `grid boost status` shows them: whoever enforces them, and what is only claimed yet."""

from __future__ import annotations

from typing import Any

from distributed_grid.cli.commands.boost import BY_GRID_ALONE, release_text, status_text
from distributed_grid.cli.output import format_time
from tests.support.records import records


def a_boost(name: str, **fields: Any) -> Any:
    plain = {
        "boost_id": name * 8,
        "source_node": "gpu2",
        "target_node": "gpu-master",
        "resource_type": "cpu",
        "amount": 2.0,
        "state": "active",
        "recovered": False,
        "allocated_at": "2026-05-01T10:00:00.000Z",
        "expires_at": None,
        "enforced_by": "grid",
        "placement_group": None,
        "automatic": False,
        "used_amount": None,
    }
    return records(plain | fields)


def shown(*boosts: Any, warnings: tuple[str, ...] = ()) -> str:
    active = sum(boost["state"] == "active" for boost in boosts)
    totals = {"cpu": 2.0 * active} if active else {}
    return status_text(
        records({"active_boosts": active, "totals": totals, "boosts": list(boosts), "warnings": list(warnings)})
    )


def test_a_second_release_says_how_and_when_the_boost_ended() -> None:
    ended, at = {"reason": "released", "state": "ended"}, "2026-05-01T10:00:00.000Z"
    assert release_text("boost b1", records(ended), records({"already_ended_at": None})) == "boost b1: released"
    again = release_text("boost b1", records(ended), records({"already_ended_at": at}))
    assert again == f"boost b1: already released at {format_time(at)}"


def test_without_boosts_there_is_one_line() -> None:
    assert shown() == "0 active boosts"


def test_it_is_said_how_much_of_an_automatic_boost_was_used() -> None:
    text = shown(
        a_boost("auto", automatic=True, resource_type="memory", amount=6.5, used_amount=4.0),
        a_boost("idle", automatic=True, resource_type="memory", amount=6.5, used_amount=0.0),
    )
    assert [line.split()[4:8] for line in text.splitlines()[3:5]] == [
        ["6.5", "GB", "4", "GB"],
        ["6.5", "GB", "nothing", "active"],
    ]


def test_a_claim_says_that_nobody_has_confirmed_it() -> None:
    text = shown(a_boost("abcd"), a_boost("beef", state="reserving", recovered=True))
    assert text.startswith("1 active boost: 2 cores\n")
    assert "recovered, not confirmed yet" in text


def test_enforcement_of_a_boost_is_shown() -> None:
    alone = shown(a_boost("abcd"))
    assert "grid alone" in alone
    assert alone.endswith(BY_GRID_ALONE)
    ray = shown(a_boost("abcd", enforced_by="ray", placement_group="grid-boost-x-1"))
    assert BY_GRID_ALONE not in ray
    assert "Ray" in ray


def test_control_characters_of_warnings_never_reach_the_terminal() -> None:
    assert shown(warnings=("look\x1b[31m",)).endswith(r"warning: look\x1b[31m")
