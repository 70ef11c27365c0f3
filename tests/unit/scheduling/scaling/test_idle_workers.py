"""Idle workers: which of them are given back, and which are kept."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import (
    BlockAsked,
    NodeDrained,
    ScalingRulesSet,
    WorkerDrainRequested,
    WorkerTerminationRequested,
)
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import SCALED_DOWN
from distributed_grid.scheduling.scaling.idle_workers import GiveBack, has_work, idle_workers
from tests.support.builders import GB, a_request
from tests.support.scaling import ScalingScenario, a_busy_grid


@pytest.fixture
def idle() -> ScalingScenario:
    """Three workers whose tasks are over, idle from now on."""
    scenario = a_busy_grid(up_cooldown_ms=0)
    for number in range(3):
        scenario.ask(a_request(f"r{number}", cores=4))
    scenario.evaluate()
    scenario.deliver()
    scenario.advance(30)
    for number in range(3):
        scenario.advance(5)
        scenario.release(f"r{number}")
    return scenario


def test_the_longest_idle_go_first_and_the_last_warm_one_stays_for_its_cooldown(idle: ScalingScenario) -> None:
    order = sorted(idle.ledger.workers.values(), key=lambda worker: worker.used_at_ms)
    assert idle.evaluate(seconds=60).action == "none", "they had leases for more than 30 % of the window"
    plan = idle.evaluate(seconds=30)
    assert (plan.action, plan.worker_ids) == ("scale_down", (order[0].id, order[1].id))
    assert plan.reason == "2 workers without a lease, the first for 100 s"
    kept = idle.evaluate(seconds=1)
    assert (kept.action, kept.reason) == (
        "none",
        "nothing waits for a worker; the last warm worker is kept for its cooldown",
    )


def test_scaling_down_rests_after_a_worker_is_gone(idle: ScalingScenario) -> None:
    idle.evaluate(seconds=100)
    assert SCALED_DOWN not in idle.ledger.counters
    idle.bring_home()
    assert SCALED_DOWN not in idle.ledger.counters
    idle.end_terminating()
    assert idle.ledger.counters[SCALED_DOWN] == idle.now
    assert "given back a short while ago" in idle.evaluate(seconds=100).reason
    assert idle.evaluate(seconds=100).action == "scale_down"
    idle.bring_home()
    idle.end_terminating()
    assert not idle.ledger.workers


@pytest.mark.parametrize("request_type", [WorkerTerminationRequested, WorkerDrainRequested])
def test_scaling_down_rests_after_a_worker_whose_end_was_requested(idle: ScalingScenario, request_type: Any) -> None:
    first, why = idle.in_state(WorkerState.JOINED)[0], "as evaluate_scaling proposed"
    drain = request_type is WorkerDrainRequested
    idle.handle(request_type(first, "ada", why) if drain else request_type(first, "ada", why, idle.wall_ms))
    idle.bring_home()
    assert SCALED_DOWN not in idle.ledger.counters
    idle.end_terminating()
    assert idle.ledger.counters[SCALED_DOWN] == idle.now
    assert "given back a short while ago" in idle.evaluate(seconds=100).reason


def test_a_worker_that_a_budget_ends_starts_no_cooldown(idle: ScalingScenario) -> None:
    first = idle.in_state(WorkerState.JOINED)[0]
    idle.handle(WorkerTerminationRequested(first, GRID_USER, "the day's budget is spent", idle.wall_ms, force=True))
    idle.end_terminating()
    assert SCALED_DOWN not in idle.ledger.counters


def test_a_worker_with_a_live_lease_is_never_given_back(idle: ScalingScenario) -> None:
    idle.ask(a_request("again", cores=1))
    busy = idle.ledger.leases["again"].node
    plan = idle.evaluate(seconds=150)
    assert plan.action == "scale_down"
    assert busy not in plan.worker_ids


def test_the_others_stay_below_the_target_without_those_that_go(idle: ScalingScenario) -> None:
    idle.handle(ScalingRulesSet(replace(idle.ledger.scaling, target_milli=400)))
    idle.ask(a_request("again", cores=3))
    plan = idle.evaluate(seconds=150)
    assert len(plan.worker_ids) == 1, "3 of 8 cores are below 40 %, 3 of 4 are not"


def test_a_warm_pool_is_given_back_down_to_its_size_whatever_the_target_is(idle: ScalingScenario) -> None:
    idle.handle(ScalingRulesSet(replace(idle.ledger.scaling, target_milli=400)))
    idle.ask(a_request("again", cores=3))
    assert len(idle.evaluate(seconds=150, warm=1).worker_ids) == 2


def test_the_minimum_stays(idle: ScalingScenario) -> None:
    idle.handle(ScalingRulesSet(replace(idle.ledger.scaling, min_workers=2)))
    assert len(idle.evaluate(seconds=500).worker_ids) == 1


def test_more_than_the_maximum_go_at_once(idle: ScalingScenario) -> None:
    idle.handle(ScalingRulesSet(replace(idle.ledger.scaling, max_workers=1)))
    assert len(idle.evaluate(seconds=1).worker_ids) == 2


def test_idle_is_counted_from_the_last_lease_also_where_no_evaluation_saw_it(idle: ScalingScenario) -> None:
    idle.advance(60)
    for number in range(3):
        idle.ask(a_request(f"short{number}", cores=4))
    for number in range(3):
        idle.release(f"short{number}")
    assert idle.evaluate(seconds=60).action == "none"


def test_a_worker_is_idle_since_it_joined_or_was_last_used(idle: ScalingScenario) -> None:
    found = idle_workers(idle.ledger, idle.ledger.workers.values(), idle.now)
    assert [one.idle_ms for one in found] == [10_000, 5_000, 0]
    assert [one.used_milli for one in found] == [900, 950, 1000]
    assert not any(has_work(idle.ledger, one.worker.node) for one in found)


def test_copies_of_blocks_are_no_work(idle: ScalingScenario) -> None:
    (worker_id, *_) = idle.ledger.workers
    idle.handle(BlockAsked("b1", "ada", GB, 3_600_000, prefer=worker_id))
    assert idle.ledger.leases_on[worker_id]
    assert not has_work(idle.ledger, worker_id)
    assert idle.ask(a_request("r9", cores=1, require=[worker_id])) is not None
    assert has_work(idle.ledger, worker_id)


def test_a_worker_that_is_silent_or_drains_is_not_idle(idle: ScalingScenario) -> None:
    first, _, third = idle.ledger.workers
    idle.handle(NodeDrained(first))
    idle.advance(7, heard=False)
    idle.heartbeat(third)
    found = idle_workers(idle.ledger, idle.ledger.workers.values(), idle.now)
    assert [one.worker.id for one in found] == [third]


def test_what_is_too_many_goes_even_while_scaling_down_rests_and_the_floor_stays(idle: ScalingScenario) -> None:
    workers = [*idle.ledger.workers.values()]
    idle.advance(1000)
    found = idle_workers(idle.ledger, workers, idle.now)
    give_back = GiveBack(idle.ledger, workers, found, floor=1)
    chosen, why = give_back.choose(1, resting=True)
    assert (len(chosen), why) == (1, "a worker was given back a short while ago")
    assert len(give_back.choose(9, resting=True)[0]) == 2
    assert len(give_back.choose(0, resting=False)[0]) == 2
    assert GiveBack(idle.ledger, workers, found, floor=3).choose(9, resting=False)[0] == []
