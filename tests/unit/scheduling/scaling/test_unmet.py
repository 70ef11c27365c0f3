"""Unmet demand: what is packed onto what there is and what comes, and which workers are for the rest."""

from __future__ import annotations

from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.states import WorkerState
from tests.support.builders import a_node, a_request
from tests.support.scaling import ScalingScenario, a_busy_grid, a_type, rules


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
