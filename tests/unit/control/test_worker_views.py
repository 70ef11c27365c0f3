"""Costs of the workers of each provider are shown beside its budgets."""

from __future__ import annotations

from distributed_grid.control.worker_views import spending_view
from distributed_grid.domain.workers import WorkerRules
from distributed_grid.scheduling.scaling.budget import HOUR_MS
from tests.support.worker_model import WorkerModel


def test_money_and_core_hours_of_each_provider_are_those_of_today() -> None:
    model = WorkerModel(WorkerRules(core_hour_budgets={"scripted": 50_000, "unused": 1_500}))
    (unused,) = [one for one in spending_view(model.ledger, model.now, model.wall_ms) if one["provider"] == "unused"]
    assert (unused["workers"], unused["core_hours_today"], unused["budget_core_hours"]) == (0, 0, 1.5)
    model.want()
    model.perform()
    model.now += HOUR_MS // 2
    scripted, _ = spending_view(model.ledger, model.now, model.wall_ms)
    assert (scripted["provider"], scripted["workers"]) == ("scripted", 1)
    assert (scripted["core_hours_today"], scripted["budget_core_hours"]) == (1.0, 50.0)
    assert scripted["spent_today"] == scripted["per_hour"] / 2


def test_a_provider_without_a_budget_of_core_hours_has_none() -> None:
    model = WorkerModel(WorkerRules())
    model.want()
    (scripted,) = spending_view(model.ledger, model.now, model.wall_ms)
    assert scripted["budget_core_hours"] is None
