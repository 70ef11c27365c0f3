"""Replacement of workers that are taken away: at once, for what fits nowhere else, within the budget."""

from __future__ import annotations

from distributed_grid.domain.events import WorkerDrainRequested, WorkerEndAnnounced, WorkerRulesSet, WorkersChecked
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import WorkerRules
from distributed_grid.scheduling.queue.reasons import why_not_now
from tests.support.builders import a_node, a_request, a_submission
from tests.support.scaling import DOLLAR, ScalingScenario, rules


def a_grid(jobs: int = 4, **fields: int) -> tuple[ScalingScenario, str]:
    """A worker of four cores with jobs of one core, in a grid that was quiet for long and is in its cooldown."""
    scenario = ScalingScenario(a_node("home", cores=2), scaling=rules(**{"up_cooldown_ms": 3_600_000, **fields}))
    scenario.ask(a_request("all", cores=2))
    for number in range(jobs):
        scenario.handle(a_submission(a_request(f"j{number}", cores=1)))
    scenario.evaluate()
    (worker_id,) = scenario.deliver()
    for number in range(jobs):
        scenario.start(f"j{number}")
    return scenario, worker_id


def announce(scenario: ScalingScenario, worker_id: str, seconds: float | None = 120) -> None:
    ends_in_ms = None if seconds is None else round(1000 * seconds)
    scenario.handle(WorkerEndAnnounced(worker_id, "spot notice", ends_in_ms))


def test_a_replacement_is_ordered_at_once_for_what_has_to_leave() -> None:
    scenario, old = a_grid(max_workers=1)
    for _ in range(10):
        scenario.evaluate(seconds=10)
    announce(scenario, old)
    plan = scenario.evaluate()
    assert (plan.action, plan.count) == ("scale_up", 1)
    assert plan.reason.startswith(f"4 jobs have to leave {old}, which ends in 120 s: spot notice")
    again = scenario.evaluate(seconds=1)
    assert (again.action, again.reason) == ("none", "what waits is served by what there is or comes")


def test_what_fits_elsewhere_or_ends_in_time_needs_no_replacement() -> None:
    scenario, old = a_grid(jobs=2)
    scenario.release("all")
    announce(scenario, old)
    assert scenario.evaluate().action == "none", "there is room at home"
    scenario, old = a_grid(jobs=1)
    scenario.handle(a_submission(a_request("short", cores=1, expects_ms=30_000)))
    scenario.end("j0")
    announce(scenario, old)
    assert scenario.evaluate().action == "none"


def test_a_recommendation_orders_nothing_while_nothing_has_to_leave() -> None:
    scenario, old = a_grid()
    announce(scenario, old, None)
    assert scenario.evaluate().action == "none"


def test_without_money_for_both_the_replacement_waits_until_the_old_one_is_gone() -> None:
    scenario, old = a_grid(jobs=1)
    scenario.handle(WorkerRulesSet(WorkerRules(budget_per_hour_micro=15 * DOLLAR // 100)))
    announce(scenario, old, 60)
    plan = scenario.evaluate()
    assert plan.action == "none"
    assert f"1 job has to leave {old}, which ends in 60 s: spot notice" in plan.reason
    assert "scaling.budget_per_hour is $0.15; the replacement waits until it is gone" in plan.reason
    scenario.now += 61_000
    scenario.handle(WorkersChecked(scenario.wall_ms))
    scenario.handle(WorkersChecked(scenario.wall_ms))
    scenario.end_terminating()
    assert old not in scenario.ledger.workers
    plan = scenario.evaluate(seconds=1)
    assert (plan.action, plan.count) == ("scale_up", 1), plan.reason


def test_a_worker_that_is_taken_away_is_not_kept_for_new_demand() -> None:
    scenario, old = a_grid(jobs=1)
    scenario.end("j0")
    scenario.handle(WorkerDrainRequested(old, "grid", "idle"))
    announce(scenario, old)
    scenario.ask(a_request("later", cores=4))
    plan = scenario.evaluate(seconds=1)
    assert old not in plan.worker_ids
    assert scenario.ledger.workers[old].state is WorkerState.DRAINING
    why = why_not_now(scenario.ledger, a_request("later", cores=4), scenario.now)
    assert f"{old}: its machine ends in 119 s: spot notice" in why


def test_the_replacement_is_not_given_back_because_there_are_too_many() -> None:
    scenario, old = a_grid(jobs=1, max_workers=1, window_ms=600_000)
    announce(scenario, old, 60)
    scenario.evaluate()
    (new,) = scenario.deliver()
    scenario.now += 61_000
    for name in (new, "home"):
        scenario.heartbeat(name)
    scenario.handle(WorkersChecked(scenario.wall_ms))
    assert scenario.ledger.workers[old].state is WorkerState.TERMINATING
    plan = scenario.evaluate(seconds=1)
    assert plan.action == "none", plan.reason
    assert scenario.ledger.workers[new].state is WorkerState.JOINED


def test_the_minimum_is_filled_up_while_one_leaves() -> None:
    scenario, old = a_grid(jobs=1, min_workers=1)
    scenario.end("j0")
    announce(scenario, old)
    plan = scenario.evaluate()
    assert (plan.action, plan.reason) == ("scale_up", "at least 1 worker must be there")
