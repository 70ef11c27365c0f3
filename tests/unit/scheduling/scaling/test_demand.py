"""Demand: only what a new worker would serve counts."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.scheduling.scaling.demand import (
    HELD,
    INSIDE,
    LATER,
    MAX_GROUPS,
    MAX_SHAPES,
    NEAR,
    PINNED,
    TOO_LARGE,
    read_demand,
)
from tests.support.builders import GB, Scenario, a_ledger, a_node, a_request
from tests.support.scaling import a_type

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


def test_what_no_worker_would_get_does_not_count() -> None:
    scenario = a_full_grid()
    scenario.ledger.apply([replace(scenario.ledger.nodes["full"], labels=(("rack", "a"),))])
    scenario.ask(a_request("pinned", cores=1, require=["full"]))
    scenario.ask(a_request("labelled", cores=1, labels=(("rack", "a"),)))
    scenario.ask(a_request("near", cores=1, affinity=("all",)))
    demand = read_demand(scenario.ledger, TYPES)
    assert demand.shapes == ()
    assert demand.not_counted == {PINNED: 2, NEAR: 1}
    assert INSIDE not in demand.not_counted


def test_what_is_too_large_for_every_type_does_not_count() -> None:
    scenario = Scenario(a_node("large", cores=8, custom={"licence": 1}, gpus=1))
    scenario.ask(a_request("all", cores=8, gpus=1, custom={"licence": 1}))
    scenario.ask(a_request("wide", cores=5))
    scenario.ask(a_request("gpu", gpus=1))
    scenario.ask(a_request("licence", custom={"licence": 1}))
    assert read_demand(scenario.ledger, TYPES).not_counted == {TOO_LARGE: 3}
    served = read_demand(scenario.ledger, [a_type("gpu", cores=8, gpus=2).resources])
    assert sorted(shape.request.ask.gpu_milli for shape in served.shapes) == [0, 1000]


def test_what_a_quota_holds_does_not_count() -> None:
    scenario = Scenario(a_node("full", cores=2))
    quota = Quota("ada", cpu_milli=5000)
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
