"""Evaluation: when workers are started and given back, how many and which; and who replaces what is taken away."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import (
    BlockAsked,
    NodeDrained,
    ScalingRulesSet,
    WallTimePassed,
    WorkerDrainRequested,
    WorkerEndAnnounced,
    WorkerRefused,
    WorkerRulesSet,
    WorkerTerminationRequested,
)
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.states import LeaseState, WorkerState
from distributed_grid.domain.workers import SCALED_DOWN, SCALED_UP, WorkerRules
from distributed_grid.scheduling.queue.reasons import texts, why_not_now
from distributed_grid.scheduling.scaling.demand import why_no_worker
from distributed_grid.scheduling.scaling.evaluation import has_work, idle_workers, workers_to_give_back
from tests.support.builders import GB, a_node, a_request, a_submission
from tests.support.scaling import DOLLAR, ScalingScenario, a_busy_grid, a_type, rules

ON_ITS_WAY = (WorkerState.WANTED, WorkerState.ASKED, WorkerState.BOOTING)


def test_256_tasks_on_256_idle_cores_start_nothing() -> None:
    scenario = ScalingScenario(*(a_node(f"n{number}", cores=16) for number in range(16)))
    for number in range(256):
        scenario.ask(a_request(f"r{number}", cores=1))
    for _ in range(20):
        plan = scenario.evaluate(seconds=10)
        assert (plan.action, plan.reason) == ("none", "nothing waits for a worker")
    assert plan.utilization_milli == 1000
    assert not scenario.ledger.workers


def test_without_a_provider_nothing_is_started() -> None:
    scenario = ScalingScenario(a_node("home", cores=1), scaling=replace(rules(), provider=""))
    scenario.ask(a_request("all", cores=1))
    scenario.ask(a_request("waits", cores=1))
    assert scenario.evaluate().reason == "scaling.provider is not set"
    assert not scenario.ledger.workers


def test_the_tasks_run_on_the_workers_that_join() -> None:
    scenario = a_busy_grid()
    for number in range(8):
        scenario.ask(a_request(f"r{number}", cores=1))
    scenario.evaluate()
    scenario.deliver()
    assert not scenario.ledger.waiting
    assert scenario.evaluate(seconds=1).action == "none"


def test_a_short_queue_after_a_quiet_time_starts_nothing_yet() -> None:
    scenario = ScalingScenario(a_node("home", cores=4))
    for _ in range(10):
        scenario.evaluate(seconds=10)
    scenario.ask(a_request("all", cores=4))
    scenario.ask(a_request("waits", cores=1))
    plan = scenario.evaluate(seconds=1)
    assert (plan.action, plan.count) == ("none", 0)
    assert plan.reason == "1 request waits, cpu at 11 % over the window, which is below 80 %"
    seconds = 0
    while plan.action == "none" and seconds < 100:
        seconds += 10
        plan = scenario.evaluate(seconds=10)
    assert plan.action == "scale_up"
    assert 20 < seconds < 100


def test_a_request_that_no_node_can_ever_serve_waits_for_a_worker() -> None:
    scenario = ScalingScenario(a_node("home", cores=1), scaling=rules(a_type(cores=8, gpus=1, worker_type="gpu")))
    lease = scenario.ask(a_request("wide", cores=6, gpus=1))
    assert lease is not None
    assert scenario.evaluate().count == 1
    scenario.deliver()
    assert scenario.ledger.leases["wide"].node in scenario.ledger.workers


def test_an_offer_that_is_closed_is_not_started() -> None:
    scenario = a_busy_grid()
    scenario.ask(a_request("waits", cores=1))
    scenario.evaluate()
    (worker_id,) = scenario.ledger.workers
    scenario.handle(WorkerRefused(worker_id, "no room in this zone", scenario.wall_ms, scope="cpu-4"))
    plan = scenario.evaluate(seconds=1)
    assert plan.action == "none"
    assert "what serves them cannot be had now: cpu-4 (no room in this zone; not tried for 179 s)" in plan.reason
    assert not scenario.ledger.workers
    request = scenario.ledger.leases["waits"].request
    assert why_no_worker(scenario.ledger, request, scenario.now) == [
        "no cpu-4 of scripted can be had: no room in this zone; not tried for 179 s"
    ]


def test_request_for_a_closed_type_is_demand_and_served_when_it_opens() -> None:
    scenario = ScalingScenario(a_node("home", cores=1))
    scenario.ask(a_request("wide", cores=3))
    scenario.evaluate()
    (worker_id,) = scenario.ledger.workers
    scenario.handle(WorkerRefused(worker_id, "no room", scenario.wall_ms, scope="kind:cpu"))
    assert scenario.evaluate(seconds=1).action == "none"
    assert "wide" in scenario.ledger.leases
    scenario.now += 180_000
    scenario.handle(WallTimePassed(scenario.wall_ms))
    assert scenario.evaluate(seconds=1).count == 1


def test_the_budget_limits_what_is_started() -> None:
    scenario = a_busy_grid()
    scenario.handle(WorkerRulesSet(WorkerRules(budget_per_hour_micro=DOLLAR // 4)))
    for number in range(16):
        scenario.ask(a_request(f"r{number}", cores=1))
    plan = scenario.evaluate()
    assert plan.count == 2
    assert "2 of 4 are within the budget" in plan.reason
    assert len(scenario.ledger.workers) == 2
    assert scenario.evaluate(seconds=1).action == "none"


def test_scaling_up_rests_after_a_worker_has_joined_not_after_it_was_wanted() -> None:
    scenario = a_busy_grid(up_cooldown_ms=60_000)
    scenario.ask(a_request("r1", cores=4))
    scenario.evaluate()
    assert SCALED_UP not in scenario.ledger.counters
    scenario.ask(a_request("r2", cores=4))
    assert scenario.evaluate(seconds=5).count == 1, "nothing has joined yet, so nothing rests"
    scenario.deliver()
    assert scenario.ledger.counters[SCALED_UP] == scenario.now
    scenario.ask(a_request("r3", cores=4))
    for _ in range(5):
        rests = scenario.evaluate(seconds=10)
        assert rests.action == "none"
    assert "the next is started in 10 s" in rests.reason
    assert scenario.evaluate(seconds=11).action == "scale_up"


def test_a_worker_that_never_came_starts_no_cooldown() -> None:
    scenario = a_busy_grid()
    scenario.ask(a_request("r1", cores=4))
    scenario.evaluate()
    (worker_id,) = scenario.ledger.workers
    scenario.handle(WorkerRefused(worker_id, "not today", scenario.wall_ms))
    assert SCALED_UP not in scenario.ledger.counters
    assert SCALED_DOWN not in scenario.ledger.counters
    closed = scenario.evaluate(seconds=1)
    assert (closed.action, "not today; not tried for" in closed.reason) == ("none", True)
    scenario.advance(180)
    scenario.handle(WallTimePassed(scenario.wall_ms))
    assert scenario.evaluate(seconds=1).count == 1


def test_request_beyond_every_node_skips_window_and_cooldown() -> None:
    scenario = ScalingScenario(a_node("home", cores=2))
    for _ in range(30):
        scenario.evaluate(seconds=10)
    scenario.ask(a_request("wide", cores=4))
    plan = scenario.evaluate(seconds=1)
    assert (plan.action, plan.count, plan.reason) == ("scale_up", 1, "1 request waits that no node could serve")
    scenario.deliver()
    assert scenario.ledger.leases["wide"].state is LeaseState.ACTIVE
    scenario.ask(a_request("wider", cores=4))
    waits = scenario.evaluate(seconds=1)
    assert waits.action == "none", "the worker could serve it, later"


def test_the_minimum_is_there_without_any_demand_and_the_maximum_never_exceeded() -> None:
    scenario = ScalingScenario(a_node("home", cores=2), scaling=rules(min_workers=2, max_workers=3))
    plan = scenario.evaluate()
    assert (plan.count, plan.reason) == (2, "at least 2 workers must be there")
    scenario.deliver()
    for number in range(40):
        scenario.ask(a_request(f"r{number}", cores=1))
    scenario.advance(200)
    assert scenario.evaluate(seconds=1).count == 1
    full = scenario.evaluate(seconds=1)
    assert (full.action, len(scenario.ledger.workers)) == ("none", 3)
    assert "3 of at most 3 workers" in full.reason


def test_the_expected_load_keeps_workers_warm() -> None:
    scenario = ScalingScenario(a_node("home", cores=2), scaling=rules(max_workers=3))
    plan = scenario.evaluate(warm=2)
    assert (plan.count, plan.reason) == (2, "2 workers are kept warm for the load that is expected")
    assert scenario.evaluate(warm=9).count == 1, "the maximum holds"


def a_leaving_grid(jobs: int = 4, **fields: int) -> tuple[ScalingScenario, str]:
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
    scenario, old = a_leaving_grid(max_workers=1)
    for _ in range(10):
        scenario.evaluate(seconds=10)
    announce(scenario, old)
    plan = scenario.evaluate()
    assert (plan.action, plan.count) == ("scale_up", 1)
    assert plan.reason.startswith(f"4 jobs have to leave {old}, which ends in 120 s: spot notice")
    again = scenario.evaluate(seconds=1)
    assert (again.action, again.reason) == ("none", "what waits is served by what there is or comes")


def test_work_that_fits_elsewhere_or_ends_in_time_needs_no_replacement() -> None:
    scenario, old = a_leaving_grid(jobs=2)
    scenario.release("all")
    announce(scenario, old)
    assert scenario.evaluate().action == "none", "there is room at home"
    scenario, old = a_leaving_grid(jobs=1)
    scenario.handle(a_submission(a_request("short", cores=1, expects_ms=30_000)))
    scenario.end("j0")
    announce(scenario, old)
    assert scenario.evaluate().action == "none"


def test_a_recommendation_orders_nothing_while_nothing_has_to_leave() -> None:
    scenario, old = a_leaving_grid()
    announce(scenario, old, None)
    assert scenario.evaluate().action == "none"


def test_without_money_for_both_the_replacement_waits_until_the_old_one_is_gone() -> None:
    scenario, old = a_leaving_grid(jobs=1)
    scenario.handle(WorkerRulesSet(WorkerRules(budget_per_hour_micro=15 * DOLLAR // 100)))
    announce(scenario, old, 60)
    plan = scenario.evaluate()
    assert plan.action == "none"
    assert f"1 job has to leave {old}, which ends in 60 s: spot notice" in plan.reason
    assert "scaling.budget_per_hour is $0.15; the replacement waits until it is gone" in plan.reason
    scenario.now += 61_000
    scenario.handle(WallTimePassed(scenario.wall_ms))
    scenario.handle(WallTimePassed(scenario.wall_ms))
    scenario.end_terminating()
    assert old not in scenario.ledger.workers
    plan = scenario.evaluate(seconds=1)
    assert (plan.action, plan.count) == ("scale_up", 1), plan.reason


def test_a_worker_that_is_taken_away_is_not_kept_for_new_demand() -> None:
    scenario, old = a_leaving_grid(jobs=1)
    scenario.end("j0")
    scenario.handle(WorkerDrainRequested(old, "grid", "idle"))
    announce(scenario, old)
    scenario.ask(a_request("later", cores=4))
    plan = scenario.evaluate(seconds=1)
    assert old not in plan.worker_ids
    assert scenario.ledger.workers[old].state is WorkerState.DRAINING
    why = texts(why_not_now(scenario.ledger, a_request("later", cores=4), scenario.now))
    assert f"{old}: its machine ends in 119 s: spot notice" in why


def test_the_replacement_is_not_given_back_because_there_are_too_many() -> None:
    scenario, old = a_leaving_grid(jobs=1, max_workers=1, window_ms=600_000)
    announce(scenario, old, 60)
    scenario.evaluate()
    (new,) = scenario.deliver()
    scenario.now += 61_000
    for name in (new, "home"):
        scenario.heartbeat(name)
    scenario.handle(WallTimePassed(scenario.wall_ms))
    assert scenario.ledger.workers[old].state is WorkerState.TERMINATING
    plan = scenario.evaluate(seconds=1)
    assert plan.action == "none", plan.reason
    assert scenario.ledger.workers[new].state is WorkerState.JOINED


def test_the_minimum_is_filled_up_while_one_leaves() -> None:
    scenario, old = a_leaving_grid(jobs=1, min_workers=1)
    scenario.end("j0")
    announce(scenario, old)
    plan = scenario.evaluate()
    assert (plan.action, plan.reason) == ("scale_up", "at least 1 worker must be there")


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
    idle.handle(BlockAsked(id="b1", user="ada", size_bytes=GB, term_ms=3_600_000, prefer=worker_id))
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


def test_excess_workers_leave_during_the_cooldown_down_to_the_floor(idle: ScalingScenario) -> None:
    workers = [*idle.ledger.workers.values()]
    idle.advance(1000)
    found = idle_workers(idle.ledger, workers, idle.now)
    choose = partial(workers_to_give_back, idle.ledger, workers, found)
    chosen, why = choose(1, excess=1, resting=True)
    assert (len(chosen), why) == (1, "a worker was given back a short while ago")
    assert len(choose(1, excess=9, resting=True)[0]) == 2
    assert len(choose(1, excess=0, resting=False)[0]) == 2
    assert choose(3, excess=9, resting=False)[0] == []
