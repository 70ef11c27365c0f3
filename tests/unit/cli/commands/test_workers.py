"""How workers and what they cost are shown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from distributed_grid.cli.commands.workers import cost_text, spending_text, why_text
from tests.support.records import records


def worker(**fields: Any) -> Any:
    return records({"state": "joined", "problem": None, "reason": None, "warning": None, "ends_at": None} | fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"reason": "the queue calls for it"}, "the queue calls for it"),
        ({"reason": "bob asked for it", "problem": "it cannot be terminated"}, "it cannot be terminated"),
        ({"warning": "2 cores instead of 8", "reason": "x"}, "x; 2 cores instead of 8"),
    ],
)
def test_problems_come_first(fields: dict[str, Any], text: str) -> None:
    assert why_text(worker(**fields)) == text


def test_a_worker_with_an_end_of_its_own_says_when() -> None:
    at = (datetime.now(UTC) + timedelta(minutes=10, seconds=20)).isoformat().replace("+00:00", "Z")
    assert why_text(worker(ends_at=at)) == "ends in 10 min"
    assert why_text(worker(ends_at=at, state="gone")) == ""


def test_spending_of_a_provider_is_shown_against_the_budget() -> None:
    one = {"provider": "aws", "workers": 2, "per_hour": 0.34, "spent_today": 1.5}
    budget: dict[str, Any] = {"budget_per_day": None, "core_hours": {}}
    assert spending_text(records(one), records(budget)) == "aws: 2 workers, $0.34 an hour, $1.5000 today"
    shown = spending_text(records(one | {"workers": 1}), records(budget | {"budget_per_day": 20.0}))
    assert shown == "aws: 1 worker, $0.34 an hour, $1.5000 today (8 % of the day's budget)"


def test_core_hours_are_shown_against_their_budget() -> None:
    cores = {"slurm": {"core_hours_today": 1.25, "by_midnight": 4.0, "budget_core_hours": 10.0}}
    budget = {"per_hour": 0.0, "spent_today": 0.0, "by_midnight": 0.0, "core_hours": cores}
    budget |= {"budget_per_hour": None, "budget_per_day": None}
    used = "1.25 core-hours today (4 by midnight UTC) of 10"
    assert cost_text(records(budget)) == f"$0 an hour, $0.0000 today; slurm: {used}"
    one = {"provider": "slurm", "workers": 2, "per_hour": 0.0, "spent_today": 0.0}
    assert spending_text(records(one), records(budget)) == f"slurm: 2 workers, $0 an hour, $0.0000 today, {used}"
    assert "core-hours" not in spending_text(records(one | {"provider": "aws"}), records(budget))
