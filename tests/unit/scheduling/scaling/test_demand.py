"""Demand: only what a new worker would serve counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.scheduling.scaling.demand import (
    HELD,
    INSIDE,
    LATER,
    MAX_GROUPS,
    MAX_SHAPES,
    NEAR,
    PINNED,
    TOO_LARGE,
    Bins,
    UnmetDemand,
    WaitingShape,
    choose_type,
    read_demand,
    size_of,
    workers_for,
)
from tests.support.builders import GB, Scenario, a_ledger, a_node, a_request
from tests.support.scaling import ScalingScenario, a_busy_grid, a_type, rules

TYPES = [a_type().resources]


def a_full_grid(cores: float = 2) -> Scenario:
    scenario = Scenario(a_node("full", cores=cores))
    scenario.ask(a_request("all", cores=cores))
    return scenario


def test_equal_requests_of_all_users_are_one_shape() -> None:
    scenario = a_full_grid()
    for number in range(6):
        scenario.ask(a_request(f"r{number}", cores=1, user=f"user{number % 2}"))
    demand = read_demand(scenario.ledger, TYPES)
    assert [(shape.count, shape.request.ask.cpu_milli) for shape in demand.shapes] == [(6, 1000)]
    assert not demand.not_counted


def test_request_that_no_worker_would_get_is_not_counted() -> None:
    scenario = a_full_grid()
    scenario.ledger.apply([replace(scenario.ledger.nodes["full"], labels=(("rack", "a"),))])
    scenario.ask(a_request("pinned", cores=1, require=["full"]))
    scenario.ask(a_request("labelled", cores=1, labels=(("rack", "a"),)))
    scenario.ask(a_request("near", cores=1, affinity=("all",)))
    demand = read_demand(scenario.ledger, TYPES)
    assert demand.shapes == ()
    assert demand.not_counted == {PINNED: 2, NEAR: 1}
    assert INSIDE not in demand.not_counted


def test_request_too_large_for_every_type_is_not_counted() -> None:
    scenario = Scenario(a_node("large", cores=8, custom={"licence": 1}, gpus=1))
    scenario.ask(a_request("all", cores=8, gpus=1, custom={"licence": 1}))
    scenario.ask(a_request("wide", cores=5))
    scenario.ask(a_request("gpu", gpus=1))
    scenario.ask(a_request("licence", custom={"licence": 1}))
    assert read_demand(scenario.ledger, TYPES).not_counted == {TOO_LARGE: 3}
    served = read_demand(scenario.ledger, [a_type("gpu", cores=8, gpus=2).resources])
    assert sorted(shape.request.ask.gpu_milli for shape in served.shapes) == [0, 1000]


def test_request_held_by_a_quota_is_not_counted() -> None:
    scenario = Scenario(a_node("full", cores=2))
    quota = Quota(name="ada", cpu_milli=5000)
    scenario.handle(PolicySet(SchedulingPolicy(quotas=(quota,))))
    scenario.ask(a_request("all", cores=2))
    for number in range(4):
        scenario.ask(a_request(f"r{number}", cores=1))
    scenario.ask(a_request("two", cores=2))
    demand = read_demand(scenario.ledger, TYPES)
    assert [(shape.count, shape.request.ask.cpu_milli) for shape in demand.shapes] == [(3, 1000)]
    assert demand.not_counted == {HELD: 2}


def test_only_so_many_shapes_are_looked_at_at_once() -> None:
    scenario = Scenario(a_node("full", cores=4, memory_gb=64))
    scenario.ask(a_request("all", cores=4, memory_gb=64))
    for number in range(MAX_SHAPES + 5):
        scenario.ask(a_request(f"r{number}", cores=1 + number / 1000))
    demand = read_demand(scenario.ledger, TYPES)
    assert len(demand.shapes) == MAX_SHAPES
    assert demand.not_counted == {LATER: 5}


def test_in_a_queue_of_many_shapes_those_that_differ_a_little_are_one() -> None:
    scenario = Scenario(a_node("full", cores=4, memory_gb=64))
    scenario.ask(a_request("all", cores=4, memory_gb=64))
    for number in range(MAX_SHAPES + 5):
        scenario.ask(a_request(f"r{number}", cores=1, memory_gb=1 + number / 1024))
    demand = read_demand(scenario.ledger, TYPES)
    assert demand.requests == MAX_SHAPES + 5
    asked = [shape.request.ask.memory_bytes / GB for shape in demand.shapes]
    assert asked == [1, 1.125, 1.25]


def test_without_a_queue_there_is_no_demand() -> None:
    demand = read_demand(a_ledger(a_node()), TYPES)
    assert (demand.shapes, demand.not_counted, demand.requests) == ((), {}, 0)


def test_only_so_many_groups_are_read_at_once() -> None:
    scenario = a_full_grid()
    for number in range(MAX_GROUPS + 3):
        scenario.ask(replace(a_request(f"r{number}", cores=1), expects_ms=60_000 + number))
    demand = read_demand(scenario.ledger, TYPES)
    assert (demand.requests, demand.not_counted) == (MAX_GROUPS, {LATER: 3})


def test_waiting_requests_are_packed_onto_new_workers() -> None:
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


SIZES = st.tuples(st.integers(0, 8), st.integers(0, 16), st.sampled_from([0, 0, 0.5, 1, 2]))


def shapes(*asked: tuple[float, float, float], count: int = 1, apart: bool = False) -> UnmetDemand:
    """So many of each of these requests: cores, gigabytes, GPUs."""
    requests = (a_request(cores=cores, memory_gb=memory_gb, gpus=gpus) for cores, memory_gb, gpus in asked)
    return UnmetDemand(tuple(WaitingShape(request, apart, count) for request in requests))


@given(st.lists(SIZES, max_size=8), st.integers(1, 5), st.booleans(), st.integers(0, 6))
def test_new_workers_never_serve_more_than_waits_nor_more_than_they_have(asked, count, apart, limit):
    unmet, has = shapes(*asked, count=count, apart=apart), WorkerResources(8000, 32 * GB, 2)
    workers, served = workers_for(unmet, has, limit)
    assert 0 <= served <= unmet.requests
    assert workers <= limit
    assert (workers == 0) == (served == 0)
    assert workers_for(unmet, has, limit + 1)[1] >= served
    if not apart:
        cpu = sorted(shape.request.ask.cpu_milli for shape in unmet.shapes for _ in range(shape.count))
        assert sum(cpu[:served]) <= workers * has.cpu_milli


@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(0, 20), st.booleans())
def test_packed_capacity_is_not_free_any_more(asked, count, apart):
    bins = Bins.of_workers([WorkerResources(8000, 32 * GB, 2)] * 3)
    for cores, memory_gb, gpus in asked:
        size = size_of(a_request(cores=cores, memory_gb=memory_gb, gpus=gpus).ask)
        room = bins.room(size, apart=apart)
        taken = bins.take(size, count, apart=apart)
        assert taken.sum() == min(count, room.sum())
        assert (taken <= room).all()
        assert not apart or taken.max() <= 1
        if not apart:
            assert (bins.room(size, apart=False) == room - taken).all()


def test_requests_that_must_be_apart_get_a_worker_each():
    has = WorkerResources(8000, 32 * GB)
    assert workers_for(shapes((1, 1, 0), count=4), has, 10) == (1, 4)
    assert workers_for(shapes((1, 1, 0), count=4, apart=True), has, 10) == (4, 4)


def test_the_type_that_serves_most_comes_before_the_cheaper_one_and_a_known_price_before_an_unknown_one():
    small, large = a_type(cores=2, price=0.01), a_type(cores=8, price=0.5)
    cheap, unknown = a_type(cores=8, price=0.4, offer="cheap"), a_type(cores=8, price=None, offer="unknown")
    unmet = shapes((1, 0, 0), (8, 0, 0))
    offered = [(one, one.resources) for one in (unknown, small, large, cheap)]
    assert choose_type(unmet, ResourceType.CPU, offered, 10) == (cheap, 2)
    assert choose_type(shapes((1, 0, 0)), ResourceType.CPU, offered, 10) == (small, 1)
    assert choose_type(shapes((16, 0, 0)), ResourceType.CPU, offered, 10) is None


def test_total_demand_sums_up_over_gangs():
    request = a_request(cores=2, memory_gb=1, gang=3)
    unmet = UnmetDemand((WaitingShape(request, apart=True, count=2), WaitingShape(request, True, 1, displaced=True)))
    assert (unmet.requests, unmet.displaced.requests) == (3, 1)
    assert [unmet.total(kind) for kind in (ResourceType.CPU, ResourceType.MEMORY, ResourceType.GPU)] == [
        18_000,
        9 * GB,
        0,
    ]
