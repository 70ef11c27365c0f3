"""Evaluation: when workers are started and given back, how many and which."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import ScalingRulesSet, WorkerRefused, WorkerRulesSet, WorkersChecked
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.states import LeaseState, WorkerState
from distributed_grid.domain.workers import SCALED_DOWN, SCALED_UP, WorkerRules
from distributed_grid.scheduling.scaling.demand import why_no_worker
from tests.support.builders import a_node, a_request
from tests.support.scaling import DOLLAR, ScalingScenario, a_type, rules

ON_ITS_WAY = (WorkerState.WANTED, WorkerState.ASKED, WorkerState.BOOTING)


def a_busy_grid(cores: float = 2, **fields: int) -> ScalingScenario:
    scenario = ScalingScenario(a_node("home", cores=cores), scaling=rules(**fields))
    scenario.ask(a_request("all", cores=cores))
    return scenario


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


def test_what_waits_is_packed_onto_new_workers() -> None:
    scenario = a_busy_grid()
    for number in range(9):
        scenario.ask(a_request(f"r{number}", cores=1))
    plan = scenario.evaluate()
    assert (plan.action, plan.count, plan.bottleneck) == ("scale_up", 3, ResourceType.CPU)
    assert plan.worker is not None
    assert plan.worker.worker_type == "cpu"
    assert plan.reason == "9 requests wait for cpu at 550 % over the window"
    assert len(scenario.in_state(WorkerState.WANTED)) == 3


def test_workers_on_their_way_are_capacity() -> None:
    scenario = a_busy_grid()
    for number in range(8):
        scenario.ask(a_request(f"r{number}", cores=1))
    assert scenario.evaluate().count == 2
    again = scenario.evaluate(seconds=10)
    assert (again.action, again.reason) == ("none", "what waits is served by what there is or comes")
    scenario.ask(a_request("one-more", cores=4))
    assert scenario.evaluate(seconds=10).count == 1
    assert len(scenario.ledger.workers) == 3


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


def test_the_bottleneck_picks_the_type() -> None:
    types = (a_type("cpu"), a_type("memory", cores=2, memory_gb=64, price=0.3), a_type("gpu", gpus=1, price=1.0))
    for request, bottleneck, memory_gb in (
        (a_request("c", cores=2), ResourceType.CPU, 16),
        (a_request("m", cores=0.1, memory_gb=30), ResourceType.MEMORY, 32),
        (a_request("g", gpus=1), ResourceType.GPU, 16),
    ):
        home = a_node("home", cores=2, memory_gb=memory_gb, gpus=1)
        scenario = ScalingScenario(home, scaling=rules(*types))
        scenario.ask(a_request("all", cores=2, memory_gb=memory_gb, gpus=1))
        scenario.ask(request)
        plan = scenario.evaluate()
        assert plan.worker is not None, plan.reason
        assert (plan.bottleneck, plan.worker.worker_type, plan.count) == (bottleneck, str(bottleneck), 1)


def test_the_cheapest_offer_of_a_type_is_started() -> None:
    types = (a_type(cores=4, price=0.2), a_type(cores=8, price=0.3), a_type(cores=2, price=0.15))
    scenario = ScalingScenario(a_node("home", cores=1), scaling=rules(*types))
    scenario.ask(a_request("all", cores=1))
    for number in range(8):
        scenario.ask(a_request(f"r{number}", cores=1))
    plan = scenario.evaluate()
    assert plan.worker is not None
    assert (plan.worker.offer, plan.count) == ("cpu-8", 1)


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


def test_what_waits_for_a_closed_type_is_demand_and_served_when_it_opens() -> None:
    scenario = ScalingScenario(a_node("home", cores=1))
    scenario.ask(a_request("wide", cores=3))
    scenario.evaluate()
    (worker_id,) = scenario.ledger.workers
    scenario.handle(WorkerRefused(worker_id, "no room", scenario.wall_ms, scope="kind:cpu"))
    assert scenario.evaluate(seconds=1).action == "none"
    assert "wide" in scenario.ledger.leases
    scenario.now += 180_000
    scenario.handle(WorkersChecked(scenario.wall_ms))
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


def test_a_gang_waits_until_all_of_its_machines_may_be_started() -> None:
    scenario = ScalingScenario(a_node("home", cores=1), a_node("other", cores=1), scaling=rules(max_workers=2))
    scenario.ask(a_request("all", cores=1))
    scenario.ask(a_request("gang", cores=1, gang=2))
    assert scenario.evaluate().count == 1, "the other node has room for one member"
    larger = ScalingScenario(*(a_node(f"n{one}", cores=1) for one in range(5)), scaling=rules(max_workers=1))
    for number in range(5):
        larger.ask(a_request(f"r{number}", cores=1))
    larger.ask(a_request("gang", cores=1, gang=4))
    assert larger.evaluate().action == "none"


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
    scenario.handle(WorkersChecked(scenario.wall_ms))
    assert scenario.evaluate(seconds=1).count == 1


def test_what_no_node_could_serve_waits_for_no_window_and_no_cooldown() -> None:
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
